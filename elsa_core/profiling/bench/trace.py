"""`elsa bench attention --trace`: the structural proof of a call.

Shows how a call is cut and merged, then replays exactly that partition with `elsa_core.monoid` on
the call's own inputs, and holds five claims against numbers:

- cover: every key lies in one leaf, and in one alone;
- exact: in float64 the partition gives the softmax, up to float64 rounding;
- stable: in float32 its merges, with the states' round trip, err by at most u x depth;
- theorem 1: and by at most u L(n, B), the bound of a scan of the same leaves;
- kernel: what the kernel returned is that result, up to twice what PyTorch's own kernel errs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import dispatch, monoid, reference
from elsa_core.backends.partition import Partition
from elsa_core.base import calls
from elsa_core.errors import UnavailableError
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.timing import float32_products
from elsa_core.monoid import State
from elsa_core.ops.attention.api import attention
from elsa_core.precision import unit_roundoff
from elsa_core.profiling.bench.attention import TURBO_ULP
from elsa_core.profiling.bench.cases import Case, Inputs, inputs, of_softmax
from elsa_core.profiling.runs.runs import Progress

_ROWS: Final = 32  # sampled query rows of each sampled head
_SCORES: Final = 2**24  # float64 scores that the replay holds at most


@dataclass(frozen=True)
class Claim(Plain):
    """One claim: what was found, what it may be at most, and whether it holds.

    `ok` is None where the claim could not be tried; `note` says why, or what was compared.
    """

    name: str
    found: float | None
    allowed: float | None
    ok: bool | None
    note: str


@dataclass(frozen=True)
class Trace:
    """The structural proof of one call. `heads` and `rows` are those that the replay sampled."""

    case: Case
    precision: str
    partition: Partition
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    claims: tuple[Claim, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `ok`: no claim failed."""
        partition = self.partition
        spans = [list(span) for span in partition.spans()]
        return {
            "case": self.case.to_dict(),
            "precision": self.precision,
            "partition": asdict(partition) | {"spans": spans, "tree": partition.tree},
            "sample": {"batch": 0, "heads": list(self.heads), "rows": list(self.rows)},
            "claims": [claim.to_dict() for claim in self.claims],
            "ok": all(claim.ok is not False for claim in self.claims),
        }


def run(
    cases: Sequence[Case], *, device: torch.device, backend: str = "auto", seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Trace, ...]:  # fmt: skip
    """Trace `cases` on `device`, each in its first precision."""
    traces, cases = [], of_softmax(cases, "--trace")
    for i, case in enumerate(cases):
        progress(case.name, i, len(cases))
        traces.append(trace(case, device, case.precisions[0], backend=backend, seed=seed))
    return tuple(traces)


def trace(
    case: Case, device: torch.device, precision: str, *, backend: str = "auto", seed: int = 0
) -> Trace:
    """The structural proof of one call.

    For CUDA without a GPU the call is planned and replayed, and the kernel's claim stays untried.
    """
    absent = device.type == "cuda" and not torch.cuda.is_available()
    # Without the GPU only the sampled heads are needed, and the call itself as shapes.
    made = replace(case, batch=1, heads=min(2, case.heads)) if absent else case
    tensors = inputs(made, "cpu" if absent else device, seed)
    query, key, value, mask = inputs(case, "meta") if absent else tensors
    if absent:
        name = dispatch.kernels_of("attention", "cuda")
        if backend not in ("auto", name):
            raise UnavailableError(f"without a GPU {name} alone plans calls, not {backend!r}")
    else:  # the kernels behind `auto`'s measured table, which gives some calls to PyTorch's own
        kind = (calls.place(query), query.dtype, query.shape[3], value.shape[3], precision)
        name = dispatch.choose("attention", *kind, backend)
    told = dispatch.implementation("attention", name).partition
    if told is None:
        raise UnavailableError(f"backend={name!r} tells no partition of its calls: name another")
    partition = told(query, key, value, mask, False, precision)
    sample = sample_of(made, tensors)
    output: Tensor | None = None
    if not absent:
        with torch.inference_mode():
            returned = attention(*tensors, precision=precision, backend=partition.backend)
        assert isinstance(returned, Tensor)
        output = sample.pick(returned)
    claims = (_cover(partition), *_replayed(partition, sample, precision, output))
    return Trace(case, precision, partition, sample.heads, sample.rows, claims)


class Sample(NamedTuple):
    """Rows of the first batch element that stand for all: [1, heads, rows, ...]."""

    heads: tuple[int, ...]
    rows: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    def pick(self, output: Tensor) -> Tensor:
        """The sampled part of the call's output [B, H, Nq, Dv]."""
        return output[:1, list(self.heads)][:, :, list(self.rows)]


