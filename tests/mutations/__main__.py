"""`python -m tests.mutations --json FILE`: change the sources, one place at a time, in a copy.

Every change (a mutant) should make a test fail. Sources: csrc, the kernels of Triton (by its
interpreter), the adapters of models, graphs and the host code of operators. FILE holds the
verdicts; a run that was ended goes on where it was. The sources of csrc are compiled by the
project's own build, without most of the optimisation.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .judge import ROOT, Judge, tracked
from .report import tables
from .source import Mutant
from .suites import plan


def main() -> int:
    """Judge the mutants; the exit code is 1 where one survives that is not argued for."""
    given = _arguments()
    ranks: Counter[str] = Counter()
    ranked = []
    for name, one in plan(ROOT, tracked()):
        ranked.append((ranks[one.file], name, one))
        ranks[one.file] += 1
    ranked.sort(key=lambda item: item[0])  # every file's first, then its second: a part says much
    wanted = [
        (name, one)
        for index, (_, name, one) in enumerate(ranked)
        if index % given.shard[1] == given.shard[0] and fnmatch(one.file, given.only)
    ]
    if given.table:
        print(tables(_read(given.json)))
        return 0
    if given.list:
        for name, one in wanted:
            print(f"{name} {one.file}:{one.line} {one.kind}: {one.before!r} -> {one.after!r}")
        return 0
    rows = _read(given.json)
    if given.again:
        for name, _ in wanted:
            if rows.get(name, {}).get("verdict") == "survived":
                del rows[name]
    left = [(name, one) for name, one in wanted if name not in rows]
    os.nice(max(0, 10 - os.nice(0)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies are removed
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="elsa-mutations-") as folder:
        judge = Judge(Path(folder)) if left else None
        for count, (name, one) in enumerate(left, len(wanted) - len(left) + 1):
            if judge is None or time.monotonic() > end:
                break
            verdict = judge.judge(one)
            rows[name] = _row(one, verdict.word, verdict.by, verdict.seconds)
            _write(given.json, rows)
            line = f"{count}/{len(wanted)} {one.file}:{one.line} {verdict.word} {verdict.by}"
            print(f"{line} {verdict.seconds:.0f} s", file=sys.stderr, flush=True)
    counts = Counter(rows[name]["verdict"] for name, _ in wanted if name in rows)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "nothing")
    argued = [name for name, row in rows.items() if row.get("argument")]
    survivors = [n for n, _ in wanted if n in rows and rows[n]["verdict"] == "survived"]
    return 1 if set(survivors) - set(argued) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="read, written after each mutant")
    parser.add_argument("--only", default="*", help="files, as a pattern: 'csrc/*'")
    parser.add_argument("--shard", type=_shard, default=(0, 1), help="I/N: every Nth, from the Ith")
    parser.add_argument("--minutes", type=float, default=1e9, help="no mutant begins later")
    parser.add_argument("--again", action="store_true", help="judge those again that survived")
    parser.add_argument("--list", action="store_true", help="name the mutants, judge none")
    parser.add_argument("--table", action="store_true", help="FILE as tables of Markdown")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    index, of = (int(part) for part in text.split("/"))
    if not 0 < index <= of:
        raise argparse.ArgumentTypeError("I/N with I from 1 to N")
    return index - 1, of


def _row(one: Mutant, word: str, by: str, seconds: float) -> dict[str, Any]:
    by = by.rpartition("/")[2] if "::" in by else by
    return {
        "file": one.file, "line": one.line, "kind": one.kind, "before": one.before,
        "after": one.after, "verdict": word, "by": by, "seconds": seconds,
    }  # fmt: skip


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text())["mutants"]) if path.exists() else {}


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    ordered = dict(sorted(rows.items(), key=lambda item: (item[1]["file"], item[1]["line"])))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in ordered.items())
    part.write_text(f'{{"schema_version": 1, "mutants": {{\n{lines}\n}}}}\n')
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
