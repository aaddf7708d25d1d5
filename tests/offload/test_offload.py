"""Streamed attention on a CPU: the order of blocks, sums, what is copied and what is refused."""

import functools
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core as elsa
from elsa_core.distributed.shards import Saved, Wanted
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.offload import passes, streaming

from .cases import CASES, Case, Terms, assert_exact, differentiated


def streamed(case: Case, **options: Any) -> Terms:
    blocks = {"block": case.block, "query_block": case.query_block, "device": "cpu"} | options

    def call(*tensors: Any) -> Any:
        return elsa.offload.attention(*tensors, **case.arguments(), **blocks, return_lse=True)

    return differentiated(call, case, case.dtype)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks of queries", "all queries at once"])
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str, whole: bool) -> None:
    assert_exact(streamed(CASES[name], **({"query_block": None} if whole else {})), CASES[name])


@pytest.mark.parametrize("name", ["plain", "causal", "hidden", "float16"])
def test_equal_calls_give_equal_bits(name: str) -> None:
    first, second = streamed(CASES[name]), streamed(CASES[name])
    assert all(torch.equal(first[term], second[term]) for term in first)


def test_through_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    query, key, value, mask, _ = Case(mask="bool").tensors()
    found, lse = elsa.attention(
        query, key, value, mask, offload="host", offload_block=16, return_lse=True
    )
    report = elsa.offload.report()
    assert report is not None and report.blocks == 4 and report.hidden is None
    assert report.to_dict()["copied_bytes"] == 0 and report.fold_seconds > 0
    whole, whole_lse = elsa.attention(query, key, value, mask, return_lse=True)
    assert torch.allclose(found, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-6)
    assert torch.equal(elsa.attention(query, key, value, mask, offload="host"), whole)


def test_other_ranks_and_batches() -> None:
    query, key = torch.randn(3, 1, 2, 9, 8), torch.randn(5, 2, 11, 8)
    found = elsa.offload.attention(query, key, key, device="cpu", block=4)
    whole = elsa.attention(query, key, key)
    assert isinstance(found, Tensor) and found.shape == whole.shape
    assert torch.allclose(found, whole, atol=1e-6)


def test_hidden_blocks_are_not_visited() -> None:
    query = torch.randn(1, 1, 8, 8)
    key = torch.randn(1, 1, 64, 8)
    key[:, :, 16:] = torch.nan
    out = elsa.offload.attention(query, key, key, is_causal=True, device="cpu", block=8)
    report = streaming.report()
    assert isinstance(out, Tensor) and out.isfinite().all()
    assert report is not None and report.blocks == 1


def test_only_wanted_gradients() -> None:
    query, key, value, _, grad = Case().tensors()
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.clone().requires_grad_(w) for t, w in zip((query, key, value), wanted,
                                                              strict=True)]  # fmt: skip
        out = elsa.offload.attention(*leaves, device="cpu", block=16)
        assert isinstance(out, Tensor)
        out.backward(grad)
        assert tuple(leaf.grad is not None for leaf in leaves) == wanted


def test_autocast_and_compile() -> None:
    query, key, value, _, _ = Case().tensors()

    def call(*tensors: Tensor) -> Any:
        return elsa.offload.attention(*tensors, device="cpu", block=16)

    with torch.autocast("cpu", torch.bfloat16):
        assert call(query, key, value).dtype == torch.bfloat16
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    compiled(*leaves).square().sum().backward()
    others = [t.clone().requires_grad_() for t in (query, key, value)]
    call(*others).square().sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert torch.equal(leaf.grad, other.grad)


def test_operator() -> None:
    query, key, value, mask, _ = Case(mask="hidden", dtype=torch.float64).tensors()
    for causal, bias in ((True, None), (False, mask)):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        terms = (causal, 0.25, "strict", "auto", "cpu", 16, 13)
        torch.library.opcheck(torch.ops.elsa.offloaded_attention.default, (*leaves, bias, *terms))


