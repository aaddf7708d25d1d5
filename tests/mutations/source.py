"""What a mutant is, and what the two languages share in finding them."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one source file.

    Attributes:
        file: path from the root of the tree.
        line: of the change's first character, from 1.
        start, end: what is replaced, in characters of the file.
        before, after: the text there, and what it becomes.
        kind: what sort of change it is, in one word.
    """

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    kind: str

    def applied(self, text: str) -> str:
        """The file's text with the change."""
        if text[self.start : self.end] != self.before:
            raise ValueError(f"{self.file}:{self.line} does not hold {self.before!r}")
        return text[: self.start] + self.after + text[self.end :]


def mutant(file: str, text: str, start: int, end: int, after: str, kind: str) -> Mutant:
    """The mutant of the characters `start` to `end` of a file."""
    line = text.count("\n", 0, start) + 1
    return Mutant(file, line, start, end, text[start:end], after, kind)


def identity(mutant: Mutant, text: str) -> str:
    """A name that stays when other lines of the file change: a run goes on where it ended."""
    begin = text.rfind("\n", 0, mutant.start) + 1
    last = text.find("\n", mutant.end)
    lines = text[begin : last if last >= 0 else len(text)]
    earlier = text[:begin].count(lines)
    facts = (mutant.file, lines, earlier, mutant.start - begin, mutant.before, mutant.after)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def chosen(mutants: Iterable[tuple[str, Mutant]], count: int) -> list[tuple[str, Mutant]]:
    """`count` named mutants of a file, of every kind in turn, the same ones every time."""
    kinds: dict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    for name, found in sorted(mutants, key=lambda pair: pair[0]):
        kinds[found.kind].append((name, found))
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [pair for turn in turns for pair in turn if pair is not None][:count]
