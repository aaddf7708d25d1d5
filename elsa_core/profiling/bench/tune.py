"""`elsa bench attention --tune`: measure tiles of the GPU kernels for the shapes a user has.

Candidates are variations of the shipped tile of a shape. Each is judged against float64, then timed
under CUDA graph beside the shipped one; the fastest goes into the user's own table, which the GPU
backend reads before its shipped one. A tile never changes what is computed, only how fast.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from elsa_core import reference
from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.attention.schedules import Call
from elsa_core.backends.triton.attention.tiling import Plan, Shape, Table, Tile
from elsa_core.backends.triton.shared import device as gpu
from elsa_core.backends.triton.shared import usertable
from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError
from elsa_core.measuring import environment, timing
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench.attention import Settings
from elsa_core.profiling.bench.cases import Case, inputs, of_softmax
from elsa_core.profiling.bench.runner import require_gpu
from elsa_core.profiling.bench.trace import sample_of, tolerance
from elsa_core.profiling.runs.runs import Progress
from elsa_core.profiling.runs.variants import on_device

check_device: Final = functools.partial(
    require_gpu, keeps="has no tile table, its kernels size themselves", lists="candidates"
)
WORTH: Final = 1.02
"""A tile goes into the table where the shipped one takes this many times its time."""
_FINALISTS: Final = 5
_ACCUMULATORS: Final = 160  # registers of a thread that an output tile may take


@dataclass(frozen=True)
class Timed(Plain):
    """One candidate. `seconds` is None where it did not compile or was wrong: `reason` says so."""

    tile: Tile
    partitions: int
    shipped: bool
    seconds: float | None = None
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Tuned(Plain):
    """The candidates of one call, fastest first, and what the fastest gains over the shipped."""

    case: Case
    precision: str
    mode: str
    candidates: tuple[Timed, ...]
    gain: float | None
    chosen: Tile | None


def shape_of(case: Case) -> Shape:
    """The case as the tile tables see it."""
    heads = case.heads
    return Shape(case.batch, heads, heads, case.queries, case.keys, case.head_dim, case.head_dim)


def candidates(
    case: Case,
    precision: str,
    table: Table,
    *,
    multiprocessors: int,
    shared: int | None = None,
    specialized: bool = False,
) -> tuple[tuple[Plan, bool], ...]:
    """What to measure for a call: (plan, whether it is the shipped one), the shipped one first.

    A pure function of shapes, the shipped table and the GPU's sizes; needs no GPU. specialized: the
    kernels of sm_90 alone may take the call.
    """
    if case.queries == 1:
        raise ArgumentError(f"{case.name}: one query is streamed without tiles; nothing to tune")
    if precision == "lean":
        raise ArgumentError("--tune: lean shares its tiles with strict; tune strict or turbo")
    if case.dtype == "fp64" or case.head_dim > LARGEST_HEAD_DIM:
        raise ArgumentError(f"{case.name}: the GPU kernels do not take it; nothing to tune")
    shape, mode = shape_of(case), gpu.mode_of(DTYPES[case.dtype], precision)

    planned = functools.partial(
        tiling.plan, shape, mode, workspace=True, multiprocessors=multiprocessors,
        specialized=specialized,
    )  # fmt: skip
    shipped = planned(table)
    bytes_shared = shared or table.shared_memory
    variations = _variations(shipped.tile, mode, shape, bytes_shared)
    if specialized and mode == "split":
        variations = itertools.chain(_specialized(shipped.tile, shape, bytes_shared), variations)
    found: dict[Plan, Plan] = {}
    others = (planned(replace(table, tiles=(tile,))) for tile in variations)
    for plan in itertools.chain([shipped], others):
        # what a plan launches: these only say for which calls
        launched = replace(plan.tile, dim=0, keys=None, programs=None)
        found.setdefault(replace(plan, tile=launched), plan)
    return tuple((plan, plan is shipped) for plan in found.values())


def candidates_on(
    case: Case, precision: str, device: torch.device | None
) -> tuple[str, tuple[tuple[Plan, bool], ...]]:
    """A GPU's name and the candidates of a call on it; None: on that of the shipped table."""
    like = torch.empty(case.batch, case.heads, case.keys, case.head_dim, device="meta")
    mask = None if case.mask == "none" else like
    if device is None:
        specialized, table = gpu.gluon_known(), tiling.load_table("h200")
        count, shared = table.multiprocessors, table.shared_memory
    else:
        specialized, facts = gpu.specializes(device), torch.cuda.get_device_properties(device)
        name = "MI300" if torch.version.hip else facts.name
        table = tiling.load_table(tiling.table_name(name, (facts.major, facts.minor)))
        count = facts.multi_processor_count
        shared = int(getattr(facts, "shared_memory_per_block_optin", table.shared_memory))
    specialized = specialized and planner.fits_specialized(like, like, like, mask)
    return table.gpu, candidates(
        case, precision, table, multiprocessors=count, shared=shared, specialized=specialized
    )


