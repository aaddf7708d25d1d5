"""What a call reads and writes beside its arguments, seen by one run of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core.graphs import capture
from elsa_core.graphs.given import RefusedError, is_plain

_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_, _ATEN._to_copy, _ATEN.to, _ATEN._copy_from}


class Reads(TorchDispatchMode):
    """Notes the tensors that operators read and the call did not make.

    Args:
        device: where the call runs.
        writable: tensors that the call may write to, buffers of a model that trains.

    Attributes:
        reason: why a graph of the call could be wrong; empty where nothing was seen.
    """

    def __init__(self, device: torch.device, writable: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self._device = device
        self._writable = {storage_of(tensor) for tensor in writable}
        self._made: set[int] = set()  # storages; outer ones are never freed here: no number is both
        self._outer: dict[int, Tensor] = {}
        self._hooks = saved_tensor_hooks()

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
            number = storage_of(tensor)
            if number not in self._made and number not in self._writable:
                self.reason = f"{func} writes to a tensor that the call did not make"
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.reason = "it draws from a random generator of its own"
        if saved_tensor_hooks() is not self._hooks:
            self.reason = (
                "it sets hooks for saved tensors (activation checkpointing, offloading), which no "
                "graph calls; torch's checkpointing also resets random states in its backward"
            )
        self._made.update({storage_of(tensor) for tensor in made} - self._outer.keys())
        # a copy from or to the host is recorded with addresses that the host may free
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


def saved_tensor_hooks() -> Any:
    """What packs the tensors that autograd saves now; None where nothing does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def watched(
    run: Callable[[], None], device: torch.device, writable: Iterable[Tensor] = (), *,
    draws: bool = False,
) -> Reads:  # fmt: skip
    """One run, and what it read.

    Args:
        run, device, writable: as for `Reads`.
        draws: it may draw random numbers on the device.

    Raises:
        RefusedError: a replay could differ from it.
    """
    before = _random(device), capture.BACKEND.random_state(device)
    reads = Reads(device, writable)
    with reads:
        run()
    after = _random(device), capture.BACKEND.random_state(device)
    if before[0] != after[0]:
        raise RefusedError("it draws random numbers on the host")
    if before[1] != after[1] and not draws:
        raise RefusedError("it draws random numbers")
    if reads.reason:
        raise RefusedError(reads.reason)
    return reads


def _random(device: torch.device) -> Any:
    """The random state of the host, where it is not the device's."""
    state = None if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), state
