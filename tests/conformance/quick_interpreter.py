"""Triton's interpreter, twice as fast and with constants on the left of tensors.

What it does again and again without effect is done once.

Every call of a device function puts the interpreter's functions in place of the language's, where
the launch has put them already. Every sum and product of integers is repeated in 64 bits for an
assertion that only Triton's debug mode makes. Every tensor works out its shape, which its type has
checked again. Operands of one type and shape are cast and broadcast to what they are.
"""

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


def _work_out_shapes_once() -> None:
    import triton.language as tl

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    # By the type of the elements and the shape: that type, which keeps its id, and the attributes.
    known: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if type(size) is tl.constexpr else size for size in shape]
        key = (id(element_ty), *sizes)
        if key not in known:
            make_type(self, element_ty, shape)
            known[key] = element_ty, self.__dict__ | {"_of_tensors": {}}
        self.__dict__.update(known[key][1])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        found = type.__dict__.get("_of_tensors")
        if not found:
            make_tensor(self, handle, type)
            own = {name: x for name, x in self.__dict__.items() if name not in ("handle", "type")}
            if found is None:
                type._of_tensors = own
            else:
                found.update(own)
            return
        self.__dict__.update(found)
        self.handle, self.type = handle, type

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


def _leave_equal_operands_alone() -> None:
    """Two tensors of one type are neither cast nor broadcast."""
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def broadcast_if_needed(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            a, b = left.shape, right.shape
            if a is b or getattr(a, "values", a) == getattr(b, "values", b):
                return lhs, rhs
        return broadcast(lhs, rhs)

    def check_if_needed(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor and not div_or_mod:
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is tl.dtype:
                return broadcast_if_needed(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.binary_op_type_checking_impl = check_if_needed


def _unwrap_by_type() -> None:
    """What is no constant and no tuple stays, as nearly all values do."""
    import triton.language as tl

    unwrap, plain = tl.core._unwrap_if_constexpr, (tl.tensor, tl.dtype, int, bool, str, type(None))

    def quick(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    tl.core._unwrap_if_constexpr = quick


def _call_the_language_directly() -> None:
    """Not by two functions that pass on and check what the interpreter always gives."""
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return called(*given, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


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


def _index_by_one_number() -> None:
    """NumPy 2.4 makes no number of an array with one axis, as Triton up to 3.6 asks it to."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    _index_by_one_number()
    _tensors_are_no_constants()
    _patch_once_a_launch()
    _leave_out_what_is_not_asserted()
    _look_up_types_once()
    _work_out_shapes_once()
    _leave_equal_operands_alone()
    _unwrap_by_type()
    _call_the_language_directly()
