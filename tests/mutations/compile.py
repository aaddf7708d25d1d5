"""A compiler in front of the compiler, for mutants alone; the project's own build calls it.

A unit that cannot hold the change, or is of another instruction set than the one that runs, is
compiled from the sources without it, every unit with -O1 in place of -O3, and none twice: objects
are kept by what the preprocessor leaves of their source. Set in the environment: ELSA_MUTANT (the
tree with the change), ELSA_PLAIN (the tree without), ELSA_CHANGED (the changed file), ELSA_OBJECTS
(a folder), ELSA_SET (the instruction set).
"""

import hashlib
import os
import shutil
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Compile one unit, or hand anything else to g++; returns the exit code."""
    if "-c" not in arguments:
        return subprocess.run(["g++", *arguments], check=False).returncode
    at = arguments.index("-o")
    output = arguments[at + 1]
    rest = ["-O1" if word == "-O3" else word for word in arguments[:at] + arguments[at + 2 :]]
    if not _affected(rest):
        rest = [word.replace(os.environ["ELSA_MUTANT"], os.environ["ELSA_PLAIN"]) for word in rest]
        text = b""
    else:
        read = subprocess.run(["g++", "-E", "-P", *rest], capture_output=True, check=False)
        if read.returncode:
            sys.stderr.buffer.write(read.stderr)
            return read.returncode
        text = read.stdout
    key = hashlib.sha256(repr(rest).encode() + text).hexdigest()
    kept = os.path.join(os.environ["ELSA_OBJECTS"], key)  # noqa: PTH118  # pathlib takes longer
    if not os.path.exists(kept):  # noqa: PTH110
        code = subprocess.run(["g++", *rest, "-o", output], check=False).returncode
        if code:
            return code
        shutil.copyfile(output, f"{kept}.{os.getpid()}")
        os.replace(f"{kept}.{os.getpid()}", kept)  # noqa: PTH105
        return 0
    shutil.copyfile(kept, output)
    return 0


def _affected(words: list[str]) -> bool:
    """True where a unit may hold the changed file: a header of the kernels, or itself."""
    changed = os.environ["ELSA_CHANGED"]
    source = next(word for word in words if word.endswith(".cpp"))
    named = [word for word in words if word.startswith("-DELSA_KERNEL_NAME=")]
    if named and os.environ["ELSA_SET"] not in named[0]:
        return False
    same_folder = changed.rpartition("/")[0] == source[source.rindex("csrc/") :].rpartition("/")[0]
    return same_folder if changed.endswith(".h") else source.endswith(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
