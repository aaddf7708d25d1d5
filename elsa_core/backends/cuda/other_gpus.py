"""Plans of recorded calls for a GPU that is not here: planned under its description, compiled, and
never run.

A layout says all that a call's plan depends on but the GPU, so that the call can be made again, on
tensors without memory, with the planners told of another GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda import plan as plans
from elsa_core.backends.cuda.kernels import PlanError, kernel_of
from elsa_core.backends.cuda.library import Library
from elsa_core.backends.cuda.plan import Kernel
from elsa_core.backends.cuda.planfile import Recorded
from elsa_core.backends.cuda.record import DTYPES, Recorder
from elsa_core.base.messages import first_line
from elsa_core.errors import UnavailableError

_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
_NO_TENSOR = (1 << 64) - 1
Progress = Callable[[int, int], None]


@dataclass
class _Launch:
    """What `Recorder` asks of a launch; `compiled` is the kernel's key until it is compiled."""

    compiled: Any
    grid: tuple[int, ...]
    values: tuple[Any, ...]

    def hooked(self) -> bool:
        return False


def planned(
    found: Recorded,
    gpu: Any,
    kernels: Mapping[str, Callable[..., Any]],
    progress: Progress = lambda done, total: None,
) -> Recorded:
    """The same calls as they are to be launched on another GPU.

    Args:
        found: what was recorded, on any GPU.
        gpu: a `pack.cases.Gpu`.
        kernels: what computes each operator in Python, by its name.
        progress: called with kernels compiled and in all.

    Raises:
        UnavailableError: a call would do more there than launch kernels, or a kernel cannot be
            compiled or is too large for it.
    """
    from elsa_core.backends.triton.pack.cases import Planner

    planner, launches = Planner(gpu.arch), list[_Launch]()
    calls = [
        _called(name, words, gpu, kernels[name.removeprefix("elsa::")], planner, launches)
        for name, words, _ in found.layouts
    ]
    compiled = dict[str, Any]()
    numbers = dict[int, tuple[int, Kernel]]()
    for key, job in planner.jobs.items():
        progress(len(compiled), len(planner.jobs))
        where = f"kernel {job.kernel.__name__} for sm_{gpu.arch}"
        try:
            compiled[key] = job.compile()
            kernel = kernel_of(compiled[key])
        except Exception as error:  # a compiler may raise anything
            raise UnavailableError(f"{where} cannot be compiled: {first_line(error)}") from error
        if kernel.shared > gpu.shared_memory:
            raise UnavailableError(
                f"{where} takes {kernel.shared} bytes of shared memory, {gpu.facts.name} has "
                f"{gpu.shared_memory}"
            )
        numbers[id(compiled[key])] = len(numbers), kernel
    progress(len(compiled), len(planner.jobs))
    for launch in launches:
        launch.compiled = compiled[launch.compiled]
    layouts = []
    for (name, words, _), (recorder, results) in zip(found.layouts, calls, strict=True):
        try:
            plan = plans.write(recorder.plan(results, lambda one: numbers[id(one)]))
        except PlanError as error:
            raise UnavailableError(_lost(name, gpu, str(error))) from None
        layouts.append((name, words, plan))
    return Recorded(tuple(layouts), dict(numbers.values()))


def _called(
    name: str,
    words: bytes,
    gpu: Any,
    kernel: Callable[..., Any],
    planner: Any,
    launches: list[_Launch],
) -> tuple[Recorder, tuple[Tensor, ...]]:
    """Make a call as on that GPU, without its launches, which join `launches`."""
    from elsa_core.backends.triton.shared.device import describing
    from elsa_core.backends.triton.shared.launch import recording

    given = arguments_of(name, words)
    recorder = Recorder([a for a in given if a is None or isinstance(a, Tensor)])

    def note(launch: Any, tensors: tuple[Any, ...]) -> None:
        rest = [each.name for each in launch.kernel.params][len(tensors) :]
        values = tuple(launch.tail[each] for each in rest)
        launches.append(_Launch(planner.key(launch, tensors), launch.grid, values))
        recorder.launched(launches[-1], tensors)

    with describing(gpu.facts), recording(note), torch.no_grad(), recorder:
        try:
            results = kernel(*given)
        except Exception as error:  # PyTorch's own functions may refuse tensors without memory
            why = f"PyTorch serves it ({first_line(error)})"
            raise UnavailableError(_lost(name, gpu, why)) from error
    return recorder, results if isinstance(results, tuple) else (results,)


def _lost(name: str, gpu: Any, why: str) -> str:
    return f"a call of {name} on sm_{gpu.arch} is not by kernels of this package alone: {why}"


def arguments_of(name: str, words: bytes) -> list[Any]:
    """The arguments of a call of a layout, as `Arguments::describe` of csrc/cuda/operators.cpp
    wrote them; its tensors are on the device "meta".
    """
    given = iter(struct.unpack(f"<{len(words) // 8}Q", words))

    def signed(count: int = 1, kind: str = "q") -> list[Any]:
        data = struct.pack(f"<{count}Q", *(next(given) for _ in range(count)))
        return list(struct.unpack(f"<{count}{kind}", data))

    def one(kind: str) -> Any:
        if kind in "nd":
            return signed(kind="d" if kind == "d" else "q")[0]
        if kind == "b":
            return bool(next(given))
        if kind in "TO":
            head = next(given)
            return None if head == _NO_TENSOR else _tensor(head, signed)
        count = next(given)
        if kind == "s":
            parts = -(-count // 8)
            return struct.pack(f"<{parts}Q", *(next(given) for _ in range(parts)))[:count].decode()
        return [bool(item) for item in signed(count)] if kind == "B" else signed(count)

    schema = getattr(torch.ops.elsa, name.removeprefix("elsa::")).default._schema
    return [one(kind) for kind in Library.types(schema)]


def _tensor(head: int, signed: Callable[[int], list[int]]) -> Tensor:
    """A tensor of the layout's dtype, sizes, strides and alignment."""
    dtype, dims, aligned = _DTYPES[head >> 8 & 0xFF], head >> 16 & 0xFF, head & 0xF
    sizes, strides = signed(dims), signed(dims)
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0
    first = aligned // dtype.itemsize
    memory = torch.empty(first + last + 1, dtype=dtype, device="meta")
    return memory.as_strided(sizes, strides, first)
