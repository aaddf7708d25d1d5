"""Plans and kernels in one file: what the library serves calls by where there is no Python planner.

`recorded` runs a model, and every layout of its calls is planned and noted; `write` puts those
layouts and their kernels into bytes that `csrc/cuda/planfile.h` reads. A call of another layout,
such as another batch size, has no plan then, and says so in one line. A file holds them
for one architecture or several, and the library takes those of the GPU that is there. The last 4
bytes are the CRC-32 of those before: what is damaged is refused before anything of it is loaded.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda import plan as plans
from elsa_core.backends.cuda.library import Library
from elsa_core.backends.cuda.plan import Kernel, PlanError, kernel_of
from elsa_core.backends.cuda.record import DTYPES, Recorder
from elsa_core.base.messages import first_line
from elsa_core.errors import UnavailableError

MAGIC = 0x534E414C50414C45
VERSION = 4
_NOT_ALONE = "a call of {} is not by kernels of this package alone: {}"


@dataclass(frozen=True)
class Recorded:
    """The calls of some runs. layouts: the operator's name, its layout in words, its plan. kernels:
    those that the plans launch, by the number in the plans. calls: the arguments of layouts, whose
    tensors have no memory.
    """

    layouts: tuple[tuple[str, bytes, bytes], ...]
    kernels: dict[int, Kernel]
    calls: Mapping[tuple[str, bytes], list[Any]] = field(default_factory=dict)


def joined(parts: Sequence[Recorded]) -> Recorded:
    """Several runs as one; the same layout twice is kept once."""
    kernels = {number: kernel for part in parts for number, kernel in part.kernels.items()}
    calls = {key: call for part in parts for key, call in part.calls.items()}
    layouts = {(name, words): plan for part in parts for name, words, plan in part.layouts}
    return Recorded(tuple((*key, plan) for key, plan in sorted(layouts.items())), kernels, calls)


def recorded(library: Library, run: Callable[[], object]) -> Recorded:
    """Run `run` and note every layout of a call that the library serves in it.

    Raises:
        UnavailableError: a call is one for Python: it does more than launch kernels.
    """
    noted = library.noted = []
    library.clear()  # so that every layout is planned again
    try:
        run()
    finally:
        library.noted = None
    layouts, kernels, calls = {}, dict[int, Kernel](), {}
    for name, arguments, plan in noted:
        if plan is None:
            why = "PyTorch serves it, as it does where rows or channels are few"
            raise UnavailableError(_NOT_ALONE.format(name, why))
        key = name, words_of(arguments)
        layouts[key], calls[key] = plans.write(plan), list(map(_without_memory, arguments))
        numbers = {step.kernel for step in plan.steps if isinstance(step, plans.Launch)}
        kernels |= {number: library.kernels[number] for number in numbers}
    return Recorded(tuple((*key, plan) for key, plan in layouts.items()), kernels, calls)


def words_of(arguments: Iterable[Any]) -> bytes:
    """A call's layout, as `Arguments::describe` of csrc/cuda/operators.cpp has it without the index
    of a device.
    """
    words: list[int] = []
    for each in arguments:
        if isinstance(each, Tensor):
            head = each.data_ptr() % 16 | DTYPES[each.dtype] << 8 | each.dim() << 16
            words += [head | (each.device.type != "cpu") << 24, *each.shape, *each.stride()]
        elif isinstance(each, float):
            words += struct.unpack("<Q", struct.pack("<d", each))
        elif isinstance(each, str):
            data = each.encode()
            count = -(-len(data) // 8)
            words += [len(data), *struct.unpack(f"<{count}Q", data.ljust(8 * count, b"\0"))]
        elif isinstance(each, list):
            words += [len(each), *map(int, each)]
        else:
            words.append(-1 if each is None else int(each))
    return struct.pack(f"<{len(words)}Q", *(word % (1 << 64) for word in words))


def _without_memory(given: Any) -> Any:
    """Of a tensor one of its dtype, sizes, strides and alignment."""
    if not isinstance(given, Tensor):
        return given
    last = sum((n - 1) * s for n, s in zip(given.shape, given.stride(), strict=True))
    first = given.data_ptr() % 16 // given.itemsize
    memory = torch.empty(first + max(0, last) + 1, dtype=given.dtype, device="meta")
    return memory.as_strided(given.shape, given.stride(), first)


def planned(
    found: Recorded,
    gpu: Any,
    kernels: Mapping[str, Callable[..., Any]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recorded:
    """The same calls as they are to be launched on another GPU that is not here: planned under its
    description, compiled, and never run.

    A layout says all that a call's plan depends on but the GPU: the call is made again, on tensors
    without memory, with the planners told of another GPU.

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
            raise UnavailableError(_NOT_ALONE.format(f"{name} on sm_{gpu.arch}", error)) from None
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
            raise UnavailableError(_NOT_ALONE.format(f"{name} on sm_{gpu.arch}", why)) from error
    return recorder, results if isinstance(results, tuple) else (results,)


def write(archs: Mapping[int, Recorded], served: str) -> bytes:
    """The bytes of a file. archs: what was recorded by the architecture that it is for, 90 for
    sm_90. served: what the message of a call without a plan says of those that have one.
    """
    names = sorted(
        {name.removeprefix("elsa::") for each in archs.values() for name, _, _ in each.layouts}
    )
    out = [struct.pack("<QI", MAGIC, VERSION), _text(served), struct.pack("<I", len(names))]
    for name in names:
        schema = getattr(torch.ops.elsa, name).default._schema
        out += [_text(name), _text(Library.types(schema)), struct.pack("<I", len(schema.returns))]
        out.append(_text(str(schema).removeprefix("elsa::")))
    out.append(struct.pack("<I", len(archs)))
    for arch, each in sorted(archs.items()):
        out.append(struct.pack("<II", arch, len(each.kernels)))
        for number, kernel in sorted(each.kernels.items()):
            out += [struct.pack("<I", number), _text(kernel.symbol)]
            out.append(struct.pack("<4IQ", *kernel.facts, len(kernel.code)) + kernel.code)
        out.append(struct.pack("<I", len(each.layouts)))
        for name, words, plan in each.layouts:
            out += [_text(name), struct.pack("<I", len(words) // 8), words]
            out.append(struct.pack("<Q", len(plan)) + plan)
    body = b"".join(out)
    return body + struct.pack("<I", zlib.crc32(body))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data