def sample_of(case: Case, tensors: Inputs) -> Sample:
    """The first and the last head, and evenly spread rows with the first and the last."""
    heads = tuple(sorted({0, case.heads - 1}))
    count = max(2, min(_ROWS, case.queries, _SCORES // (case.keys * len(heads))))
    rows = tuple(sorted({round(i * (case.queries - 1) / (count - 1)) for i in range(count)}))
    query, key, value, mask = tensors
    picked = None if mask is None else mask[:, list(heads)][:, :, list(rows)]
    return Sample(
        heads, rows, query[:1, list(heads)][:, :, list(rows)], key[:1, list(heads)],
        value[:1, list(heads)], picked,
    )  # fmt: skip


def replay(partition: Partition, scores: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Fold and merge exactly as `partition` says, with states of `dtype`.

    Args:
        partition: leaves, splits, and how states travel between them.
        scores: [..., rows, keys], float64 numbers that `dtype` can hold.
        value: [..., keys, dv], float64.
        dtype: of the states. Leaves are computed in float64 and rounded to it, so that the result's
            error is that of the merges.

    Returns:
        output [..., rows, dv] in `dtype`.
    """

    def leaves(first: int, last: int) -> list[State]:
        """Of a chain: those of a full tile are lifted at once, the ragged one alone."""
        tile, found = partition.key_tile, []
        ragged = first + (last - first) // tile * tile
        for start, stop, size in ((first, ragged, tile), (ragged, last, last - ragged)):
            if stop > start:
                own = scores[..., start:stop].unflatten(-1, (-1, size)).movedim(-2, 0)
                values = value[..., start:stop, :].unflatten(-2, (-1, size)).movedim(-3, 0)
                state = monoid.lift(own, values[..., None, :, :])
                parts = (part.to(dtype).unbind(0) for part in state)
                found += [State(*leaf) for leaf in zip(*parts, strict=True)]
        return found

    merged: list[State] = []
    step = partition.chain_keys
    for first, last in partition.spans():
        starts = range(first, last, step)  # of chains
        total = monoid.fold([monoid.fold(leaves(i, min(last, i + step))) for i in starts])
        if partition.splits > 1:  # a round trip through memory as (lse, W / S)
            output, lse = monoid.finalize(total)
            total = State(lse, (total.S > 0).to(total.S.dtype), output)
        merged.append(total)
    return monoid.finalize(monoid.tree(merged))[0]


def _cover(partition: Partition) -> Claim:
    leaves = partition.leaves()
    ends = [0, *(last for _, last in leaves)]
    starts = [*(first for first, _ in leaves), partition.keys]
    gaps = sum(abs(start - end) for start, end in zip(starts, ends, strict=True))
    wrong = gaps + abs(len(leaves) - partition.key_tiles)
    note = f"missing or doubled keys, of {partition.keys} in {len(leaves)} leaves"
    return Claim("cover", float(wrong), 0.0, wrong == 0, note)


def _replayed(
    partition: Partition, sample: Sample, precision: str, output: Tensor | None
) -> list[Claim]:
    query, key, value = sample.query.double(), sample.key.double(), sample.value.double()
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if sample.mask is not None:
        scores = scores + sample.mask.double()
    oracle, _ = reference.attention(sample.query, sample.key, sample.value, sample.mask)
    exact, tree = replay(partition, scores, value, torch.float64), partition.tree
    # Two float64 computations of the same rows: merges and the scores' own rounding differ. A score
    # is a sum of head_dim products; an error of it moves its weight by as much.
    error = reference.relative_l2(exact, oracle)
    score_rounding = 2 * exact.shape[-1] * float(scores.abs().amax())
    allowed = unit_roundoff(torch.float64) * (tree["depth"] + score_rounding)
    note = "replay in float64, against softmax"
    claims = [Claim("exact", error, allowed, error <= allowed, note)]
    rounded = scores.float().double()
    truth = torch.softmax(rounded, -1) @ value
    error = reference.relative_l2(replay(partition, rounded, value, torch.float32), truth)
    for name, bound, formula in (
        ("stable", tree["bound"], "u x depth of this schedule"),
        ("theorem 1", tree["scan_bound"], "u x L(n, B)"),
    ):
        note = f"float32 merges of exact leaves, against {formula}"
        claims.append(Claim(name, error, bound, error <= bound, note))
    if output is None:
        note = "not run: torch sees no CUDA GPU here; the plan and its replay need none"
        return [*claims, Claim("kernel", None, None, None, note)]
    error = max(reference.relative_l2(output, exact), reference.relative_l2(output, oracle))
    allowed = tolerance(sample, precision, oracle)
    ok = math.isfinite(error) and error <= allowed
    note = "the kernel, against the replay and softmax"
    return [*claims, Claim("kernel", error, allowed, ok, note)]


def tolerance(sample: Sample, precision: str, oracle: Tensor) -> float:
    """Twice the error of PyTorch's own kernel on the sampled rows, and one ulp of the output.

    "turbo" may err by 4 of its own ulp, as in the tables of the benchmark.
    """
    with float32_products(), torch.inference_mode():
        own = F.scaled_dot_product_attention(sample.query, sample.key, sample.value, sample.mask)
    allowed = 2 * reference.relative_l2(own, oracle) + torch.finfo(own.dtype).eps
    return max(allowed, 4 * TURBO_ULP) if precision == "turbo" else allowed
