"""Triton's interpreter, twice as fast and with constants on the left of tensors.

What it does again and again without effect is done once.

Every call of a device function puts the interpreter's functions in place of the language's, where
the launch has put them already. Every sum and product of integers is repeated in 64 bits for an
assertion that only Triton's debug mode makes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any


def _patch_once_a_launch() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    inner = interpreter._patch_lang
    patched: set[tuple[bool, ...]] = set()
    seen: dict[int, tuple[bool, ...]] = {}

    def patch(fn: Any) -> Any:
        names = fn.__globals__  # of a module, which lives as long as the program
        if id(names) not in seen:
            seen[id(names)] = tuple(any(x is m for x in names.values()) for m in (tl, tl.core))
        langs = seen[id(names)]
        if langs in patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        patched.add(langs)
        scope = inner(fn)
        if outermost:  # the launch's own, which restores the language when it ends
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch


def _leave_out_what_is_not_asserted() -> None:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _look_up_types_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    inner = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        if type(kind) is not tl.dtype:
            return inner(kind)
        if kind.name not in known:
            known[kind.name] = inner(kind)
        return known[kind.name]

    interpreter._get_np_dtype = look_up


def _tensors_are_no_constants() -> None:
    """In Triton 3.8 a constant of a module, less a tensor, is a constant that holds a tensor, which
    functions such as `minimum` refuse. Compiled code knows no such thing.
    """
    from triton.language import constexpr, tensor

    def unwrapped(operation: Any) -> Any:
        def found(self: Any, other: Any) -> Any:
            result = operation(self, other)
            return result.value if isinstance(result.value, tensor) else result

        return found

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift"):
        for each in (f"__{name}__", f"__r{name}__"):
            if each in vars(constexpr):
                setattr(constexpr, each, unwrapped(vars(constexpr)[each]))


if os.environ.get("TRITON_INTERPRET") == "1":
    _tensors_are_no_constants()
    _patch_once_a_launch()
    _leave_out_what_is_not_asserted()
    _look_up_types_once()
