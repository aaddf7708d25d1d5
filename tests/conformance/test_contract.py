"""What the public operators promise beside their numbers: what they take, refuse, say and keep.

Shapes of any rank, dtypes under autocast, shapes without data, programs for any length, derivatives
in float64, seeds of dropout, `explain`, and errors of one line that name the argument.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import forked
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import elsa_core as elsa
from elsa_core import ops
from elsa_core.errors import ArgumentError, UnavailableError

from . import edges
from .backends import backends
from .cases import CASES, Case, build
from .judge import PUBLIC, public

OPERATORS = list(CASES)
Q = torch.zeros(1, 2, 4, 8)
P = torch.zeros(5, 2, 8)
CU = torch.tensor([0, 2, 5])
IMAGE = torch.zeros(1, 10, 9, 72)


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(operator: str, **changes: Any) -> Case:
    return Case(operator, "a call", changes)


def f64(operator: str) -> Case:
    small = {"window_attention": {"size": (2, 3), "window": (2, 2), "shift": (0, 1), "dim": 1,
                                  "batch": 1, "pad": True},
             "linear": {"batch": (3,), "depth": 4, "width": 5, "scale": True, "residual": True},
             "varlen_attention": {"lengths": (3, 1), "heads": 2, "dim": 3},
             "entmax_varlen_attention": {"lengths": (3, 1), "heads": 2, "dim": 3}}  # fmt: skip
    dense = {"batch": (1,), "heads": 2, "queries": 3, "keys": 4, "dim": 3, "mask": "own dtype"}
    return case(operator, dtype="float64", **small.get(operator, dense))


# What is refused: the arguments that differ, and a word of the message.
DENSE = [
    ({"query": Q.int(), "key": Q.int(), "value": Q.int()}, "query"),
    ({"key": Q.half()}, "dtype"),
    ({"key": Q.to("meta")}, "device"),
    ({"query": Q[0, 0, 0], "key": Q[0, 0, 0], "value": Q[0, 0, 0]}, "rank"),
    ({"key": Q[..., :4]}, "head_dim"),
    ({"value": Q[:, :, :3]}, "tokens"),
    ({"query": Q.expand(2, -1, -1, -1), "key": Q.expand(3, -1, -1, -1)}, "batch"),
    ({"query": Q.repeat(1, 2, 1, 1)}, "enable_gqa"),
    ({"query": Q.repeat(1, 2, 1, 1)[:, :3], "enable_gqa": True}, "heads"),
    ({"attn_mask": torch.zeros(3, 4)}, "attn_mask"),
    ({"attn_mask": torch.zeros(1, 1, 1, 1, 4)}, "attn_mask"),
    ({"attn_mask": torch.zeros(4, 4, dtype=torch.int32)}, "attn_mask"),
    ({"attn_mask": torch.zeros(4, 4, device="meta")}, "attn_mask"),
    ({"attn_mask": torch.zeros(4, 4), "is_causal": True}, "is_causal"),
    ({"scale": torch.tensor(0.3)}, "scale must be a number"),
    ({"precision": "exact"}, "precision"),
    ({"backend": "fast"}, "backend='fast' is unknown"),
]
REFUSED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "attention": ({"query": Q, "key": Q, "value": Q}, [
        *DENSE,
        *(({"dropout_p": p}, "dropout_p") for p in (1.5, -0.1, math.nan)),
        *(({"sparsity": s}, "sparsity=") for s in (0.0, 1.0, -0.5, "auto", math.nan, True)),
        ({"dropout_p": 0.1, "sparsity": "exact"}, "exclude each other"),
        ({"query": Q.clone().requires_grad_(), "sparsity": 0.01}, "has no gradients"),
    ]),
    "entmax_attention": ({"query": Q, "key": Q, "value": Q}, [
        *DENSE,
        ({"alpha": 0.9}, "alpha=0.9 must be in [1, 4]"),
        ({"alpha": math.nan}, "alpha=nan must be"),
        ({"alpha": torch.tensor([1.0, 4.5]).reshape(2, 1, 1)}, "entries from 1.0 to 4.5"),
        ({"alpha": torch.ones(3, 1, 1)}, "alpha of shape [3, 1, 1] does not broadcast"),
        ({"alpha": torch.ones((), dtype=torch.int64)}, "alpha must be floating"),
    ]),
    "window_attention": (
        {"qkv": IMAGE, "bias": torch.zeros(4, 16, 16), "num_heads": 4, "window_size": (4, 4),
         "shift_size": (2, 2)},
        [
            ({"window_size": (4, 4, 4)}, "expected"),
            ({"window_size": (0, 4)}, "must be positive"),
            ({"window_size": (4.7, 4)}, "window_size must be whole numbers"),
            ({"window_size": 4}, "window_size must be whole numbers"),
            ({"shift_size": (2, 2.5)}, "shift_size must be whole numbers"),
            ({"shift_size": (4, 0)}, "smaller than"),
            ({"shift_size": (-1, 0)}, "at least 0"),
            ({"scale": torch.tensor(0.3)}, "scale must be a number"),
            ({"num_heads": 5}, "does not divide"), ({"num_heads": 0}, "does not divide"),
            ({"layout": "kqv"}, "layout='kqv' is unknown"),
            ({"grid": True, "shift_size": (0, 0)}, "grid=True needs"),
            ({"mask_value": math.nan}, "mask_value"), ({"precision": "exact"}, "precision"),
            ({"backend": "fast"}, "backend='fast' is unknown"),
            ({"bias": torch.zeros(4, 16, 15)}, "bias of shape"),
            ({"bias": torch.zeros(4, 16, 16).double()}, "bias must be half precision"),
            ({"bias_index": torch.zeros(16, 16).int()}, "bias_index must be int64"),
            ({"bias": None, "bias_index": torch.zeros(16, 16).long()}, "needs bias"),
            ({"bias": torch.zeros(5, 4), "bias_index": torch.full((16, 16), 5)}, "bias_index"),
            ({"pad_qkv": torch.zeros(7)}, "pad_qkv of shape"),
            ({"logit_scale": torch.zeros(2)}, "logit_scale of shape"),
            ({"qkv": IMAGE.long()}, "must be floating"), ({"qkv": IMAGE[0]}, "expected"),
            ({"qkv": IMAGE[..., :0]}, "does not divide"),
        ],
    ),
    "linear": ({"input": torch.zeros(3, 8), "weight": torch.zeros(5, 8)}, [
        ({"input": torch.zeros(3, 7)}, "input must be [..., 8]"),
        ({"input": torch.zeros(3, 8).int()}, "input must be floating"),
        ({"weight": torch.zeros(8)}, "weight must be [N, K]"),
        ({"bias": torch.zeros(4)}, "bias must be [5]"),
        ({"scale": torch.zeros(1, 5)}, "scale must be [5]"),
        ({"residual": torch.zeros(1, 5)}, "residual must be [3, 5]"),
        ({"activation": "tanh"}, "activation='tanh' is unknown"),
        ({"precision": "exact"}, "precision"), ({"backend": "fast"}, "backend='fast' is unknown"),
        ({"value": (torch.zeros(5, 7), None)}, "value"),
    ]),
    "varlen_attention": ({"query": P, "key": P, "value": P, "cu_seqlens_q": CU}, [
        ({"query": P[None]}, "must be [tokens, heads, dim]"),
        ({"key": P.half()}, "share one floating dtype"),
        ({"key": P[..., :4]}, "key has head_dim 4"),
        ({"value": P[:4]}, "key has [5, 2] tokens and heads, value [4, 2]"),
        ({"key": P[:, :1], "value": P[:, :1]}, "key has 1 heads, query 2"),
        ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q must be int32 or int64"),
        ({"cu_seqlens_q": CU[None]}, "cu_seqlens_q must be [sequences + 1]"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 5])}, "cu_seqlens_q must start with 0, not decrease"),
        ({"cu_seqlens_k": torch.tensor([1, 2, 5])}, "cu_seqlens_k must start with 0"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, "end with 5 tokens"),
        ({"cu_seqlens_k": CU[[0, 2]]}, "cu_seqlens_q is of 2 sequences, cu_seqlens_k of 1"),
        ({"max_seqlen_q": 2}, "max_seqlen_q=2, but a sequence has 3"),
        ({"scale": torch.ones(())}, "scale must be a number"),
        ({"backend": "fast"}, "backend='fast' is unknown"), ({"precision": "low"}, "'low'"),
    ]),
}  # fmt: skip
given, rows = REFUSED["varlen_attention"]
REFUSED["entmax_varlen_attention"] = (given, [*rows, ({"alpha": 0.9}, "alpha=0.9 must be in")])


@pytest.mark.parametrize(
    ("operator", "change", "words"),
    [(name, *row) for name, (_, rows) in REFUSED.items() for row in rows],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused(operator: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, TypeError)) as error:
        getattr(elsa, operator)(**REFUSED[operator][0] | change)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("operator", REFUSED)
def test_arguments_of_other_types_are_named(operator: str) -> None:
    right = REFUSED[operator][0]
    for name in [name for name, t in right.items() if isinstance(t, Tensor)]:
        with pytest.raises(TypeError, match=f"{name} must be a torch"):
            getattr(elsa, operator)(**right | {name: [1.0]})


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_backend_that_cannot_serve_says_why(operator: str) -> None:
    if operator == "linear":  # PyTorch's product serves what a backend does not
        return
    with pytest.raises(UnavailableError, match="triton"):
        public(operator, "triton", False)(build(case(operator)).arguments)


def test_too_wide_a_head_is_plain_pytorchs() -> None:
    wide = torch.zeros(1, 1, 4, 300)
    with pytest.raises(UnavailableError, match="head_dim"):
        elsa.attention(wide, wide, wide, backend="native")
    route = elsa.explain(wide, wide, wide)
    assert route.backend == "eager" and any(r.startswith("native:") for r in route.reasons)


# Shapes


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("operator", ["attention", "entmax_attention", "sparsity", "dropout"])
def test_any_rank_and_broadcast_batches(operator: str, backend: str) -> None:
    """Leading axes are a batch; axes of one are broadcast, masks as PyTorch does."""
    call = public(operator, backend, False)
    extra = {"sparsity": {"sparsity": "exact"}, "dropout": {"dropout_p": 0.3}}.get(operator, {})

    def run(*tensors: Tensor, **terms: Any) -> Tensor:
        torch.manual_seed(0)
        names = ("query", "key", "value", "attn_mask")
        return call(dict(zip(names, tensors, strict=False)) | extra | terms)["out"]

    for shape in ((20, 8), (3, 20, 8), (2, 3, 4, 20, 8), (2, 1, 3, 2, 20, 8)):
        q, k, v, mask = (make(*shape, seed=i) for i in range(4))
        mask = make(20, 20, seed=5)
        flat = [t.reshape(1, -1, 20, 8) for t in (q, k, v)]
        if len(shape) > 3:
            flat = [t.reshape(-1, shape[-3], 20, 8) for t in (q, k, v)]
        torch.testing.assert_close(run(q, k, v, mask), run(*flat, mask).reshape(shape))
    q, k, v = make(1, 4, 7, 8), make(3, 1, 20, 8, seed=1), make(3, 4, 20, 8, seed=2)
    wide = run(q.expand(3, -1, -1, -1), k.expand(-1, 4, -1, -1), v)
    torch.testing.assert_close(run(q, k, v), wide)
    q, k = make(4, 3, 8), make(2, 5, 8, seed=1)
    grouped = run(q, k, k, make(4, 3, 5, seed=3), enable_gqa=True)
    assert grouped.shape == (4, 3, 8)
    windows = make(2, 4, 16, 3, 2, 8).permute(3, 0, 4, 1, 2, 5)  # [3, B, H, windows, N, D]
    torch.testing.assert_close(run(*windows), run(*(t.contiguous() for t in windows)))


@pytest.mark.parametrize("operator", ["attention", "entmax_attention"])
def test_the_callers_transpose_is_a_view(operator: str) -> None:
    q = make(2, 3, 11, 8)
    out = getattr(elsa, operator)(q, q, q)
    rows = out.transpose(1, 2).reshape(2, 11, 24)
    assert rows.data_ptr() == out.data_ptr() and rows.is_contiguous()


@pytest.mark.parametrize("operator", OPERATORS)
def test_shapes_without_data_and_under_autocast(operator: str) -> None:
    arguments = build(case(operator)).arguments
    if operator not in ("linear", "window_attention"):  # whose operands a layer casts
        with torch.autocast("cpu", torch.bfloat16):
            assert public(operator, "auto", False)(arguments)["out"].dtype == torch.bfloat16
    shape = public(operator, "auto", False)(arguments)["out"].shape
    meta = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in arguments.items()}
    assert public(operator, "auto", False)(meta)["out"].shape == shape


def test_alpha_of_one_is_softmax_and_zeros_are_exact() -> None:
    q, k = make(1, 2, 50, 16), make(1, 2, 200, 16, seed=1)
    assert torch.equal(elsa.entmax_attention(q, k, k, alpha=1), elsa.attention(q, k, k))
    weights = elsa.entmax_attention(q, k, torch.eye(200).expand(1, 2, 200, 200))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 50), rtol=0, atol=1e-6)
    assert 0.5 < (weights == 0).float().mean() < 1


# Derivatives


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "sparsity"])
def test_derivatives_agree_with_differences(operator: str) -> None:
    call = build(f64(operator))
    names = call.wants
    leaves = [call.arguments[name].clone().requires_grad_() for name in names]

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)
        given = call.arguments | dict(zip(names, tensors, strict=True))
        return public(operator, "auto", False)(given)["out"]

    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=False)
    if operator in ("attention", "window_attention", "linear"):
        assert torch.autograd.gradgradcheck(run, leaves)


def test_a_backend_without_forward_mode_says_so() -> None:
    q = make(1, 2, 5, 8)
    with forward_ad.dual_level():
        with pytest.raises(UnavailableError, match="native' has no forward-mode AD"):
            elsa.attention(q, q, q, backend="native")
        assert elsa.explain(q, q, q).backend == "eager"


@pytest.mark.parametrize("operator", ["attention", "window_attention", "entmax_attention"])
def test_derivatives_of_each_sample(operator: str) -> None:
    """`vmap` of a gradient is the gradients one by one."""
    call = build(f64(operator))
    name = call.wants[0]

    def loss(t: Tensor) -> Tensor:
        return public(operator, "auto", False)(call.arguments | {name: t})["out"].sin().sum()

    many = torch.stack([call.arguments[name], call.arguments[name] * 2])
    one_by_one = torch.stack([torch.func.grad(loss)(t) for t in many])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(many), one_by_one)


# Programs


class Block(nn.Module):
    """A projection and one operator, of any batch and length."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.call = nn.Linear(16, 48), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.call(q, k, v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("operator", ["attention", "entmax_attention", "sparsity"])
