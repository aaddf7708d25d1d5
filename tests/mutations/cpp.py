"""Mutants of C++ sources, found in the text: the sources are formatted, so blanks tell much."""

import re
from collections.abc import Iterator

from .source import Mutant, mutant

# What is no code of a kernel: comments, strings, preprocessor lines, static assertions, hints.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'|^[ \t]*#(?:\\\n|[^\n])*"
    r"|static_assert\([^;]*;|__builtin_prefetch\([^;]*;|\btemplate <[^\n]*|\busing [^\n]*",
    re.DOTALL | re.MULTILINE,
)
_OPERATORS = {
    " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " << ": " >> ",
    " & ": " | ", " | ": " & ", " && ": " || ", " || ": " && ", " += ": " -= ", " -= ": " += ",
    " *= ": " += ",
}  # fmt: skip
_COMPARISONS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
}  # fmt: skip
_NAMES = {"smaller": "larger", "larger": "smaller", "min": "max", "max": "min"}
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*(?:e[-+]?\d+)?f?|\d+e[-+]?\d+f?|\d+)(?![\w.])")
_STATEMENT = re.compile(
    r"^[ ]+(?:[\w\].\[>()*-]+ [-+*/|&]?= [^;{}\n]*;|(?!return\b)[\w.:>-]+\([^;{}\n]*\);)$",
    re.MULTILINE,
)
_TERNARY = re.compile(r" \? ([^?:;,\n]+) : ([^?:;,)\n]+)")
_CALL = re.compile(r"\b[\w.:]+\((\w+), (\w+)(?=[,)])")


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a C++ file."""
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)

    def change(start: int, end: int, after: str, kind: str) -> Mutant:
        return mutant(file, text, start, end, after, kind)

    for table, kind in ((_OPERATORS, "operator"), (_COMPARISONS, "comparison")):
        for before, after in table.items():
            for match in re.finditer(re.escape(before), code):
                yield change(match.start(), match.end(), after, kind)
    for match in re.finditer(r"!(?=[\w(])", code):
        yield change(match.start(), match.end(), "", "condition")
    for match in re.finditer(r"\bif \(([^;{}\n]*)\)(?= \{$| return| continue| break)", code, re.M):
        yield change(match.start(1), match.end(1), f"!({match[1]})", "condition")
        yield change(match.start(1), match.end(1), "false", "condition")
    for match in _NUMBER.finditer(code):
        yield change(match.start(), match.end(), _other_number(match[1]), "constant")
    for match in re.finditer(r"\b(true|false)\b", code):
        yield change(match.start(), match.end(), "false" if match[1] == "true" else "true", "flag")
    for match in _STATEMENT.finditer(code):
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        yield change(start, match.end(), ";", "deleted")
    for match in _TERNARY.finditer(code):
        yield change(match.start(), match.end(), f" ? {match[2]} : {match[1]}", "swapped")
    for match in _CALL.finditer(code):
        if match[1] != match[2]:
            yield change(match.start(1), match.end(2), f"{match[2]}, {match[1]}", "swapped")
    for match in re.finditer(r"\b(smaller|larger|min|max)(?=\()", code):
        yield change(match.start(), match.end(), _NAMES[match[1]], "extreme")
    for match in re.finditer(r"(?<=\w)\[([a-z]\w*)\]", code):
        yield change(match.start(1), match.end(1), "0", "index")


def _other_number(number: str) -> str:
    if number.isdigit():
        return str(int(number) + 1)
    value, suffix = number.rstrip("f"), "f" if number.endswith("f") else ""
    return "1.0" + suffix if float(value) == 0 else f"{float(value) * 2!r}{suffix}"
