"""The cases as data: complete, named, selectable."""

import pytest
import torch

from elsa_core.errors import ArgumentError
from elsa_core.precision import validate
from elsa_core.profiling.bench.cases import DTYPES, Case, inputs, lengths_of, select


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_are_unique_and_precisions_fit(device: str) -> None:
    cases = select(device)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case in select(device, tables=[case.table])
        assert case.precisions and case.dtype in DTYPES
        for precision in case.precisions:
            assert validate(precision, DTYPES[case.dtype]) == precision


def test_packed_sequences_are_half_of_a_padded_batch() -> None:
    for device in ("cpu", "cuda"):
        for case in select(device, tables=["varlen"]):
            lengths = lengths_of(case.batch, case.queries)
            assert max(lengths) == lengths[0] == case.queries
            share = sum(lengths) / (case.batch * case.queries)
            assert 0.5 <= share <= 0.625
            padded = 4 * case.batch * case.heads * case.queries**2 * case.head_dim
            assert case.flops < padded / 2
    assert lengths_of(16, 4096) == [256 * (16 - i) for i in range(16)]


def test_what_a_case_says_of_itself() -> None:
    case = Case("vit", 2, 3, 5, 7, 8, mask="additive")
    assert case.name == "vit/2x3x5:7x8-fp32-mask" and case.flops == 4 * 2 * 3 * 5 * 7 * 8
    assert case.score_bytes == 2 * 3 * 5 * 7 * 4
    query, key, value, mask = inputs(case, "cpu", seed=1)
    assert query.shape == (2, 3, 5, 8) and key.shape == value.shape == (2, 3, 7, 8)
    assert mask is not None and mask.shape == (1, 3, 5, 7)
    again = inputs(case, "cpu", seed=1)
    assert torch.equal(again[0], query) and not torch.equal(inputs(case, "cpu", seed=2)[0], query)
    assert inputs(Case("t", 1, 1, 2, 2, 4, dtype="bf16"), "cpu")[0].dtype == torch.bfloat16


def test_selection() -> None:
    quick = select("cpu", quick=True)
    assert 3 <= len(quick) <= 10
    assert {c.table for c in quick} == {"vit", "window", "sweep", "entmax"}
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
