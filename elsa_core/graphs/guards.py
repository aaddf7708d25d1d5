"""Whether a model is still what it was when its graph was captured.

A replay reads the memory that the capture read and runs none of the model's Python. It follows
writes to that memory; anything else that has changed must be noticed here: a tensor elsewhere, of
another dtype, size or stride; another attribute, module, class or hook; training mode. Not
noticed is what no module holds as an attribute, in a dict, list or deque: fields of other objects,
class attributes and globals that are no tensors.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from elsa_core.graphs.given import is_plain

_DTYPE = attrgetter("dtype")
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)
# What every module has and a forward does not read.
_BASE = frozenset(nn.Module().__dict__) - {"training"}
_NESTED = (dict, OrderedDict, defaultdict, list, tuple, deque)
MOST_NESTED: Final = 16384


class Guards:
    """A model as it is now, to be compared with what it is later.

    `alive` is asked before a replay, which reads the memory; `hold` may be asked while it runs.

    Args:
        model: what is compared.
        backward: whether its backward is in the graph too, which runs hooks of its own.

    Attributes:
        complete: whether all dicts and lists are compared: there are at most `MOST_NESTED`.
        tensors: that are compared.
    """

    def __init__(self, model: nn.Module, *, backward: bool = False) -> None:
        self._modules = list(model.modules())
        self._types = [type(module) for module in self._modules]
        own = [vars(module) for module in self._modules]
        tables = _TABLES + (_BACKWARD_HOOKS if backward else ())
        self._dicts = own + [each[name] for each in own for name in tables]
        self._rows: list[Sequence[Any]] = []  # lists, tuples and deques
        seen = {id(each) for each in self._dicts}
        self.complete, self._most = True, len(seen) + MOST_NESTED
        for each in own:
            self._add((value for name, value in each.items() if name not in _BASE), seen)
        # most are empty, which is asked of all of them at once
        self._empty: list[Any] = [each for each in (*self._dicts, *self._rows) if not each]
        self._filled: list[Any] = [each for each in (*self._dicts, *self._rows) if each]
        self._counts = [*map(len, self._filled)]
        pairs = [
            (each, name)
            for number, each in enumerate(self._dicts)
            for name, value in each.items()
            if number >= len(own) or name not in _BASE or (name in tables and value)
        ]
        self._owners, self._names = [each for each, _ in pairs], [name for _, name in pairs]
        self._values = [*self._now()]  # keeps them, so that no other object has their ids
        self.tensors = [v for v in self._values if isinstance(v, Tensor) and is_plain(v)]
        self._addresses = [*map(Tensor.data_ptr, self.tensors)]
        self._layouts = self._layout()
        self._fast = _tensor_guards(self.tensors)

    def _add(self, values: Iterable[Any], seen: set[int]) -> None:
        """Also the dicts, lists, tuples and deques within attributes, where models keep caches."""
        for value in values:
            if type(value) not in _NESTED or id(value) in seen:
                continue
            if len(seen) >= self._most:
                self.complete = False
                return
            seen.add(id(value))
            if isinstance(value, dict):
                self._dicts.append(value)
                self._add(value.values(), seen)
            else:
                self._rows.append(value)
                self._add(value, seen)

    def _now(self) -> Iterator[Any]:
        """Every value that is compared, as it is now.

        Raises:
            KeyError: one is gone.
        """
        named = map(dict.__getitem__, self._owners, self._names)
        return chain(named, chain.from_iterable(self._rows))

    def _layout(self) -> list[Any]:
        held = self.tensors
        return [*map(Tensor.size, held), *map(Tensor.stride, held), *map(_DTYPE, held)]

    def alive(self) -> bool:
        """Whether every tensor is where it was."""
        return [*map(Tensor.data_ptr, self.tensors)] == self._addresses

    def hold(self) -> bool:
        """Whether nothing else has changed that a forward may read."""
        try:
            return (
                not any(self._empty)
                and [*map(len, self._filled)] == self._counts
                and [*map(type, self._modules)] == self._types
                and self._same_values()
                and (self._fast(*self.tensors) or self._layout() == self._layouts)
            )
        except (KeyError, RuntimeError):  # another thread changes a deque just now
            return False

    def all_hold(self) -> bool:
        """Whether nothing has changed."""
        return self.alive() and self.hold()

    def _same_values(self) -> bool:
        if all(map(is_, self._now(), self._values)):
            return True
        now = [*self._now()]
        # Another number or text that is equal is no change: a forward may set such in every call.
        if not all(a is b or _equal(a, b) for a, b in zip(now, self._values, strict=True)):
            return False
        self._values = now
        return True


def _tensor_guards(tensors: list[Tensor]) -> Callable[..., bool]:
    """Compares types, dtypes, sizes and strides at once, a quarter of the time that Python takes.

    It knows modes too, and may say no where nothing has changed.
    """
    sizes, strides = ([list(ask(t)) for t in tensors] for ask in (Tensor.size, Tensor.stride))
    try:
        kind: Any = torch._C._dynamo.guards.TensorGuards
        guards = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        guards.check(*tensors)
    except Exception:  # no part of PyTorch that stays as it is
        return lambda *_: False
    check: Callable[..., bool] = guards.check
    return check


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) in _SIMPLE and repr(a) == repr(b)


def why_not(model: nn.Module, device: torch.device, *, backward: bool = False) -> str:
    """Why a graph of the model on a device could be wrong, as far as its modules say; or empty."""
    hooks = _HOOKS + (_BACKWARD_HOOKS if backward else ())
    for path, module in model.named_modules():
        if any(getattr(module, name) for name in hooks):
            return f"{path or 'the model'} has hooks, and a replay calls none"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{path or 'the model'} is compiled"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not is_plain(tensor):
            return f"{name} is a {type(tensor).__qualname__} of its own kind"
        if tensor.device != device:
            return f"{name} is on {tensor.device} and the input on {device}"
    return ""
