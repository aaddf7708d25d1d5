"""`python -m tests.sanitizers.cuda [--tool NAME] [--short] [FILE...]`: compute-sanitizer.

It runs the GPU tests of the operators, or those that are named.
memcheck finds accesses beyond an allocation and misaligned ones, initcheck reads of device memory
that nobody wrote; cuDNN's gradients, the peer of some tests, read padding that nobody wrote.
racecheck is left out: it does not understand warp-specialised kernels. PyTorch's
caching allocator is switched off, so that each tensor is an allocation of its own; what needs it
(CUDA graphs) or measures time is left out.

Hours for all files. The exit code is 1 where a sanitizer or a test found something, 3 where there
is no compute-sanitizer or no GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BACKENDS = "tests/backends"
PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "initcheck")
# Of the sanitizer where it found something; pytest's own end at 5.
FOUND = 86
CONFORMANCE = "tests/conformance/test_conformance.py"
EVERYTHING = (
    CONFORMANCE,
    *(
        f"{BACKENDS}/test_{name}_gpu.py"
        for name in ("streams_graphs_and_sizes", "specialised_tiles", "portable")
    ),
)
SHORT = tuple(
    f"{CONFORMANCE}::test_results_are_exact[cuda-{row}-triton]"
    for row in (
        "attention-mask hidden row-infer", "attention-many heads-infer", "attention-causal-train",
        "window_attention-layout odd rows-infer", "linear-layout odd rows-infer",
    )
)  # fmt: skip
# Parts of names of tests that are not for a sanitizer.
_LEFT_OUT = (
    "graph", "replays", "host_cost", "recompile", "2_to_31", "beyond_32_bits", "measured",
    "model", "delays", "compiled",
)  # fmt: skip
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")


class Answer(NamedTuple):
    """What a run of one tool found: its errors, pytest's exit code, and the end of the output.

    `errors` is None where the sanitizer did not say: it did not run to its end.
    """

    errors: int | None
    code: int
    text: str

    @property
    def clean(self) -> bool:
        """Whether tests passed, none failed, and no tool found anything."""
        return self.errors == 0 and self.code == 0 and " passed" in self.text


def program() -> str | None:
    """The sanitizer: of PATH, else of the CUDA toolkit."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", PROGRAM)]
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(places))


def missing() -> str:
    """Why the sanitizer cannot run here, in words; "" where it can."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return "no NVIDIA GPU"
    return "" if program() else f"no {PROGRAM}: it comes with the CUDA toolkit"


def command(tool: str, tests: Sequence[str]) -> list[str]:
    """The command that runs tests in one tool."""
    chosen = " and ".join(f"not {name}" for name in _LEFT_OUT)
    # what PyTorch asks the driver for in vain is no error of a kernel
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no",
               "--target-processes", "all", "--print-limit", "20"]  # fmt: skip
    pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "timeout=0",
              "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen, *tests]  # fmt: skip
    return [program() or PROGRAM, *options, *pytest]


def run(tool: str, tests: Sequence[str]) -> Answer:
    """Run tests in one tool."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command(tool, tests), cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
    )  # fmt: skip
    text = done.stdout + done.stderr
    counts = [int(count) for count in _SUMMARY.findall(text)]
    code = 0 if counts and done.returncode == FOUND else done.returncode
    return Answer(sum(counts) if counts else None, code, text[-8000:])


def answers(tools: Sequence[str], tests: Sequence[str]) -> Iterator[tuple[str, str, Answer]]:
    """A run of each file in each tool: a file alone, so that one that dies hides no other."""
    for tool in tools:
        for test in tests:
            yield tool, test, run(tool, [test])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print a line for each file; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers.cuda", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, help="default: both")
    parser.add_argument("--short", action="store_true", help="the tests of the short pass")
    parser.add_argument("files", nargs="*", metavar="FILE", help="GPU tests; default: all")
    given = parser.parse_args(arguments)
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 3
    tools = [given.tool] if given.tool else TOOLS
    found, start = 0, time.monotonic()
    for tool, test, answer in answers(tools, given.files or (SHORT if given.short else EVERYTHING)):
        found += not answer.clean
        said = "no summary" if answer.errors is None else f"{answer.errors} errors"
        words = "clean" if answer.clean else f"{said}, exit {answer.code}\n{answer.text}"
        print(f"{tool} {test}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
        start = time.monotonic()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
