"""What a call reads and writes beside its arguments, seen by one run of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core import calls

_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_, _ATEN._to_copy, _ATEN.to, _ATEN._copy_from}


class Reads(TorchDispatchMode):
    """Notes the tensors that operators read and the call did not make.

    Attributes:
        reason: why a graph of the call could be wrong; empty where nothing was seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self._device = device
        self._made: set[int] = set()  # storages; outer ones are never freed here: no number is both
        self._outer: dict[int, Tensor] = {}

    def __enter__(self) -> Reads:
        calls.observe(1)  # sites run as they do without it
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        calls.observe(-1)

    def outside(self, held: Iterable[Tensor]) -> bool:
        """Whether something was read that is in the memory of none of the tensors `held`."""
        known = {storage_of(tensor) for tensor in held}
        return not self._outer.keys() <= known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.reason:
            try:
                self._look(func, args, kwargs, result)
            except (NotImplementedError, RuntimeError):  # a tensor without a storage
                self.reason = f"{func} works on tensors that are not plain"
        return result

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = _tensors((args, kwargs)), _tensors(result)
        if func is _ATEN.lift_fresh.default:  # torch.tensor has made it
            self._made.add(storage_of(given[0]))
        if any(not is_plain(tensor) for tensor in (*given, *made)):
            self.reason = f"{func} works on tensors that are not plain"
            return
        for tensor in given:
            number = storage_of(tensor)
            if number not in self._made:
                self._outer.setdefault(number, tensor)
                if tensor.device != self._device:
                    self.reason = f"it reads a tensor on {tensor.device}"
        for tensor in _written(func, args, kwargs):
            if storage_of(tensor) not in self._made:
                self.reason = f"{func} writes to a tensor that the call did not make"
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.reason = "it draws from a random generator of its own"
        self._made.update({storage_of(tensor) for tensor in made} - self._outer.keys())
        self._compare(func, given, made)

    def _compare(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """A copy from or to the host is recorded with addresses that the host may free."""
        here = {tensor.device == self._device for tensor in made}
        for tensor in given:
            crosses = (tensor.device == self._device) not in here if here else False
            number = tensor.device != self._device and tensor.dim() == 0  # a kernel's argument
            if crosses and not (number and func.overloadpacket not in _COPIES):
                self.reason = "it copies between the host and the GPU"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def storage_of(tensor: Tensor) -> int:
    """The number of a tensor's memory, among all memory alive."""
    return int(tensor.untyped_storage()._cdata)


def is_plain(tensor: Tensor) -> bool:
    """Whether all of a tensor is its sizes, strides, dtype and memory."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
