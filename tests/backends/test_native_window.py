"""The CPU's window kernels against a float64 reference.

`test_instruction_sets` runs the file again on the other kernels.

The reference spells the steps out (roll, pad, cut, attend, join, crop, roll back), as Swin and
MaxViT do. The criterion is relative: at most twice the error of the same steps in the input's own
dtype (float32 for fp32 inputs), plus rounding.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from native_kernels import ULPS, call_apart, guarded, make, once, relative
from torch import Tensor

import elsa_core
from elsa_core.backends import native
from elsa_core.errors import ArgumentError


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


@dataclass(frozen=True)
class Terms:
    """The operator's arguments after qkv."""

    bias: Tensor | None = None
    bias_index: Tensor | None = None
    pad_qkv: Tensor | None = None
    logit_scale: Tensor | None = None
    num_heads: int = 2
    window: tuple[int, int, int] = (1, 7, 7)
    shift: tuple[int, int, int] = (0, 0, 0)
    scale: float = 0.25
    mask_value: float = -100.0
    layout: str = "qkv"
    grid: bool = False

    @property
    def tokens(self) -> int:
        return math.prod(self.window)

    def to(self, dtype: torch.dtype) -> Terms:
        floats = {
            name: getattr(self, name).to(dtype)
            for name in ("bias", "pad_qkv", "logit_scale")
            if getattr(self, name) is not None
        }
        return replace(self, **floats)


def window_attention(qkv: Tensor, t: Terms) -> Tensor:
    return torch.ops.elsa.window_attention(
        qkv, t.bias, t.bias_index, t.pad_qkv, t.logit_scale, t.num_heads, t.window, t.shift,
        t.scale, t.mask_value, t.layout, t.grid, "strict",
    )  # fmt: skip


