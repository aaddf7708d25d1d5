"""A compiler in front of g++ that adds the sanitizers; the project's own build calls it.

Set in the environment: ELSA_SET, the instruction set to compile, ELSA_LEVEL, how far to optimise,
and ELSA_OBJECTS, a folder of objects that are not compiled again while their text is the same. The
tables of the other sets stay empty: see `one_set.py`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from one_set import emptied

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main(arguments: list[str]) -> int:
    """Compile one unit or link; returns the exit code."""
    words = [os.environ["ELSA_LEVEL"] if word == "-O3" else word for word in arguments]
    empty, others = emptied(words, os.environ["ELSA_SET"])
    if empty:
        command = ["g++", *FLAGS, *others, "-x", "c++", "-"]
        return subprocess.run(command, input=empty, text=True, check=False).returncode
    return _once(words) if "-c" in words else _run(["g++", *FLAGS, *words])


def _once(words: list[str]) -> int:
    """Compile a unit unless the other runtime's library, or an earlier run, holds it already."""
    at = words.index("-o")
    output, rest = words[at + 1], ["g++", *FLAGS, *words[:at], *words[at + 2 :]]
    text = subprocess.run([*rest, "-E"], capture_output=True, check=False)
    version = subprocess.run(["g++", "--version"], capture_output=True, check=False)
    key = hashlib.sha256(repr(rest).encode() + version.stdout + text.stdout).hexdigest()
    kept = Path(os.environ["ELSA_OBJECTS"]) / key
    if text.returncode or not kept.exists():
        code = _run([*rest, "-o", output])
        if code:
            return code
        shutil.copyfile(output, f"{kept}.new")
        Path(f"{kept}.new").replace(kept)
    shutil.copyfile(kept, output)
    kept.touch()  # in use
    return 0


def _run(command: list[str]) -> int:
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
