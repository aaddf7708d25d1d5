"""The digest of a kernel's source with everything that it calls.

Triton has such a hash of its own (`JITFunction.cache_key`), which depends on what else the process
has compiled before: up to 3.6 at least, a function takes in the constants of one that it calls only
where that was hashed earlier. A pack is built in one process and read in another.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from elsa_core.backends import cache
from elsa_core.base.files import write_text
from elsa_core.errors import UnavailableError

KERNELS = Path(__file__).parents[1]
_KNOWN: dict[int, tuple[Any, str]] = {}
_MISSING = object()


def source_key(kernel: Any) -> str:
    """SHA-256 of the text of a kernel and of all functions that it reaches, and of the constants
    that they read; what is Triton's own is left to its version.

    Raises:
        ValueError: it reads what is neither a function of Triton, a constant nor a module.
    """
    known = _KNOWN.get(id(kernel))
    if known is not None:
        return known[1]
    found: dict[str, Any] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        name = f"{function.__module__}:{function.__qualname__}"
        if name in found:
            continue
        constants: dict[str, str] = {}
        for text, value in _read(function):
            if _is_function(value):
                waiting.append(value)
            else:
                constants[text] = repr(value)
        noinline = bool(getattr(function, "noinline", False))
        found[name] = [function.src, noinline, sorted(constants.items())]
    key = hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()
    _KNOWN[id(kernel)] = kernel, key
    return key


def _read(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function's text names outside of itself and of Triton, with its value."""
    nonlocals = inspect.getclosurevars(function.fn).nonlocals
    scope = {**function.fn.__globals__, **nonlocals}
    for node in ast.walk(ast.parse(function.src)):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        value = _value(node, scope)
        if value is _MISSING or value is None or _is_triton(value):
            continue
        text = ast.unparse(node)
        if not _is_function(value) and not _is_constant(value):
            raise ValueError(f"{function.__qualname__} reads {text}, which has no digest")
        yield text, value


def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
    """The value of a name or of an attribute of modules; `_MISSING` for all that is computed."""
    if isinstance(node, ast.Name):
        return scope.get(node.id, _MISSING)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, scope)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, _MISSING)
    return _MISSING


def _is_function(value: Any) -> bool:
    from triton.runtime.jit import JITCallable

    return isinstance(value, JITCallable) and not _of_triton(value.__module__)


def _is_triton(value: Any) -> bool:
    """Whether a value is a module, or of Triton's own code."""
    if isinstance(value, ModuleType):
        return True
    return not _is_constant(value) and _of_triton(str(getattr(value, "__module__", "")))


def _of_triton(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "triton"


def _is_constant(value: Any) -> bool:
    from triton.language.core import constexpr

    plain = value.value if isinstance(value, constexpr) else value
    if isinstance(plain, tuple | list):
        return all(map(_is_constant, plain))
    return plain is None or isinstance(plain, bool | int | float | str)


@functools.cache
def sources_digest() -> str:
    """SHA-256 of every file that kernels are written in; read from the cache where the files have
    the sizes and times that they had then, by some of which Python tells what it has compiled.

    Where a pack's build had the same, and the same Triton, each kernel's key is the one that it
    wrote down: to compute one takes 10 ms, and the files together as much.
    """
    paths = [Path(path) for path in sorted(_files(str(KERNELS)))]
    facts = [(str(path), *_facts(path.stat())) for path in paths]
    state = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    kept = _kept()
    if kept is not None and kept.get("files") == state and isinstance(kept.get("digest"), str):
        return str(kept["digest"])
    digest = hashlib.sha256()
    for path in paths:
        name, content = path.relative_to(KERNELS).as_posix(), path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    _keep({"files": state, "digest": digest.hexdigest()})
    return digest.hexdigest()


def _facts(found: os.stat_result) -> tuple[int, ...]:
    """Of a file: the last two cannot be set back, as an image's or a copy's times are."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _files(folder: str) -> Iterator[str]:
    """The files below a folder that kernels are written in."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith(".py") and folder != str(Path(__file__).parent):
                yield entry.path


def _kept() -> dict[str, Any] | None:
    try:
        descriptor = cache.open_own(_place())
        if descriptor is None:
            return None
        with os.fdopen(descriptor, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, UnavailableError):
        return None
    return found if isinstance(found, dict) else None


def _keep(content: dict[str, str]) -> None:
    """Beside the packs of this user; where that cannot be, the next process reads all again."""
    try:
        cache.make(_place().parent)
        write_text(json.dumps(content), _place()).chmod(0o644)  # whatever the umask: `open_own`
    except (OSError, UnavailableError):
        return


def _place() -> Path:
    return cache.directory().with_name("packs") / "sources.json"
