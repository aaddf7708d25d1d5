"""Who serves a call and why: the shipped table, PyTorch's own kernels, and guests of other
packages."""

from __future__ import annotations

import importlib
import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import elsa_core as elsa
from elsa_core import backends, dispatch, ops
from elsa_core.backends import processor, sdpa
from elsa_core.backends.support import Backend, Implementation, Request, Support
from elsa_core.base import calls
from elsa_core.dispatch import chooser, measured, table
from elsa_core.errors import ArgumentError, UnavailableError


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


# Whole calls that PyTorch's kernels train


@pytest.fixture
def trains_whole(monkeypatch):
    """The CPU's rows as those of half precision on a GPU."""
    trained, gradients = measured.trained, measured.gradients

    def whole(operator, device, dtype):
        stands_in = device.type == "cpu" and dtype != torch.float64
        return (measured.Trained("sdpa"),) if stands_in else trained(operator, device, dtype)

    def asked(operator, device_type, dtype):
        stands_in = device_type == "cpu" and dtype != torch.float64
        return ("sdpa", "eager") if stands_in else gradients(operator, device_type, dtype)

    monkeypatch.setattr(measured, "trained", whole)
    monkeypatch.setattr(measured, "gradients", asked)
    chooser._trained_by.cache_clear()  # answers by the shipped rows, of tests before
    yield
    chooser._trained_by.cache_clear()


def whole_by(*kind, **terms) -> str:
    """The backend of PyTorch's own kernels that takes such calls; empty where there is none."""
    name = dispatch.choose(*kind, **terms)
    return name if dispatch.is_whole(kind[0], name) else ""


def called(monkeypatch) -> list[str]:
    """The names of the backends that calls are made of, as they come."""
    taken = []
    run = sdpa.attention

    def noted(*arguments):
        taken.append("sdpa")
        return run(*arguments)

    monkeypatch.setattr(sdpa, "attention", noted)
    return taken


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive", "key"])
def test_training_takes_pytorchs_kernels(kind: str, trains_whole, monkeypatch) -> None:
    taken = called(monkeypatch)
    leaves = [make(2, 4, n, 16, seed=n).requires_grad_() for n in (9, 12, 12)]
    mask = {
        "bool": make(2, 1, 9, 12) > 0, "additive": make(1, 4, 9, 12), "key": make(2, 1, 1, 12) > 0,
    }.get(kind)  # fmt: skip
    if kind == "bool":
        mask[0, 0, 3] = False
    if kind == "additive":
        mask[0, 2, 5] = -math.inf
    causal = kind == "causal"
    weight = make(2, 4, 9, 16, seed=5)

    def gradients(call, dtype=torch.float32):
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        m = mask.to(dtype) if kind == "additive" else mask
        out = call(*given, m, is_causal=causal)
        return out.detach(), *torch.autograd.grad(out, given, weight.to(dtype))

    ours = gradients(elsa.attention)
    assert taken == ["sdpa"]
    exact = gradients(elsa.attention, torch.float64)  # no row of the table is for float64
    for mine, reference in zip(ours, exact, strict=True):
        assert relative(mine, reference) < 2e-6
    if kind == "bool":
        assert not ours[0][0, :, 3].any() and not ours[1][0, :, 3].any()
    with torch.no_grad():
        elsa.attention(*leaves, mask, is_causal=causal)
    assert taken == ["sdpa"]  # inference is ours
    elsa.attention(*leaves, mask, is_causal=causal, return_lse=True)
    elsa.attention(*leaves, mask, is_causal=causal, backend="eager")
    assert taken == ["sdpa"]


def test_explain_says_that_training_is_pytorchs(trains_whole) -> None:
    q = make(1, 2, 5, 16).requires_grad_()
    route = elsa.explain(q, q, q)
    assert route.backend == "sdpa"
    assert any("trains slower" in reason for reason in route.reasons)
    assert elsa.explain(q.detach(), q.detach(), q.detach()).backend == "native"


