"""Attention over two and three processes on gloo against float64, and against one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference

from .cases import CASES, NAMES, Case, Result, differentiated
from .conftest import Results


def by_float64(case: Case) -> Result:
    def run(*tensors: Any) -> Tensor:
        return reference.attention(*tensors, is_causal=case.is_causal, scale=case.scale)[0]

    return differentiated(run, case.whole(), torch.float64)


def by_one(case: Case, device: str = "cpu") -> Result:
    """By one process."""
    run = partial(elsa.attention, **case.arguments())
    return differentiated(run, case.whole(), case.dtype, device)


def joined(case: Case, parts: list[Result]) -> Result:
    """The ranks' results as those of the whole call."""
    found: Result = {}
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


def band(case: Case, term: str, oracle: Tensor) -> float:
    """One rounding of the result's dtype. The gradient of a column is a sum whose terms cancel, to
    zero in real arithmetic: what counts there is the rounding of the terms. That of a row is the
    sum of the ranks' shares, each of which is rounded before."""
    scale = oracle
    if term == "mask" and case.mask in ("column", "row"):
        whole = by_float64(Case(**{**vars(case), "expanded": True}))["mask"]
        assert whole is not None
        if case.mask == "column":
            scale = whole.abs().sum(-1)
        else:
            shares = [part.sum(2).abs() for part in whole.split(list(case.queries), 2)]
            scale = torch.stack(shares).sum(0)
    return torch.finfo(case.dtype).eps * float(torch.linalg.vector_norm(scale))


@pytest.mark.parametrize(("world", "name", "method"), NAMES)
def test_as_exact_as_one_process(world: int, name: str, method: str, results: Results) -> None:
    """The error against float64 is at most 1.1 times that of one process, and one rounding."""
    case = CASES[world][name]
    found = [results[world][rank]["calls"][name, method] for rank in range(world)]
    assert all(same_again for _, same_again in found)
    for rank, (part, _) in enumerate(found):
        assert part["out"].shape[2] == case.queries[rank]
        assert part["key"].shape[2] == case.lengths()[1][rank]
    exact, one = by_float64(case), by_one(case)
    for term, whole in joined(case, [part for part, _ in found]).items():
        oracle, alone = exact[term], one[term]
        assert (whole is None) == (oracle is None), term
        if whole is None or oracle is None or alone is None:
            continue
        assert whole.dtype == case.dtype and whole.isfinite().all(), term
        limit = 1.1 * error(alone, oracle) + band(case, term, oracle)
        assert error(whole, oracle) <= limit, term


def test_one_rank(results: Results) -> None:
    """A group of one rank gives the bits of a single process."""
    for rank in range(2):
        for name, out in results[2][rank]["one rank"]["calls"].items():
            case = CASES[2][name.split()[0]]
            with torch.no_grad():
                query, key, value, mask, _ = case.whole()
                alone = elsa.attention(query, key, value, mask, **case.arguments())
            assert torch.equal(out, alone), name


def test_the_next_run_is_under_way_while_one_is_folded(results: Results) -> None:
    for rank in range(3):
        assert results[3][rank]["order"] == ["post", "fold", "post", "fold", "fold"]


def test_compiled_callers(results: Results) -> None:
    for found in results[2]:
        assert found["compiled"] == dict.fromkeys(("ring", "gather", "heads", "vit"), True)