def test_one_program_serves_every_length(operator: str, backend: str) -> None:
    """A new batch or length compiles nothing; exported programs keep the operator."""
    extra = {"sparsity": "exact"} if operator == "sparsity" else {}
    function = getattr(elsa, PUBLIC.get(operator, operator))
    block = Block(lambda q, k, v: function(q, k, v, backend=backend, **extra)).eval()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((2, 5), (3, 9), (5, 33), (2, 64)):
            x = make(batch, length, 16)
            torch.testing.assert_close(compiled(x), block(x))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    if operator == "entmax_attention":
        return
    program = torch.export.export(block, (make(2, 5, 16),), dynamic_shapes=(dims,))
    names = [str(node.target) for node in program.graph.nodes]
    assert operator == "sparsity" or any("elsa." in name for name in names)
    x = make(4, 37, 16)
    torch.testing.assert_close(program.module()(x), block(x))


def test_one_program_serves_all_packed_lengths() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
        return elsa.varlen_attention(q * 2, k, v, ends, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, lengths in enumerate(((5, 0, 9), (1, 30, 2, 2), (64, 0))):
        q, k, v = (make(sum(lengths), 2, 8, seed=s).requires_grad_() for s in (1, 2, 3))
        ends = torch.tensor([0, *lengths]).cumsum(0)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            out = compiled(q, k, v, ends)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        plain = step(q, k, v, ends)
        torch.testing.assert_close(out, plain)
        for a, b in zip(grads, torch.autograd.grad(plain.square().sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def arguments_of_operators(*, grads: bool = False) -> dict[str, tuple[Any, ...]]:
    """A call of each operator that programs hold."""
    q, k, mask = make(2, 4, 9, 8), make(2, 2, 65, 8, seed=1), make(1, 4, 9, 65)
    for t in (q, k):
        t.requires_grad_(grads)
    v = (k * 2).detach().requires_grad_(grads)
    x = make(1, 1, 5, 7, 24).requires_grad_(grads)
    packed, doubled = (make(9, 2, 8, seed=i).requires_grad_(grads) for i in (0, 1))
    ends = torch.tensor([0, 4, 9])
    return {
        "attention": (q, k, v, mask, False, 0.3, "strict"),
        "entmax_attention": (q, k, v, None, None, 1.5, True, 0.3, "strict"),
        "attention_dropout": (
            q, k, v, mask, False, 0.3, "strict", 0.2, torch.tensor([3, 4])),
        "window_attention": (
            x, make(2, 12, 12), None, None, None, 2, [1, 3, 4], [0, 1, 2], 0.5, -100.0, "qkv",
            False, "strict"),
        "varlen_attention": (packed, packed, doubled, ends, ends, True, 0.3, "strict"),
        "entmax_varlen_attention": (
            packed, packed, doubled, ends, ends, None, 5, 5, 1.5, True, 0.3, "strict"),
        "sparse_attention": (q, k, v, mask, False, 0.3, "strict", 0.0, 0),
        "linear": (packed, make(5, 8), make(5), "gelu", make(9, 2, 5), make(5), "strict"),
    }  # fmt: skip


@pytest.mark.parametrize("grads", [False, True])
def test_operators_are_what_pytorch_is_told(grads: bool) -> None:
    """`opcheck`: schema, fake and autograd of the operators that programs hold."""
    assert elsa.explain(X, X, X, backend="native").backend == "native"  # the library is loaded
    for name, given in arguments_of_operators(grads=grads).items():
        for each in ops.RECORDS[name].names:
            operator = getattr(torch.ops.elsa, each.removeprefix("elsa::"))
            torch.library.opcheck(operator, given)
            if not grads:  # float32 results of half precision are what the fake says too
                half = [t.half() if isinstance(t, Tensor) and t.is_floating_point() else t
                        for t in given]  # fmt: skip
                torch.library.opcheck(operator, half, test_utils="test_faketensor")


@pytest.mark.parametrize("name", arguments_of_operators())
def test_what_is_exported_stays_on_its_device(name: str) -> None:
    given = arguments_of_operators()[name]
    with FakeTensorMode():
        moved = [
            torch.empty(t.shape, dtype=t.dtype, device="cuda:1") if isinstance(t, Tensor) else t
            for t in given
        ]
        found = ops.RECORDS[name].exported(*moved)
    assert (found if isinstance(found, Tensor) else found[0]).device == torch.device("cuda:1")


# Dropout


@pytest.mark.parametrize("backend", [b for b in backends("dropout", "cpu") if b != "auto"])
def test_what_is_dropped_follows_the_seed(backend: str) -> None:
    q, v = torch.zeros(2, 3, 40, 4), torch.eye(48).expand(2, 3, 48, 48)
    k = torch.zeros(2, 3, 48, 4)
    kept = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        kept += [elsa.attention(q, k, v, dropout_p=0.3, backend=backend) > 0 for _ in range(2)]
    assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3])
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[4])
    centred = kept[0].double() - 0.7
    spread = 0.3 * 0.7
    assert abs(centred.mean()) < 5 * math.sqrt(spread / centred.numel())
    for dim in range(4):  # neighbours have nothing to do with each other
        last = centred.shape[dim] - 1
        pairs = centred.narrow(dim, 0, last) * centred.narrow(dim, 1, last)
        assert abs(pairs.mean()) < 5 * spread / math.sqrt(pairs.numel()), dim


