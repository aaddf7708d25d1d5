"""Packed sequences against padded ones: everyone gives the same, and padding counts for nothing."""

from __future__ import annotations

import pytest
import torch

from elsa_core.bench.cases import Case, bench_of, inputs
from elsa_core.bench.peers import Inputs, field_of

CASE = Case("varlen", 4, 2, 24, 24, 8)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_everyone_agrees_with_float64(backend: str) -> None:
    tensors = Inputs(*inputs(CASE, "cpu"))
    field = field_of(CASE, tensors, backend=backend)
    names = [contender.name for contender in field.contenders]
    assert names == ["elsa-strict", "padded-sdpa", "padded-elsa", "each-sdpa"]
    exact = bench_of(CASE).exact(tensors.query, tensors.key, tensors.value, None)
    assert not exact[1, :, 18:].any()
    for contender in field.contenders:
        assert torch.allclose(contender.output().double(), exact, atol=2e-6), contender.name


def test_a_part_of_the_longest_sequence() -> None:
    """What is judged of a case too large for float64 as a whole."""
    query, key, value, _ = inputs(CASE, "cpu")
    exact = bench_of(CASE).exact
    whole = exact(query, key, value, None)
    part = exact(query[:1, :, ::3], key[:1], value[:1], None)
    assert torch.allclose(part, whole[:1, :, ::3])
