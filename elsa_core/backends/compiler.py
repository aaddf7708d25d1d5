"""Compiling the libraries of `csrc/` on first need, and keeping them in the user's cache.

Every library is the kernels of `csrc/elsa` behind one runtime's binding: PyTorch's
(`elsa_core.backends.native`) or ONNX Runtime's (`elsa_core.exporting.ort_library`).

Environment variables:
    ELSA_CACHE_DIR: see `elsa_core.backends.cache`.
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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends import cache
from elsa_core.base.files import scratch
from elsa_core.base.processes import running
from elsa_core.errors import UnavailableError

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
# All units are compiled side by side: seconds on a usual machine.
BUILD_SECONDS = 600
VERSION_SECONDS = 60
_DAMAGED = (
    "{} is damaged or not your own and was not built again: {}; then run `elsa build --force`"
)
_LOG = logging.getLogger("elsa")


@dataclass(frozen=True)
class Recipe:
    """One library: the kernels of `csrc/elsa` and the units that bind them to a runtime.

    Attributes:
        stem: the file's name before the key of its contents.
        title: what messages call it.
        folder: the binding's folder under `csrc`.
        units: the binding's translation units: a name, a file of `folder` or ("../cuda/plan.cpp")
            beside it, flags of its own.
        link_flags: what the link adds to `-shared`.
        kernels: those of `csrc/elsa`: "attention", "window", "gradient", "entmax", or none.
        facts: what the key holds besides sources, compiler, flags and machine.
    """

    stem: str
    title: str
    folder: str
    units: tuple[tuple[str, str, tuple[str, ...]], ...]
    link_flags: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("attention", "window")
    facts: tuple[Any, ...] = ()


def torch_recipe(
    stem: str, title: str, folder: str, units: Sequence[str], *, kernels: tuple[str, ...] = ()
) -> Recipe:
    """The recipe of a library that is bound to PyTorch's stable ABI.

    It runs on the oldest torch whose stable ABI is used, 2.10, and on every later one. `units`: the
    binding's files without their ending.
    """
    import torch

    home = Path(torch.__file__).parent
    flags = ("-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{home / 'include'}")
    return Recipe(
        stem, title, folder, tuple((f"{folder}-{unit}", f"{unit}.cpp", flags) for unit in units),
        (f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"), kernels,
        (".".join(torch.__version__.split(".")[:2]),),
    )  # fmt: skip


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
    say = progress or (lambda line: None)
    if force:
        compiler_version(tuple(compiler()))  # what was built ahead is no answer here
    path = library_path(recipe)
    sound = cache.read(path) is not None
    if sound and not force:
        return path
    damaged = os.path.lexists(path) and not sound
    try:
        cache.make(path.parent)
        if reason := cache.not_own(path.parent):  # in /tmp another user may have been faster
            raise UnavailableError(f"{reason}; set ELSA_CACHE_DIR to a directory of yours")
        with cache.locked(path, recipe.title, say):
            if force or cache.read(path) is None:  # another process may have built it meanwhile
                _compile(recipe, path, say)
    except (UnavailableError, OSError) as error:
        if isinstance(error, OSError):
            error = UnavailableError(
                f"the {recipe.title} cannot be written to {path.parent}: "
                f"{error.strerror or error}; set ELSA_CACHE_DIR to a directory that can be written"
            )
        if damaged:
            error = UnavailableError(_DAMAGED.format(path, error))
        raise error from None
    return path


def library_path(recipe: Recipe) -> Path:
    """Where the library of these sources, compiler, flags and facts is kept, built or not.

    The name holds two keys, of the facts and of the compiler: where no compiler is left, the
    newest library of the same facts is the answer.

    Raises:
        UnavailableError: no compiler and nothing built ahead, or a cache that cannot be read.
    """
    start = cache.directory() / f"{recipe.stem}-{_facts_key(recipe)}"
    try:
        version = compiler_version(tuple(compiler()))
    except UnavailableError as error:
        found = list(start.parent.glob(f"{start.name}-*.so"))
        sound = [path for path in found if cache.read(path) is not None]
        if sound:
            return max(sound, key=lambda path: path.stat().st_mtime)
        if found:
            raise UnavailableError(_DAMAGED.format(found[0], error)) from None
        raise
    path = start.with_name(f"{start.name}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so")
    cache.read(path)  # raises where the cache cannot be read
    return path


def _facts_key(recipe: Recipe) -> str:
    """The key of all that a library is made of, except for the compiler itself."""
    digest = hashlib.sha256()
    folders = {recipe.folder, *(["elsa"] if recipe.kernels else [])}
    folders |= {Path(file).parent.name for _, file, _ in recipe.units} - {""}
    root = source_directory()
    found = [p for folder in folders for p in (root / folder).iterdir()]
    for source in sorted(p for p in found if p.suffix in (".cpp", ".h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    flags = [flag for *_, flags in recipe.units for flag in flags]
    # Where torch lies decides nothing, and differs between the stages of an image.
    flags = [flag for flag in (*flags, *recipe.link_flags) if not flag.startswith(("-I", "-L"))]
    facts = (_named_compiler()[1:], FLAGS, flags, kernels(), *recipe.facts)
    digest.update(repr((*facts, sys.platform, platform.machine())).encode())
    return digest.hexdigest()[:16]


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
        facts["cache"] = str(cache.directory())
        path = library_path(recipe)
        built = cache.read(path) is not None
        damaged = not built and os.path.lexists(path)
        facts |= {"path": str(path), "built": built, "damaged": damaged}
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
    """The command in CXX, or the one file whose path it is; empty where the variable is."""
    named = os.environ.get("CXX", "")
    if os.path.isfile(named):  # noqa: PTH113  # no error where the name is too long
        return [named]
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
    name = " ".join(command)
    try:
        with running([*command, "--version"], stdout=subprocess.PIPE,
                     stderr=subprocess.DEVNULL) as process:  # fmt: skip
            said, _ = process.communicate(timeout=VERSION_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"the compiler {name} gave no version in {VERSION_SECONDS} s; set CXX to another one"
        ) from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"the compiler {name} does not run: {error}") from None
    return next(filter(None, (line.strip() for line in said.splitlines())), "")


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


def _compile(recipe: Recipe, path: Path, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    _LOG.info("compiling the %s (once for this machine)", recipe.title)
    with scratch(".build-", folder=path.parent) as folder:
        units = [(name, [*command, "-o", f"{folder}/{name}.o"]) for name, command in _units(recipe)]
        say(f"compiling {len(units)} units with {' '.join(compiler())}")
        _run_all(units, folder)
        say("linking")
        library = folder / path.name
        objects = [f"{folder}/{name}.o" for name, _ in units]
        link = [*compiler(), *objects, "-shared", *recipe.link_flags]
        if sys.platform != "darwin":
            link.append("-Wl,--exclude-libs,ALL")
        _run_all([("link", [*link, "-o", str(library)])], folder)
        if not library.exists() or not library.stat().st_size:
            raise UnavailableError(f"the compiler {' '.join(compiler())} wrote no library")
        cache.put(library, path)
    _LOG.info("built %s in %.1f s", path, time.monotonic() - started)


def _units(recipe: Recipe) -> Iterator[tuple[str, list[str]]]:
    root = source_directory()
    common = [*compiler(), *FLAGS, "-c"]
    for name, file, flags in recipe.units:
        yield name, [*common, *flags, str(root / recipe.folder / file)]
    tables = {
        "attention": "kKernel", "window": "kWindowKernel", "gradient": "kGradientKernel",
        "entmax": "kEntmaxKernel",
    }  # fmt: skip
    for operator in recipe.kernels:
        table = tables[operator]
        yield f"{operator}-driver", [*common, str(root / "elsa" / f"{operator}.cpp")]
        kernel = str(root / "elsa" / f"{operator}_kernel.cpp")
        for name, flags in kernels().items():
            names = [f"-DELSA_KERNEL={table}{name}", f'-DELSA_KERNEL_NAME="{name.lower()}"']
            yield f"{operator}-{name}", [*common, *flags, *names, kernel]


def _run_all(commands: list[tuple[str, list[str]]], folder: Path) -> None:
    """Run the commands side by side, their temporary files in `folder`; the first failure is the
    error, and leaves nothing running."""
    environment = os.environ | {"TMPDIR": str(folder)}
    end = time.monotonic() + BUILD_SECONDS
    name = " ".join(compiler())
    with ExitStack() as stack:
        started = [
            (unit, stack.enter_context(
                running(command, env=environment, stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE)
            ))
            for unit, command in commands
        ]  # fmt: skip
        for unit, process in started:
            try:
                _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UnavailableError(
                    f"the compiler {name} did not end within {BUILD_SECONDS} s on unit '{unit}' "
                    "and was stopped; set CXX to another one"
                ) from None
            if process.returncode != 0:
                lines = [line.strip() for line in errors.splitlines() if line.strip()]
                said = [line for line in lines if "error" in line.lower()] + lines
                raise UnavailableError(
                    f"the compiler {name} failed on unit '{unit}' "
                    f"(exit {process.returncode}): {said[0] if said else 'it said nothing'}"
                )
