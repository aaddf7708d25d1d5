"""The CPU kernels of `csrc/`: compiled on first need, cached, loaded as one operator library.

The library is written to PyTorch's stable ABI and holds no Python symbol, so one file serves every
torch from 2.10 on, with or without this package. Building it takes a C++20 compiler and seconds.

Environment variables:
    ELSA_NATIVE: "0" switches the backend off.
    ELSA_CACHE_DIR: where built libraries are kept (default: the user's cache directory).
    ELSA_CPU_ISA: kernels to run ("baseline", "avx2", "avx512", "neon") instead of the best ones.
    CXX: the compiler (default: g++, then clang++, then c++).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.errors import UnavailableError

HEAD_DIM_MAX = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMA_OWNER = "ELSA_SCHEMA_DEFINED_BY_PYTHON"
_LOCK_SECONDS = 600
_LOG = logging.getLogger("elsa")
_LIBRARY: list[ctypes.CDLL] = []  # the one that `load` loaded

_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-w",
)  # fmt: skip
# The oldest torch whose stable ABI is used: the library runs on that one and on every later one.
_TORCH_FLAGS = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)
_KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "Baseline": (),
        "Avx2": ("-mavx2", "-mfma", "-mf16c"),
        "Avx512": (
            "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma", "-mf16c",
        ),
    },
    "aarch64": {"Neon": ()},
}  # fmt: skip


def support(request: Request) -> Support:
    """Whether the library can serve a call; builds and loads it at the first request it fits."""
    if request.dtype not in DTYPES:
        return Support(False, f"takes float32, float16 and bfloat16, not {_short(request.dtype)}")
    widest = max(request.head_dim, request.value_dim)
    if widest > HEAD_DIM_MAX:
        return Support(False, f"takes head_dim up to {HEAD_DIM_MAX}, not {widest}")
    if min(request.head_dim, request.value_dim) < 1:
        return Support(False, "takes head_dim from 1, not 0")
    return load()


def schedule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    precision: str,
) -> str:
    """Name the kernels and how work is cut."""
    return f"{isa()} kernels, tiles of query rows over {torch.get_num_threads()} threads"


class Cut(NamedTuple):
    """How the kernels cut a call; see `elsa::Cut` in csrc/elsa/attention.h.

    `key_block` keys are folded at a time, `key_blocks` of them one after another; each head's
    queries are cut in `query_ranges`, which `workers` threads take in turn, `block_rows` rows at a
    time. Sums within a block are chains of `sum_chain` keys. `workspace_bytes` is of each worker.
    """

    key_block: int
    key_blocks: int
    query_ranges: int
    workers: int
    block_rows: int
    sum_chain: int
    workspace_bytes: int


def cut(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> Cut:
    """The kernels' own plan of a call that is not empty, for torch's current number of threads.

    Raises:
        UnavailableError: the library is not loaded, and why.
    """
    library = _loaded()
    batch, heads, queries, head_dim = query.shape
    sizes = (batch, heads, key.shape[1], queries, key.shape[2], head_dim, value.shape[3])
    answer = (ctypes.c_int64 * len(Cut._fields))()
    plan = library.elsa_cpu_cut
    plan(
        (ctypes.c_int64 * 7)(*sizes),
        is_causal,
        attn_mask is not None,
        torch.get_num_threads(),
        answer,
    )
    return Cut(*answer)


@functools.cache
def load() -> Support:
    """Load the library, building it if this machine has not built it yet. Never raises.

    The answer is kept for the life of the process; a failure is logged once, in one line.
    """
    if os.environ.get("ELSA_NATIVE", "1") == "0":
        return Support(False, "switched off by ELSA_NATIVE=0")
    try:
        path = str(build())
        with _schema_owned_by_python():
            torch.ops.load_library(path)
        _isa_of(ctypes.CDLL(path))
        _LIBRARY.append(ctypes.CDLL(path))
    except (UnavailableError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        _LOG.warning("the native library is off, plain PyTorch takes over: %s", reason)
        return Support(False, reason)
    return Support(True)


def isa() -> str:
    """The instruction set whose kernels run here: "avx512", "avx2", "baseline" or "neon".

    Raises:
        UnavailableError: the library is not loaded, and why.
    """
    return _isa_of(_loaded())


def build(*, force: bool = False, progress: Callable[[str], None] | None = None) -> Path:
    """Compile the library into the user's cache unless it is there already.

    Args:
        force: compile again although a library of the same key is there.
        progress: called with one line before each step.

    Returns:
        Path of the library. It appears under its name in one step: an interrupt, a second process
        and a full disk leave either the whole file or none.

    Raises:
        UnavailableError: no compiler, a compiler that fails, or a cache that cannot be written.
    """
    path = library_path()
    if path.exists() and not force:
        return path
    from filelock import FileLock, Timeout

    say = progress or (lambda line: None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            if path.exists() and not force:  # another process built it while this one waited
                return path
            _compile(path, say)
    except Timeout:
        raise UnavailableError(f"another process has held {path}.lock for 10 minutes") from None
    except OSError as error:
        raise UnavailableError(
            f"the native library cannot be written to {path.parent}: {error.strerror or error}; "
            "set ELSA_CACHE_DIR to a directory that can be written"
        ) from None
    return path


def library_path() -> Path:
    """Where the library of these sources, compiler, flags and torch version lives.

    Raises:
        UnavailableError: no compiler was found.
    """
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    compiler = _compiler()
    facts = (_compiler_version(tuple(compiler)), _FLAGS, _TORCH_FLAGS, _kernels(), _torch_version())
    digest.update(repr((*facts, sys.platform, platform.machine())).encode())
    return cache_directory() / f"libelsa-{digest.hexdigest()[:16]}.so"


def cache_directory() -> Path:
    """Where built libraries are kept."""
    chosen = os.environ.get("ELSA_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "native"
    import platformdirs

    return Path(platformdirs.user_cache_dir("elsa")) / "native"


def status() -> dict[str, Any]:
    """What `elsa doctor` shows, without building anything: compiler, path, whether it is built."""
    facts: dict[str, Any] = {"cache": str(cache_directory()), "built": False, "path": None}
    try:
        compiler = _compiler()
        facts["compiler"] = " ".join(compiler)
        facts["compiler_version"] = _compiler_version(tuple(compiler))
        facts["path"] = str(library_path())
        facts["built"] = library_path().exists()
    except UnavailableError as error:
        facts["reason"] = str(error)
    return facts


def _compile(path: Path, say: Callable[[str], None]) -> None:
    """Compile every unit at once, link, and put the result under its name."""
    started = time.monotonic()
    _LOG.info("compiling the native library (once for this machine)")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        units = [(name, [*command, "-o", f"{scratch}/{name}.o"]) for name, command in _units()]
        say(f"compiling {len(units)} units with {' '.join(_compiler())}")
        _run_all(units)
        say("linking")
        library = Path(scratch) / path.name
        objects = [f"{scratch}/{name}.o" for name, _ in units]
        _run_all([("link", [*_compiler(), *objects, *_link_flags(), "-o", str(library)])])
        library.replace(path)
    _LOG.info("built %s in %.1f s", path, time.monotonic() - started)


def _units() -> Iterator[tuple[str, list[str]]]:
    """Each translation unit: its name and the command that compiles it."""
    root = _source_directory()
    common = [*_compiler(), *_FLAGS, "-c"]
    yield "driver", [*common, str(root / "elsa" / "attention.cpp")]
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    yield "torch", [*common, *_TORCH_FLAGS, include, str(root / "torch" / "attention.cpp")]
    kernel = str(root / "elsa" / "attention_kernel.cpp")
    for name, flags in _kernels().items():
        names = [f"-DELSA_KERNEL=kKernel{name}", f'-DELSA_KERNEL_NAME="{name.lower()}"']
        yield name, [*common, *flags, *names, kernel]


def _run_all(commands: list[tuple[str, list[str]]]) -> None:
    """Run the commands side by side; the first failure is the error, and leaves nothing running."""
    running: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        for name, command in commands:
            running.append((name, _start(command)))
        for name, process in running:
            _, errors = process.communicate()
            if process.returncode != 0:
                raise UnavailableError(
                    f"the compiler {' '.join(_compiler())} failed on unit '{name}' "
                    f"(exit {process.returncode}): {_first_line(errors)}"
                )
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip


def _first_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    chosen = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return chosen or "it said nothing"


def _link_flags() -> tuple[str, ...]:
    lib = Path(torch.__file__).parent / "lib"
    flags = ("-shared", f"-L{lib}", "-ltorch_cpu", "-lc10")
    return flags if sys.platform == "darwin" else (*flags, "-Wl,--exclude-libs,ALL")


def _kernels() -> dict[str, tuple[str, ...]]:
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return _KERNELS.get(machine, {"Baseline": ()})


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if not command or shutil.which(command[0]) is None:
            raise UnavailableError(
                f"the compiler CXX={named!r} does not exist; unset or correct CXX"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise UnavailableError("no C++ compiler was found; install g++ (or clang++), or set CXX")


@functools.cache
def _compiler_version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the compiler {' '.join(command)} does not run: {error}") from None
    return _first_line(done.stdout) if done.stdout else ""


def _torch_version() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def _source_directory() -> Path:
    package = Path(__file__).resolve().parents[1]
    for place in (package / "csrc", package.parent / "csrc"):  # a wheel, or the repository
        if (place / "elsa" / "attention.cpp").exists():
            return place
    raise UnavailableError(
        f"the C++ sources are missing beside {package}; reinstall elsa-attention"
    )


def _sources() -> list[Path]:
    root = _source_directory()
    found = [p for d in ("elsa", "torch") for p in (root / d).iterdir()]
    return sorted(p for p in found if p.suffix in (".cpp", ".h"))


@contextmanager
def _schema_owned_by_python() -> Iterator[None]:
    """Tell the library's static initialiser that `elsa_core.ops` has defined the schema."""
    os.environ[_SCHEMA_OWNER] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SCHEMA_OWNER, None)


def _loaded() -> ctypes.CDLL:
    """The library that `load` loaded; its file may have been replaced since."""
    answer = load()
    if not answer.ok:
        raise UnavailableError(answer.reason)
    return _LIBRARY[0]


def _isa_of(library: ctypes.CDLL) -> str:
    function = library.elsa_cpu_isa
    function.restype = ctypes.c_char_p
    name: bytes | None = function()
    if name is None:
        raise UnavailableError(
            f"ELSA_CPU_ISA={os.environ.get('ELSA_CPU_ISA')!r} is unknown, or this CPU lacks it; "
            "unset it for the best kernels"
        )
    return name.decode()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
