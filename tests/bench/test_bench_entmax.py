"""The cases of alpha-entmax attention: who takes part and that each computes what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elsa_core import reference
from elsa_core.bench.cases import bench_of, inputs, select
from elsa_core.bench.peers import Inputs, field_of


def test_everyone_computes_entmax_but_softmax() -> None:
    case = dataclasses.replace(select("cpu", tables=["entmax"])[0], batch=1, heads=2)
    tensors = Inputs(*inputs(case, "cpu"))
    exact = bench_of(case).exact(*tensors)
    found = field_of(case, tensors)
    errors = {c.name: reference.relative_l2(c.output(), exact) for c in found.contenders}
    assert errors["elsa-strict"] < 1e-6 < 1e-2 < errors["softmax"]
    if "entmax" in errors:
        assert errors["entmax"] < 1e-5
    else:
        assert "not installed" in found.left_out["entmax"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases of a GPU are made there")
def test_the_gpu_has_cases_of_three_dtypes() -> None:
    cases = select("cuda", tables=["entmax"])
    assert {c.dtype for c in cases} == {"fp32", "fp16", "bf16"}
    assert {c.keys for c in cases} == {2048, 4096, 8192, 16384, 32768}
