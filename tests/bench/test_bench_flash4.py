"""FlashAttention 4 as a peer: when it takes part, what it is given, what its failures end."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elsa_core.bench import flash4, peers
from elsa_core.bench.cases import Case, bench_of, inputs
from elsa_core.bench.peers import Inputs, field_of
from elsa_core.measuring import timing
from elsa_core.measuring.timing import Contender

FORWARD = Case("fp16", 2, 3, 24, 24, 8, dtype="fp16")
TRAINED = replace(FORWARD, table="gradients", dtype="bf16")


class Package:
    """`flash_attn.cute`: computes by PyTorch what the package does, and keeps what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[Tensor, ...]] = []
        self.named: list[dict[str, Any]] = []
        package, part = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute"))
        part.flash_attn_func = self.attend  # type: ignore[attr-defined]
        package.cute = part  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", part)

    def attend(self, *tensors: Tensor, **named: Any) -> tuple[Tensor, None]:
        self.given.append(tensors)
        self.named.append(named)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors))
        return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    return Package(monkeypatch)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose only peer is the package."""
    forward = bench_of(FORWARD)  # read before anything is replaced: it keeps `of_attention`

    def found(case: Case, tensors: Inputs, flex: bool) -> dict[str, Any]:
        return {flash4.NAME: lambda: flash4.contender(*tensors[:3])}

    monkeypatch.setattr(peers, "of_attention", found)  # what the gradients ask
    monkeypatch.setattr(
        peers, "bench_of",
        lambda case: bench_of(case) if case is TRAINED else replace(forward, peers=found),
    )  # fmt: skip


def on_gpu(case: Case, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Any:
    """What a GPU's list of peers says of the package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(peers, "available_bytes", lambda _: 2**40)
    with FakeTensorMode():
        shape = (case.batch, case.heads, case.queries, case.head_dim)
        made = [torch.empty(shape, dtype=case.torch_dtype, device="cuda") for _ in range(3)]
        mask = torch.empty(1, device="cuda") if case.mask != "none" else None
        return peers.of_attention(case, Inputs(*made, mask), False)[flash4.NAME]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_half_precision_on_hopper_and_blackwell(
    dtype: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(on_gpu(replace(FORWARD, dtype=dtype), monkeypatch, capability))


@pytest.mark.parametrize(
    ("more", "capability", "reason"),
    [
        ({"dtype": "fp32"}, (9, 0), "it takes float16 and bfloat16, not float32"),
        ({"mask": "additive"}, (9, 0), "it takes no mask"),
        ({}, (8, 9), "it is for Hopper and Blackwell, not for compute capability 8.9"),
    ],
)
@pytest.mark.usefixtures("package")
def test_what_it_does_not_take(
    more: dict[str, Any], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_gpu(replace(FORWARD, **more), monkeypatch, capability) == reason


def test_a_cpu_does_not_name_it() -> None:
    assert flash4.NAME not in peers.of_attention(FORWARD, Inputs(*inputs(FORWARD, "cpu")), False)


@pytest.mark.parametrize("missing", ["flash_attn", "flash_attn.cute"])
@pytest.mark.parametrize("case", [FORWARD, TRAINED], ids=["forward", "gradients"])
@pytest.mark.usefixtures("package", "only")
def test_without_the_package(case: Case, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 is `flash_attn` without `cute`."""
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "flash_attn":
        monkeypatch.delitem(sys.modules, "flash_attn.cute")
    found = field_of(case, Inputs(*inputs(case, "cpu")))
    assert found.left_out == {flash4.NAME: "the package flash-attn-4 is not installed"}
    assert [c.name for c in found.contenders] == ["elsa-strict"]


@pytest.mark.usefixtures("only")
def test_a_package_without_its_compiler_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    part = types.ModuleType("flash_attn.cute")
    part.__getattr__ = broken  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", part)
    found = field_of(FORWARD, Inputs(*inputs(FORWARD, "cpu")))
    assert found.left_out == {flash4.NAME: "No module named 'cutlass'"}


@pytest.mark.usefixtures("only")
def test_it_reads_the_tensors_themselves(package: Package) -> None:
    tensors = Inputs(*inputs(FORWARD, "cpu"))
    peer = field_of(FORWARD, tensors).contenders[1]
    out, exact = peer.output(), bench_of(FORWARD).exact(*tensors)
    assert out.shape == exact.shape and (out - exact).norm() < 1e-2 * exact.norm()
    assert peer.name == flash4.NAME and peer.precision is None
    assert peer.notes["package"].startswith("flash-attn-4")
    for given, own in zip(package.given[-1], tensors[:3], strict=True):
        assert given.shape == (2, 24, 3, 8) and given.stride(-1) == 1
        assert given.data_ptr() == own.data_ptr() and not given.requires_grad
    assert package.named == [{}] * len(package.given)


@pytest.mark.usefixtures("only")
def test_its_gradients(package: Package) -> None:
    tensors = Inputs(*inputs(TRAINED, "cpu"))
    found = field_of(TRAINED, tensors)
    assert [c.name for c in found.contenders] == ["elsa-strict", flash4.NAME], found.left_out
    bench, peer = bench_of(TRAINED), found.contenders[1]
    assert bench.error is not None
    assert bench.error(TRAINED, peer.output(), bench.exact(*tensors)) < 2e-2
    assert peer.notes["package"].startswith("flash-attn-4")
    assert all(t.requires_grad and t.shape == (2, 24, 3, 8) for t in package.given[-1])
    returned = peer.call()
    assert isinstance(returned, tuple)
    assert all(t.shape == tensors.query.shape for t in returned)


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize("case", [FORWARD, TRAINED], ids=["forward", "gradients"])
def test_an_error_of_any_kind_is_a_reason(
    case: Case, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiler(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            assert case is TRAINED, "head_dim is not supported\nmore"
            return tensors[0].clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise AssertionError("head_dim is not supported")

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", Compiler.apply)
    found = field_of(case, Inputs(*inputs(case, "cpu")))
    assert found.left_out == {flash4.NAME: "AssertionError: head_dim is not supported"}


def test_what_cannot_be_captured_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a package raises during the capture."""

    def refused(_: object) -> Any:
        raise ValueError("not in a graph")

    monkeypatch.setattr(timing.capture, "captured", refused)
    monkeypatch.setattr(timing, "_gpu_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *_, **__: empty(1))
    samples, notes = timing.time_cuda([Contender("a", lambda: None)], rounds=3)
    assert samples == {"a": [1e-3] * 3} and notes == {"a": "timed without a graph: not in a graph"}
