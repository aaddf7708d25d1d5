"""Builds of the kernels of one instruction set: the tables of the others stay empty.

The driver takes the best one that the processor has, or the one named in ELSA_CPU_ISA, and never
looks at the rest. As a program it is such a compiler: `python one_set.py SET ARGUMENTS`.
"""

import subprocess
import sys
from pathlib import Path

_EMPTY = """#include "{header}"
namespace elsa {{ extern const {kind} {name}; const {kind} {name} = {{"none"}}; }}
"""
_HEADERS = {"Kernel": "kernel.h", "WindowKernel": "window_kernel.h",
            "GradientKernel": "gradient_kernel.h",
            "EntmaxKernel": "entmax_kernel.h"}  # fmt: skip


def emptied(words: list[str], isa: str) -> tuple[str, list[str]]:
    """What stands for the kernels of another instruction set, and the arguments without their file;
    "" where the arguments are of something else.
    """
    named = [word for word in words if word.startswith("-DELSA_KERNEL_NAME=")]
    if not named or isa in named[0]:
        return "", words
    table = next(w.partition("=")[2] for w in words if w.startswith("-DELSA_KERNEL="))
    kind = next(kind for kind in _HEADERS if table.startswith(f"k{kind}"))
    source = next(Path(w) for w in words if w.endswith("_kernel.cpp"))
    others = [f"-I{source.parent}" if w == str(source) else w for w in words]
    return _EMPTY.format(header=_HEADERS[kind], kind=kind, name=table), others


if __name__ == "__main__":
    empty, others = emptied(sys.argv[2:], sys.argv[1])
    command = ["c++", *others, *(["-x", "c++", "-"] if empty else [])]
    sys.exit(subprocess.run(command, input=empty, text=True, check=False).returncode)
