"""Every contender of an operator's cases computes what it says, against float64."""

import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elsa_core import ops, reference
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench import attention, peers
from elsa_core.profiling.bench.attention import Settings
from elsa_core.profiling.bench.cases import Case, Inputs, bench_of, from_shape, inputs, select
from elsa_core.profiling.bench.peers import Bench, field_of

VARLEN = Case("varlen", 4, 2, 24, 24, 8)
PLAIN = Case("gradients", 2, 3, 24, 24, 8)
MASKED = replace(PLAIN, mask="additive")
WINDOWS = Case("gradients", 16, 2, 16, 16, 8, mask="additive", window=4)


def test_everyone_computes_entmax_but_softmax() -> None:
    case = replace(select("cpu", tables=["entmax"])[0], batch=1, heads=2)
    tensors = inputs(case, "cpu")
    exact = bench_of(case).exact(*tensors)
    contenders, left_out = field_of(case, tensors)
    errors = {c.name: reference.relative_l2(c.output(), exact) for c in contenders}
    assert errors["elsa-strict"] < 1e-6 < 1e-2 < errors["softmax"]
    if "entmax" in errors:
        assert errors["entmax"] < 1e-5
    else:
        assert "not installed" in left_out["entmax"]


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_packed_sequences_beside_padded_ones(backend: str) -> None:
    tensors = inputs(VARLEN, "cpu")
    contenders, _ = field_of(VARLEN, tensors, backend=backend)
    names = [contender.name for contender in contenders]
    assert names == ["elsa-strict", "padded-sdpa", "padded-elsa", "each-sdpa"]
    query, key, value, _ = tensors
    exact = bench_of(VARLEN).exact(query, key, value, None)
    assert not exact[1, :, 18:].any()
    for contender in contenders:
        assert torch.allclose(contender.output().double(), exact, atol=2e-6), contender.name
    part = bench_of(VARLEN).exact(query[:1, :, ::3], key[:1], value[:1], None)
    assert torch.allclose(part, exact[:1, :, ::3])  # what is judged of a case that is too large


@pytest.mark.parametrize("case", [PLAIN, MASKED, WINDOWS], ids=["plain", "masked", "windows"])
def test_gradients(case: Case) -> None:
    tensors = inputs(case, "cpu")
    contenders, _ = field_of(case, tensors)
    names = {contender.name for contender in contenders}
    # flash has no gradient of a mask
    assert names == {"elsa-strict", "sdpa-math", "eager", *(["sdpa-flash"] * (case is PLAIN))}
    bench = bench_of(case)
    assert bench.error is not None
    exact = bench.exact(*tensors)
    for contender in contenders:
        assert bench.error(case, contender.output(), exact) < 2e-6, contender.name
    size = tensors.query.numel()
    for part in range(5 if case is MASKED else 0):  # one wrong gradient shows
        wrong = exact.clone()
        wrong[part * size] += 0.1 * wrong[part * size :][:size].norm()
        assert bench.error(case, wrong, exact) == pytest.approx(0.1, rel=0.3)


# --- FlashAttention 4, which no CPU has ----------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """A package `flash_attn.cute` that computes by PyTorch; what it was given."""
    given: list[tuple[Tensor, ...]] = []

    def attend(*tensors: Tensor) -> tuple[Tensor, None]:
        given.append(tensors)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors))
        return out.transpose(1, 2).contiguous(), None

    whole, part = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute"))
    part.flash_attn_func = attend  # type: ignore[attr-defined]
    whole.cute = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", whole)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", part)
    return given


def test_flash_attention_reads_the_tensors_themselves(package: list[tuple[Tensor, ...]]) -> None:
    own = [t.requires_grad_() for t in inputs(PLAIN, "cpu")[:3]]
    peer = peers.flash_4(*own)
    out, exact = peers.flash_4_attention()(*own), F.scaled_dot_product_attention(*own)
    torch.testing.assert_close(out, exact)
    assert torch.equal(peer.output(), out)
    grads = (torch.autograd.grad(each.square().sum(), own) for each in (out, exact))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)
    assert peer.name == peers.FLASH_4 and peer.notes["package"].startswith("flash-attn-4")
    for given, tensor in zip(package[-1], own, strict=True):
        assert given.shape == (2, 24, 3, 8) and given.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("more", "capability", "reason"),
    [
        ({"dtype": "fp16"}, (9, 0), ""),
        ({"dtype": "bf16"}, (10, 3), ""),
        ({"dtype": "fp32"}, (9, 0), "it takes float16 and bfloat16, not float32"),
        ({"mask": "additive"}, (9, 0), "it takes no mask"),
        ({}, (8, 9), "it is for Hopper and Blackwell, not for compute capability 8.9"),
    ],
)
def test_where_flash_attention_takes_part(
    more: dict[str, Any], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(peers, "available_bytes", lambda _: 2**40)
    case = replace(Case("fp16", 2, 3, 24, 24, 8, dtype="fp16"), **more)
    with FakeTensorMode():
        made = [torch.empty(2, 3, 24, 8, dtype=DTYPES[case.dtype], device="cuda") for _ in range(3)]
        mask = torch.empty(1, device="cuda") if case.mask != "none" else None
        found = peers.of_attention(case, Inputs(*made, mask), False)[peers.FLASH_4]
    assert found == reason if reason else callable(found)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("missing", ["flash_attn", "flash_attn.cute"])
def test_without_flash_attention(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 is `flash_attn` without `cute`."""
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "flash_attn":
        monkeypatch.delitem(sys.modules, "flash_attn.cute")
    with pytest.raises(Exception, match="the package flash-attn-4 is not installed"):
        peers.flash_4_attention()


# --- An operator of another package ---------------------------------------------------------------


def squared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).square()
    return weights / weights.sum(-1, keepdim=True) @ value


OTHER = Case("test_squared", 1, 2, 9, 9, 8)
BENCH = Bench(
    {"cpu": {"test_squared": (OTHER,)}},
    lambda case, tensors, precision, backend: Contender(
        f"elsa-{precision}",
        partial(torch.ops.elsa.test_squared_bench.default, *tensors[:3]), precision=precision,
    ),
    lambda case, tensors, flex: {
        "plain": lambda: Contender("plain", partial(squared, *tensors[:3])),
        "fast": "is not installed",
    },
    lambda query, key, value, mask: squared(query.double(), key.double(), value.double()),
)  # fmt: skip
RECORD = ops.Operator(
    name="test_squared_bench",
    schema="(Tensor query, Tensor key, Tensor value) -> Tensor",
    reference=squared,
    bench=f"{__name__}:BENCH",
)


def test_a_variant_says_its_cases_in_one_place() -> None:
    ops.register(RECORD)
    try:
        assert select("cpu", tables=["test_squared"]) == (OTHER,)
        settings = Settings(rounds=3, budget_seconds=0.1, memory=False)
        found = attention.run([OTHER], device=torch.device("cpu"), settings=settings)
        (result,) = found["results"]["cases"]
        of_windows = select("cpu", tables=["window"])[0]
        assert bench_of(of_windows) is ops.WINDOW_ATTENTION.part("bench")
        assert bench_of(from_shape("1,2,9,16")) is ops.ATTENTION.part("bench")
    finally:
        ops.RECORDS.pop(RECORD.name)  # other tests list every table that there is
    assert [m["contender"] for m in result["measurements"]] == ["elsa-strict", "plain"]
    assert result["left_out"] == {"fast": "is not installed"}
    assert all(m["error"] < 1e-6 for m in result["measurements"])
