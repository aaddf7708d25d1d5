"""Building the libraries with the sanitizers, and running tests with their runtime loaded first."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Words of pytest: the CPU kernels' rows of the conformance suite, and ONNX Runtime's library.
_FILES = ("tests/conformance/test_conformance.py", "tests/backends/test_ort_library.py")
_ROWS = "-native and not compiled and not exported"
EVERYTHING = (*_FILES, "-k", f"({_ROWS}) or test_ort_library")
_HERE = "guarded or (no and key)"
SHORT = (
    *_FILES, "-k",
    f"({_ROWS} and ({_HERE})) or hostile_model or one_true_is_no_mask",
)  # fmt: skip
_BUILD = """
from elsa_core.backends import native
from elsa_core.exporting import ort_library
native.build(), ort_library.build()
"""


def missing() -> str:
    """Why the sanitizers cannot be had here, in words; "" where they can."""
    if sys.platform != "linux":
        return f"the sanitizers' runtime is loaded first on Linux alone, not on {sys.platform}"
    if shutil.which("g++") is None:
        return "no g++"
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        if not Path(_library(name)).is_absolute():
            return f"g++ has no {name}"
    return ""


def _library(name: str) -> str:
    """The path of one of the compiler's libraries; the name alone where it has none."""
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def build(folder: Path, name: str, level: str = "-O1", objects: Path | None = None) -> None:
    """Compile both libraries for one instruction set into a cache of their own.

    `-O0` halves the time to compile, which is most of that of a short pass; tests run slower. Where
    `objects` is given, what an earlier run left there of the same text is not compiled again.

    Raises:
        RuntimeError: the compiler failed.
    """
    command, start = [sys.executable, "-c", _BUILD], time.time()
    env = _environment(folder, name) | {"ELSA_LEVEL": level, "ELSA_OBJECTS": str(objects or folder)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    for path in objects.iterdir() if objects is not None else ():
        if path.stat().st_mtime < start:  # of an older text
            path.unlink()


def run(folder: Path, name: str, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests with the libraries that `build` left in `folder`.

    Returns:
        pytest's exit code, and the end of what it and the sanitizers said.
    """
    options = ("-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist")
    first = " ".join(_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so"))
    env = _environment(folder, name) | {
        "LD_PRELOAD": first,
        # Python's own memory is freed at its end or never; torch mixes malloc with delete.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1"
        f":log_path='{folder}/report'",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path='{folder}/report'",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    # pytest holds back what a process that dies has written, so the reports are files.
    reports = [path.read_text()[:4000] for path in sorted(folder.glob("report.*"))]
    return done.returncode or int(bool(reports)), "\n".join([*reports, done.stdout[-2000:]])


def _environment(folder: Path, name: str) -> dict[str, str]:
    places = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    script = Path(__file__).with_name("compile.py")
    compiler = shlex.join([sys.executable, "-I", "-S", str(script)])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(places), "CXX": compiler, "ELSA_SET": name,
        "ELSA_CPU_ISA": name, "ELSA_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "2",
    }  # fmt: skip
