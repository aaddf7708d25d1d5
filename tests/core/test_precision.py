"""Each precision takes its dtypes, and errors of merges stay inside Theorem 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsa_core.errors import ArgumentError
from elsa_core.monoid import State, finalize, lift, tree
from elsa_core.precision import PRECISIONS, depth, theorem1_bound, unit_roundoff, validate
from elsa_core.reference import relative_l2

ACCEPTED = {
    "strict": {torch.float32, torch.float64, torch.float16, torch.bfloat16},
    "ieee": {torch.float32, torch.float64},
    "turbo": {torch.float32},
    "lean": {torch.float32, torch.float16, torch.bfloat16},
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_each_precision_takes_its_dtypes(name: str, dtype: torch.dtype) -> None:
    if dtype in ACCEPTED[name]:
        assert validate(name, dtype) == name
    else:
        with pytest.raises(ArgumentError, match=rf"^precision: '{name}' takes .*; use "):
            validate(name, dtype)


def test_the_table_is_complete() -> None:
    assert set(PRECISIONS) == set(ACCEPTED) and next(iter(PRECISIONS)) == "strict"
    for name, precision in PRECISIONS.items():
        assert precision.met_by and set(precision.dtypes) == ACCEPTED[name]


def test_wrong_names_and_dtypes_are_one_clear_error() -> None:
    with pytest.raises(ArgumentError, match="precision: 'exact' is unknown; use one of strict, "):
        validate("exact", torch.float32)
    with pytest.raises(ArgumentError, match="no precision takes int64"):
        validate("strict", torch.int64)


@given(st.integers(1, 2**24), st.integers(1, 4096))
def test_depth_is_the_papers_formula(n: int, block: int) -> None:
    length = depth(n, block)
    assert 3 <= length <= 2 * math.ceil(math.log2(n)) + 3
    if block <= n:
        exact = math.ceil(math.log2(block)) + 2 * math.ceil(math.log2(n / block)) + 3
        assert length == exact


def test_depth_of_known_sizes() -> None:
    assert depth(1) == 3 and depth(128) == 10
    assert depth(16384) == 24 and depth(2**20) == 36
    assert depth(2**20, 1) == 43
    assert theorem1_bound(16384) == pytest.approx(24 * 2.0**-24, rel=1e-15)
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
    for n, block in ((0, 128), (5, 0), (-1, 1)):
        with pytest.raises(ArgumentError, match="use a positive number"):
            depth(n, block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("exponent", [10, 13, 17, 20])
def test_measured_merge_error_is_inside_theorem_1(exponent: int, block: int) -> None:
    """States of single keys, exact in float32, folded in float32 by trees of trees."""
    n = 2**exponent
    generator = torch.Generator().manual_seed(exponent)
    scores = 3 * torch.randn(n, generator=generator)
    value = torch.randn(n, 4, generator=generator)
    expected, _ = finalize(lift(scores.double(), value.double()))
    keys = State(
        scores.view(n // block, block).T,
        torch.ones(block, n // block),
        value.view(n // block, block, -1).transpose(0, 1),
    )
    output, _ = finalize(tree(tree(keys)))
    assert relative_l2(output, expected) <= theorem1_bound(n, block)
