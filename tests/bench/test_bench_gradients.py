"""A forward with its gradients: everyone gives the same, and one wrong part shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from elsa_core.bench import peers
from elsa_core.bench.attention import measure
from elsa_core.bench.cases import Case, all_tables, bench_of, inputs
from elsa_core.bench.peers import Inputs, field_of
from elsa_core.bench.results import Settings

PLAIN = Case("gradients", 2, 3, 24, 24, 8)
MASKED = replace(PLAIN, mask="additive")
WINDOWS = Case("gradients", 16, 2, 16, 16, 8, mask="additive", window=4)


@pytest.mark.parametrize("case", [PLAIN, MASKED, WINDOWS], ids=["plain", "masked", "windows"])
def test_everyone_agrees_with_float64(case: Case) -> None:
    tensors = Inputs(*inputs(case, "cpu"))
    field = field_of(case, tensors)
    names = {contender.name for contender in field.contenders}
    # flash has no gradient of a mask
    assert names == {"elsa-strict", "sdpa-math", "eager", *(["sdpa-flash"] * (case is PLAIN))}
    bench = bench_of(case)
    assert bench.error is not None
    exact = bench.exact(*tensors)
    for contender in field.contenders:
        assert bench.error(case, contender.output(), exact) < 2e-6, contender.name


@pytest.mark.parametrize("part", range(5))
def test_one_wrong_part_shows(part: int) -> None:
    bench, tensors = bench_of(MASKED), Inputs(*inputs(MASKED, "cpu"))
    assert bench.error is not None
    exact = bench.exact(*tensors)
    size = tensors.query.numel()
    wrong: Tensor = exact.clone()
    wrong[part * size] += 0.1 * wrong[part * size :][:size].norm()
    assert bench.error(MASKED, wrong, exact) == pytest.approx(0.1, rel=0.3)


def test_a_case_is_measured() -> None:
    found = measure(PLAIN, torch.device("cpu"), Settings(rounds=3, budget_seconds=0.2), {})
    own = next(m for m in found.measurements if m.contender == "elsa-strict")
    assert own.error is not None and own.error < 2e-6
    assert own.flops_per_second == pytest.approx(PLAIN.flops / own.seconds, rel=1e-3)
    assert PLAIN.flops == 14 * 2 * 3 * 24 * 24 * 8
    assert found.best_peer in {"sdpa-flash", "sdpa-math", "eager"}


def test_windows_go_into_images_and_back() -> None:
    tensors = Inputs(*inputs(WINDOWS, "cpu"))
    image = peers.image_of(WINDOWS, tensors)
    assert image.shape == (4, 8, 8, 3 * 16)
    for part, windows in zip(image.chunk(3, -1), tensors[:3], strict=True):
        assert torch.equal(peers.windows_of(WINDOWS, part), windows)


def test_the_tables_hold_what_is_aimed_at() -> None:
    goals = {case.name: case.goal for case in all_tables()["cpu"]["gradients"]}
    assert goals == {
        "gradients/8x12x197x64-fp32": 1.3, "gradients/1x12x1025x64-fp32": 1.2,
        "gradients/256x3x49x32-fp32-mask": 2.0,
    }  # fmt: skip
    assert {case.dtype for case in all_tables()["cuda"]["gradients"]} == {"fp32", "fp16", "bf16"}