def _variations(shipped: Tile, mode: str, shape: Shape, shared: int) -> Iterator[Tile]:
    dim = tiling.padded_dim(shape)
    ahead = (True, False) if mode in ("split", "single") else (False,)
    rows = ((64, 4), (128, 8)) if mode != "exact" else ((32, 4), (64, 4), (64, 8))
    keys = (32, 64, 128) if mode != "exact" else (32, 64)
    sizes = itertools.product(rows, keys, (2, 3), (0, 128), ahead, (False, True))
    for (block_m, warps), block_n, stages, registers, early, loop in sizes:
        tile = replace(
            shipped, mode=mode, dim=256, keys=None, programs=None, block_m=block_m, block_n=block_n,
            warps=warps, stages=stages, ahead=early, registers=registers,
            one_loop=loop, specialized=False,
        )  # fmt: skip
        # Split ahead, two loops may win on long rows alone; in-loop splitting is rarely the
        # fastest: few of its variations are worth compiling.
        worth = mode == "half" or not (registers or loop)
        if early:
            worth = loop or shape.keys > 4096
        if worth and _fits(tile, dim, shared):
            yield tile


def _specialized(shipped: Tile, shape: Shape, shared: int) -> Iterator[Tile]:
    dim = tiling.padded_dim(shape)
    common = replace(
        shipped, dim=256, keys=None, programs=None, warps=4, one_loop=True, specialized=True
    )
    for block_m, warps in ((64, 4), (64, 8), (128, 8), (256, 16)):
        sizes: dict[str, Any] = {"block_m": block_m, "block_n": 64, "warps": warps, "stages": 1}
        tile = replace(common, **sizes, ahead=False, registers=0)
        if tile.serves("split", dim, shape):
            yield tile
    for block_m, block_n, stages in itertools.product((64, 128), (64, 128), (2, 3)):
        # two programs of one folding warpgroup share a multiprocessor
        sizes = {"block_m": block_m, "block_n": block_n, "stages": stages}
        tile = replace(common, **sizes, ahead=True, registers=128 if block_m == 64 else 0)
        if dim * block_n <= 8192 and _fits(tile, dim, shared):
            yield tile


def _fits(tile: Tile, dim: int, shared: int) -> bool:
    """Whether operands fit in shared memory and the output tile in registers, by a rough count."""
    element = {"half": 2, "split": 4, "single": 2, "exact": 4}[tile.mode]
    if not tile.ahead and tile.mode != "half":
        element = 4
    operands = tile.stages * tile.block_n * 2 * dim * element
    queries = tile.block_m * dim * element
    accumulators = tile.block_m * dim // (32 * tile.warps)
    fits = tile.registers == 0 or accumulators <= tile.registers // 2
    return operands + queries <= shared and accumulators <= _ACCUMULATORS and fits


