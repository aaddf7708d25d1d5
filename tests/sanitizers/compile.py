"""A compiler in front of g++ that adds the sanitizers; the project's own build calls it.

Set in the environment: ELSA_SET, the instruction set to compile, ELSA_LEVEL, how far to optimise,
and ELSA_OBJECTS, a folder. The tables of the other sets stay empty: the driver takes the best one
that the processor has, or the one named in ELSA_CPU_ISA, and never looks at the rest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_EMPTY = """#include "{header}"
namespace elsa {{ extern const {kind} {name}; const {kind} {name} = {{"none"}}; }}
"""
_HEADERS = {"Kernel": "kernel.h", "WindowKernel": "window_kernel.h",
            "GradientKernel": "gradient_kernel.h",
            "EntmaxKernel": "entmax_kernel.h"}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Compile one unit or link; returns the exit code."""
    words = [os.environ["ELSA_LEVEL"] if word == "-O3" else word for word in arguments]
    named = [word for word in words if word.startswith("-DELSA_KERNEL_NAME=")]
    if named and os.environ["ELSA_SET"] not in named[0]:
        table = next(w.partition("=")[2] for w in words if w.startswith("-DELSA_KERNEL="))
        kind = next(kind for kind in _HEADERS if table.startswith(f"k{kind}"))
        source = next(Path(w) for w in words if w.endswith("_kernel.cpp"))
        empty = _EMPTY.format(header=_HEADERS[kind], kind=kind, name=table)
        words = [f"-I{source.parent}" if w == str(source) else w for w in words]
        command = ["g++", *FLAGS, *words, "-x", "c++", "-"]
        return subprocess.run(command, input=empty, text=True, check=False).returncode
    return _once(words) if "-c" in words else _run(["g++", *FLAGS, *words])


def _once(words: list[str]) -> int:
    """Compile a unit unless the other runtime's library holds it already."""
    at = words.index("-o")
    output, rest = words[at + 1], words[:at] + words[at + 2 :]
    key = hashlib.sha256(repr(rest).encode()).hexdigest()
    kept = Path(os.environ["ELSA_OBJECTS"]) / key
    if not kept.exists():
        code = _run(["g++", *FLAGS, *words])
        if code:
            return code
        shutil.copyfile(output, kept)
    shutil.copyfile(kept, output)
    return 0


def _run(command: list[str]) -> int:
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