def test_a_float32_mask_beside_half_precision_stays_ours(trains_whole, monkeypatch) -> None:
    taken = called(monkeypatch)
    q = make(1, 2, 5, 16, dtype=torch.bfloat16).requires_grad_()
    elsa.attention(q, q, q, make(5, 5)).sum().backward()
    assert not taken and torch.isfinite(q.grad).all()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_training_compiles_whole_and_exports_keep_the_operator(trains_whole) -> None:
    class Site(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return elsa.attention(q, k, v).transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    site, x = Site(), make(2, 7, 32)
    plain = torch.autograd.grad(site(x).square().sum(), site.qkv.weight)[0]
    compiled = torch.compile(site, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).square().sum(), site.qkv.weight)[0]
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    program = torch.export.export(site, (x,))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert "elsa.attention.default" in targets
    assert not any("scaled_dot_product" in target for target in targets)


def request(**changes) -> Request:
    given = {
        "device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "value_dim": 64,
        "precision": "strict", "gradient": ("query",),
    }  # fmt: skip
    return Request(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "native"),
        ({"dtype": torch.float16}, "sdpa"),
        ({"gradient": ("query", "attn_mask")}, "eager"),
        ({"value_dim": 32}, "native"),
        ({"dtype": torch.float64}, "eager"),
        ({"device_type": "cuda"}, "sdpa"),
        ({"device_type": "cuda", "gradient": ("attn_mask",)}, "sdpa"),
        ({"device_type": "cuda", "value_dim": 32}, "sdpa"),
        ({"device_type": "cuda", "head_dim": 10, "value_dim": 10}, "eager"),
        ({"device_type": "cuda", "precision": "ieee"}, "eager"),
        ({"device_type": "mps"}, "eager"),
    ],
)
def test_who_computes_gradients(changes, name, monkeypatch) -> None:
    table = importlib.import_module("elsa_core.dispatch.table")
    monkeypatch.setattr(table, "_triton_backward", lambda: None)
    assert chooser.gradient_name(request(**changes))[0] == name


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "precision", "name"),
    [
        ("cuda", torch.float16, (64, 64), "strict", "sdpa"),
        ("cuda", torch.bfloat16, (80, 64), "strict", "sdpa"),
        ("cuda", torch.float32, (64, 64), "strict", ""),
        ("cuda", torch.float32, (10, 10), "strict", "sdpa"),  # our gradients would be plain PyTorch
        ("cuda", torch.float32, (10, 10), "ieee", ""),
        ("cuda", torch.float64, (64, 64), "strict", ""),
        ("cpu", torch.float32, (64, 64), "strict", ""),
        ("cpu", torch.bfloat16, (64, 64), "strict", ""),
    ],
)
def test_whose_training_is_whole(device, dtype, dims, precision, name, monkeypatch) -> None:
    table = importlib.import_module("elsa_core.dispatch.table")
    monkeypatch.setattr(table, "_triton_backward", lambda: None)
    kind = ("attention", device, dtype, *dims, precision)
    assert whole_by(*kind, mode="train", gradient=("query",)) == name


