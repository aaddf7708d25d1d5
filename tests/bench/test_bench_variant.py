"""An operator of another package in `elsa bench attention`: its cases, its peers, its float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from elsa_core import ops
from elsa_core.measuring.timing import Contender
from elsa_core.ops.factory import _RECORDS
from elsa_core.profiling.bench import attention, cases
from elsa_core.profiling.bench.cases import Inputs
from elsa_core.profiling.bench.peers import Bench
from elsa_core.profiling.bench.results import Settings


def _squared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).square()
    return weights / weights.sum(-1, keepdim=True) @ value


CASE = cases.Case("test_squared", 1, 2, 9, 9, 8)


def _elsa(case: cases.Case, tensors: Inputs, precision: str, backend: str) -> Contender:
    call = torch.ops.elsa.test_squared_bench.default
    return Contender(f"elsa-{precision}", lambda: call(*tensors[:3]), precision=precision)


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return _squared(query.double(), key.double(), value.double())


BENCH = Bench(
    {"cpu": {"test_squared": (CASE,)}},
    _elsa,
    lambda case, tensors, flex: {
        "plain": lambda: Contender("plain", lambda: _squared(*tensors[:3])),
        "fast": "is not installed",
    },
    _exact,
)
RECORD = ops.Operator(
    name="test_squared_bench",
    schema="(Tensor query, Tensor key, Tensor value) -> Tensor",
    reference=_squared,
    bench=f"{__name__}:BENCH",
)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """The variant, for the length of this module: other tests list every table that there is."""
    ops.register(RECORD)
    yield
    _RECORDS.pop(RECORD.name)


def test_a_variant_says_its_cases_in_one_place() -> None:
    assert cases.select("cpu", tables=["test_squared"]) == (CASE,)
    settings = Settings(rounds=3, budget_seconds=0.1, memory=False)
    (result,) = attention.run([CASE], settings=settings).cases
    assert [m.contender for m in result.measurements] == ["elsa-strict", "plain"]
    assert result.left_out == {"fast": "is not installed"}
    assert all(m.error < 1e-6 for m in result.measurements)


def test_the_operators_of_elsa_keep_their_tables() -> None:
    of_windows = cases.all_tables()["cpu"]["window"][0]
    assert cases.bench_of(of_windows) is ops.WINDOW_ATTENTION.part("bench")
    own = cases.from_shape("1,2,9,16")
    assert cases.bench_of(own) is ops.ATTENTION.part("bench")
