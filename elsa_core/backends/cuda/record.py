"""From a call that runs in Python to its plan: what it allocates and launches is noted.

A plan may be kept for a layout only if a call does nothing but allocate, look at its tensors, set
memory to zero and launch kernels through `Launch`: any other operation of PyTorch that is seen on
the way makes the call one for Python. A pointer is known by the tensor that it was taken from,
never by its address, since two arguments may be the same memory in one call and not in another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from elsa_core.backends.cuda.kernels import PlanError, arguments_of
from elsa_core.backends.cuda.plan import Launch, Output, Plan, Pointer, Zero

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


@dataclass(frozen=True)
class _Place:
    """Where a tensor's memory comes from: an input by its number, or an allocation."""

    source: int | Tensor
    start: int  # the address that offsets count from


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Notes what is done while it is active in this thread.

    inputs: the operator's tensors, None where one is absent: each a tensor object of its own.
    reason: why the call is one for Python; empty where a plan can be made. hooked: a launch was
    made with Triton's launch hooks set, so that the next call may be another matter.
    """

    inputs: Sequence[Tensor | None]
    reason: str = ""
    hooked: bool = False
    _places: dict[int, _Place] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)  # so that no object takes another's place
    _steps: list[tuple[Any, tuple[Tensor, ...]] | Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for number, tensor in enumerate(self.inputs):
            if tensor is not None:
                self._know(tensor, _Place(number, tensor.data_ptr()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would load its compiler for that, which takes a second or more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS or func in _ZEROED:
            self._know(result, _Place(result, result.untyped_storage().data_ptr()))
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
            if not isinstance(part, Tensor) or _storage(part) != _storage(args[0]):
                return False
            self._know(part, place)
        return True

    def _know(self, tensor: Tensor, place: _Place) -> None:
        self._kept.append(tensor)
        self._places[id(tensor)] = place

    def launched(self, launch: Any, pointers: tuple[Tensor, ...]) -> None:
        """Note one launch of `elsa_core.backends.triton.shared.launch.Launch`."""
        self._steps.append((launch, pointers))
        self._kept += pointers
        self.hooked = self.hooked or launch.hooked()

    def plan(self, results: Sequence[Tensor], number: Callable[[Any], int]) -> Plan:
        """The plan of the call that was noted.

        results: what it returned. number: the library's, of a compiled kernel.

        Raises:
            PlanError: there can be none.
        """
        if self.reason:
            raise PlanError(self.reason)
        places = _Slots(len(self.inputs), [self._of(t) for t in results], results)
        outputs = tuple(Output(DTYPES[t.dtype], tuple(t.shape), tuple(t.stride())) for t in results)
        steps: list[Launch | Zero] = []
        for step in self._steps:
            if isinstance(step, Tensor):
                if not step.is_contiguous():
                    raise PlanError("it zeroes memory with gaps")
                if step.numel():
                    size = step.numel() * step.element_size()
                    steps.append(Zero(places.pointer(self._of(step), step), size))
                continue
            launch, pointers = step
            if launch.compiled is None:
                raise PlanError("this version of Triton is launched by its own JIT")
            if 0 in launch.grid:
                continue
            found = [places.pointer(self._of(t), t) for t in pointers]
            given = arguments_of(launch.compiled, launch.values, found)
            steps.append(Launch(number(launch.compiled), launch.grid, given))
        return Plan(len(self.inputs), outputs, places.workspace, tuple(steps))

    def _of(self, tensor: Tensor) -> _Place:
        place = self._places.get(id(tensor))
        if place is None:
            raise PlanError("it reads a tensor that is neither given nor allocated by it")
        return place


class _Apart(Recorder):
    """Where PyTorch's compiler is loaded already: it leaves alone what is noted."""

    __torch_dispatch__ = Recorder.__torch_dispatch__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True


def recorder_of(inputs: Sequence[Tensor | None]) -> Recorder:
    """A `Recorder` of a call with these tensors."""
    return (_Apart if "torch._dynamo" in sys.modules else Recorder)(inputs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Slots:
    """The slots of a plan: inputs, outputs, and one workspace that holds all other allocations."""

    def __init__(self, inputs: int, places: Sequence[_Place], results: Sequence[Tensor]):
        self.inputs, self.count = inputs, len(results)
        self.workspace = 0
        self.outputs: dict[int, int] = {}  # storage: slot
        self.parts: dict[int, int] = {}  # storage: offset in the workspace
        for number, (place, result) in enumerate(zip(places, results, strict=True)):
            if not isinstance(place.source, Tensor):
                raise PlanError("it returns a tensor that it was given")
            storage, steps = (
                result.untyped_storage(),
                zip(result.shape, result.stride(), strict=True),
            )
            size = sum((n - 1) * s for n, s in steps) + 1 if result.numel() else 0
            whole = storage.nbytes() == size * result.element_size()
            if not whole or storage.data_ptr() != result.data_ptr():
                raise PlanError("it returns a part of what it allocates")
            if _storage(result) in self.outputs and result.numel():
                raise PlanError("it returns one tensor twice")
            self.outputs[_storage(result)] = inputs + number

    def pointer(self, place: _Place, tensor: Tensor) -> Pointer:
        """The pointer to a tensor's first element."""
        offset = tensor.data_ptr() - place.start if tensor.numel() else 0
        if not isinstance(place.source, Tensor):
            return Pointer(place.source, offset)
        storage = _storage(place.source)
        if storage in self.outputs:
            return Pointer(self.outputs[storage], offset)
        if storage not in self.parts:
            self.parts[storage] = self.workspace
            size = place.source.untyped_storage().nbytes()
            self.workspace += -(-size // _ALIGNMENT) * _ALIGNMENT
        return Pointer(self.inputs + self.count, self.parts[storage] + offset)


def heard(launch: Any, pointers: tuple[Tensor, ...]) -> None:
    """Tell this thread's recorder, if one is active, of a launch that was made."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.launched(launch, pointers)
