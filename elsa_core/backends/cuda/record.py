"""From a call that runs in Python to its plan: what it allocates and launches is noted.

A plan may be kept for a layout only if a call does nothing but allocate, look at its tensors, set
memory to zero and launch kernels through `Launch`: any other operation of PyTorch that is seen on
the way makes the call one for Python. A pointer is known by the tensor that it was taken from,
never by its address, since two arguments may be the same memory in one call and not in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from elsa_core.backends.cuda.plan import (
    Launch,
    Output,
    Plan,
    PlanError,
    Pointer,
    Zero,
    arguments_of,
)

_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.new_empty.default, _ATEN.new_empty_strided.default, _ATEN.empty.memory_format,
    _ATEN.empty_strided.default, _ATEN.empty_like.default,
}  # fmt: skip
_ZEROED = {_ATEN.new_zeros.default, _ATEN.zeros.default, _ATEN.zeros_like.default}
# PyTorch's numbers of dtypes (c10::ScalarType), which its stable ABI shares.
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
# Parts of the workspace begin at multiples of it, as PyTorch's own allocations do.
_ALIGNMENT = 512


class Recorder(TorchDispatchMode):
    """Notes what is done while it is active in this thread.

    inputs: the operator's tensors, None where one is absent: each a tensor object of its own.
    reason: why the call is one for Python; empty where a plan can be made. hooked: a launch was
    made with Triton's launch hooks set, so that the next call may be another matter.
    """

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs, self.reason, self.hooked = inputs, "", False
        # by the id of a tensor: itself, so that no object takes another's place; an input's number
        # or what was allocated; the address that offsets count from
        self._places: dict[int, tuple[Tensor, int | Tensor, int]] = {}
        self._steps: list[tuple[Any, tuple[Tensor, ...]] | Tensor] = []
        for number, tensor in enumerate(inputs):
            if tensor is not None:
                self._places[id(tensor)] = tensor, number, tensor.data_ptr()

    # PyTorch would load its compiler for that, which takes a second or more
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS or func in _ZEROED:
            self._places[id(result)] = result, result, result.untyped_storage().data_ptr()
            if func in _ZEROED:
                self._steps.append(result)
        elif func is _ATEN.zero_.default:
            self._steps.append(result)
        elif not self._is_view(func, args, result):
            self.reason = self.reason or f"{func} is PyTorch's"
        return result

    def _is_view(self, func: Any, args: Any, result: Any) -> bool:
        """Whether an operation gives parts of a known tensor, and changes nothing."""
        place = self._places.get(id(args[0])) if args else None
        parts = result if isinstance(result, (list, tuple)) else [result]
        if place is None or func._schema.is_mutable:
            return False
        for part in parts:
            if not isinstance(part, Tensor):
                return False
            if part.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
                return False
            self._places[id(part)] = part, *place[1:]
        return True

    def launched(self, launch: Any, pointers: tuple[Tensor, ...]) -> None:
        """Note one launch of `elsa_core.backends.triton.shared.launch.Launch`."""
        self._steps.append((launch, pointers))
        self.hooked = self.hooked or launch.hooked()

    def plan(self, results: Sequence[Tensor], number: Callable[[Any], int]) -> Plan:
        """The plan of the call that was noted.

        results: what it returned. number: the library's, of a compiled kernel.

        Raises:
            PlanError: there can be none.
        """
        if self.reason:
            raise PlanError(self.reason)
        slots = self._slots_of(results)
        parts: dict[int, int] = {}  # storage: offset in the workspace, which holds all the others
        workspace = 0

        def pointer(tensor: Tensor) -> Pointer:
            nonlocal workspace
            if id(tensor) not in self._places:
                raise PlanError("it reads a tensor that is neither given nor allocated by it")
            _, source, start = self._places[id(tensor)]
            offset = tensor.data_ptr() - start if tensor.numel() else 0
            if not isinstance(source, Tensor):
                return Pointer(source, offset)
            storage = source.untyped_storage()._cdata
            if storage in slots:
                return Pointer(slots[storage], offset)
            if storage not in parts:
                parts[storage] = workspace
                workspace += -(-source.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
            return Pointer(len(self.inputs) + len(results), parts[storage] + offset)

        steps: list[Launch | Zero] = []
        for step in self._steps:
            if isinstance(step, Tensor):
                if not step.is_contiguous():
                    raise PlanError("it zeroes memory with gaps")
                if step.numel():
                    steps.append(Zero(pointer(step), step.numel() * step.element_size()))
                continue
            launch, pointers = step
            if launch.compiled is None:
                raise PlanError("this version of Triton is launched by its own JIT")
            if 0 not in launch.grid:
                found = list(map(pointer, pointers))
                given = arguments_of(launch.compiled, launch.values, found)
                steps.append(Launch(number(launch.compiled), launch.grid, given))
        outputs = tuple(Output(DTYPES[t.dtype], tuple(t.shape), tuple(t.stride())) for t in results)
        return Plan(len(self.inputs), outputs, workspace, tuple(steps))

    def _slots_of(self, results: Sequence[Tensor]) -> dict[int, int]:
        """The slots of results by their storages: each must be one that the call allocated."""
        slots: dict[int, int] = {}
        for slot, result in enumerate(results, len(self.inputs)):
            if not isinstance(self._places.get(id(result), (result, 0, 0))[1], Tensor):
                raise PlanError("it returns a tensor that it did not allocate")
            if result.dtype not in DTYPES:
                raise PlanError(f"it returns {result.dtype}")
            storage = result.untyped_storage()
            steps = zip(result.shape, result.stride(), strict=True)
            size = sum((n - 1) * s for n, s in steps) + 1 if result.numel() else 0
            whole = storage.nbytes() == size * result.element_size()
            if not whole or storage.data_ptr() != result.data_ptr():
                raise PlanError("it returns a part of what it allocates")
            if storage._cdata in slots and result.numel():
                raise PlanError("it returns one tensor twice")
            slots[storage._cdata] = slot
        return slots


class Apart(Recorder):
    """Where PyTorch's compiler is loaded already: it leaves alone what is noted."""

    __torch_dispatch__ = Recorder.__torch_dispatch__
    _should_skip_dynamo = classmethod(lambda cls: True)


def heard(launch: Any, pointers: tuple[Tensor, ...]) -> None:
    """Tell this thread's recorder, if one is active, of a launch that was made."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.launched(launch, pointers)
