"""What the code of a module class does, read from its bytecode: which methods `forward` reaches,
where they call `scaled_dot_product_attention`, and whether they compute softmax attention by hand.

Bytecode and not source: it is there for every Python function, and names resolve exactly.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from logging import Logger
from types import CodeType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

SDPA = F.scaled_dot_product_attention
_SDPA_NAME = "scaled_dot_product_attention"
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_SOFTMAXES = frozenset({"softmax", "log_softmax"})
_MAX_FUNCTIONS = 64  # a class whose forward reaches more is a whole model, not an attention layer


@dataclass(frozen=True)
class Method:
    """A function that `forward` reaches, under the name it has on the class.

    Attributes:
        name: the attribute of the class, or the global name of a helper function.
        function: the plain function.
        rebuildable: whether a subclass can override it with a rebuilt copy: a plain method that
            attribute look-up on the class finds (not a helper, not decorated, not behind super()).
    """

    name: str
    function: FunctionType
    rebuildable: bool


@dataclass(frozen=True)
class SdpaCalls:
    """The references to `scaled_dot_product_attention` in one function.

    Attributes:
        chains: how each is spelled from a global name: ("F", "scaled_dot_product_attention").
        unresolved: references by that name whose owner is no global (a local import, an argument).
    """

    chains: frozenset[tuple[str, ...]]
    unresolved: int

    def __bool__(self) -> bool:
        return bool(self.chains) or self.unresolved > 0


def methods(cls: type) -> tuple[Method, ...]:
    """Every function that `cls.forward` reaches: methods of the class and its bases below
    `nn.Module`, and helper functions of the same top-level package."""
    package = cls.__module__.partition(".")[0]
    found: dict[FunctionType, Method] = {}
    pending = list(_methods_named(cls, "forward"))
    while pending and len(found) < _MAX_FUNCTIONS:
        method = pending.pop(0)
        if method.function in found:
            continue
        found[method.function] = method
        for name in _names(method.function.__code__):
            if name not in nn.Module.__dict__ or name == "forward":
                pending.extend(_methods_named(cls, name))
            helper = method.function.__globals__.get(name)
            if isinstance(helper, FunctionType) and package != "torch":
                helper = inspect.unwrap(helper)
                if str(helper.__module__).partition(".")[0] == package:
                    pending.append(Method(name, helper, rebuildable=False))
        for name in _super_names(method.function.__code__):
            pending.extend(_methods_named(cls, name, behind_super=True))
    return tuple(found.values())


def sdpa_calls(function: FunctionType) -> SdpaCalls:
    """Where one function refers to PyTorch's `scaled_dot_product_attention`."""
    chains: set[tuple[str, ...]] = set()
    unresolved = 0
    for code in _codes(function.__code__):
        for chain in _chains(code):
            if _resolve(function, chain) is SDPA:
                chains.add(chain)
            elif chain[-1] == _SDPA_NAME and (len(chain) > 1 or chain[0] in function.__globals__):
                unresolved += 1
        unresolved += sum(1 for name in _imported_names(code) if name == _SDPA_NAME)
    return SdpaCalls(frozenset(chains), unresolved)


def variable_globals(function: FunctionType) -> list[str]:
    """The globals of a function that may get another value: those it sets, and those it reads that
    are no module, function, class or other callable."""
    names = []
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                names.append(name)
            elif instruction.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(name, getattr(builtins, name, None))
                if not (inspect.ismodule(value) or callable(value) or isinstance(value, Logger)):
                    names.append(name)
    return names


def computes_softmax_attention(reached: tuple[Method, ...]) -> bool:
    """Whether the functions together take a softmax and multiply matrices: eager attention."""
    softmax = product = False
    for method in reached:
        for code in _codes(method.function.__code__):
            names = set(code.co_names)
            softmax |= bool(names & _SOFTMAXES)
            product |= bool(names & _PRODUCTS) or any(
                i.opname == "BINARY_MATRIX_MULTIPLY"
                or (i.opname == "BINARY_OP" and "@" in i.argrepr)
                for i in dis.get_instructions(code)
            )
    return softmax and product


def calls_multi_head_attention_forward(reached: tuple[Method, ...]) -> bool:
    """Whether a function hands its weights to PyTorch's `multi_head_attention_forward`."""
    return any("multi_head_attention_forward" in _names(m.function.__code__) for m in reached)


def _methods_named(cls: type, name: str, *, behind_super: bool = False) -> Iterator[Method]:
    owners = [base for base in _own_bases(cls) if name in base.__dict__]
    for owner in owners[1:] if behind_super else owners[:1]:
        raw = owner.__dict__[name]
        if isinstance(raw, property):
            raw = raw.fget
        plain = isinstance(raw, FunctionType) and not hasattr(raw, "__wrapped__")
        if isinstance(raw, staticmethod | classmethod):
            raw = raw.__func__
        function = inspect.unwrap(raw) if callable(raw) else raw
        if isinstance(function, FunctionType):
            yield Method(name, function, rebuildable=plain and not behind_super)


def _own_bases(cls: type) -> list[type]:
    """The classes of the MRO that add to `nn.Module`."""
    bases = []
    for base in cls.__mro__:
        if base is nn.Module:
            break
        bases.append(base)
    return bases


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> Iterator[str]:
    for inner in _codes(code):
        yield from inner.co_names


def _super_names(code: CodeType) -> Iterator[str]:
    """The attributes taken from `super()`."""
    pending = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "LOAD_GLOBAL" and instruction.argval == "super":
            pending = True
        elif name == "LOAD_SUPER_ATTR" or (pending and name in ("LOAD_ATTR", "LOAD_METHOD")):
            pending = False
            yield str(instruction.argval)


def _chains(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Dotted names from a global (`torch.nn.functional.x`), each at its full length; an attribute
    of anything else starts a chain with an empty name."""
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*(chain or ("",)), str(instruction.argval))
            continue
        if chain:
            yield chain
        chain = (str(instruction.argval),) if name == "LOAD_GLOBAL" else ()
    if chain:
        yield chain


def _imported_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_FROM":
            yield str(instruction.argval)


def _resolve(function: FunctionType, chain: tuple[str, ...]) -> Any:
    value = function.__globals__.get(chain[0])
    for name in chain[1:]:
        if value is None:
            return None
        # Only look into modules and classes: an arbitrary object's attribute may run code.
        value = vars(value).get(name) if inspect.ismodule(value) else None
    return value
