"""`explain` says where the published results show a loss, and nothing where they show a gain."""

from __future__ import annotations

import pytest
import torch

import elsa_core as elsa
from elsa_core.bench import published

CASE = {
    "batch": 1, "heads": 8, "queries": 1024, "keys": 1024, "head_dim": 64, "dtype": "fp32",
    "masked": False, "precision": "strict", "peer": "sdpa-flash", "machine": "a test",
}  # fmt: skip


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        published.Case(name="lost", ratio=0.9, **CASE),
        published.Case(name="won", ratio=1.4, **(CASE | {"queries": 256, "keys": 256})),
    )
    monkeypatch.setattr(published, "_cases", lambda device_type: cases)


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "said"),
    [
        (1024, 64, torch.float32, True),
        (1400, 64, torch.float32, True),  # near
        (256, 64, torch.float32, False),  # won
        (8192, 64, torch.float32, False),  # far from anything measured
        (1024, 80, torch.float32, False),  # not measured
        (1024, 64, torch.bfloat16, False),
    ],
)
def test_the_nearest_case_speaks(
    results: None, length: int, head_dim: int, dtype: torch.dtype, said: bool
) -> None:
    query = torch.empty(1, 8, length, head_dim, dtype=dtype)
    reasons = elsa.explain(query, query, query).reasons
    line = [r for r in reasons if "published results: 0.90x the speed of sdpa-flash at lost" in r]
    assert len(line) == said


def test_shipped_results_are_read() -> None:
    for device_type in ("cpu", "cuda"):
        cases = published._cases(device_type)
        assert len({case.name for case in cases}) > 10
        assert all(case.ratio > 0 and case.queries > 0 for case in cases)