@pytest.mark.parametrize(
    ("vendor", "capability", "device", "below"),
    [
        ("AuthenticAMD", "AVX512", "cpu", 1 << 22),
        ("AuthenticAMD", "AVX2", "cpu", 1 << 24),
        ("GenuineIntel", "AVX512", "cpu", 1 << 27),
        ("", "AVX2", "cpu", 1 << 27),
        ("AuthenticAMD", "AVX512", "cuda", 1 << 28),
    ],
)
def test_small_calls_of_a_processor(
    vendor, capability, device, below, monkeypatch, tmp_path
) -> None:
    """PyTorch's attention multiplies by MKL, which an AMD processor runs more slowly."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(processor, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    rows = measured.trained.__wrapped__("attention", torch.device(device), torch.float32)
    rows = [row for row in rows if not row.without_gradients]

    def by(work):
        return next((row.backend for row in rows if row.holds(work, False)), "native")

    assert by(below - 1) == "sdpa" and by(below) == "native" == by(None)


def test_small_masked_calls_train_by_the_native_kernels() -> None:
    """On a CPU they are the faster ones where the mask is boolean."""
    q = make(1, 2, 5, 16).requires_grad_()
    mask = make(5, 5) > 0
    assert elsa.explain(q, q, q).backend == "sdpa"
    assert elsa.explain(q, q, q, is_causal=True).backend == "sdpa"
    assert elsa.explain(q, q, q, mask).backend == "native"
    assert elsa.explain(q, q, q, mask.float()).backend == "sdpa"
    kind = ("attention", "cuda", torch.float32, 64, 64, "strict")
    terms = {"mode": "train", "gradient": ("query",), "work": 1, "masked": True}
    assert whole_by(*kind, **terms) == "sdpa"  # not measured to be slower


def test_a_gradient_of_the_mask_alone_is_not_for_whole_calls(trains_whole, monkeypatch) -> None:
    """PyTorch's memory-efficient backward fails then: "LSE is not correctly aligned"."""
    taken = called(monkeypatch)
    q, mask = make(1, 2, 5, 16), make(1, 2, 5, 5).requires_grad_()
    (found,) = torch.autograd.grad(elsa.attention(q, q, q, mask).square().sum(), mask)
    (wanted,) = torch.autograd.grad(
        F.scaled_dot_product_attention(q, q, q, mask).square().sum(), mask
    )
    assert not taken
    torch.testing.assert_close(found, wanted)


# Inference on the GPU that was measured


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


@pytest.mark.parametrize(
    ("shape", "dtype", "held"),
    [
        ((1, 8, 16384, 64), torch.float16, True),
        ((1, 8, 4096, 64), torch.bfloat16, True),
        ((1, 4, 65536, 64), torch.float16, True),
        ((4, 16, 1024, 80), torch.float16, True),
        ((1, 8, 4096, 128), torch.float16, True),
        ((1, 8, 16384, 64), torch.float32, False),
        ((1, 12, 4097, 64), torch.float16, False),  # no multiple of 128: ours is faster
        ((8, 12, 1025, 64), torch.float16, False),
        ((8, 16, 577, 64), torch.float16, False),
    ],
)
def test_long_rows_of_half_precision(shape, dtype, held, h200) -> None:
    rows = measured.rows("attention", torch.device("cuda", 0), dtype)
    assert any(row.holds(shape, shape) for row in rows) is held
    assert not any(row.holds(shape, (*shape[:2], 1, shape[3])) for row in rows)


@pytest.mark.parametrize(
    ("shape", "mask", "held"),
    [
        ((8, 6, 196, 64), (1, 6, 196, 196), True),
        ((1, 12, 4097, 64), (1, 1, 4097, 4097), True),
        ((8, 12, 1024, 128), (8, 12, 1024, 1024), True),
        ((8, 6, 195, 64), (1, 6, 195, 195), False),
        ((8, 6, 196, 64), (8, 1, 1, 196), False),  # a mask of one row: ours is faster
        ((8, 6, 196, 72), (1, 6, 196, 196), False),  # not measured
        ((1, 1, 4096, 64), (1, 1, 4096, 4096), False),
    ],
)
def test_masks_of_half_precision(shape, mask, held, h200) -> None:
    rows = measured.rows("attention", torch.device("cuda", 0), torch.float16)
    assert any(row.holds(shape, shape, mask) for row in rows) is held
    assert not any(row.holds(shape, shape, mask) for row in rows if not row.masked)
    assert not any(row.holds(shape, shape) for row in rows if row.masked)
    assert not any(
        row.masked for row in measured.rows("attention", torch.device("cuda", 0), torch.float32)
    )


