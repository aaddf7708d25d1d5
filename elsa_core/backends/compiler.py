"""Compiling the libraries of `csrc/` on first need, and keeping them in the user's cache.

Every library is the kernels of `csrc/elsa` behind one runtime's binding: PyTorch's
(`elsa_core.backends.native`) or ONNX Runtime's (`elsa_core.exporting.ort_library`).

Environment variables:
    ELSA_CACHE_DIR: where built libraries are kept (default: the user's cache directory).
    CXX: the compiler (default: g++, then clang++, then c++).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.errors import UnavailableError
from elsa_core.files import flush

FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-w",
)  # fmt: skip
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
_LOCK_SECONDS = 600
_LOG = logging.getLogger("elsa")


@dataclass(frozen=True)
class Recipe:
    """One library: the kernels of `csrc/elsa` and the units that bind them to a runtime.

    Attributes:
        stem: the file's name before the key of its contents.
        title: what messages call it.
        folder: the binding's folder under `csrc`.
        units: the binding's translation units: a name, a file of `folder`, flags of its own.
        link_flags: what the link adds to `-shared`.
        facts: what the key holds besides sources, compiler, flags and machine.
    """

    stem: str
    title: str
    folder: str
    units: tuple[tuple[str, str, tuple[str, ...]], ...]
    link_flags: tuple[str, ...] = ()
    facts: tuple[Any, ...] = ()


def build(
    recipe: Recipe, *, force: bool = False, progress: Callable[[str], None] | None = None
) -> Path:
    """Compile a library into the user's cache unless it is there already.

    Args:
        recipe: what to build.
        force: compile again although a library of the same key is there.
        progress: called with one line before each step.

    Returns:
        Path of the library. It appears under its name in one step: an interrupt, a second process
        and a full disk leave either the whole file or none. Without a compiler, the newest library
        that was built ahead for the same sources, flags and facts, unless `force` asks for more.

    Raises:
        UnavailableError: no compiler and nothing built ahead, a compiler that fails, or a cache
            that cannot be read or written.
    """
    if force:
        compiler_version(tuple(compiler()))  # what was built ahead is no answer here
    path = library_path(recipe)
    if is_whole(path) and not force:
        return path
    damaged = path.exists() and not is_whole(path)
    try:
        _build(recipe, path, force, progress or (lambda line: None))
    except UnavailableError as error:
        if damaged:
            raise _cannot_mend(path, error) from None
        raise
    return path


def _build(recipe: Recipe, path: Path, force: bool, say: Callable[[str], None]) -> None:
    """Compile a library while no other process does."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            if is_whole(path) and not force:  # another process built it while this one waited
                return
            _compile(recipe, path, say)
    except Timeout:
        raise UnavailableError(f"another process has held {path}.lock for 10 minutes") from None
    except OSError as error:
        raise UnavailableError(
            f"the {recipe.title} cannot be written to {path.parent}: {error.strerror or error}; "
            "set ELSA_CACHE_DIR to a directory that can be written"
        ) from None


def _cannot_mend(path: Path, error: UnavailableError) -> UnavailableError:
    return UnavailableError(
        f"{path} is damaged and was not built again: {error}; then run `elsa build --force`"
    )


def library_path(recipe: Recipe) -> Path:
    """Where the library of these sources, compiler, flags and facts lives, built or not.

    The name holds two keys, of the facts and of the compiler: where no compiler is left, the
    newest library of the same facts is the answer.

    Raises:
        UnavailableError: no compiler and nothing built ahead, or a cache that cannot be read.
    """
    start = cache_directory() / f"{recipe.stem}-{_facts_key(recipe)}"
    try:
        version = compiler_version(tuple(compiler()))
    except UnavailableError as error:
        return _built_ahead(start, error)
    path = start.with_name(f"{start.name}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so")
    is_whole(path)  # whoever asks for the path learns here that the cache cannot be read
    return path


def _facts_key(recipe: Recipe) -> str:
    """The key of all that a library is made of, except for the compiler itself."""
    digest = hashlib.sha256()
    for source in _sources(recipe.folder):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    flags = [flag for *_, flags in recipe.units for flag in flags]
    # Where torch lies decides nothing, and differs between the stages of an image.
    flags = [flag for flag in (*flags, *recipe.link_flags) if not flag.startswith(("-I", "-L"))]
    facts = (_named_compiler()[1:], FLAGS, flags, kernels(), *recipe.facts)
    digest.update(repr((*facts, sys.platform, platform.machine())).encode())
    return digest.hexdigest()[:16]


def _built_ahead(start: Path, error: UnavailableError) -> Path:
    """The newest whole library whose name begins like `start`; `error` says why none is built."""
    found = list(start.parent.glob(f"{start.name}-*.so"))
    whole = [path for path in found if is_whole(path)]
    if whole:
        return max(whole, key=lambda path: path.stat().st_mtime)
    raise _cannot_mend(found[0], error) if found else error


