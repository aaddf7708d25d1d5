"""Calls of streamed attention by name, with odd lengths, and what they are held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from conformance import oracle
from drawn import Operands, operands, tokens_first
from torch import Tensor

from elsa_core import reference

Terms = dict[str, Tensor]
Place = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A call; lengths are odd and no multiple of the blocks.

    mask: none, bool (whole rows hidden), hidden (additive with -inf, whole rows too), row (one for
    all queries), column (one value a query) or heads (one for each head). factor: of the queries.
    strided: tokens before heads in memory, as a projection leaves them.
    """

    queries: int = 37
    keys: int = 53
    batch: int = 2
    heads: int = 3
    kv_heads: int = 3
    head_dim: int = 16
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    is_causal: bool = False
    scale: float | None = None
    factor: float = 1.0
    strided: bool = False
    block: int = 16
    query_block: int = 13

    def tensors(self) -> Operands:
        shapes = {"row": (1, 1, 1, self.keys), "column": (1, self.heads, self.queries, 1),
                  "heads": (1, self.heads, self.queries, self.keys)}  # fmt: skip
        of_mask = shapes.get(self.mask, (self.batch, 1, self.queries, self.keys))
        *parts, mask, grad = operands(self, self.queries, self.keys, of_mask)
        query, key, value = (tokens_first(t) if self.strided else t for t in parts)
        return query, key, value, mask, grad

    def arguments(self) -> dict[str, Any]:
        grouped = {"enable_gqa": True} if self.heads != self.kv_heads else {}
        return {"is_causal": self.is_causal, "scale": self.scale, **grouped}


CASES = {
    "plain": Case(),
    "one block": Case(block=128, query_block=128),
    "one key a block": Case(keys=7, block=1, query_block=1),
    "batch 1": Case(batch=1, heads=1, kv_heads=1),
    "strided": Case(strided=True),
    "grouped": Case(heads=4, kv_heads=2, strided=True),
    "causal": Case(is_causal=True),
    "causal, more queries": Case(queries=53, keys=37, is_causal=True),
    "causal, aligned": Case(queries=48, keys=48, is_causal=True, query_block=16),
    "bool": Case(mask="bool"),
    "hidden": Case(mask="hidden"),
    "row": Case(mask="row"),
    "column": Case(mask="column"),
    "heads": Case(mask="heads"),
    "extreme": Case(factor=60.0),
    "zero scale": Case(scale=0.0),
    "float64": Case(dtype=torch.float64, mask="hidden"),
    "float16": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, is_causal=True),
    "no keys": Case(keys=0),
    "no queries": Case(queries=0),
}


def differentiated(
    call: Callable[..., tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype,
    place: Place = lambda name, tensor: tensor,
) -> Terms:  # fmt: skip
    """out, lse and the gradients of query, key and value of `sum(out * grad) + sum(lse)`.

    place: moves a tensor, named query, key, value or mask, to where the call takes it.
    """
    query, key, value, mask, grad = case.tensors()
    names = ("query", "key", "value")
    leaves = [
        place(name, t.to(dtype)).detach().requires_grad_()
        for name, t in zip(names, (query, key, value), strict=True)
    ]
    if mask is not None:
        mask = place("mask", mask if mask.dtype == torch.bool else mask.to(dtype))
    out, lse = call(*leaves, mask)
    seen = lse.detach().isfinite()
    loss = (out * grad.to(out.device, out.dtype)).sum() + lse[seen].sum()
    loss.backward()
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}  # type: ignore[return-value]


def by_float64(case: Case) -> Terms:
    """The oracle's."""

    def call(*tensors: Any) -> tuple[Tensor, Tensor]:
        return reference.attention(*tensors, is_causal=case.is_causal, scale=case.scale)

    return differentiated(call, case, torch.float64)


def by_peer(case: Case, device: str = "cpu") -> Terms:
    """The definition's in the case's own dtype, with scores in float32."""

    def call(*tensors: Any) -> tuple[Tensor, Tensor]:
        found = oracle.attention(*tensors, is_causal=case.is_causal, scale=case.scale)
        return found["out"], found["lse"]

    return differentiated(call, case, case.dtype, lambda name, tensor: tensor.to(device))


def error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the entries that are finite in `exact`, and the others'
    equality."""
    found, finite = found.double().cpu(), exact.isfinite()
    assert torch.equal(found[~finite], exact[~finite])
    return float(torch.linalg.vector_norm(found[finite] - exact[finite]))


def assert_exact(found: Terms, case: Case, device: str = "cpu") -> None:
    """The error against float64 is at most twice the peer's on the device, and one rounding.

    A gradient reads P = exp(score - lse): the roundings of both, eps |lse| at most, are a relative
    error of P, which shows where scores are large (`factor`).
    """
    exact, peer = by_float64(case), by_peer(case, device)
    finite = exact["lse"][exact["lse"].isfinite()]
    of_weights = float(finite.abs().max()) if case.factor > 1.0 else 0.0
    for term, right in exact.items():
        result = found[term]
        wide = torch.promote_types(case.dtype, torch.float32)
        assert result.dtype == (wide if term == "lse" else case.dtype), term
        assert result.shape == right.shape, term
        norm = float(torch.linalg.vector_norm(right[right.isfinite()]))
        band = (
            (2 + of_weights * (term not in ("out", "lse"))) * torch.finfo(result.dtype).eps * norm
        )
        assert error(result, right) <= 2 * error(peer[term], right) + band, term
