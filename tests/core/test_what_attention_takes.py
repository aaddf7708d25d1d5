"""What `elsa.attention` takes as PyTorch's operator does: mixed ranks, unequal heads, layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core.backends import native
from elsa_core.errors import ArgumentError

BACKENDS = ["eager", "native"]


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agrees(
    shapes: tuple[tuple[int, ...], ...], mask_shape: tuple[int, ...] | None, backend: str, **kw
) -> None:
    if backend == "native":
        answer = native.load()
        assert answer.ok, answer.reason  # a machine that tests elsa has a compiler
    q, k, v = (make(*shape, seed=i) for i, shape in enumerate(shapes))
    mask = None if mask_shape is None else make(*mask_shape, seed=3)
    out, lse = elsa.attention(q, k, v, mask, backend=backend, return_lse=True, **kw)
    double = None if mask is None else mask.double()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), double, **kw)
    peer = F.scaled_dot_product_attention(q, k, v, mask, **kw)
    assert out.shape == peer.shape and lse.shape == peer.shape[:-1]
    error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (out, peer))
    assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps


RANKS = {
    "3 and 2": ((3, 5, 8), (7, 8), (7, 4)),
    "2 and 3": ((5, 8), (3, 7, 8), (3, 7, 4)),
    "4 and 3": ((2, 3, 5, 8), (3, 7, 8), (3, 7, 4)),
    "4 and 3, one head": ((2, 3, 5, 8), (1, 7, 8), (1, 7, 4)),
    "4 and 2": ((2, 3, 5, 8), (7, 8), (7, 4)),
    "3 and 4": ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    "4, 4 and 3": ((2, 3, 5, 8), (2, 3, 7, 8), (3, 7, 4)),
    "4, 3 and 2": ((2, 3, 5, 8), (3, 7, 8), (7, 4)),
    "5 and 4": ((2, 2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    "4 and 5": ((2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 4)),
    "5 and 3": ((2, 2, 3, 5, 8), (3, 7, 8), (3, 7, 4)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mask_shape", [None, (3, 5, 7)], ids=str)
def test_ranks_may_differ(ranks: str, mask_shape: tuple[int, ...] | None, backend: str) -> None:
    agrees(RANKS[ranks], mask_shape, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 2), (2, 4), (3, 2), (12, 2), (6, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_key_and_value_heads_may_differ(
    key_heads: int, value_heads: int, masked: bool, backend: str
) -> None:
    shapes = ((2, 12, 5, 8), (2, key_heads, 7, 8), (2, value_heads, 7, 4))
    agrees(shapes, (2, 12, 5, 7) if masked else None, backend, enable_gqa=True)
    shapes = ((12, 5, 8), (key_heads, 7, 8), (value_heads, 7, 4))  # without a batch
    agrees(shapes, (12, 5, 7) if masked else None, backend, enable_gqa=True)


def test_heads_that_do_not_divide_are_refused() -> None:
    q = make(2, 12, 5, 8)
    with pytest.raises(ArgumentError, match="heads"):
        elsa.attention(q, make(2, 5, 7, 8), make(2, 2, 7, 8), enable_gqa=True)
    with pytest.raises(ArgumentError, match="heads"):
        elsa.attention(q, make(2, 4, 7, 8), make(2, 2, 7, 8))


DENSE = make(2, 3, 5, 5)
JAGGED = [make(5, 3, 5), make(7, 3, 5)]
LAYOUTS = {
    "nested": (lambda: torch.nested.nested_tensor([make(3, 5, 5), make(3, 7, 5)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor(JAGGED, layout=torch.jagged).transpose(1, 2),
        "nested",
    ),
    "sparse": (DENSE.to_sparse, "sparse_coo"),
    "compressed": (DENSE[0, 0].to_sparse_csr, "sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning", "ignore:.*beta:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_what_is_not_dense_is_refused_in_one_line(layout: str, backend: str) -> None:
    build, words = LAYOUTS[layout]
    tensor = build()
    for name, arguments in {
        "query": (tensor, tensor, tensor),
        "key": (DENSE, tensor, DENSE),
        "value": (DENSE, DENSE, tensor),
    }.items():
        if (layout, name) == ("jagged", "query"):
            continue  # all three: what `attention` takes
        with pytest.raises(ArgumentError, match=f"^{name} .*{words}"):
            elsa.attention(*arguments, backend=backend)
    if layout == "sparse":
        with pytest.raises(ArgumentError, match=r"attn_mask .*sparse_coo"):
            elsa.attention(DENSE, DENSE, DENSE, tensor, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_of_no_image_lie_in_any_strides(backend: str) -> None:
    """PyTorch calls it contiguous, and the kernel refused its channels."""
    qkv = torch.empty(0, 4, 4, 48)[..., ::2].requires_grad_()
    out = elsa.window_attention(qkv, num_heads=2, window_size=(2, 2), backend=backend)
    assert out.shape == (0, 4, 4, 8)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape
