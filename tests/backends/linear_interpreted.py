"""Split products of linear layers, by Triton's interpreter, are exact for numbers of every size."""

from contextlib import contextmanager

import pytest
import torch
from conformance.fence import fenced

from elsa_core.backends.triton.linear import launches, planner
from elsa_core.ops.linear.record import plain, plain_backward

# name: (rows, channels, columns), options
CASES = {
    "several groups": ((600, 64, 4), {}),
    "large": ((130, 264, 132), {"tile": launches.LARGE}),
    "wide": ((65, 136, 140), {"tile": launches.WIDE}),
    "medium": ((70, 104, 68), {"tile": launches.MEDIUM}),
    "shallow": ((70, 96, 132), {"tile": launches.SHALLOW}),
    "long rows": ((64, 4104, 4), {}),
    "large numbers": ((64, 64, 8), {"times": 1e30}),
    "largest numbers": ((64, 64, 8), {"largest": True}),
    "small numbers": ((64, 64, 8), {"times": 1e-36}),
    "one small row": ((64, 64, 8), {"row": 1e-36}),
    "channels of other magnitude": ((64, 64, 8), {"channel": 1e12}),
    "whole numbers": ((70, 96, 68), {"whole": True}),
    "infinity": ((104, 64, 12), {"entry": float("inf")}),
    "not a number": ((104, 64, 12), {"entry": float("nan")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_of_numbers_of_every_size(name):
    """NaNs and infinities are where PyTorch has them."""
    (rows, depth, columns), options = CASES[name]
    x = torch.randn(rows, depth) * options.get("times", 1.0)
    if "largest" in options:
        x = torch.full_like(x, torch.finfo(torch.float32).max)
    if "row" in options:
        x[3] *= options["row"]
    if "entry" in options:
        x[100, 5] = options["entry"]
    w = torch.randn(columns, depth)
    if "largest" in options:
        w *= 1e-4
    if "whole" in options:
        x, w = (x * 4).round(), (w * 4).round()
    bias = None if {"times", "row", "whole", "channel"} & set(options) else torch.randn(columns)
    if "channel" in options:
        x[..., 3] *= options["channel"]
        w[:, 3] /= options["channel"]
    with fenced() as fence:
        out, again = (planner.linear(x, w, bias) for _ in range(2))  # planned, and found again
        if "tile" in options:
            given = (x, w, bias, None, None)
            again = planner.plan(given, "none", False, options["tile"])(*given)
    assert fence["intact"]
    if "tile" in options:
        # tiles differ in the order of their sums: by three last places, from 44 on by 2.3e-7
        bound = 1e-5 * max(1.0, out.abs().max().item() / 44)
        assert (out - again).abs().max().item() <= bound
        out = again
    assert out.shape == (rows, columns)
    assert torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0))
    exact, peer = plain(*wide(x, w, bias)), plain(x, w, bias)
    assert torch.equal(torch.isnan(out), torch.isnan(exact))
    assert torch.equal(out[torch.isinf(exact)].double(), exact[torch.isinf(exact)])
    finite = torch.isfinite(exact)
    scale = exact[finite].norm().item() or 1.0
    error, others = ((t.double() - exact)[finite].norm().item() / scale for t in (out, peer))
    assert error <= 2 * others + 2**-24
    assert name != "whole numbers" or error == 0.0
    row = exact[3]
    assert (out[3].double() - row).norm() <= 1e-6 * row.norm()


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


def spread(t, most):
    """Rows from 10**-most to 10**most."""
    t *= 10.0 ** torch.linspace(-most, most, len(t))[:, None]


def disjoint(x, w):
    """Rows and columns of 1e30 that share no channel with one another: their products are 0."""
    half = x.shape[1] // 2
    x[:half, half:], x[half:, :half], w[:half, half:], w[half:, :half] = 0.0, 0.0, 0.0, 0.0
    x[:half] *= 1e30
    w[half:] *= 1e30


def entries(t, other):
    """Weights that are not finite, and a zero that meets one of them."""
    t[3, 5], t[9, 2], t[9, 7] = float("inf"), float("nan"), -float("inf")
    other[4, 5] = 0.0


def alone(t, other, value):
    """An entry beside which the others of its row are small, and which meets zeros."""
    t[0, 3] = value
    other[1:, 3] = 0.0


def denormal(t):
    t[:, ::2] *= 1e-40
    t[::3] = torch.randn_like(t[::3]) * 1e-41


def outlier(t):
    t[:, 3] *= 1e4


# name: what is done to x [64, channels] and w [64, channels]
HOSTILE = {
    "rows of x": lambda x, w: spread(x, 30),
    "rows of w": lambda x, w: spread(w, 30),
    "rows of both": lambda x, w: (spread(x, 18), spread(w, 18)),
    "outlier channel of x": lambda x, w: outlier(x),
    "outlier channel of w": lambda x, w: outlier(w),
    "outlier channels": lambda x, w: (outlier(x), outlier(w)),
    "denormals in x": lambda x, w: denormal(x),
    "denormals in w": lambda x, w: denormal(w),
    "denormal results": lambda x, w: (x.mul_(1e-22), w.mul_(1e-22)),
    "not finite in x": entries,
    "not finite in w": lambda x, w: entries(w, x),
    "disjoint": disjoint,
    "large times large": lambda x, w: (x.mul_(1e18), w.mul_(1e18)),
    "an entry of 1e5": lambda x, w: alone(x, w, 1e5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_row_of_hostile_data_loses(name):
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    HOSTILE[name](x, w)
    with fenced() as fence:
        out = planner.linear(x, w, None)
    peer, exact = plain(x, w, None), plain(*wide(x, w, None))
    assert fence["intact"] and same_not_finite(out, peer)
    assert excess((out, peer, exact), x, w) <= 2**-24


def excess(triple, left, right):
    """By how much the largest error of a row, over the row's norm, exceeds twice PyTorch's.

    Columns are compared by what they are of the largest entries of `right`, whose products with
    `left` these are. The first one is left out: what an entry of `alone` adds to it hides what is
    lost of the others.
    """
    out, peer, exact = triple
    there = torch.isfinite(peer) & torch.isfinite(out)
    sizes = [t.double().abs().nan_to_num(0.0, 0.0).amax(1) for t in (left, right)]
    size = sizes[0][:, None] * sizes[1][None, :]

    def norms(t):
        return torch.where(there, t / size, 0.0)[:, 1:].norm(dim=1)

    beyond = norms(out.double() - exact) - 2 * norms(peer.double() - exact)
    return (beyond / norms(exact).clamp(min=1e-300)).max().item()


def same_not_finite(out, peer):
    inf = torch.isinf(peer)
    return torch.equal(torch.isnan(out), torch.isnan(peer)) and (
        torch.equal(torch.isinf(out), inf) and torch.equal(out[inf], peer[inf])
    )


@contextmanager
def cut_in(parts):
    """Gradients of few columns by the kernel, their sums in so many parts."""
    kept = planner.cut_for, planner.LEAST_WEIGHT
    planner.cut_for, planner.LEAST_WEIGHT = lambda *given: (launches.SMALL, parts), 0
    try:
        yield
    finally:
        planner.cut_for, planner.LEAST_WEIGHT = kept


# rows, channels, columns, parts
GRADIENTS = [(70, 64, 72, 1), (300, 72, 136, 3), (64, 136, 64, 1)]


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case):
    rows, depth, columns, parts = case
    x, w = torch.randn(rows, depth), torch.randn(columns, depth)
    grad = torch.randn(rows, columns)
    x[:, 5] *= 1e6
    w[7] = 0.0
    grad[3] = 0.0
    wanted = (True, True, True)
    with cut_in(parts):
        found = planner.backward(grad, x, w, wanted)
        only = planner.backward(grad, torch.empty(0), w, (True, False, False))
    assert torch.equal(only[0], found[0]) and only[1].numel() == only[2].numel() == 0
    exact = plain_backward(grad.double(), x.double(), w.double(), "strict", wanted)
    peer = plain_backward(grad, x, w, "strict", wanted)
    for ours, others, e in zip(found, peer, exact, strict=True):
        assert (ours.double() - e).norm() <= 2 * (others.double() - e).norm() + 2**-24 * e.norm()


# name: what is done to the gradient [70, 72], to x [70, 64] and to w [72, 64]
HOSTILE_GRADIENTS = {
    "rows of the gradient": lambda g, x, w: spread(g, 15),
    "rows of all": lambda g, x, w: (spread(g, 15), spread(x, -15), spread(w, 15)),
    "outlier channels": lambda g, x, w: [outlier(t) for t in (g, x, w)],
    "infinity": lambda g, x, w: g[3].__setitem__(5, float("inf")),
    "not a number": lambda g, x, w: g[3].__setitem__(5, float("nan")),
    "both": lambda g, x, w: entries(g, w),
    "not finite in x": lambda g, x, w: entries(x, w),
    "large times large": lambda g, x, w: [t.mul_(1e18) for t in (g, x, w)],
}


@pytest.mark.parametrize("name", HOSTILE_GRADIENTS)
def test_no_row_of_hostile_gradients_loses(name):
    """In sums that one product dominates PyTorch rounds once, and operands have 22 bits here."""
    grad, x, w = torch.randn(70, 72), torch.randn(70, 64), torch.randn(72, 64)
    HOSTILE_GRADIENTS[name](grad, x, w)
    wanted = (True, True, True)
    with cut_in(2), fenced() as fence:
        found = planner.backward(grad, x, w, wanted)
    exact = plain_backward(grad.double(), x.double(), w.double(), "strict", wanted)
    peer = plain_backward(grad, x, w, "strict", wanted)
    triples = list(zip(found, peer, exact, strict=True))
    assert fence["intact"] and all(same_not_finite(*triple[:2]) for triple in triples)
    for triple, pair in zip(triples, ((grad, w.t()), (grad.t(), x.t())), strict=False):
        assert excess(triple, *pair) <= (2**-23 if name.startswith("rows") else 2**-24)


def declined():
    """What the kernel leaves to PyTorch: few rows, few channels, rows off 16 bytes, turned ones."""
    for rows, depth, columns in [(63, 64, 64), (64, 56, 64), (64, 68, 64), (64, 64, 65)]:
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        yield x, w, torch.randn(columns)
    big = torch.randn(64 * 65)
    yield big[1 : 64 * 64 + 1].view(64, 64), torch.randn(64, 64), None
    yield torch.randn(64, 65)[:, :64], torch.randn(64, 64), None
    yield torch.randn(64, 64), torch.randn(64, 64).t(), None
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(128)[::2]
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(1)


def refused():
    """What PyTorch refuses: the kernel must not read or write beyond it."""
    yield torch.randn(64, 128), torch.randn(64, 64), None
    yield torch.randn(128, 64), torch.randn(64, 128), None
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(4)
    yield torch.randn(64, 64), torch.randn(64, 64).half(), None
    yield torch.randn(64, 64), torch.randn(64, 64, device="meta"), None


def test_what_the_kernel_leaves_to_pytorch():
    for given in (*declined(), *refused()):
        assert planner.linear(*given) is None, [t if t is None else t.shape for t in given]