def test_no_dropout_draws_nothing() -> None:
    x = make(1, 2, 9, 8)
    state = torch.get_rng_state()
    assert torch.equal(elsa.attention(x, x, x, dropout_p=0.0), elsa.attention(x, x, x))
    assert torch.equal(state, torch.get_rng_state())


def test_entmax_keeps_wide_scores_in_derivatives_of_torch_func_under_autocast() -> None:
    """Products in half precision made them NaN."""
    q, k, v = (make(2, 2, 64, 32, seed=i).bfloat16() for i in range(3))

    def slope(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.grad(lambda t: elsa.entmax_attention(t, k, v).double().square().sum())(q)

    exact = slope(q.double(), k.double(), v.double())
    with torch.autocast("cpu", torch.bfloat16):
        error = (slope(q, k, v).double() - exact).norm()
    assert error < 4 * (slope(q, k, v).double() - exact).norm()


# explain


@pytest.mark.parametrize("operator", REFUSED)
def test_explain_names_who_serves_and_raises_what_the_call_does(operator: str) -> None:
    right, rows = REFUSED[operator]
    explain = elsa.explain if operator == "attention" else getattr(elsa, f"explain_{operator}")
    route = explain(**right)
    assert route.backend in backends(operator, "cpu") and route.schedule
    for change, words in rows:
        if change.keys() & {"scale", "mask_value"}:  # numbers that choose nothing
            continue
        with pytest.raises((ArgumentError, TypeError)) as error:
            explain(**right | change)
        assert words in str(error.value), change


@pytest.mark.parametrize(
    "operator", ["attention", "entmax_attention", "varlen_attention", "entmax_varlen_attention"]
)
def test_explain_speaks_of_what_autocast_makes_of_a_call(operator: str) -> None:
    """It named the arithmetic of the tensors as they were given."""
    explain = elsa.explain if operator == "attention" else getattr(elsa, f"explain_{operator}")
    right = REFUSED[operator][0]
    tensors = {n: t for n, t in right.items() if isinstance(t, Tensor) and t.is_floating_point()}
    with torch.autocast("cpu", torch.bfloat16):
        route = explain(**right)
    assert route == explain(**right | {n: t.bfloat16() for n, t in tensors.items()})
    assert route.arithmetic != explain(**right).arithmetic


def test_plain_attention_needs_memory_linear_in_tokens() -> None:
    length = 4096
    q = make(1, 1, length, 8)
    for operator in ("attention", "entmax_attention"):
        with torch.profiler.profile(profile_memory=True) as profile:
            getattr(elsa, operator)(q, q, q, backend="eager")
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert largest < length * length * 4 / 3


# The operators, called past the checks of the functions


X = make(1, 3, 5, 16)
WRONG: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "attention": (
        {"query": X, "key": X, "value": X, "attn_mask": None, "is_causal": False, "scale": 0.3,
         "precision": "strict"},
        [
            ({"query": X[0]}, "query must have 4 dimensions, has 3"),
            ({"key": X.expand(2, -1, -1, -1)}, "batch sizes differ"),
            ({"key": X[:, :2]}, "key has 2 heads and value 3"),
            ({"key": X[:, :2], "value": X[:, :2]}, "no multiple"),
            ({"key": X[:, :, :3]}, "3 keys and 5 values"),
            ({"key": X[..., :3]}, "head_dim of query is 16 and of key 3"),
            ({"query": X.half()}, "one dtype"),
            ({"query": X.int(), "key": X.int(), "value": X.int()}, "float32, float16 or bfloat16"),
            ({"attn_mask": torch.zeros(1, 1, 5, 4)}, "attn_mask has size 4 in dimension 3"),
            ({"attn_mask": torch.zeros(1, 1, 5, 5).half()}, "attn_mask must be bool"),
        ],
    ),
    "window_attention": (
        {"qkv": torch.zeros(1, 1, 7, 7, 96), "bias": None, "bias_index": None, "pad_qkv": None,
         "logit_scale": None, "num_heads": 2, "window_size": (1, 7, 7), "shift_size": (0, 0, 0),
         "scale": 0.25, "mask_value": -100.0, "layout": "qkv", "grid": False,
         "precision": "strict"},
        [
            ({"qkv": torch.zeros(1, 7, 7, 96)}, "5 dimensions, has 4"),
            ({"qkv": torch.zeros(1, 1, 7, 7, 95)}, "95 channels"),
            ({"qkv": torch.zeros(1, 1, 7, 7, 6 * 257)}, "head_dim must be 1 to 256"),
            ({"qkv": torch.zeros(1, 1, 7, 7, 96).int()}, "float32, float16 or bfloat16"),
            ({"num_heads": 0}, "96 channels"), ({"window_size": (1, 7)}, "3 entries"),
            ({"window_size": (1, 0, 7)}, "window_size must be positive"),
            ({"window_size": (2**31 - 1,) * 3}, "too large"),
            ({"shift_size": (0, 7, 0)}, "smaller than the window"),
            ({"shift_size": (0, -1, 0)}, "at least 0"),
            ({"layout": "kqv"}, "layout must be qkv or"),
            ({"qkv": torch.zeros(1, 1, 8, 7, 96), "grid": True}, "multiples of the window"),
            ({"grid": True, "shift_size": (0, 0, 1)}, "and no shift"),
            ({"bias": torch.zeros(2, 49, 48)}, "bias must be [2, 49, 49]"),
            ({"bias": torch.zeros(2, 49, 49).half()}, "float32 or qkv's dtype"),
            *(({"bias": torch.zeros(5, 2), "bias_index": torch.full((49, 49), at)},
               "entries outside [0, 5)") for at in (-1, 5)),
            ({"pad_qkv": torch.zeros(95)}, "pad_qkv must be [96]"),
            ({"logit_scale": torch.zeros(3)}, "logit_scale must be [2]"),
        ],
    ),
    "entmax_attention": (
        {"query": X, "key": X, "value": X, "attn_mask": None, "head_alpha": None, "alpha": 1.5,
         "is_causal": False, "scale": 0.5, "precision": "strict"},
        [
            ({"head_alpha": torch.ones(4, 1, 1, 1)}, "head_alpha must be"),
            ({"head_alpha": torch.ones(1, 1, 1, 1).long()}, "head_alpha must be floating"),
            ({"key": X[..., :3]}, "head_dim of query is 16"),
            ({"query": X.double()}, "float32, float16 or bfloat16"),
        ],
    ),
}  # fmt: skip
WRONG["attention_dropout"] = (
    WRONG["attention"][0] | {"dropout_p": 0.5, "seed": torch.tensor([3, 4])},
    [
        ({"seed": torch.tensor([3])}, "int64"), ({"seed": torch.tensor([3, 4]).int()}, "int64"),
        ({"dropout_p": 1.5}, "dropout_p"),
    ],
)  # fmt: skip
WRONG["sparse_attention"] = (
    WRONG["attention"][0] | {"threshold": 0.0, "relief": 0},
    [({"threshold": 0.5}, "threshold must not be positive"), ({"relief": 8}, "relief 0 to 7")],
)
WRONG["varlen_attention"] = (
    {"query": P, "key": P, "value": P, "cu_seqlens_q": CU, "cu_seqlens_k": CU,
     "is_causal": False, "scale": 1.0, "precision": "strict"},
    [
        ({f"cu_seqlens_{side}": torch.tensor(ends)}, "must start with 0")
        for side in "qk"
        for ends in ([0, 9, 5], [1, 2, 5], [0, 2, 4], [0, -1, 5])
    ],
)  # fmt: skip