def test_a_call_looks_at_rows_of_its_width_alone(h200, monkeypatch) -> None:
    monkeypatch.setattr(chooser, "select", lambda *_: ("triton", ()))
    for head_dim, masked in ((64, [False, True]), (32, [True]), (72, [])):
        kind = (torch.device("cuda", 0), torch.float16, head_dim, head_dim, "strict", "auto")
        rows = [row for row, _ in chooser.chosen.__wrapped__("attention", *kind).rows]
        assert [row.head_dim for row in rows] == [head_dim] * len(masked)
        assert [row.masked for row in rows] == masked


@pytest.mark.parametrize(("precision", "held"), [("ieee", True), ("strict", False)])
def test_float32_multiply_adds_are_the_portable_kernels(precision, held, h200) -> None:
    rows = measured.rows("attention", torch.device("cuda", 0), torch.float32, precision)
    assert not any(row.holds((1, 3, 1025, 64), (1, 3, 1025, 64)) for row in rows), "few programs"
    for shape in ((8, 12, 1025, 64), (1, 12, 197, 64), (4, 16, 2048, 128)):
        assert any(row.holds(shape, shape) for row in rows) is held
        assert not any(row.holds((*shape[:2], 1, shape[3]), shape) for row in rows), "one query"
        mask = (1, 1, shape[2], shape[2])
        assert not any(row.holds(shape, shape, mask) for row in rows)


