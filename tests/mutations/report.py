"""The verdicts as Markdown: counts by file, and each survivor with its line."""

from collections import Counter, defaultdict
from typing import Any

_WORDS = ("killed", "survived", "same code", "invalid")


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown of the verdicts that a run left, by name.

    An argument that a survivor's row holds says why no test can or need notice it.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows.values():
        counts[_group(row["file"])][row["verdict"]] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"| files | {' | '.join(_WORDS)} |", f"|---|{'---:|' * len(_WORDS)}"]
    for group, of in counts.items():
        lines.append(f"| {group} | {' | '.join(str(of[word]) for word in _WORDS)} |")
    lines += ["", "| survivor | change | why |", "|---|---|---|"]
    for row in rows.values():
        if row["verdict"] == "survived":
            place = f"`{row['file'].rpartition('/')[2]}:{row['line']}`"
            change = f"{_code(row['before'])} to {_code(row['after'])}"
            lines.append(f"| {place} | {change} | {row.get('argument', 'open')} |")
    return "\n".join(lines)


def _group(file: str) -> str:
    folder = file.rpartition("/")[0]
    return f"{folder}/{file.rpartition('/')[2]}" if folder == "csrc/elsa" else folder


def _code(text: str) -> str:
    short = " ".join(text.split())
    short = short if len(short) <= 50 else f"{short[:47]}..."
    return f"`{short.replace('|', chr(92) + '|')}`" if short else "nothing"