@pytest.mark.parametrize("operator", WRONG)
def test_native_operators_check_what_they_read(operator: str) -> None:
    right, rows = WRONG[operator]
    assert elsa.explain(X, X, X, backend="native").backend == "native"  # the library is loaded
    for change, words in rows:
        with pytest.raises((RuntimeError, ArgumentError)) as error:
            getattr(torch.ops.elsa, operator)(**right | change)
        assert words in str(error.value), change


MEMORY = """
import resource, sys, torch, elsa_core
torch.set_num_threads(2)
def step(n):
    q = torch.randn(1, 1, n, 8, requires_grad=sys.argv[1] == "train")
    call = elsa_core.entmax_attention if sys.argv[1] == "entmax" else elsa_core.attention
    out = call(q, q, q, backend="native")
    if q.requires_grad:
        out.sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(64)
before = peak()
step(8192)
print((peak() - before) / 1024)
"""


def test_native_memory_is_linear_in_tokens(tmp_path: Path) -> None:
    """The scores would take 256 MiB."""
    rows = [(MEMORY, [mode], {}) for mode in ("infer", "train", "entmax")]
    for done in forked(tmp_path, *rows):
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 64  # MiB: operands, output and two workspaces of a few


def test_sparsity_leaves_out_tiles_and_says_so() -> None:
    edges.sparsity_leaves_out_tiles_and_says_so("cpu", "native")
    x = make(1, 1, 512, 8)
    assert elsa.explain(x, x, x, sparsity="exact").backend == "native"
    wide = x.double()
    ordinary = elsa.attention(wide, wide, wide)
    assert torch.equal(elsa.attention(wide, wide, wide, sparsity=0.01), ordinary)


