"""alpha-entmax attention, forward and in training: `python -m benchmarks.entmax`.

At alpha = 1.5: this package's kernels, those of the authors' package `adasplash` (`adasplash_v1`;
`adasplash_v2`, whose calls are causal) and `entmax`, where they are installed, and softmax by this
package and PyTorch, which computes something else. Errors are relative, against float64: of the
output, or in training of the worst gradient; of the first heads, or of some rows of the first one.
`training` is a forward and its gradients of query, key and value. In the table `sparse` tokens lie
in runs of alike ones, so that few tiles of 64 queries and 64 keys hold a weight; the share of empty
ones is measured. In the table `packed` the tokens are those of sequences of even lengths up to the
longest, in one call and in one for each.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, compared, left_out, main, options
from elsa_core.backends import eager_entmax
from elsa_core.measuring.timing import Contender
from elsa_core.ops.attention.api import attention
from elsa_core.ops.entmax.api import entmax_attention, entmax_varlen_attention
from elsa_core.ops.varlen.api import varlen_attention
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench.entmax import ALPHA, by_adasplash, by_entmax, missing

RUNS: Final = 11  # of alike tokens: 1 - 1 / 11 of the tiles are empty, but for those at the edges
_LARGEST: Final = 2**28  # scores that a package may hold, which holds all of them
_PLAIN: Final = 2**27  # scores of a call that plain PyTorch computes in less than seconds
_JUDGED: Final = 2**24  # scores of the float64 reference: of as many heads, or rows of one head
FORWARD, TRAINING = "forward", "training"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A call of query, key and value [batch, heads, tokens, dim], in one direction.

    sparse: tokens in runs of alike ones; else they are normal. sequences: how many the tokens are
    of, packed; 0: the batch.
    """

    direction: str
    batch: int
    heads: int
    tokens: int
    dim: int
    dtype: str
    causal: bool
    sparse: bool = False
    sequences: int = 0

    @property
    def name(self) -> str:
        """As the tables have it."""
        shape = f"{self.batch}x{self.heads}x{self.tokens}x{self.dim}-{self.dtype}"
        kinds = ("-causal" if self.causal else "") + ("-sparse" if self.sparse else "")
        kinds += f"-packed{self.sequences}" if self.sequences else ""
        return f"{self.direction}/{shape}{kinds}"

    @property
    def starts(self) -> list[int]:
        """Where packed sequences start, and the number of tokens."""
        whole = self.sequences * (self.sequences + 1)
        return [i * (i + 1) * self.tokens // whole for i in range(self.sequences + 1)]


def _cases() -> Iterator[Case]:
    for direction in (FORWARD, TRAINING):
        for dtype in ("fp16", "bf16", "fp32"):
            for causal in (True, False):
                for exponent in range(11, 16):
                    yield Case(direction, 1, 8, 2**exponent, 64, dtype, causal)
        for dtype in ("fp16", "fp32"):
            for causal in (True, False):
                yield Case(direction, 1, 8, 2**14, 64, dtype, causal, sparse=True)
                for sequences in (8, 64):
                    yield Case(direction, 1, 8, 2**15, 64, dtype, causal, sequences=sequences)


CASES: Final = {
    "cuda": tuple(_cases()),
    "cpu": tuple(
        Case(direction, 1, 2, tokens, 64, "fp32", causal, sparse)
        for direction in (FORWARD, TRAINING)
        for causal in (True, False)
        for tokens, sparse in ((1024, False), (2048, True))
    ),
}


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value: the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device)
    shape = case.batch, case.heads, case.tokens, case.dim
    query, key, value = (normal(*shape) for _ in range(3))
    if case.sparse:
        # 12 x 12 / 8 above what other runs have: more than the 1 / (alpha - 1) that weighs nothing
        centres = 12 * F.normalize(normal(case.batch, case.heads, RUNS, case.dim), dim=-1)
        of = torch.arange(case.tokens, device=device) * RUNS // case.tokens
        query, key = (centres[:, :, of] + 0.1 * t for t in (query, key))
    dtype = DTYPES[case.dtype]
    return query.to(dtype), key.to(dtype), value.to(dtype)


