"""A C++ compiler for tests of two builds at once, which takes a part of the time.

    python quick_compiler.py KEPT LOG SET ARGUMENTS

It does not optimise, leaves out the kernels of all instruction sets but SET, the best one of this
processor (`one_set.py`), and copies from the folder KEPT a unit that another test had compiled.
LOG gets a line for each unit. No unit is done before two processes have asked for the version, so
that neither of two builds can end before the other one has begun.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent))
from one_set import emptied

COMPILER = "c++"
SECONDS = 120


class QuickCompiler(NamedTuple):
    """The value of CXX, and the file LOG."""

    command: str
    log: Path

    def units(self) -> list[str]:
        """What was compiled since the test began, by either process."""
        return self.log.read_text().split()


def meet(log: Path) -> None:
    """Wait until two processes are about to build."""
    met = log.with_name(f"{log.name}.met")
    if met.exists():
        return
    end = time.monotonic() + SECONDS
    while len(list(log.parent.glob(f"{log.name}.by-*"))) < 2:
        if time.monotonic() > end:
            sys.exit("no second process asked for the compiler's version")
        time.sleep(0.02)
    time.sleep(0.5)  # from the version to the lock
    met.touch()


def main(kept: Path, log: Path, isa: str, words: list[str]) -> int:
    if "--version" in words:
        log.with_name(f"{log.name}.by-{os.getppid()}").touch()
    words = ["-O0" if word == "-O3" else word for word in words]
    if "-c" not in words:
        return subprocess.call([COMPILER, *words])
    place = words.index("-o")
    output = Path(words[place + 1])
    with log.open("a") as lines:
        lines.write(f"{output.name}\n")
    meet(log)
    del words[place : place + 2]
    known = kept / hashlib.sha256("\n".join(words).encode()).hexdigest()
    if not known.exists():
        empty, others = emptied(words, isa)
        command = [COMPILER, *others, "-o", str(output)]
        if empty:
            command += ["-x", "c++", "-"]
        status = subprocess.run(command, input=empty, text=True, check=False).returncode
        if status:
            return status
        mine = known.with_suffix(f".{os.getpid()}")
        shutil.copyfile(output, mine)
        mine.replace(known)
    shutil.copyfile(known, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