@pytest.mark.parametrize(
    "terms", [{"scale": 0.9}, {"is_causal": True}, {"attn_mask": torch.ones(40, 40).tril() > 0}]
)
def test_a_report_of_sparsity_is_of_the_call(terms: dict[str, Any]) -> None:
    q, k, v = (make(1, 2, 40, 8, seed=i) for i in range(3))
    report = elsa.sparsity_report(q, k, v, **terms)
    assert 0 < report.error < 1e-6 and 0 < report.dense_error < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):  # it was that of the call outside autocast
        report = elsa.sparsity_report(q, k, v, **terms)
    cast = [t.bfloat16() for t in (q, k, v)]
    assert report == elsa.sparsity_report(*cast, **terms) and report.error > 1e-4


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper writes it, in Python's integers."""
    (a, b, c, d), (first, second), word = counter, key, 0xFFFFFFFF
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ first, y & word, (x >> 32) ^ d ^ second, x & word
        first, second = (first + 0x9E3779B9) & word, (second + 0xBB67AE85) & word
    return [a, b, c, d]


@pytest.mark.parametrize("name", ["attention_dropout", "attention_dropout_eager"])
def test_a_weight_is_dropped_by_its_position_and_the_seed_alone(name: str) -> None:
    """By Philox: its counter is (key / 4, query, batch and head, offset)."""
    known = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # of Random123
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(counter, [0xA4093822, 0x299F31D0]) == known
    b, h, n, m, p = 2, 3, 5, 11, 0.3
    seed, offset = -0x123456789ABCDEF, 0x1_8765_4321
    q, k, eye = torch.zeros(b, h, n, 4), torch.zeros(b, h, m, 4), torch.eye(m).expand(b, h, m, m)
    operator = getattr(torch.ops.elsa, name)
    out = operator(q, k, eye, None, False, 1.0, "strict", p, torch.tensor([seed, offset]))[0]
    for i in itertools.product(range(b), range(h), range(n), range(m)):
        at = [i[3] // 4, i[2], i[0] * h + i[1], offset & 0xFFFFFFFF]
        word = philox(at, [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])[i[3] % 4]
        assert bool(out[i] > 0) == (word / 2**32 >= p)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_checkpointing_drops_the_same(backend: str, reentrant: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return elsa.attention(x, x, x, dropout_p=0.5, backend=backend)

    found = []
    for way in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        x = make(1, 2, 19, 8).requires_grad_()
        out = way(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_trace_draws_when_it_runs() -> None:
    x = make(1, 2, 9, 8)
    graph = make_fx(lambda x: elsa.attention(x, x, x, dropout_p=0.5))(x)
    assert not torch.equal(graph(x), graph(x))
    names = [str(node.target) for node in graph.graph.nodes]
    assert any("elsa.attention_dropout" in name for name in names)


def test_dropout_by_pytorch_is_pytorchs() -> None:
    x = make(1, 2, 9, 8)
    torch.manual_seed(0)
    out = elsa.attention(x, x, x, dropout_p=0.5, backend="sdpa")
    torch.manual_seed(0)
    peer = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert torch.equal(out, peer)


@pytest.mark.parametrize("operator", ["attention", "dropout", "entmax_attention"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_nothing_of_the_size_of_the_weights_is_saved(operator: str, backend: str) -> None:
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    x = make(1, 2, 300, 8).requires_grad_()
    given = {"query": x, "key": x, "value": x}
    given |= {"dropout_p": 0.5} if operator == "dropout" else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        public(operator, backend, False)(given)
    assert saved and max(saved) == x.numel()


@pytest.mark.parametrize("outside", [-1, 7])
def test_an_entry_beyond_the_table_is_nan_where_nobody_looks(outside: int) -> None:
    """Under transforms: a negative one must not read the table from its end."""
    table, index = make(7, 2), torch.randint(7, (16, 16))
    index[3, 5] = outside

    def call(x: Tensor) -> Tensor:
        terms = {"num_heads": 2, "window_size": (4, 4), "bias_index": index}
        return elsa.window_attention(x, table, **terms)

    x = make(1, 4, 4, 24)
    out, _ = torch.func.jvp(call, (x,), (x,))
    rows = out.flatten(0, 2).isnan().all(-1)
    assert rows.tolist() == [i == 3 for i in range(16)]


def test_whoever_watches_a_call_sees_the_operator() -> None:
    q = make(1, 2, 5, 8)
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        elsa.attention(q, q, q)
        with Recorder():
            elsa.attention(q, q, q)
        assert "elsa::attention" in seen
        graph = torch.jit.trace(lambda x: elsa.attention(x, x, x), (q,), check_trace=False).graph
        assert "elsa::attention" in str(graph)
        with FakeTensorMode() as fake:
            assert elsa.attention(*[fake.from_tensor(q)] * 3).shape == q.shape


def test_gradients_of_a_recorded_layer_are_in_its_dtype() -> None:
    x, w, b = (make(*s, seed=i).requires_grad_() for i, s in enumerate([(3, 8), (5, 8), (5,)]))
    out = torch.ops.elsa.linear(x, w, b)
    exact = torch.autograd.grad((x @ w.mT + b).square().sum(), (x, w, b))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, w, b)), exact)


def test_a_layer_promotes_and_casts_as_pytorch_does() -> None:
    x, w, scale = make(3, 8).bfloat16(), make(5, 8).bfloat16(), make(5)
    assert elsa.linear(x, w, scale=scale).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert elsa.linear(x.float(), w.float()).dtype == torch.bfloat16
        assert elsa.linear(x.float(), w.float(), residual=make(3, 5)).dtype == torch.float32
