"""Plans of recorded calls for a GPU that is not here: planned under its description, compiled, and
never run.

A layout says all that a call's plan depends on but the GPU: the call is made again, on tensors
without memory, with the planners told of another GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda import plan as plans
from elsa_core.backends.cuda.kernels import PlanError, kernel_of
from elsa_core.backends.cuda.plan import Kernel
from elsa_core.backends.cuda.planfile import Recorded
from elsa_core.backends.cuda.record import Recorder
from elsa_core.base.messages import first_line
from elsa_core.errors import UnavailableError

Progress = Callable[[int, int], None]


def planned(
    found: Recorded,
    gpu: Any,
    kernels: Mapping[str, Callable[..., Any]],
    progress: Progress = lambda done, total: None,
) -> Recorded:
    """The same calls as they are to be launched on another GPU.

    gpu: a `pack.cases.Gpu`. kernels: what computes each operator in Python, by its name. progress:
    called with kernels compiled and in all.

    Raises:
        UnavailableError: a call would do more there than launch kernels, or a kernel cannot be
            compiled or is too large for it.
    """
    from elsa_core.backends.triton.pack.cases import Planner

    planner, launches = Planner(gpu.arch), list[tuple[Any, str]]()
    calls = [
        _called(name, found.calls[name, words], gpu, kernels, planner, launches)
        for name, words, _ in found.layouts
    ]
    compiled = dict[str, Any]()
    numbers, held = dict[int, int](), dict[int, Kernel]()
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
        numbers[id(compiled[key])] = len(numbers)
        held[len(held)] = kernel
    progress(len(compiled), len(planner.jobs))
    for launch, key in launches:
        launch.compiled = compiled[key]
    layouts = []
    for (name, words, _), (recorder, results) in zip(found.layouts, calls, strict=True):
        try:
            plan = plans.write(recorder.plan(results, lambda one: numbers[id(one)]))
        except PlanError as error:
            raise UnavailableError(_lost(name, gpu, str(error))) from None
        layouts.append((name, words, plan))
    return Recorded(tuple(layouts), held)


def _called(
    name: str, given: list[Any], gpu: Any, kernels: Mapping[str, Callable[..., Any]], planner: Any,
    launches: list[tuple[Any, str]],
) -> tuple[Recorder, tuple[Tensor, ...]]:  # fmt: skip
    """Make a call as on that GPU, without its launches, which join `launches` with their keys."""
    from elsa_core.backends.triton.shared.device import describing
    from elsa_core.backends.triton.shared.launch import recording

    # objects of their own, as in `calls`
    given = [a.detach() if isinstance(a, Tensor) else a for a in given]
    recorder = Recorder([a for a in given if a is None or isinstance(a, Tensor)])

    def note(launch: Any, tensors: tuple[Any, ...]) -> None:
        launches.append((launch, planner.key(launch, tensors)))
        recorder.launched(launch, tensors)

    with describing(gpu.facts), recording(note), torch.no_grad(), recorder:
        try:
            results = kernels[name.removeprefix("elsa::")](*given)
        except Exception as error:  # PyTorch's own functions may refuse tensors without memory
            why = f"PyTorch serves it ({first_line(error)})"
            raise UnavailableError(_lost(name, gpu, why)) from error
    return recorder, results if isinstance(results, tuple) else (results,)


def _lost(name: str, gpu: Any, why: str) -> str:
    return f"a call of {name} on sm_{gpu.arch} is not by kernels of this package alone: {why}"