def is_whole(path: Path) -> bool:
    """Whether a library is there up to its last byte: loading half of one kills the process.

    Raises:
        UnavailableError: the cache cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnavailableError(
            f"the cache {path.parent} cannot be read: {error.strerror or error}; "
            "set ELSA_CACHE_DIR to a directory of yours"
        ) from None
    if sys.platform == "darwin":
        return size > 0
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    # The table of sections is what linkers write last: its offset, an entry's size, their number.
    order = ">" if header[5] == 2 else "<"
    (offset,) = struct.unpack_from(f"{order}Q", header, 0x28)
    entry, entries = struct.unpack_from(f"{order}HH", header, 0x3A)
    return bool(size >= offset + entry * entries)


def cache_directory() -> Path:
    """Where built libraries are kept.

    Raises:
        UnavailableError: ELSA_CACHE_DIR names a home directory that does not exist, or there is
            neither that variable nor a home directory.
    """
    chosen = os.environ.get("ELSA_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser() / "native"
        except RuntimeError:
            raise UnavailableError(
                f"ELSA_CACHE_DIR={chosen!r} names a home directory that does not exist; "
                "unset or correct ELSA_CACHE_DIR"
            ) from None
    import platformdirs

    place = Path(platformdirs.user_cache_dir("elsa"))
    if place.parts[0].startswith("~"):
        raise UnavailableError("this user has no home directory; set ELSA_CACHE_DIR")
    return place / "native"


def status(recipe: Recipe) -> dict[str, Any]:
    """What `elsa doctor` shows, without building or loading anything. Never raises.

    Returns:
        `built` and `damaged`, `cache` and `path` (None where they are unknown), `compiler` and
        `compiler_version`, or `compiler_reason` why there is none; `reason` where the library can
        be neither found nor built.
    """
    facts: dict[str, Any] = {"cache": None, "built": False, "damaged": False, "path": None}
    try:
        command = compiler()
        version = compiler_version(tuple(command))
        facts |= {"compiler": " ".join(command), "compiler_version": version}
    except UnavailableError as error:
        facts["compiler_reason"] = str(error)
    try:
        facts["cache"] = str(cache_directory())
        path = library_path(recipe)
        built = is_whole(path)
        facts |= {"path": str(path), "built": built, "damaged": not built and path.exists()}
    except (UnavailableError, OSError) as error:
        facts["reason"] = str(error)
    return facts


def kernels() -> dict[str, tuple[str, ...]]:
    """The instruction sets that this architecture's libraries hold, with their flags."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return _KERNELS.get(machine, {"Baseline": ()})


def compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        UnavailableError: there is none.
    """
    command = _named_compiler()
    if command:
        if shutil.which(command[0]) is None:
            raise UnavailableError(
                f"the compiler CXX={os.environ['CXX']!r} does not exist; unset or correct CXX"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise UnavailableError("no C++ compiler was found; install g++ (or clang++), or set CXX")


def _named_compiler() -> list[str]:
    """The command in CXX, empty where the variable is."""
    named = os.environ.get("CXX", "")
    try:
        return shlex.split(named)
    except ValueError as error:
        raise UnavailableError(
            f"CXX={named!r} cannot be read as a command: {error}; unset or correct CXX"
        ) from None


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """The first line of `--version`.

    Raises:
        UnavailableError: the command does not run.
    """
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=60, check=False,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the compiler {' '.join(command)} does not run: {error}") from None
    return _first_line(done.stdout) if done.stdout else ""


def source_directory() -> Path:
    """The folder `csrc`, of a wheel or of the repository.

    Raises:
        UnavailableError: it is missing.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "csrc", package.parent / "csrc"):
        if (place / "elsa" / "attention.cpp").exists():
            return place
    raise UnavailableError(
        f"the C++ sources are missing beside {package}; reinstall elsa-attention"
    )


def _sources(folder: str) -> list[Path]:
    root = source_directory()
    found = [p for d in ("elsa", folder) for p in (root / d).iterdir()]
    return sorted(p for p in found if p.suffix in (".cpp", ".h"))


def _compile(recipe: Recipe, path: Path, say: Callable[[str], None]) -> None:
    """Compile every unit at once, link, and put the result under its name."""
    started = time.monotonic()
    _LOG.info("compiling the %s (once for this machine)", recipe.title)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        units = [
            (name, [*command, "-o", f"{scratch}/{name}.o"]) for name, command in _units(recipe)
        ]
        say(f"compiling {len(units)} units with {' '.join(compiler())}")
        _run_all(units)
        say("linking")
        library = Path(scratch) / path.name
        objects = [f"{scratch}/{name}.o" for name, _ in units]
        link = [*compiler(), *objects, "-shared", *recipe.link_flags]
        if sys.platform != "darwin":
            link.append("-Wl,--exclude-libs,ALL")
        _run_all([("link", [*link, "-o", str(library)])])
        if not is_whole(library):
            raise UnavailableError(f"the compiler {' '.join(compiler())} wrote no library")
        flush(library)  # a crash after the rename must not leave half a library under its name
        library.replace(path)
    _LOG.info("built %s in %.1f s", path, time.monotonic() - started)


def _units(recipe: Recipe) -> Iterator[tuple[str, list[str]]]:
    """Each translation unit: its name and the command that compiles it."""
    root = source_directory()
    common = [*compiler(), *FLAGS, "-c"]
    for name, file, flags in recipe.units:
        yield name, [*common, *flags, str(root / recipe.folder / file)]
    for operator, table in (("attention", "kKernel"), ("window", "kWindowKernel")):
        yield f"{operator}-driver", [*common, str(root / "elsa" / f"{operator}.cpp")]
        kernel = str(root / "elsa" / f"{operator}_kernel.cpp")
        for name, flags in kernels().items():
            names = [f"-DELSA_KERNEL={table}{name}", f'-DELSA_KERNEL_NAME="{name.lower()}"']
            yield f"{operator}-{name}", [*common, *flags, *names, kernel]


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
                    f"the compiler {' '.join(compiler())} failed on unit '{name}' "
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