def split(x: Tensor, t: Terms) -> Tensor:
    """[B, D, H, W, C] -> [B, nd, nh, nw, T, C]."""
    for axis in (3, 2, 1):
        size, window = x.shape[axis], t.window[axis - 1]
        shape = (window, size // window) if t.grid else (size // window, window)
        x = x.unflatten(axis, shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if t.grid else (0, 1, 3, 5, 2, 4, 6, 7)
    return x.permute(*order).flatten(4, 6)


def join(x: Tensor, t: Terms) -> Tensor:
    """The way back from `split`."""
    x = x.unflatten(4, t.window)
    order = (0, 4, 1, 5, 2, 6, 3, 7) if t.grid else (0, 1, 4, 2, 5, 3, 6, 7)
    return x.permute(*order).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def regions(padded: tuple[int, ...], t: Terms) -> Tensor:
    """The shift mask as Swin builds it: number the regions in slices, cut, compare."""
    number = torch.zeros(1, *padded, 1)
    axes = [
        (slice(0, -w), slice(-w, -s), slice(-s, None)) if s else (slice(None),)
        for w, s in zip(t.window, t.shift, strict=True)
    ]
    for i, (z, y, x) in enumerate(itertools.product(*axes)):
        number[:, z, y, x] = i
    flat = split(number, t)[..., 0]
    different = flat.unsqueeze(-1) != flat.unsqueeze(-2)
    return torch.zeros(different.shape).masked_fill(different, t.mask_value).unsqueeze(4)


def reference(qkv: Tensor, t: Terms) -> Tensor:
    """In qkv's dtype throughout."""
    sizes = qkv.shape[1:4]
    x = qkv.roll([-s for s in t.shift], (1, 2, 3))
    padded = tuple(-(-n // w) * w for n, w in zip(sizes, t.window, strict=True))
    fill = torch.zeros(qkv.shape[-1], dtype=qkv.dtype) if t.pad_qkv is None else t.pad_qkv
    image = fill.expand(qkv.shape[0], *padded, -1).clone()
    image[:, : sizes[0], : sizes[1], : sizes[2]] = x
    parts = (3, t.num_heads, -1) if t.layout == "qkv" else (t.num_heads, 3, -1)
    windows = split(image, t).unflatten(-1, parts)
    q, k, v = (p.transpose(4, 5) for p in windows.unbind(5 if t.layout == "qkv" else 6))
    if t.logit_scale is not None:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * t.logit_scale.view(-1, 1, 1)
    else:
        scores = (q @ k.mT) * t.scale
    if t.bias is not None:
        bias = t.bias if t.bias_index is None else t.bias[t.bias_index].permute(2, 0, 1)
        scores = scores + bias
    if any(t.shift):
        scores = scores + regions(padded, t).to(scores.dtype)
    out = (scores.softmax(-1) @ v).transpose(4, 5).flatten(5)
    out = join(out, t)[:, : sizes[0], : sizes[1], : sizes[2]]
    return out.roll(t.shift, (1, 2, 3))


def check(qkv: Tensor, t: Terms) -> Tensor:
    out = window_attention(qkv, t)
    assert out.shape == (*qkv.shape[:-1], qkv.shape[-1] // 3)
    assert out.dtype == qkv.dtype
    assert out.is_contiguous()
    exact = reference(qkv.double(), t.to(torch.float64))
    peer = reference(qkv.float(), t.to(torch.float32)).to(qkv.dtype)
    error, peers = relative(out, exact), relative(peer, exact)
    assert error <= 2 * peers + ULPS * torch.finfo(qkv.dtype).eps, (error, peers)
    return out


def image(
    batch: int, size: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    size = (1,) * (3 - len(size)) + size
    return make(batch, *size, 3 * heads * dim, dtype=dtype, seed=math.prod(size) + dim)


def bias_of(t: Terms, dtype: torch.dtype = torch.float32) -> Tensor:
    return make(t.num_heads, t.tokens, t.tokens, dtype=dtype, seed=t.tokens)


WINDOWS = [
    (1, 2, 2), (1, 3, 5), (1, 7, 7), (1, 8, 8), (1, 5, 13), (1, 12, 12), (1, 16, 16),
    (1, 24, 24), (1, 27, 25), (4, 7, 7), (2, 3, 4),
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("heads_dim", [(1, 32), (3, 20)], ids=str)
def test_windows(window: tuple[int, int, int], heads_dim: tuple[int, int]) -> None:
    """Two windows an axis where they are small; sizes that need padding; a shift on every axis."""
    heads, dim = heads_dim
    size = tuple(w if w > 12 else 2 * w - (w > 2) for w in window)
    shift = (window[0] // 2, window[1] // 2, window[2] // 3)
    t = Terms(num_heads=heads, window=window)
    t = replace(t, bias=bias_of(t))
    qkv = image(1, size, heads, dim)
    check(qkv, t)
    check(qkv, replace(t, shift=shift, pad_qkv=make(3 * heads * dim, seed=4)))


@pytest.mark.parametrize("dim", [1, 3, 4, 8, 17, 20, 28, 32, 48, 64, 128, 200])
@pytest.mark.parametrize("heads", [1, 16])
def test_heads_and_head_dims(heads: int, dim: int) -> None:
    t = Terms(num_heads=heads, window=(1, 4, 5), shift=(0, 2, 2))
    for layout in ("qkv", "head"):
        check(image(1, (7, 9), heads, dim), replace(t, layout=layout, bias=bias_of(t)))


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (7, 7), (8, 13), (14, 6), (15, 22)], ids=str)
@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (0, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_sizes_and_shifts(size: tuple[int, int], shift: tuple[int, int], batch: int) -> None:
    """Images smaller than a window too, where the shift exceeds the image."""
    qkv = image(batch, size, 2, 16)
    t = Terms(shift=(0, *shift), pad_qkv=make(96, seed=3))
    for mask_value in (-1.0, -7.5, -100.0, -math.inf):
        check(qkv, replace(t, bias=bias_of(t), mask_value=mask_value))
    check(qkv, replace(t, pad_qkv=None))


def test_shifts_in_three_dimensions() -> None:
    t = Terms(window=(4, 3, 5), pad_qkv=make(96, seed=3))
    qkv = image(2, (7, 8, 9), 2, 16)
    for shift in itertools.product((0, 2), (0, 1), (0, 3)):
        check(qkv, replace(t, shift=shift, bias=bias_of(t)))


def test_padding_takes_part_as_a_key() -> None:
    t = Terms(num_heads=1, window=(1, 2, 2))
    qkv = torch.zeros(1, 1, 1, 1, 3)
    qkv[..., 2] = 1.0
    assert window_attention(qkv, t).item() == 0.25
    pad = torch.tensor([0.0, 0.0, 5.0])
    assert window_attention(qkv, replace(t, pad_qkv=pad)).item() == 4.0


@pytest.mark.parametrize("layout", ["qkv", "head"])
def test_grid(layout: str) -> None:
    t = Terms(window=(1, 4, 3), grid=True, layout=layout)
    check(image(2, (8, 9), 2, 24), replace(t, bias=bias_of(t)))
    check(image(1, (4, 4, 3), 2, 24), replace(t, window=(2, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 20, 32])
def test_dtypes(dtype: torch.dtype, dim: int) -> None:
    qkv = image(2, (9, 12), 2, dim, dtype)
    t = Terms(shift=(0, 3, 3), pad_qkv=make(6 * dim, dtype=dtype, seed=5))
    for bias_dtype in {torch.float32, dtype}:
        check(qkv, replace(t, bias=bias_of(t, bias_dtype)))
    check(qkv, replace(t, logit_scale=torch.tensor([3.0, 11.0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_from_its_table(dtype: torch.dtype) -> None:
    t = Terms(num_heads=3, shift=(0, 3, 3))
    index = torch.randint(169, (49, 49), generator=torch.Generator().manual_seed(1))
    table = make(169, 3, dtype=dtype, seed=6)
    qkv = image(1, (14, 14), 3, 32, dtype)
    tabled = check(qkv, replace(t, bias=table, bias_index=index))
    dense = table[index].permute(2, 0, 1)
    assert torch.equal(tabled, window_attention(qkv, replace(t, bias=dense)))
    assert torch.equal(tabled, window_attention(qkv, replace(t, bias=dense.contiguous())))
    for bad in (-1, 169):
        wrong = index.clone()
        wrong[3, 4] = bad
        with pytest.raises(RuntimeError, match="outside"):
            window_attention(qkv, replace(t, bias=table, bias_index=wrong))


def test_cosine_attention() -> None:
    """Swin-V2: rows of any length are normalised, and a row of zeros stays one."""
    for dim in (20, 32):
        qkv = image(2, (8, 8), 2, dim)
        qkv[:, :, 1] *= 1e4
        qkv[:, :, 2] *= 1e-4
        qkv[:, :, 3, 4] = 0.0
        qkv[:, :, 4] *= 1e-9  # above the least divisor of 1e-12
        qkv[:, :, 5] *= 1e-13  # and below it
        t = Terms(window=(1, 8, 8), shift=(0, 4, 4), logit_scale=torch.tensor([10.0, 90.0]))
        check(qkv, replace(t, bias=bias_of(t)))


@pytest.mark.parametrize(("length", "divisor"), [(1e-9, 1e-9), (1e-13, 1e-12)])
def test_the_least_length_that_divides_is_that_of_pytorch(length: float, divisor: float) -> None:
    """One query of a given length, two keys: the weight of the first is known."""
    qkv = torch.zeros(1, 1, 1, 2, 12)
    qkv[..., 0, 0] = length  # the query of the first token
    qkv[..., 0, 4] = 1.0
    qkv[..., 1, 5] = 1.0
    qkv[..., 0, 8] = 1.0
    t = Terms(num_heads=1, window=(1, 1, 2), logit_scale=torch.ones(1))
    expected = 1.0 / (1.0 + math.exp(-length / divisor))
    assert abs(window_attention(qkv, t)[..., 0, 0].item() - expected) <= 1e-6


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("bad", [-1, -169, 169])
def test_an_index_beyond_its_table_is_refused(backend: str, bad: int) -> None:
    index = torch.zeros(49, 49, dtype=torch.int64)
    table, qkv = make(169, 2), image(1, (7, 7), 2, 16)[:, 0]
    terms = {"num_heads": 2, "window_size": (7, 7), "backend": backend}
    elsa_core.window_attention(qkv, table, bias_index=index, **terms)
    index[3, 4] = bad
    with pytest.raises(ArgumentError, match=r"bias_index has entries from .* in \[0, 169\)"):
        elsa_core.window_attention(qkv, table, bias_index=index, **terms)
    t = Terms(bias=table, bias_index=index)
    with pytest.raises(ArgumentError, match="bias_index"):  # as a compiled program calls it
        torch.ops.elsa.window_attention_eager(
            qkv[:, None], t.bias, t.bias_index, None, None, 2, t.window, t.shift, t.scale,
            t.mask_value, t.layout, t.grid, "strict",
        )  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale(scale: float) -> None:
    t = Terms(scale=scale)
    check(image(1, (14, 14), 2, 16), t)
    check(image(1, (14, 14), 2, 16), replace(t, bias=bias_of(t)))


@pytest.mark.parametrize("size", [1e4, 1e15, 1e30])
@pytest.mark.parametrize("window", [(1, 7, 7), (1, 27, 25)], ids=str)
def test_extreme_logits(size: float, window: tuple[int, int, int]) -> None:
    """With one key far above the rest, its value is the output: no overflow, no rounding."""
    tokens = math.prod(window)
    v = make(tokens, 32, seed=6)
    q = torch.zeros(tokens, 32)
    q[:, 0] = 2.0
    for at in (tokens // 3, *range(tokens // 16 * 16, tokens)):  # the last ones by themselves
        k = make(tokens, 32, seed=5) * 1e-3
        k[:, 0] = -size
        k[at, 0] = size
        qkv = torch.cat([q, k, v], -1).view(1, *window, 96)
        out = window_attention(qkv, Terms(num_heads=1, window=window, scale=1.0))
        assert torch.equal(out, v[at].expand_as(out)), at


@pytest.mark.parametrize("window", [(1, 7, 7), (1, 27, 25)], ids=str)
def test_nan_stays_in_its_window(window: tuple[int, int, int]) -> None:
    _, h, w = window
    for channel in (0, 40, 90):  # in the query, the key and the value of the first head
        qkv = image(1, (2 * h, w), 1, 32)
        qkv[0, 0, h + 1, 1, channel] = torch.nan
        t = Terms(num_heads=1, window=window)
        out = window_attention(qkv, t)
        assert out[:, :, :h].isfinite().all()
        assert torch.equal(out.isnan(), reference(qkv.double(), t).isnan())


def test_a_row_that_sees_nothing_is_zero() -> None:
    t = Terms(window=(1, 3, 3))
    bias = bias_of(t)
    bias[1, 4] = -torch.inf
    out = window_attention(image(1, (3, 3), 2, 16), replace(t, bias=bias)).view(9, 2, 16)
    assert not out[4, 1].any()
    assert out.isfinite().all()


def test_strides() -> None:
    """A crop, a slice of channels and a batch repeated, with NaN all around."""
    for dtype, dim in ((torch.float32, 32), (torch.float32, 20), (torch.float16, 32)):
        channels = 6 * dim
        wide = torch.full((2, 2, 16, 17, channels + 9), torch.nan, dtype=dtype)
        view = wide[:, 1:, 1:-1, 2:-1, 4:-5]
        view.copy_(image(2, (14, 14), 2, dim, dtype))
        t = Terms(shift=(0, 3, 3))
        t = replace(t, bias=bias_of(t))
        dense = window_attention(view.contiguous(), t)
        assert torch.equal(window_attention(view, t), dense)
        turned = view.transpose(2, 3)
        assert torch.equal(window_attention(turned, t), window_attention(turned.contiguous(), t))
        repeated = view[:1].expand(3, -1, -1, -1, -1)
        assert torch.equal(window_attention(repeated, t), dense[:1].expand(3, -1, -1, -1, -1))
        shared = t.bias[:1].expand(2, -1, -1)
        expected = window_attention(view, replace(t, bias=shared.contiguous()))
        assert torch.equal(window_attention(view, replace(t, bias=shared)), expected)
        for bias in (t.bias.mT, torch.stack([t.bias, t.bias * torch.nan], -1)[..., 0]):
            expected = window_attention(view, replace(t, bias=bias.contiguous()))
            assert torch.equal(window_attention(view, replace(t, bias=bias)), expected)


def test_empty() -> None:
    t = Terms()
    for shape in ((0, 1, 7, 7, 96), (2, 0, 7, 7, 96), (2, 1, 0, 7, 96)):
        assert window_attention(torch.empty(shape), t).shape == (*shape[:-1], 32)


def test_nothing_stays_from_an_earlier_call() -> None:
    t = Terms(shift=(0, 3, 3))
    qkv = image(1, (14, 14), 2, 32)
    clean = window_attention(qkv, t)
    poison = torch.full((1, 1, 24, 24, 768), torch.nan)
    window_attention(poison, replace(t, window=(1, 24, 24)))
    assert torch.equal(window_attention(qkv, t), clean)


def test_bits_depend_neither_on_threads_nor_on_the_run() -> None:
    before = torch.get_num_threads()
    try:
        for window in ((1, 7, 7), (1, 24, 24), (1, 27, 25)):
            t = Terms(num_heads=3, window=window, shift=(0, 3, 3))
            t = replace(t, bias=bias_of(t))
            qkv = image(1, (28, 28), 3, 16)
            results = []
            for threads in (1, 2, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append(window_attention(qkv, t))
            for out in results[1:]:
                assert torch.equal(out, results[0])
    finally:
        torch.set_num_threads(before)


def read_up_to_the_guard() -> None:
    for window, dim in (((1, 1, 1), 1), ((1, 2, 3), 3), ((1, 4, 4), 16), ((1, 7, 7), 32)):
        for dtype in (torch.float32, torch.float16):
            t = Terms(window=window)
            t = replace(t, bias=bias_of(t), pad_qkv=make(6 * dim, dtype=dtype))
            qkv = image(1, (9, 9), 2, dim, dtype)
            fenced = replace(t, bias=guarded(t.bias), pad_qkv=guarded(t.pad_qkv))
            assert torch.equal(window_attention(guarded(qkv), fenced), window_attention(qkv, t))


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
def test_reads_no_byte_beyond_its_operands() -> None:
    call_apart(read_up_to_the_guard)


@once
@pytest.mark.parametrize(
    ("qkv", "change", "words"),
    [
        ((1, 7, 7, 96), {}, "5 dimensions, has 4"),
        ((1, 1, 7, 7, 95), {}, "95 channels"),
        ((1, 1, 7, 7, 96), {"num_heads": 0}, "96 channels"),
        ((1, 1, 7, 7, 96), {"window": (1, 7)}, "3 entries"),
        ((1, 1, 7, 7, 96), {"window": (1, 0, 7)}, "window_size must be positive"),
        ((1, 1, 7, 7, 96), {"window": (2**31 - 1,) * 3}, "too large"),
        ((1, 1, 7, 7, 96), {"shift": (0, 7, 0)}, "smaller than the window"),
        ((1, 1, 7, 7, 96), {"shift": (0, -1, 0)}, "at least 0"),
        ((1, 1, 8, 7, 96), {"grid": True}, "multiples of the window"),
        ((1, 1, 7, 7, 96), {"grid": True, "shift": (0, 0, 1)}, "and no shift"),
        ((1, 1, 7, 7, 96), {"layout": "kqv"}, "layout must be qkv or head"),
        ((1, 1, 7, 7, 96), {"bias": torch.zeros(2, 49, 48)}, r"bias must be \[2, 49, 49\]"),
        ((1, 1, 7, 7, 96), {"bias": torch.zeros(2, 49, 49).half()}, "float32 or qkv's dtype"),
        ((1, 1, 7, 7, 96), {"pad_qkv": torch.zeros(95)}, r"pad_qkv must be \[96\]"),
        ((1, 1, 7, 7, 96), {"logit_scale": torch.zeros(3)}, r"logit_scale must be \[2\]"),
        ((1, 1, 7, 7, 6 * 257), {}, "head_dim must be 1 to 256"),
    ],
)
def test_bad_arguments_are_named(qkv: tuple[int, ...], change: dict, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        window_attention(torch.zeros(qkv), replace(Terms(), **change))
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16"):
        window_attention(torch.zeros(1, 1, 7, 7, 96, dtype=torch.int32), Terms())