def empty_share(case: Case, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The share of tiles of 64 x 64 without a weight, of the first head; of a causal call among
    those that it sees.
    """
    query, key, value = (t[:1, :1] for t in (query, key, value))
    call = (query, key, value, None, None, ALPHA, case.causal, case.dim**-0.5, "strict")
    tiles = eager_entmax.attention(*call)[2].bool()
    seen = torch.ones(tiles.shape[-2:], dtype=torch.bool, device=tiles.device)
    seen = seen.tril() if case.causal else seen
    return 1.0 - float(tiles[..., seen].double().mean())


def functions(case: Case, device: torch.device) -> dict[str, Function | str]:
    """Who takes part, or the reason why not."""
    if case.sequences:
        return _packed(case, device)
    causal = case.causal
    backends = ("triton", "eager") if device.type == "cuda" else ("auto", "eager")
    found: dict[str, Function | str] = {}
    scores = case.batch * case.heads * case.tokens**2
    for backend in backends:
        found[f"elsa-{backend}"] = functools.partial(
            entmax_attention, alpha=ALPHA, is_causal=causal, backend=backend
        )
    if device.type == "cuda" and scores > _PLAIN:
        found["elsa-eager"] = "plain PyTorch takes seconds"
    softmax: Any = functools.partial(attention, is_causal=causal)
    found["softmax-elsa"] = softmax
    found["softmax-torch"] = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    found["entmax"] = (
        missing("entmax")
        or ("all scores would be in memory" if scores > _LARGEST else "")
        or functools.partial(by_entmax, causal=causal)
    )
    why = "it needs a GPU" if device.type != "cuda" else missing("adasplash")
    found["adasplash_v1"] = why or functools.partial(by_adasplash, causal=causal)
    found["adasplash_v2"] = why or ("it is causal alone" if not causal else _adasplash_v2)
    return found


def _packed(case: Case, device: torch.device) -> dict[str, Function | str]:
    """Packed sequences in one call, by a call for each, and by softmax."""
    # made by the first call, which is not timed: a dry run needs no GPU
    starts = functools.cache(lambda: torch.tensor(case.starts, dtype=torch.int32, device=device))
    lengths = [b - a for a, b in pairwise(case.starts)]
    backend = "triton" if device.type == "cuda" else "auto"
    alone = functools.partial(entmax_attention, alpha=ALPHA, is_causal=case.causal, backend=backend)

    def at_once(attend: Callable[..., Any], **terms: Any) -> Function:
        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            operands = (t[0].transpose(0, 1) for t in (query, key, value))
            out: Tensor = attend(
                *operands, starts(), max_seqlen_q=max(lengths), is_causal=case.causal, **terms
            )
            return out.transpose(0, 1)[None]

        return call

    def each(*operands: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths, 2) for t in operands), strict=True)
        return torch.cat([alone(*part) for part in parts], 2)

    return {
        f"elsa-{backend}": at_once(entmax_varlen_attention, alpha=ALPHA, backend=backend),
        "each-sequence": each,
        "softmax-elsa": at_once(varlen_attention),
    }


def _adasplash_v2(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from adasplash import adasplash_v2

    out: Tensor = adasplash_v2(query, key, value)
    return out


def results(
    case: Case, function: Function, operands: tuple[Tensor, ...], grad_out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What a case is about: the output, or the gradients of query, key and value.

    grad_out: ones if it is not given.
    """
    if case.direction == FORWARD:
        return (function(*operands),)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in operands]
        out = function(*leaves)
        grad_out = torch.ones_like(out) if grad_out is None else grad_out.to(out.dtype)
        return torch.autograd.grad(out, leaves, grad_out)


@dataclass(frozen=True)
class Reference:
    """float64 by plain PyTorch. rows: the numbers of the queries that it has."""

    heads: int
    rows: Tensor
    expected: tuple[Tensor, ...]

    def of(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The part of results that the reference has."""
        first = [t[:1, : self.heads] for t in found]
        first[0] = first[0][:, :, self.rows]
        return tuple(first)


def exact(case: Case, operands: tuple[Tensor, ...]) -> Reference:
    """The reference of the first heads, or of rows of the first one, evenly spaced."""
    heads = max(1, min(case.heads, _JUDGED // case.tokens**2))
    count = max(1, min(case.tokens, _JUDGED // case.tokens))
    numbers = torch.arange(1, count + 1, device=operands[0].device) * case.tokens // count - 1
    query, key, value = (t[:1, :heads].double() for t in operands)
    mask = None
    if case.causal:
        mask = torch.arange(case.tokens, device=numbers.device) <= numbers[:, None]
    if case.sequences:
        ends = torch.tensor(case.starts[1:], device=numbers.device)
        of = torch.searchsorted(ends, torch.arange(case.tokens, device=ends.device), right=True)
        own = of[numbers, None] == of
        mask = own if mask is None else mask & own
    call = functools.partial(entmax_attention, attn_mask=mask, alpha=ALPHA, backend="eager")
    return Reference(heads, numbers, results(case, call, (query[:, :, numbers], key, value)))


def error(
    case: Case, function: Function, operands: tuple[Tensor, ...], reference: Reference
) -> float:
    """The worst relative error. Rows that the reference lacks have no gradient of the output."""
    query, _, value = operands
    grad_out = value.new_zeros((*query.shape[:3], value.shape[-1]))
    grad_out[:, :, reference.rows] = 1.0
    found = reference.of(results(case, function, operands, grad_out))
    return max(
        float((x.double() - y).norm() / y.norm().clamp_min(1e-300))
        for x, y in zip(found, reference.expected, strict=True)
    )


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """Everyone who can take part; `ratio`: how much longer than the fastest of this package's."""
    operands = inputs(case, given.device)
    expected = exact(case, operands)
    found = functions(case, given.device)
    about = {"empty_tiles": empty_share(case, *operands)} if case.sparse else {}
    taking = {who: each for who, each in found.items() if not isinstance(each, str)}

    def judge(contender: Contender) -> Row:
        return {"error": error(case, taking[contender.name], operands, expected), **about}

    field = [
        Contender(who, functools.partial(results, case, each, operands))
        for who, each in taking.items()
    ]
    rows = compared(name, field, given, judge)
    own = [r["median"] for r in rows if r["contender"].startswith("elsa-") and "median" in r]
    for each in rows:
        if own and "median" in each:
            each["ratio"] = each["median"] / min(own)
    return rows + [left_out(name, who, why) for who, why in found.items() if isinstance(why, str)]


def cases(given: Namespace) -> dict[str, Case]:
    """The cases of a device by name."""
    return {case.name: case for case in CASES[given.device.type]}


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=10))
