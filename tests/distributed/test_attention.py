"""Attention over two and three processes on gloo against float64, and against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference

from . import ranks
from .cases import CASES, NAMES, Case

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What the ranks of each world size computed."""
    folder = tmp_path_factory.mktemp("ranks")
    for world in CASES:
        ranks.start(ranks.calls, world, str(folder))
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)]
        for world in CASES
    }


def differentiated(case: Case, function: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Output and gradients of the whole call in one process."""
    query, key, value, mask, grad = case.whole()
    leaves = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype).requires_grad_()
    out = function(*leaves, mask)
    out.backward(grad.to(dtype))
    of_mask = None if mask is None else mask.grad
    return dict(
        zip(
            ("out", "query", "key", "value", "mask"),
            (out.detach(), *(t.grad for t in leaves), of_mask),
            strict=True,
        )
    )


def by_float64(case: Case) -> dict[str, Tensor | None]:
    def run(*tensors: Any) -> Tensor:
        return reference.attention(*tensors, is_causal=case.is_causal, scale=case.scale)[0]

    return differentiated(case, run, torch.float64)


def by_one(case: Case) -> dict[str, Tensor | None]:
    def run(*tensors: Any) -> Tensor:
        out = elsa.attention(*tensors, **case.arguments())
        assert isinstance(out, Tensor)
        return out

    return differentiated(case, run, case.dtype)


def by_pytorch(case: Case) -> dict[str, Tensor | None]:
    """PyTorch's own attention of the same call: written out, so that dead rows give zeros."""

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dead = None
        if mask is not None:
            hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
            dead = hidden.expand(*mask.shape[:3], key.shape[2]).all(-1, keepdim=True)
            mask = mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0.0)
        terms = {"is_causal": case.is_causal, "scale": case.scale}
        out = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=case.heads != case.kv_heads, **terms
        )
        return out if dead is None else out.masked_fill(dead, 0.0)

    return differentiated(case, run, case.dtype)


def joined(case: Case, parts: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """The ranks' results as those of the whole call."""
    found: dict[str, Tensor | None] = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if any(t is None for t in tensors):
            found[name] = None
        elif name == "mask" and tensors[0].shape[2] == 1 and sum(case.queries) > 1:  # type: ignore[union-attr]
            found[name] = torch.stack(tensors).sum(0)  # type: ignore[arg-type]
        else:
            found[name] = torch.cat(tensors, 2)  # type: ignore[arg-type]
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(found.double() - exact))


@pytest.mark.parametrize(("world", "name", "method"), NAMES)
def test_as_exact_as_one_process(
    world: int, name: str, method: str, results: dict[int, list[Any]]
) -> None:
    case = CASES[world][name]
    parts = [results[world][rank][name, method][0] for rank in range(world)]
    for rank, part in enumerate(parts):
        assert part["out"].shape[2] == case.queries[rank]
        assert part["key"].shape[2] == case.lengths()[1][rank]
    exact, one, peer = by_float64(case), by_one(case), by_pytorch(case)
    for term, found in joined(case, parts).items():
        oracle, alone, theirs = exact[term], one[term], peer[term]
        assert (found is None) == (oracle is None), term
        if found is None or oracle is None or alone is None or theirs is None:
            continue
        assert found.dtype == case.dtype and found.isfinite().all(), term
        # one rounding of the result's dtype
        band = torch.finfo(case.dtype).eps * float(torch.linalg.vector_norm(oracle))
        limit = max(1.1 * error(alone, oracle), error(theirs, oracle)) + band
        print(
            f"{world} {name} {method} {term} {error(found, oracle):.3g} one {error(alone, oracle):.3g} peer {error(theirs, oracle):.3g} band {band:.3g}"
        )
        assert error(found, oracle) <= limit, term


@pytest.mark.parametrize(("world", "name", "method"), NAMES)
def test_the_same_bits_again(
    world: int, name: str, method: str, results: dict[int, list[Any]]
) -> None:
    assert all(results[world][rank][name, method][1] for rank in range(world))