REFUSED = {
    "offload must be 'host'": {"offload": "disk"},
    "offload_block without offload": {"offload": None, "offload_block": 4},
    "offload_block=0 must be 1 or more": {"offload_block": 0},
    "takes no dropout_p": {"dropout_p": 0.1},
    "exclude each other": {"is_causal": True, "attn_mask": torch.zeros(9, 9)},
    "attn_mask requires a gradient": {"attn_mask": torch.zeros(9, 9, requires_grad=True)},
    "backend='other' is unknown": {"backend": "other"},
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line: str) -> None:
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ArgumentError, match=re.escape(line)):
        elsa.attention(x, x, x, **{"offload": "host"} | REFUSED[line])


def test_a_block_is_named_as_it_was_given() -> None:
    x = torch.randn(1, 2, 9, 8)
    for given in (2.5, "a"):
        with pytest.raises(TypeError, match=f"offload_block must be a whole number, not {given!r}"):
            elsa.attention(x, x, x, offload="host", offload_block=given)  # type: ignore[arg-type]
    for name in ("block", "query_block"):
        with pytest.raises(ArgumentError, match=f"^{name}=0 must be 1 or more"):
            elsa.offload.attention(x, x, x, device="cpu", **{name: 0})  # type: ignore[arg-type]


def test_a_tensor_as_scale_is_refused() -> None:
    """Its gradient was dropped without a word."""
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ArgumentError, match="scale must be a number, not a tensor"):
        elsa.offload.attention(x, x, x, device="cpu", scale=torch.ones((), requires_grad=True))  # type: ignore[arg-type]


def test_other_derivatives_are_refused() -> None:
    """Tangents were zero without a word, and torch.func.grad failed in PyTorch's own words."""
    x = torch.randn(1, 2, 9, 8)

    def call(query: Tensor) -> Tensor:
        return elsa.attention(query, x, x, offload="host").sum()  # type: ignore[union-attr]

    line = "offload='host' has no forward-mode AD"
    with pytest.raises(ArgumentError, match=line):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(ArgumentError, match=line):
        torch.func.grad(call)(x)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match=line):
        call(forward_ad.make_dual(x, x))


def test_an_exported_program_is_refused() -> None:
    """It held an operator that `import elsa_core` does not define, and did not load."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return elsa.attention(x, x, x, offload="host")

    with pytest.raises(ArgumentError, match="offload='host' cannot be exported"):
        torch.export.export(Layer(), (torch.randn(1, 2, 9, 8),))


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
def test_rows_hidden_by_a_large_number_are_refused(lowest: float) -> None:
    """Blocks of 16 and 4 keys weighed the same, because lse had lost their count."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 20, 8, generator=generator).unbind()
    mask = torch.zeros(1, 1, 20, 20)
    mask[:, :, 3] = lowest
    for query_block in (20, 7):
        call = functools.partial(
            elsa.offload.attention, query, key, value, device="cpu", block=16,
            query_block=query_block,
        )  # fmt: skip
        with pytest.raises(ArgumentError, match="hide rows with -inf or a bool mask"):
            call(mask)
        for other in (mask.clamp(min=-1e4), mask == 0, mask.masked_fill(mask < 0, -torch.inf)):
            whole = elsa.attention(query, key, value, other)
            assert torch.allclose(call(other), whole, atol=2e-3)  # type: ignore[arg-type]
    hidden = torch.zeros(1, 1, 20, 20)
    hidden[..., 5:] = lowest  # keys, not rows
    found = elsa.offload.attention(query, key, value, hidden, device="cpu", block=16)
    assert torch.allclose(found, elsa.attention(query, key, value, hidden), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("serve", ["offload", "entmax"])
def test_compiles_whole_for_several_head_dims(serve: str) -> None:
    """The second head dim is symbolic, and the table of backends wants numbers."""

    def call(x: Tensor) -> Any:
        if serve == "offload":
            return elsa.attention(x, x, x, offload="host")
        return elsa.entmax_attention(x, x, x)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for head_dim in (8, 16, 24):
        x = torch.randn(1, 2, 9, head_dim)
        assert torch.allclose(compiled(x), call(x), atol=1e-6)


def test_refused_devices() -> None:
    x, away = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8, device="meta")
    with pytest.raises(ArgumentError, match="reads keys and values from host memory: key is on"):
        elsa.attention(away, away, away, offload="host")
    with pytest.raises(ArgumentError, match="computes on CUDA devices and CPUs, not on meta"):
        elsa.attention(away, x, x, offload="host")
    with pytest.raises(ArgumentError, match="query is on meta, but cpu computes"):
        elsa.offload.attention(away, x, x, device="cpu")
    with pytest.raises(UnavailableError, match="cannot serve"):
        elsa.offload.attention(x, x, x, device="cpu", backend="triton")


