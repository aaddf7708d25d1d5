"""Single queries and packed contexts of many lengths: `python -m benchmarks.packed_decoding`.

elsa's packed call (stream-K on sm_90) against the padded batch, one call a context, and PyTorch's
kernels; times under CUDA graphs on a GPU.
"""

from __future__ import annotations

import functools
import random
from argparse import Namespace
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Row, compared, main, options
from elsa_core import reference
from elsa_core.base import packing
from elsa_core.measuring.timing import Contender
from elsa_core.ops.attention.api import attention
from elsa_core.ops.varlen.api import explain_varlen_attention, varlen_attention
from elsa_core.precision import DTYPES

_SDPA: Final = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Case(NamedTuple):
    """One query of each context; the longest has `keys`, the shortest a 64th of them."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int
    dtype: str

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x1:{self.keys // 64}..{self.keys}x{self.dim}-{self.dtype}"

    @property
    def lengths(self) -> list[int]:
        """Even in their logarithm, in an order of chance that is the same each time."""
        steps = max(1, self.batch - 1)
        lengths = [round(self.keys / 64 ** (i / steps)) for i in range(self.batch)]
        random.Random(0).shuffle(lengths)
        return lengths


CASES: Final = (
    Case(32, 8, 8, 65536, 128, "fp32"),
    Case(32, 8, 8, 65536, 128, "fp16"),
    Case(32, 32, 8, 65536, 128, "fp16"),
)
QUICK: Final = (Case(4, 4, 2, 640, 16, "fp32"),)


class Inputs(NamedTuple):
    """Operands [B, H, N, D] padded, and packed: tokens, and where the contexts start."""

    query: Tensor
    key: Tensor
    value: Tensor
    packed: tuple[Tensor, ...]


def inputs(case: Case, device: torch.device) -> Inputs:
    """The operands; what lies behind the end of a context is not read."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": device, "dtype": DTYPES[case.dtype]}
    query = torch.randn((case.batch, case.heads, 1, case.dim), **how)
    key, value = (torch.randn((case.batch, case.kv_heads, case.keys, case.dim), **how)
                  for _ in range(2))  # fmt: skip
    starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
    ones = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    tokens = [packing.packed(t.transpose(1, 2), starts, sum(case.lengths)) for t in (key, value)]
    return Inputs(query, key, value, (query.squeeze(2), *tokens, ones, starts))


def exact(case: Case, given: Inputs) -> Tensor:
    """The output in float64, one context at a time."""
    group, outs = case.heads // case.kv_heads, []
    for i, length in enumerate(case.lengths):
        q = given.query[i].double().view(case.kv_heads, group, case.dim)
        k, v = (t[i, :, :length].double() for t in (given.key, given.value))
        outs.append(reference.attention(q[None], k[None], v[None])[0].view(given.query.shape[1:]))
    return torch.stack(outs)


def contenders(case: Case, given: Inputs) -> Iterator[Contender]:
    """elsa's calls and PyTorch's."""
    own: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
    operands: tuple[Any, ...] = (*given.packed, 1, case.keys)
    lengths = torch.tensor(case.lengths, device=given.key.device)
    mask = (torch.arange(case.keys, device=lengths.device) < lengths[:, None])[:, None, None]

    def rows(returned: object) -> Tensor:
        assert isinstance(returned, Tensor)
        return returned.view(case.batch, case.heads, 1, case.dim)

    def each() -> Tensor:
        parts = zip(given.query.split(1), given.key.split(1), given.value.split(1), strict=True)
        return torch.cat([
            F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], **own)
            for n, (q, k, v) in zip(case.lengths, parts, strict=True)
        ])  # fmt: skip

    def varlen() -> Any:
        from torch.nn.attention.varlen import varlen_attn

        grouped = {"enable_gqa": True} if own["enable_gqa"] else {}
        return varlen_attn(*operands, **grouped)

    notes = {"schedule": explain_varlen_attention(*operands, **own).schedule}
    packed = functools.partial(varlen_attention, *operands, **own)
    yield Contender("elsa, packed", packed, read=rows, notes=notes)
    padded = (given.query, given.key, given.value, mask)
    yield Contender("elsa, padded", functools.partial(attention, *padded, **own))
    call = functools.partial(F.scaled_dot_product_attention, *padded, **own)
    for name, backend in _SDPA.items():
        yield Contender(f"{name}, padded", call, functools.partial(sdpa_kernel, backend))
    yield Contender("sdpa, a call each", each)
    yield Contender("varlen-attn", varlen, read=rows)


def cases(given: Namespace) -> dict[str, Case]:
    """The calls by name."""
    return {case.name: case for case in (QUICK if given.quick else CASES)}


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """Everyone's time and error, and whether a second call gives the same bits."""
    tensors = inputs(case, given.device)
    expected = exact(case, tensors)

    def judge(contender: Contender) -> Row:
        out, again = contender.output(), contender.output()
        return {
            "error": reference.relative_l2(out, expected), "same_bits": torch.equal(out, again),
            "note": contender.notes.get("schedule"),
        }  # fmt: skip

    return compared(name, contenders(case, tensors), given, judge)


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=5))
