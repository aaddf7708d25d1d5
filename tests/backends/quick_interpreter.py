"""What Triton's interpreter does again and again without effect, done once: half of its time.

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


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once_a_launch()
    _leave_out_what_is_not_asserted()
    _look_up_types_once()
