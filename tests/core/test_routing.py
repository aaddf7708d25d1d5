"""Who serves a call and why: the shipped table, PyTorch's own kernels, and guests of other
packages."""

import importlib
import json
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
from elsa_core.backends import onednn
from elsa_core.backends.support import Backend, Implementation, Request, Support
from elsa_core.dispatch import chooser, measured, table
from elsa_core.errors import ArgumentError, UnavailableError


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Whole calls that PyTorch's kernels train


def whole_by(*kind, **terms) -> str:
    """The backend of PyTorch's own kernels that takes such calls; empty where there is none."""
    name = dispatch.choose(*kind, **terms)
    return name if dispatch.is_whole(kind[0], name) else ""


def request(**changes) -> Request:
    given = {
        "device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "value_dim": 64,
        "precision": "strict", "gradient": ("query",),
    }  # fmt: skip
    return Request(**{**given, **changes})


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
def test_small_calls_of_a_processor(vendor, capability, device, below, pretended) -> None:
    """PyTorch's attention multiplies by MKL, which an AMD processor runs more slowly."""
    pretended(vendor, capability)
    rows = measured.rows("attention", "train", torch.device(device), torch.float32)
    rows = [row for row in rows if not row.without_gradients]

    def by(work):
        facts = {"work": work, "boolean": 0}
        return next((row.by for row in rows if row.holds(facts)), "native")

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
    terms = {"mode": "train", "gradient": ("query",), "work": 1, "boolean": 1}
    assert whole_by(*kind, **terms) == "sdpa"  # not measured to be slower


# Inference on the GPU that was measured


def inferred(*shapes, dtype=torch.float16, precision="strict", **terms):
    """The rows of inference that hold for [B, H, N, D] of query and key, and a mask."""
    kind = (torch.device("cuda", 0), dtype, precision, shapes[0][-1])
    facts = measured.attention_facts(*shapes, **terms)
    return [row for row in measured.rows("attention", "infer", *kind) if row.holds(facts)]


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


SINGLE = {"dtype": torch.float32}


@pytest.mark.parametrize(
    ("shape", "mask", "terms", "held"),
    [
        ((1, 8, 16384, 64), None, {}, True),
        ((1, 8, 4096, 64), None, {"dtype": torch.bfloat16}, True),
        ((1, 4, 65536, 64), None, {}, True),
        ((4, 16, 1024, 80), None, {}, True),
        ((1, 8, 4096, 128), None, {}, True),
        ((1, 8, 16384, 64), None, SINGLE, False),
        ((1, 12, 4097, 64), None, {}, False),  # no multiple of 128: ours is faster
        ((8, 12, 1025, 64), None, {}, False),
        ((8, 16, 577, 64), None, {}, False),
        ((8, 6, 196, 64), (1, 6, 196, 196), {}, True),
        ((1, 12, 4097, 64), (1, 1, 4097, 4097), {}, True),
        ((8, 12, 1024, 128), (8, 12, 1024, 1024), {}, True),
        ((8, 6, 195, 64), (1, 6, 195, 195), {}, False),
        ((8, 6, 196, 64), (8, 1, 1, 196), {}, False),  # a mask of one row: ours is faster
        ((8, 6, 196, 72), (1, 6, 196, 196), {}, False),  # not measured
        ((1, 1, 4096, 64), (1, 1, 4096, 4096), {}, False),
        ((8, 6, 196, 64), (1, 6, 196, 196), SINGLE, False),
        ((1, 3, 1025, 64), None, SINGLE | {"precision": "ieee"}, False),  # few programs
        *(((8, 12, 1025, 64), None, SINGLE | {"precision": p}, p == "ieee")
          for p in ("ieee", "strict")),
        ((1, 12, 197, 64), None, SINGLE | {"precision": "ieee"}, True),
        ((4, 16, 2048, 128), None, SINGLE | {"precision": "ieee"}, True),
        ((4, 16, 2048, 128), (1, 1, 2048, 2048), SINGLE | {"precision": "ieee"}, False),
        ((1, 40, 32768, 128), None, {"causal": True}, True),  # prefills of 17 to 40 wide heads
        ((1, 40, 32768, 128), None, {}, False),
    ],
)  # fmt: skip
def test_rows_of_the_gpu_that_was_measured(shape, mask, terms, held, h200) -> None:
    assert bool(inferred(shape, shape, *([mask] if mask else []), **terms)) is held
    if mask is None and "causal" not in terms:
        one = (*shape[:2], 1, shape[3])
        assert not inferred(shape, one, **terms) and not inferred(one, shape, **terms)


