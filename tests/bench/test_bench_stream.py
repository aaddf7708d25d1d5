"""The bench of stream-K without a GPU: its cases, its reference, and one case by CPU kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elsa_core.bench import stream
from elsa_core.errors import UnavailableError
from elsa_core.measuring.timing import Contender

RAGGED = stream.Case(4, 4, 2, 1, 640, 16, "fp32", ragged=True)
DENSE = stream.Case(2, 3, 3, 1, 70, 16, "fp32")


def test_cases() -> None:
    names = [case.name for case in stream.CASES]
    assert len(set(names)) == len(names)
    assert "32x8x1:1024..65536x128-fp32" in names and "4x12x577:577x64-fp16" in names
    lengths = stream.lengths_of(stream.CASES[0])
    assert (len(lengths), min(lengths), max(lengths)) == (32, 1024, 65536)
    assert lengths == stream.lengths_of(stream.CASES[0])


def test_the_reference_sees_its_own_context_alone() -> None:
    given = stream.inputs(RAGGED, torch.device("cpu"))
    expected = stream.exact(RAGGED, given)
    for i, n in enumerate(given.lengths):
        k, v = (t[i, :, :n].double().repeat_interleave(2, 0) for t in (given.key, given.value))
        s = given.query[i].double() @ k.mT / 4.0
        assert torch.allclose(expected[i], s.softmax(-1) @ v, rtol=1e-12, atol=1e-13)


def of_any_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any, backend: str = "auto", **own: Any) -> Any:
        return function(*operands, **own)

    return call


@pytest.mark.parametrize("case", [RAGGED, DENSE])
def test_a_case_is_measured(case: stream.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of a CPU in place of those that it is about, and invented times."""
    for name in ("attention", "varlen_attention", "explain"):
        monkeypatch.setattr(stream, name, of_any_backend(getattr(stream, name)))

    def timed(field: list[Contender], **how: Any) -> Any:
        return {c.name: [1e-6 * (i + 1)] for i, c in enumerate(field)}, {}

    monkeypatch.setattr(stream, "time_cuda", timed)
    row = stream.measure(case, 1, 0.0, torch.device("cpu"))
    assert {"stream-k", "stream-k 528"} <= set(row["rows"])
    assert all(each["error"] < 1e-6 for each in row["rows"].values())
    assert row["rows"]["stream-k"]["differs_again"] == 0.0
    assert row["ours / stream-k"] == 3.0
    assert row["peer / stream-k"] > 3.0
    ours = ("packed", "fixed split, padded") if case.ragged else ("today",)
    assert set(ours) <= set(row["rows"])


def test_every_kernel_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of contender is one worker's, and is what `elsa` yields."""
    for case, name in stream.tasks():
        assert name in stream.streams(case) or name in ("packed", "fixed split, padded", "today")
    kinds = {(case.dtype, name, case.queries == 1, case.ragged) for case, name in stream.tasks()}
    done: list[str] = []

    def elsa(case: stream.Case, given: object) -> list[Contender]:
        own = {name for other, name in stream.tasks() if other == case}
        return [Contender(n, functools.partial(done.append, f"{case.name} {n}")) for n in own]

    monkeypatch.setattr(stream, "elsa", elsa)
    monkeypatch.setattr(stream, "inputs", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for i in range(5):
        stream._compile(f"{i}/5")
    assert sorted(done) == sorted(f"{case.name} {name}" for case, name in stream.tasks())
    assert len(kinds) < len(done)


def test_it_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        stream.main([])
