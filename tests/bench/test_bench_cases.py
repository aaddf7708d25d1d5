"""The cases as data: complete, named, selectable."""

from __future__ import annotations

import math

import pytest
import torch

from elsa_core.bench.cases import (
    DTYPES,
    SWEEP_HEAD_DIMS,
    SWEEP_TOKENS,
    WINDOW_IMAGES,
    Case,
    all_tables,
    inputs,
    lengths_of,
    select,
)
from elsa_core.errors import ArgumentError
from elsa_core.precision import validate

TABLES = all_tables()


@pytest.mark.parametrize("device", TABLES)
def test_names_are_unique_and_precisions_fit(device: str) -> None:
    cases = select(device)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.table in TABLES[device] and case in TABLES[device][case.table]
        assert case.precisions and case.dtype in DTYPES
        for precision in case.precisions:
            assert validate(precision, case.torch_dtype) == precision


def test_the_cpu_tables_are_whole() -> None:
    vit = {(c.batch, c.heads, c.keys, c.head_dim): c.goal for c in TABLES["cpu"]["vit"]}
    assert vit == {
        (8, 12, 197, 64): 1.4,
        (1, 12, 197, 64): 1.4,
        (1, 12, 577, 64): 1.2,
        (1, 12, 1025, 64): 1.1,
        (1, 12, 4097, 64): 1.0,
    }
    sweep = TABLES["cpu"]["sweep"]
    assert len(sweep) == 2 * len(SWEEP_TOKENS) * len(SWEEP_HEAD_DIMS) == 80
    assert {c.goal for c in sweep} == {0.97}
    assert {(c.keys, c.head_dim, c.mask) for c in sweep} == {
        (n, d, mask) for n in SWEEP_TOKENS for d in SWEEP_HEAD_DIMS for mask in ("none", "additive")
    }


def test_windows_fill_square_images() -> None:
    for case in TABLES["cpu"]["window"]:
        across = math.isqrt(case.batch // WINDOW_IMAGES)
        assert WINDOW_IMAGES * across**2 == case.batch
        assert case.window**2 == case.queries == case.keys


def test_packed_sequences_are_half_of_a_padded_batch() -> None:
    for device in ("cpu", "cuda"):
        for case in TABLES[device]["varlen"]:
            lengths = lengths_of(case.batch, case.queries)
            assert max(lengths) == lengths[0] == case.queries
            share = sum(lengths) / (case.batch * case.queries)
            assert 0.5 <= share <= 0.625
            padded = 4 * case.batch * case.heads * case.queries**2 * case.head_dim
            assert case.flops < padded / 2
    assert lengths_of(16, 4096) == [256 * (16 - i) for i in range(16)]


def test_the_gpu_tables_are_whole() -> None:
    tables = TABLES["cuda"]
    assert all(case.precisions == ("strict", "turbo", "lean") for case in tables["fp32"])
    shapes = [{(c.batch, c.heads, c.keys, c.head_dim) for c in tables[t]} for t in ("fp32", "bf16")]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 12
    assert {case.dtype for case in tables["decode"]} == {"fp16", "bf16", "fp32"}
    assert all(case.queries == 1 for case in tables["decode"])
    assert tables["million"][0].keys == 2**20


def test_what_a_case_says_of_itself() -> None:
    case = Case("vit", 2, 3, 5, 7, 8, mask="additive")
    assert case.name == "vit/2x3x5:7x8-fp32-mask"
    assert case.flops == 4 * 2 * 3 * 5 * 7 * 8
    assert case.key_value_bytes == 2 * 2 * 3 * 7 * 8 * 4
    assert case.score_bytes == 2 * 3 * 5 * 7 * 4
    query, key, value, mask = inputs(case, "cpu", seed=1)
    assert query.shape == (2, 3, 5, 8) and key.shape == value.shape == (2, 3, 7, 8)
    assert mask is not None and mask.shape == (1, 3, 5, 7)
    again = inputs(case, "cpu", seed=1)
    assert torch.equal(again[0], query) and not torch.equal(inputs(case, "cpu", seed=2)[0], query)
    assert inputs(Case("t", 1, 1, 2, 2, 4, dtype="bf16"), "cpu")[0].dtype == torch.bfloat16


def test_selection() -> None:
    quick = select("cpu", quick=True)
    assert 3 <= len(quick) <= 10 and {c.table for c in quick} == {
        "vit",
        "window",
        "sweep",
        "entmax",
    }
    assert {c.table for c in select("cuda", tables=["decode"])} == {"decode"}
    one = select("cpu", patterns=["vit/1x12x197*"])
    assert [c.name for c in one] == ["vit/1x12x197x64-fp32"]
    for wrong, words in (
        ({"device_type": "mps"}, "no cases for 'mps'; use one of cpu, cuda"),
        (
            {"device_type": "cpu", "tables": ["fp32"]},
            "no table 'fp32'; use one of vit, sweep, entmax, varlen, window",
        ),
        ({"device_type": "cpu", "patterns": ["nothing"]}, "match nothing; --dry-run"),
    ):
        with pytest.raises(ArgumentError, match=words):
            select(**wrong)  # type: ignore[arg-type]