def test_another_gpu_has_no_rows(h200, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert not measured.rows("attention", "infer", torch.device("cuda", 0), torch.float16)


def test_plain_pytorch_is_named_for_every_operator() -> None:
    """Also for those that are no part of this package, as `backend=` takes it."""
    assert dispatch.names("varlen_attention")[0] == "auto"
    for record in ops.RECORDS.values():
        assert dispatch.names(record.name)[-1] == dispatch.PLAIN
    assert dispatch.names("no such operator") == ("auto",)


def test_the_table_is_data_with_its_reasons() -> None:
    rows = json.loads(measured.TABLE.read_text(encoding="utf-8"))["rows"]
    reasons = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    modes = {row["mode"] for row in rows}
    assert modes == {"infer", "train", "gradients", "site", "patch"}
    assert all(f"`{mode}`" in reasons for mode in modes)
    for row in rows:
        assert row["operator"] in ops.RECORDS
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
    assert dispatch.names() == tuple(importlib.import_module("elsa_cli.values").BACKENDS)


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
    assert dispatch.kernels_of("attention", "cpu") == "native", "the operator's kernel stays"
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


@pytest.fixture(params=["cpu", None])
def fused_by(request):
    """A guest that computes layers of GELU without a gradient; the list grows with its calls. Of a
    device, or of every one, which had been asked by nobody."""
    calls = []

    def direct(input, weight, bias, activation, residual, scale, precision):
        if activation == "none":
            return None
        calls.append(activation)
        out = F.gelu(F.linear(input, weight, bias)) * (1.0 if scale is None else scale)
        return (out if residual is None else out + residual).detach()

    terms = (lambda _: Support(True), None, "at once", lambda _: "as it is")
    offered = {"linear": Implementation(*terms, direct=direct)}
    dispatch.register(Backend("fuser", request.param, offered))
    yield calls
    dispatch.unregister("fuser")


def test_a_layer_that_learns_is_not_fused(fused_by) -> None:
    """Also where one operand alone wants a gradient."""
    given = [make(3, 8), make(5, 8), make(5), make(3, 5), make(5)]
    names = ("input", "weight", "bias", "residual", "scale")
    for name in names:
        terms = dict(zip(names, given, strict=True))
        terms[name] = terms[name].clone().requires_grad_()
        assert elsa.linear(**terms, activation="gelu").requires_grad
    assert not fused_by
    elsa.linear(**dict(zip(names, given, strict=True)), activation="gelu")
    assert fused_by == ["gelu"]


def test_explain_names_the_backend_that_is_asked_for(fused_by, monkeypatch) -> None:
    """Of two that can serve a layer, on a processor of which oneDNN is the first."""
    monkeypatch.setattr(onednn, "_mkl_lags", lambda: True)
    x, w = make(3, 8), make(5, 8)
    assert elsa.explain_linear(x, w).backend == "onednn"
    assert elsa.explain_linear(x, w, backend="fuser").backend == "fuser"


@pytest.mark.parametrize("home", ["cuda", None])
def test_a_guest_may_train_what_the_table_leaves_to_the_original(home: str | None) -> None:
    """Also one of every device, which had been overlooked."""
    kind = ("window_attention", "cuda", torch.float64, 32, 32, "strict")
    assert dispatch.choose(*kind, mode="site") == "original"
    terms = (lambda _: Support(True), lambda *_: None, "at once", lambda _: "as it is")
    guest = Backend("guest", home, {"window_attention": Implementation(*terms)})
    dispatch.register(guest, ahead_of="triton")
    try:
        assert not dispatch.choose(*kind, mode="site")
    finally:
        dispatch.unregister("guest")


def test_calls_go_on_while_a_backend_joins_and_leaves() -> None:
    """Calls of other threads found no kernel while the tables were made anew."""
    q, outs = make(1, 2, 5, 24), []

    class Offered(dict):
        def items(self):
            outs.append(elsa.entmax_attention(q, q, q, alpha=1.5))
            return super().items()

    dispatch.register(Backend("guest", "cpu", Offered()), ahead_of="native")
    dispatch.unregister("guest")
    assert len(outs) == 1


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
    assert ops.BY_SCHEMA["elsa::test_squared_attention"] is SQUARED and not SQUARED.kind
    with pytest.raises(ValueError, match="registered already"):
        ops.register(SQUARED)


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
    at = importlib.import_module("elsa_core.backends.triton.shared.device").capability_at
    caches = (triton._environment, dispatch.chosen, chooser._trained, at)
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


def test_a_call_asks_about_the_gpu_of_its_tensors(two_gpus) -> None:
    found = []
    with FakeTensorMode():
        for i in (0, 1):
            q = torch.empty(1, 2, 300, 64, dtype=torch.float16, device=f"cuda:{i}")
            found.append(elsa.explain_entmax_attention(q, q, q).backend)
        p = torch.empty(300, 2, 64, dtype=torch.float16, device="cuda:0")
        ends = torch.empty(3, dtype=torch.int32, device="cuda:0")
        packed = elsa.explain_entmax_varlen_attention(p, p, p, ends)
    assert found == ["triton", "eager"]
    assert packed.schedule.startswith("all sequences in one launch; ")


def test_float64_is_left_to_the_reference(two_gpus) -> None:
    kind = ("attention", "cuda:1", torch.float64, 64, 64, "strict")
    assert dispatch.choose(*kind, mode="infer") == "eager"


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