def tasks_of(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Each case in each of its precisions that has tiles of its own."""
    return [
        (case, precision)
        for case in of_softmax(cases, "--tune")
        for precision in case.precisions
        if precision != "lean" or case.precisions == ("lean",)
    ]


def run(
    cases: Sequence[Case],
    *,
    device: torch.device,
    settings: Settings,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Tuned, ...]:
    """Measure the candidates of every case and precision on a GPU; writes nothing."""
    check_device(device, measuring=True)
    tuned, tasks = [], tasks_of(cases)
    with on_device(device):
        for i, (case, precision) in enumerate(tasks):
            progress(f"{case.name} {precision}", i, len(tasks))
            tuned.append(_tune(case, precision, device, settings))
    return tuple(tuned)


def save(tuned: Sequence[Tuned], device: torch.device | str) -> Path | None:
    """Bring the user's table of this GPU up to date; None where there is nothing to write."""
    rows, retired = [], []
    for each in tuned:
        shape = shape_of(each.case)
        if each.chosen is not None:
            rows.append(usertable.measured_for(each.chosen, shape))
        elif each.gain is not None:
            # of the call's own mode: turbo may be shipped with a tile of strict
            shipped = replace(each.candidates[0].tile, mode=each.mode)
            retired.append(usertable.measured_for(shipped, shape))
    # Calls that share a mode (fp16 and bf16) share a row: one that gained keeps it.
    gained = {row.calls for row in rows}
    retired = [row for row in retired if row.calls not in gained]
    name, facts = environment.of_gpu(device)
    path = usertable.path(name)
    if not rows and not path.exists():
        return None
    return usertable.write(path, tuple(rows), facts, retired=tuple(retired))


def _tune(case: Case, precision: str, device: torch.device, settings: Settings) -> Tuned:
    tensors = inputs(case, device, settings.seed)
    sample = sample_of(case, tensors)
    oracle, _ = reference.attention(sample.query, sample.key, sample.value, sample.mask)
    allowed = tolerance(sample, precision, oracle)
    running: list[tuple[Timed, Call]] = []
    failed: list[Timed] = []
    _, plans = candidates_on(case, precision, device)
    for plan, is_shipped in plans:
        timed = Timed(plan.tile, plan.partitions, is_shipped)
        try:
            call = planner.plan_call(*tensors, False, case.head_dim**-0.5, precision, tiles=plan)
            error = reference.relative_l2(sample.pick(planner.execute(call, *tensors)[0]), oracle)
        except Exception as problem:  # a compiler may fail in any way; the candidate is left out
            failed.append(replace(timed, reason=first_line(problem)[:160]))
            continue
        if error <= allowed:
            running.append((replace(timed, error=error), call))
        else:
            failed.append(replace(timed, error=error, reason=f"wrong: error {error:.1e}"))

    # Everyone briefly, then the fastest few and the shipped one as long as asked for.
    seconds: dict[int, float] = {}
    final = list(range(len(running)))
    for rounds in (3, settings.rounds) if running else ():
        contenders = [
            Contender(str(i), functools.partial(planner.execute, running[i][1], *tensors))
            for i in final
        ]
        samples, _ = timing.time_cuda(
            contenders, rounds=rounds, budget_seconds=settings.budget_seconds
        )
        seconds |= {i: digits(percentile(samples[str(i)], 0.5)) for i in final}
        order = sorted(final, key=seconds.__getitem__)
        final = order[:_FINALISTS] + [i for i in order[_FINALISTS:] if running[i][0].shipped]
    measured = {i: replace(running[i][0], seconds=each) for i, each in seconds.items()}
    finalists = [measured.pop(i) for i in final]
    mode = gpu.mode_of(DTYPES[case.dtype], precision)
    return conclude(case, precision, mode, finalists, [*measured.values(), *failed])


def conclude(
    case: Case, precision: str, mode: str, finalists: Sequence[Timed], others: Sequence[Timed]
) -> Tuned:
    """Choose the fastest of the `finalists`, the shipped one among them, where it beats that.

    others: timed briefly, or failed.
    """
    seconds = operator.attrgetter("seconds")
    best = min(finalists, key=seconds, default=None)
    shipped = next((t for t in finalists if t.shipped), None)
    gain = None
    if best is not None and shipped is not None:
        gain = digits(seconds(shipped) / seconds(best))
    # Where the shipped tile does not run here at all, any that does is worth it.
    worth = best is not None and not best.shipped and (gain is None or gain >= WORTH)
    chosen = best.tile if best is not None and worth else None
    timed = [each for each in (*finalists, *others) if each.seconds is not None]
    failed = [each for each in others if each.seconds is None]
    everyone = (*sorted(timed, key=seconds), *failed)
    return Tuned(case, precision, mode, everyone, gain, chosen)