def test_twice_is_refused() -> None:
    x = torch.randn(1, 1, 5, 8, requires_grad=True)
    out = elsa.offload.attention(x, x, x, device="cpu")
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(ArgumentError, match="differentiable once"):
        grad.sum().backward()


def call_of(queries: int, keys: int, **changed: Any) -> passes.Call:
    x = torch.empty(1, 1, 1, 64)
    call = passes.Call(
        x.expand(1, 16, queries, 64), x.expand(1, 16, keys, 64), x.expand(1, 16, keys, 64), None,
        False, 1.0, "strict", "auto", torch.device("cuda", 0), 0, 0,
    )  # fmt: skip
    return call._replace(**changed)


def test_sizes_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks fit in the free memory, and are small where a copy is what takes the time."""
    free = 100 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    share = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, share, lambda device: 1.0, raising=False)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    token = 16 * 128 * 4  # bytes of key and value
    rows, block = passes.sizes(call_of(1 << 20, 1 << 20), backward=False)
    assert rows == 1 << 20 and block % 128 == 0 and 1 << 16 <= block <= 1 << 19
    few, small = passes.sizes(call_of(1, 1 << 20), backward=False)
    assert few == 1 and small < block
    free = 4 << 30
    rows, block = passes.sizes(call_of(1 << 20, 1 << 20), backward=False)
    assert rows < 1 << 19 and 2 * block * token < free
    assert passes.sizes(call_of(1 << 20, 1 << 20), backward=True)[0] < rows
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
    assert passes.sizes(call_of(1 << 20, 1 << 20), backward=False)[1] * token <= 300 << 20
    asked = call_of(1 << 20, 1 << 20, block=77, query_block=99)
    assert passes.sizes(asked, backward=False) == (99, 77)


def test_contiguous_parts() -> None:
    """Every element goes to its place, in as few copies as the memory allows."""
    for source, copies in (
        (torch.randn(2, 3, 50, 8)[:, :, 7:20], 6),
        (torch.randn(2, 50, 3, 8).transpose(1, 2)[:, :, 7:20], 2),
        (torch.randn(1, 3, 8, 50).mT, 1),
        (torch.randn(2, 1, 50, 8).expand(2, 3, 50, 8)[:, :, :9], 6),
    ):
        target = streaming.in_order_of(source, torch.full((source.numel() + 5,), torch.nan))
        parts = list(streaming.runs(target, source))
        assert len(parts) == copies
        for to, part in parts:
            assert to.is_contiguous() and part.is_contiguous()
            to.copy_(part)
        assert torch.equal(target, source)


class Widened(TorchDispatchMode):
    """How many blocks of keys and values in float64 are alive at a time."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.most, self._shape = 0, shape
        self._alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        widens = func is torch.ops.aten._to_copy.default and found.dtype == torch.float64
        if widens and found.shape == self._shape:
            self._alive = [each for each in self._alive if each() is not None]
            self._alive.append(weakref.ref(found))
            self.most = max(self.most, len(self._alive))
        return found


def test_large_scores_hold_one_wide_block_at_a_time() -> None:
    shape = torch.Size((1, 1, 64, 8))
    terms = [torch.randn(1, 1, n, 8) * 100 for n in (16, 256, 256)]
    call = passes.Call(*terms, None, False, 1.0, "strict", "auto", torch.device("cpu"), 64, 16)
    saved = Saved(torch.ones_like(terms[0]), *passes.forward(call))
    with Widened(shape) as widened:
        passes.backward(call, saved, Wanted(True, True, True, False))
    assert widened.most == 2  # its keys and its values