def test_another_gpu_has_no_rows(h200, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert not measured.rows("attention", torch.device("cuda", 0), torch.float16)


def test_a_row_is_called_where_it_holds(monkeypatch) -> None:
    """On the CPU: a row of small shapes, and what it calls replaced."""
    row = measured.Row("sdpa", 16, (1, 8), (8, 8), 8, (0.9, 0.9))
    served = []

    def serve(q, k, v, mask, is_causal, scale, precision):
        if mask is not None or is_causal:
            return None
        served.append(q.shape)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    chosen = dispatch.Chosen("native", ops.ATTENTION.eager, None, ((row, serve),))
    monkeypatch.setattr(dispatch, "chosen", lambda *_: chosen)
    q = make(1, 2, 8, 16)
    torch.testing.assert_close(elsa.attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
    assert len(served) == 1
    elsa.attention(q, q, q, is_causal=True)
    elsa.attention(q, q, q, return_lse=True)
    elsa.attention(make(1, 2, 7, 16), q, q)
    elsa.attention(q, q[:, :1], q[:, :1], enable_gqa=True)  # the row is of equal heads
    elsa.attention(q.clone().requires_grad_(), q, q)
    assert len(served) == 1
    elsa.attention(q[0], q[0], q[0])  # calls that take more to bring into that form
    with torch.autocast("cpu", torch.bfloat16):
        elsa.attention(q, q, q)
    assert len(served) == 3
    for each in (elsa.explain(q, q, q), elsa.explain(q[0], q[0], q[0])):
        assert each.backend == "sdpa"
        assert any("serves exported programs" in reason for reason in each.reasons)
    assert elsa.explain(q, q[:, :1], q[:, :1], enable_gqa=True).backend == "native"


def test_a_row_of_causal_calls(monkeypatch) -> None:
    """On the CPU: of these alone."""
    row = measured.Row("sdpa", 16, (1, 8), (8, 8), 1, (0.5, 0.9), causal=True)
    served = []

    def serve(q, k, v, mask, is_causal, scale, precision):
        served.append(is_causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)

    chosen = dispatch.Chosen("native", ops.ATTENTION.eager, None, ((row, serve),))
    monkeypatch.setattr(dispatch, "chosen", lambda *_: chosen)
    q = make(1, 2, 8, 16)
    out = elsa.attention(q, q, q, is_causal=True)
    exact = F.scaled_dot_product_attention(*[q.double()] * 3, is_causal=True)
    assert relative(out, exact) < 1e-6 and served == [True]
    assert elsa.explain(q, q, q, is_causal=True).backend == "sdpa"
    elsa.attention(q, q, q)
    elsa.attention(q, q, q, torch.ones(8, 8).tril().bool())
    elsa.attention(q.clone().requires_grad_(), q, q, is_causal=True)
    assert elsa.explain(q, q, q).backend == "native" and served == [True]


def test_prefills_of_many_wide_heads(h200) -> None:
    """Causal ones, as they were measured: 17 to 40 heads of 128."""
    rows = measured.rows("attention", torch.device("cuda", 0), torch.float16)
    shape = (1, 40, 32768, 128)
    assert any(row.holds(shape, shape, causal=True) for row in rows)
    assert not any(row.holds(shape, shape) for row in rows)


def test_a_row_of_masked_calls(monkeypatch) -> None:
    """On the CPU: of masks in the operands' dtype, with a row for each query, without gradients."""
    row = measured.Row("sdpa", 16, (1, 8), (8, 8), 1, (0.5, 0.9), masked=True)
    served = []

    def serve(q, k, v, mask, is_causal, scale, precision):
        served.append(mask.shape)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)

    chosen = dispatch.Chosen("native", ops.ATTENTION.eager, None, ((row, serve),))
    monkeypatch.setattr(dispatch, "chosen", lambda *_: chosen)
    q, mask = make(2, 2, 8, 16).half(), make(8, 8).half()
    for given in (mask, mask.expand(2, 2, 8, 8), mask[None]):
        out = elsa.attention(q, q, q, given)
        exact = F.scaled_dot_product_attention(*[q.double()] * 3, mask.double())
        assert relative(out, exact) < 1e-3
        assert elsa.explain(q, q, q, given).backend == "sdpa"
    assert served == [(1, 1, 8, 8), (2, 2, 8, 8), (1, 1, 8, 8)]
    for given in (mask.t(), mask.repeat(1, 2)[:, ::2], mask.repeat(1, 2)[:, :8]):
        assert elsa.explain(q, q, q, given).backend != "sdpa"  # nor would `serve` take them
    with torch.no_grad():
        elsa.attention(q, q, q, mask.clone().requires_grad_())
    elsa.attention(q[0], q[0], q[0], mask)
    assert len(served) == 5
    for given in (None, mask.float(), mask > 0, mask[:1]):
        elsa.attention(q, q, q, given)
        assert elsa.explain(q, q, q, given).backend != "sdpa"
    elsa.attention(q, q, q, mask.clone().requires_grad_())
    elsa.attention(q, q, q, mask, return_lse=True)
    elsa.attention(q[:, :, :7], q, q, mask[:7])
    assert len(served) == 5


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_graph_of_one_length_takes_its_row(monkeypatch) -> None:
    """On the CPU: a row of small shapes, served by what stands for cuDNN there. A graph of every
    length, an exported one and one that records gradients keep the operator."""
    row = measured.Row("sdpa", 16, (1, 8), (8, 16), 8, (0.9, 0.9))
    served = []

    def serve(q, k, v, mask, is_causal, scale, precision):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    def look(graph, _):
        served.append(any("scaled_dot" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    found = dispatch.rows_of

    def rows_of(*kind):
        return (row,) if kind[-1] == "auto" else found(*kind)

    rows_of._dynamo_marked_constant = True
    monkeypatch.setattr(dispatch, "rows_of", rows_of)
    monkeypatch.setitem(dispatch.BY_ROW, ("attention", "sdpa"), serve)

    def attend(x: Tensor, backend: str = "auto") -> Tensor:
        return elsa.attention(x, x, x, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=look)
    for tokens in (8, 16, 24, 32):
        x = make(1, 2, tokens, 16)
        exact = F.scaled_dot_product_attention(*[x.double()] * 3)
        torch.testing.assert_close(compiled(x).double(), exact, rtol=1e-5, atol=1e-6)
    assert served == [True, False]  # the second length opens it: one graph for all others
    torch._dynamo.reset()
    served.clear()
    compiled(make(1, 2, 8, 16), "native")
    compiled(make(1, 2, 8, 16).requires_grad_())
    assert served == [False, False]

    class Site(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x)

    program = torch.export.export(Site(), (make(1, 2, 8, 16),))
    assert any("elsa.attention.default" in str(node.target) for node in program.graph.nodes)
    torch._dynamo.reset()


def test_plain_pytorch_is_named_for_every_operator() -> None:
    """Also for those that are no part of this package, as `backend=` takes it."""
    assert dispatch.names("varlen_attention")[0] == "auto"
    for record in ops.records():
        assert dispatch.names(record.name)[-1] == dispatch.PLAIN
    assert dispatch.names("no such operator") == ("auto",)


def test_the_table_is_data_with_its_reasons() -> None:
    rows = json.loads(measured.TABLE.read_text(encoding="utf-8"))["rows"]
    reasons = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    modes = {row["mode"] for row in rows}
    assert modes == {"infer", "train", "gradients", "site", "patch"}
    assert all(f"`{mode}`" in reasons for mode in modes)
    for row in rows:
        assert ops.record(row["operator"])
        if row["mode"] in ("infer", "train"):
            assert row["by"] in dispatch.names(row["operator"])
        for name in row["by"] if row["mode"] == "gradients" else ():
            offered = dispatch.implementation(row["operator"], name)
            assert name == dispatch.PLAIN or (offered.gradient and offered.backward)


# By name, and guests


def test_sdpa_by_name() -> None:
    q = make(1, 2, 5, 16)
    torch.testing.assert_close(elsa.attention(q, q, q, backend="sdpa"), elsa.attention(q, q, q))
    with pytest.raises(UnavailableError, match="lse"):
        elsa.attention(q, q, q, backend="sdpa", return_lse=True)
    with pytest.raises(UnavailableError, match="has no window_attention"):
        elsa.window_attention(make(1, 4, 4, 24), num_heads=1, window_size=(2, 2), backend="sdpa")
    with pytest.raises(ArgumentError, match="is unknown"):
        elsa.attention(q, q, q, backend="none")


def test_the_command_line_names_the_same_backends() -> None:
    assert dispatch.names() == tuple(importlib.import_module("elsa_cli.options").BACKENDS)


@pytest.fixture
def guest():
    """A backend of another package: a softmax written out, for head_dim 24 alone."""

    def support(request: Request) -> Support:
        fits = request.head_dim == 24
        return Support(fits, "" if fits else "takes head_dim 24 alone")

    def run(query, key, value, attn_mask, is_causal, scale, precision):
        scores = query @ key.mT * scale
        scores = scores if attn_mask is None else scores + attn_mask
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    offered = Implementation(support, run, lambda *_: "all at once", lambda _: "as it is")
    dispatch.register(Backend("guest", "cpu", {"attention": offered}), ahead_of="native")
    yield
    dispatch.unregister("guest")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_backend_of_another_package(guest) -> None:
    q = make(1, 2, 5, 24).requires_grad_()
    route = elsa.explain(q, q, q)
    assert (route.backend, route.schedule) == ("guest", "all at once")
    wanted = F.scaled_dot_product_attention(q, q, q)
    compiled = torch.compile(lambda x: elsa.attention(x, x, x), fullgraph=True, backend="aot_eager")
    for call in (elsa.attention, lambda q, *_: compiled(q)):
        out = call(q, q, q)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(
            *(torch.autograd.grad(o.sum(), q, retain_graph=True)[0] for o in (out, wanted))
        )
    other = make(1, 2, 5, 16)
    assert elsa.explain(other, other, other).reasons[0] == "guest: takes head_dim 24 alone"
    with pytest.raises(UnavailableError, match="24 alone"):
        elsa.attention(other, other, other, backend="guest")
    with pytest.raises(ArgumentError, match="already"):
        dispatch.register(Backend("guest", None, {}))


def test_a_guest_that_left_is_gone() -> None:
    q = make(1, 2, 5, 24)
    assert elsa.explain(q, q, q).backend == "native"
    assert "guest" not in dispatch.names()


def _squared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).square()
    return weights / weights.sum(-1, keepdim=True) @ value


SQUARED = ops.register(
    ops.Operator(
        name="test_squared_attention",
        schema="(Tensor query, Tensor key, Tensor value) -> Tensor",
        reference=_squared,
    )
)


def test_a_variant_with_a_reference_alone() -> None:
    """It is called, compiled, differentiated, explained, and left alone by proofs."""
    q = make(1, 2, 5, 8, dtype=torch.float64).requires_grad_()
    operator = torch.ops.elsa.test_squared_attention
    torch.testing.assert_close(operator(q, q, q), _squared(q, q, q))
    compiled = torch.compile(lambda x: operator(x, x, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), _squared(q, q, q))
    assert torch.autograd.gradcheck(operator.default, (q, q, q))
    torch.library.opcheck(operator.default, (q, q, q))
    of_it = Request("cpu", torch.float32, 8, 8, "strict", SQUARED.name, gradient=("query",))
    route = dispatch.route(of_it)
    assert route.backend == "eager" and "gradients" in route.reasons[-1]
    assert ops.of("elsa::test_squared_attention") is SQUARED and not SQUARED.kind
    with pytest.raises(ValueError, match="registered already"):
        ops.register(SQUARED)


def test_explain_of_windows() -> None:
    qkv = make(1, 8, 8, 3 * 32)
    call = {"num_heads": 2, "window_size": (4, 4)}
    assert elsa.explain_window_attention(qkv, **call).backend == "native"
    route = elsa.explain_window_attention(qkv.requires_grad_(), **call)
    assert route.reasons[-1].startswith("gradients")
    assert elsa.explain_window_attention(qkv.double(), **call).backend == "eager"
    assert elsa.explain_window_attention(qkv, **call, backend="eager").backend == "eager"
    with pytest.raises(ArgumentError, match="num_heads"):
        elsa.explain_window_attention(qkv, num_heads=5, window_size=(4, 4))


def test_explain_of_projections(monkeypatch) -> None:
    from elsa_core.backends import onednn

    x, w = make(300, 192), make(192, 192)
    monkeypatch.setattr(onednn, "_mkl_lags", lambda: True)
    for backend in ("auto", "native"):
        assert elsa.explain_linear(x, w, backend=backend).backend == "onednn"
    assert elsa.explain_linear(x, w, backend="eager").backend == "eager"
    assert elsa.explain_linear(x, w, precision="ieee").backend == "eager"
    monkeypatch.setattr(onednn, "_mkl_lags", lambda: False)
    route = elsa.explain_linear(x, w)
    assert route.backend == "eager" and "MKL is no slower" in route.reasons[0]


def test_a_batch_of_gradients_goes_to_the_operator() -> None:
    """What `is_grads_batched` hands to a backward has no memory that a kernel could read."""
    seen = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen.append(calls.by_operator(None, grad))
            return grad

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Same.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Same.apply(x), x, torch.ones(3))
    torch.autograd.grad(Same.apply(x), x, torch.ones(3), create_graph=True)
    assert seen == [True, False, True]


def test_gradients_of_long_rows_in_half_precision_are_explained() -> None:
    q = torch.zeros(1, 1, 4, 8, dtype=torch.float16, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    reasons = elsa.explain(q, q, q, mask, backend="native").reasons
    assert any("by native from our output and lse up to 512 keys, beyond" in r for r in reasons)


# GPUs without kernels


@pytest.fixture
def two_gpus(monkeypatch):
    """An H100 beside a T4, as far as the choice of a backend looks."""
    triton = pytest.importorskip("elsa_core.backends.triton")
    known = {0: (9, 0), 1: (7, 5)}

    def capability(device=None):
        index = device if isinstance(device, int) else torch.device(device or "cuda:0").index
        return known[index or 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    caches = (triton._environment, dispatch.chosen, chooser._trained_by)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


CUDA_KIND = (torch.float16, 64, 64, "strict")


def test_each_gpu_is_asked_about_itself(two_gpus) -> None:
    names = [dispatch.choose("attention", f"cuda:{i}", *CUDA_KIND, "auto") for i in (0, 1)]
    assert names == ["triton", "eager"]
    names = [whole_by("attention", f"cuda:{i}", *CUDA_KIND, mode="infer") for i in (0, 1)]
    assert names == ["", "sdpa"]
    with pytest.raises(UnavailableError, match="sm_80"):
        dispatch.choose("attention", "cuda:1", *CUDA_KIND, "triton")


def test_float64_is_left_to_the_reference(two_gpus) -> None:
    kind = ("attention", "cuda:1", torch.float64, 64, 64, "strict")
    assert dispatch.choose(*kind, mode="infer") == "eager"


@pytest.mark.parametrize(("place", "name"), [("cuda:0", "triton"), ("cuda:1", "sdpa")])
def test_a_gpu_without_kernels_has_pytorchs(two_gpus, monkeypatch, place, name) -> None:
    """Plain, causal and masked; a call with lse is the reference's."""
    called = []

    def answer(each, run, *args):  # PyTorch's own operations would ask a driver
        return run(*args) if each == "triton" else (args[0], args[0])

    real = {name: dispatch.RUNS["attention", name] for name in ("eager", "sdpa", "triton")}
    for each, run in real.items():
        monkeypatch.setitem(
            dispatch.RUNS, ("attention", each),
            lambda *args, each=each, run=run: called.append(each) or answer(each, run, *args),
        )  # fmt: skip
    monkeypatch.setattr(measured, "rows", lambda *_: ())
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device=place)
        mask = torch.empty(1, 1, 8, 8, dtype=torch.bool, device=place)
        for named in ({}, {"is_causal": True}, {"attn_mask": mask}):
            elsa.attention(q, q, q, **named)
        assert called == [name] * 3
        if name == "sdpa":
            route = elsa.explain(q, q, q)
            assert route.backend == name
            assert any("exported" in reason for reason in route.reasons)
            elsa.attention(q, q, q, return_lse=True)
            assert called[3:] == ["eager"]


def test_float32_fma_on_a_gpu_without_triton(two_gpus, monkeypatch) -> None:
    """`ieee` is for the portable kernels, which no tensor core helps."""
    from elsa_core.backends import portable

    monkeypatch.setattr(portable, "_ready", lambda *_: Support(True))
    kind = (torch.float32, 64, 64)
    assert dispatch.choose("attention", "cuda:1", *kind, "ieee", "auto") == "portable"
    assert dispatch.choose("attention", "cuda:0", *kind, "ieee", "auto") == "triton"
    assert dispatch.choose("attention", "cuda:1", *kind, "strict", "auto") == "eager"
    assert dispatch.choose("attention", "cuda:1", *kind, "strict", mode="infer") == "sdpa"


def test_two_threads_that_first_call_a_backend(tmp_path, monkeypatch):
    """The second one once took the module as it lay there, half imported."""
    lines = "import sys, time\nwhile not hasattr(sys, 'elsa_seen'): time.sleep(0.001)\n"
    (tmp_path / "slow.py").write_text(lines + "time.sleep(0.02)\ndef answer(): return 42\n")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    monkeypatch.delattr(sys, "elsa_seen", raising=False)
    answer, found = table._late("slow", "answer"), []
    first = threading.Thread(target=lambda: found.append(answer()))
    first.start()
    while "elsa_core.backends.slow" not in sys.modules:
        time.sleep(0.001)
    monkeypatch.setattr(sys, "elsa_seen", True, raising=False)
    try:
        assert answer() == 42
    finally:
        first.join()
        del sys.modules["elsa_core.backends.slow"], backends.slow
    assert found == [42]
