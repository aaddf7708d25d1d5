"""The cases: rows of plain values that say which tensors an operator is called with.

A row names what differs from `DEFAULTS`; `build` makes the call, the same one for the same seed.
Random draws (`draw.py`) are rows of the same kind, so that a failing one can be printed.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DEFAULTS: dict[str, dict[str, Any]] = {
    "attention": {
        "batch": (2,), "heads": 3, "kv_heads": None, "queries": 33, "keys": None, "dim": 32,
        "value_dim": None, "dtype": "float32", "mask": None, "causal": False, "scale": None,
        "layout": "dense", "data": "normal", "precision": "strict",
    },
    "window_attention": {
        "batch": 2, "size": (8, 8), "window": (4, 4), "shift": (0, 0), "heads": 2, "dim": 16,
        "dtype": "float32", "bias": "dense", "pad": False, "cosine": False, "mask_value": -100.0,
        "channels": "qkv", "grid": False, "scale": None, "layout": "dense", "data": "normal",
        "precision": "strict", "terms": None,
    },
    "linear": {
        "batch": (2, 33), "depth": 64, "width": 96, "dtype": "float32", "bias": True,
        "activation": "none", "residual": False, "scale": False, "value": False,
        "layout": "dense", "data": "normal", "precision": "strict",
    },
    "varlen_attention": {
        "lengths": (5, 33, 1, 64), "key_lengths": None, "heads": 3, "kv_heads": None, "dim": 32,
        "value_dim": None, "dtype": "float32", "causal": False, "scale": None, "layout": "dense",
        "data": "normal", "precision": "strict", "index": "int32", "longest": True,
    },
}  # fmt: skip
DEFAULTS["entmax_attention"] = DEFAULTS["attention"] | {"alpha": 1.5}
DEFAULTS["entmax_varlen_attention"] = DEFAULTS["varlen_attention"] | {"alpha": 1.5}
DEFAULTS["sparsity"] = DEFAULTS["attention"] | {"sparsity": "exact"}
DEFAULTS["dropout"] = DEFAULTS["attention"] | {"dropout": 0.3}


@dataclass(frozen=True)
class Case:
    """One row: an operator, a name, and what differs from the operator's defaults."""

    operator: str
    name: str
    changes: Mapping[str, Any] = field(hash=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.changes.get(name, DEFAULTS[self.operator][name])
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        return self.name


@dataclass
class Call:
    """Arguments by name, as the public function takes them; `wants`: whose gradients a training
    step needs."""

    arguments: dict[str, Any]
    wants: tuple[str, ...]


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case.dtype)


# How an operand [..., N, D] lies in memory; what is around it is NaN.


def _guarded(t: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that must not be touched."""
    if t.numel() == 0 or t.is_cuda:
        return t
    page = mmap.PAGESIZE
    size = t.numel() * t.element_size()
    length = -(-size // page) * page
    memory = mmap.mmap(-1, length + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + length), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=t.dtype, offset=length - size, count=t.numel())
    return copy.view_as(t).copy_(t)


def _between(t: Tensor, dim: int) -> Tensor:
    """The middle one of three stacked along `dim`, as a projection of q, k and v gives them."""
    return torch.stack([t * math.nan, t, t * math.nan], dim).select(dim, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "guarded": _guarded,
    "packed": lambda t: _between(t.transpose(-2, -3).contiguous(), 2).transpose(-2, -3),
    "tokens first": lambda t: t.transpose(-2, -3).contiguous().transpose(-2, -3),
    "channels first": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: _between(t, -1)[..., :],
    "odd rows": lambda t: F.pad(t, (1, 2), value=math.nan)[..., 1 : 1 + t.shape[-1]],
    "unaligned": lambda t: torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view_as(t),
    "sliced": lambda t: F.pad(t, (0, 0, 3, 1), value=math.nan)[..., 3 : 3 + t.shape[-2], :],
    "expanded": lambda t: t[:1].expand(t.shape),
    "flipped": lambda t: t.flip(-2),
}

# What the numbers are: each of (q, k, v) from standard normal ones.
DATA: dict[str, Callable[[int, Tensor], Tensor]] = {
    "normal": lambda i, t: t,
    "large": lambda i, t: t * (6.0 if i < 2 else 1.0),
    "extreme": lambda i, t: t * (100.0 if i < 2 else 1.0),
    "huge": lambda i, t: t * (1e15 if i < 2 else 1.0),
    "small": lambda i, t: t * 1e-9,
    "tiny": lambda i, t: t * 1e-20,
    "shifted": lambda i, t: t + 3.0,
    "constant": lambda i, t: torch.full_like(t, 0.5),
    "zeros": lambda i, t: t * 0.0,
    "dominant key": lambda i, t: t * torch.where(torch.arange(t.shape[-2]) == 1, 30.0, 1.0)[:, None]
    if i == 1 else t,
    "balanced channels": lambda i, t: t * torch.where(
        torch.arange(t.shape[-1]) == 5, 2.0 ** (20 * (i == 1) - 20 * (i == 0)), 1.0),
    "outlier channel": lambda i, t: t * torch.where(torch.arange(t.shape[-1]) == 5, 2.0**20, 1.0)
    if i == 2 else t,
    "far channel": lambda i, t: t * torch.where(
        torch.arange(t.shape[-1]) == t.shape[-1] - 1, 2.0**24, 1.0),
    "small last row": lambda i, t: t * torch.where(
        torch.arange(t.shape[-2]) == t.shape[-2] - 1, 1e-9, 1.0)[:, None],
}  # fmt: skip

# Masks of scores [*batch, H, N, M] from standard normal numbers of that shape; `f` is the dtype.
MASKS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "bool": lambda t, f: t > -0.5,
    "bool keys": lambda t, f: (t[..., :1, :1, :] > -0.5) | (torch.arange(t.shape[-1]) == 0),
    "bool rows": lambda t, f: t[..., :1] > -1.5,
    "bool of one batch": lambda t, f: t[:1] > -0.5,
    "bool every second": lambda t, f: (t > -0.5).repeat_interleave(2, -1)[..., ::2],
    "bool nk": lambda t, f: t.flatten(0, -3)[0] > -0.5,
    "hidden row": lambda t, f: (t > -0.5) & (torch.arange(t.shape[-2]) != 3)[:, None],
    "all hidden": lambda t, f: torch.zeros(t.shape[-2:], dtype=torch.bool),
    "float": lambda t, f: t,
    "float keys": lambda t, f: t[..., :1, :1, :],
    "float rows": lambda t, f: t[..., :1],
    "float heads": lambda t, f: t[:1],
    "float of one head": lambda t, f: t[..., :1, :, :],
    "float one": lambda t, f: t.flatten()[:1].view((1,) * t.dim()),
    "own dtype": lambda t, f: t.to(f),
    "minus infinity": lambda t, f: torch.where(t > -0.5, t, -math.inf),
    "infinity hides a row": lambda t, f: torch.where(
        torch.arange(t.shape[-2])[:, None] == 3, -math.inf, t),
    "least finite": lambda t, f: torch.where(t > -0.5, 0.0, torch.finfo(f).min).to(f),
    "transposed": lambda t, f: t.mT.contiguous().mT,
    "expanded": lambda t, f: t[:1, :1].expand(t.shape),
    "sliced": lambda t, f: F.pad(t, (4, 1, 2, 1), value=math.nan)[..., 2:-1, 4:-1],
    "odd rows": lambda t, f: F.pad(t.to(f), (1, 2), value=math.nan)[..., 1:-2],
    "bool guarded": lambda t, f: _guarded(t > -0.5),
    "float guarded": lambda t, f: _guarded(t),
}  # fmt: skip


class _Draw:
    """Standard normal numbers, one stream a call, made on the CPU: the same on every device."""

    def __init__(self, case: Case, seed: int, device: str) -> None:
        self.case, self.device = case, device
        self.dtype = dtype_of(case)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def operand(self, number: int, *shape: int) -> Tensor:
        """The number-th of q, k, v: its data, dtype, device and layout."""
        t = DATA[self.case.data](number, self.normal(*shape)).to(self.dtype)
        return LAYOUTS[self.case.layout](t.to(self.device))

    def put(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return t.to(self.device, dtype or self.dtype)


def _moved(t: Tensor, device: str) -> Tensor:
    """On a device, with the strides and the memory around it."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def _attention(case: Case, draw: _Draw) -> Call:
    keys = case.queries if case.keys is None else case.keys
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    value_dim = case.dim if case.value_dim is None else case.value_dim
    q = draw.operand(0, *case.batch, case.heads, case.queries, case.dim)
    k = draw.operand(1, *case.batch, kv_heads, keys, case.dim)
    v = draw.operand(2, *case.batch, kv_heads, keys, value_dim)
    arguments = {
        "query": q, "key": k, "value": v, "attn_mask": None, "is_causal": case.causal,
        "scale": case.scale, "enable_gqa": kv_heads != case.heads, "precision": case.precision,
    }  # fmt: skip
    wants = ("query", "key", "value")
    hides = case.mask or ""
    if hides.startswith("nan"):  # what no query sees may hold anything
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        mask[..., [0, 4, keys - 1]] = False
        with torch.no_grad():
            k[..., [0, 4, keys - 1], :] = math.nan if hides == "nan keys" else math.inf
        arguments["attn_mask"] = mask.to(draw.device)
    elif case.mask is not None:
        shape = (*case.batch, case.heads, case.queries, keys)
        numbers = draw.normal(*shape).float()
        mask = MASKS[case.mask](numbers, draw.dtype)
        arguments["attn_mask"] = _moved(mask, draw.device)
        if mask.dtype != torch.bool:
            wants = (*wants, "attn_mask")
    return Call(arguments, wants)


def _alpha(case: Case, call: Call, draw: _Draw, shape: tuple[int, ...]) -> Call:
    alpha = case.alpha
    if alpha == "heads":
        alpha = draw.put(1.1 + (torch.arange(case.heads) % 3) * 0.7).view(1, -1, 1, 1)
    elif alpha == "batch and heads":
        alpha = draw.put(1.2 + torch.rand(*shape, 1, 1, generator=draw.generator))
    if isinstance(alpha, Tensor):
        call.wants = (*call.wants, "alpha")
    call.arguments["alpha"] = alpha
    return call


def _entmax_attention(case: Case, draw: _Draw) -> Call:
    return _alpha(case, _attention(case, draw), draw, (math.prod(case.batch), case.heads))


def _sparsity(case: Case, draw: _Draw) -> Call:
    call = _attention(case, draw)
    call.arguments["sparsity"] = case.sparsity
    return call


def _dropout(case: Case, draw: _Draw) -> Call:
    call = _attention(case, draw)
    call.arguments["dropout_p"] = case.dropout
    return call


def _varlen_attention(case: Case, draw: _Draw) -> Call:
    key_lengths = case.lengths if case.key_lengths is None else case.key_lengths
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    value_dim = case.dim if case.value_dim is None else case.value_dim

    def operand(number: int, tokens: int, heads: int, dim: int) -> Tensor:
        return draw.operand(number, heads, tokens, dim).transpose(0, 1)

    def ends(lengths: tuple[int, ...]) -> Tensor:
        sums = torch.tensor([0, *lengths]).cumsum(0)
        return sums.to(draw.device, getattr(torch, case.index))

    arguments = {
        "query": operand(0, sum(case.lengths), case.heads, case.dim),
        "key": operand(1, sum(key_lengths), kv_heads, case.dim),
        "value": operand(2, sum(key_lengths), kv_heads, value_dim),
        "cu_seqlens_q": ends(case.lengths),
        "cu_seqlens_k": None if case.key_lengths is None else ends(key_lengths),
        "is_causal": case.causal, "scale": case.scale, "enable_gqa": kv_heads != case.heads,
        "precision": case.precision,
    }  # fmt: skip
    if case.longest:
        arguments["max_seqlen_q"] = max(case.lengths, default=0)
        arguments["max_seqlen_k"] = max(key_lengths, default=0)
    return Call(arguments, ("query", "key", "value"))


def _entmax_varlen_attention(case: Case, draw: _Draw) -> Call:
    call = _varlen_attention(case, draw)
    return _alpha(case, call, draw, (len(case.lengths), case.heads))


def _window_attention(case: Case, draw: _Draw) -> Call:
    channels, tokens = 3 * case.heads * case.dim, math.prod(case.window)
    terms = getattr(torch, case.terms) if case.terms else draw.dtype
    t = DATA[case.data](0, draw.normal(case.batch, *case.size, channels)).to(draw.dtype)
    qkv = LAYOUTS[case.layout](t.to(draw.device))
    bias = index = None
    if case.bias == "table":
        bias = draw.put(draw.normal(40, case.heads), terms)
        index = torch.randint(40, (tokens, tokens), generator=draw.generator).to(draw.device)
    elif case.bias:
        bias = draw.put(draw.normal(case.heads, tokens, tokens), terms)
        bias = bias.mT if case.bias == "transposed" else bias
    arguments = {
        "qkv": qkv, "bias": bias, "bias_index": index, "num_heads": case.heads,
        "pad_qkv": draw.put(draw.normal(channels), terms) if case.pad else None,
        "logit_scale": draw.put(1 + draw.normal(case.heads).abs() * 5, terms)
        if case.cosine else None,
        "window_size": tuple(case.window), "shift_size": tuple(case.shift), "scale": case.scale,
        "mask_value": case.mask_value, "layout": case.channels, "grid": case.grid,
        "precision": case.precision,
    }  # fmt: skip
    named = ("qkv", "bias", "pad_qkv", "logit_scale")
    return Call(arguments, tuple(name for name in named if arguments[name] is not None))


def _linear(case: Case, draw: _Draw) -> Call:
    depth, width = case.depth, case.width
    weight = draw.put(draw.normal(width, depth) / max(1, depth) ** 0.5)
    arguments: dict[str, Any] = {
        "input": draw.operand(2, *case.batch, depth),
        "weight": LAYOUTS[case.layout](weight) if case.layout != "packed" else weight,
        "bias": draw.put(draw.normal(width)) if case.bias else None,
        "residual": draw.operand(2, *case.batch, width) if case.residual else None,
        "scale": draw.put(draw.normal(width)) if case.scale else None,
        "activation": case.activation, "precision": case.precision,
    }  # fmt: skip
    if case.value:
        arguments["value"] = (
            draw.put(draw.normal(width, depth) / max(1, depth) ** 0.5),
            draw.put(draw.normal(width)) if case.bias else None,
        )
    named = ("input", "weight", "bias", "residual", "scale")
    return Call(arguments, tuple(name for name in named if arguments[name] is not None))


_BUILDERS = {
    "attention": _attention, "window_attention": _window_attention, "linear": _linear,
    "varlen_attention": _varlen_attention, "entmax_attention": _entmax_attention,
    "entmax_varlen_attention": _entmax_varlen_attention, "sparsity": _sparsity,
    "dropout": _dropout,
}  # fmt: skip


def build(case: Case, device: str = "cpu", seed: int = 0) -> Call:
    """The call of a case on a device."""
    return _BUILDERS[case.operator](case, _Draw(case, seed, device))


def _rows(operator: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    for name, changes in rows.items():
        assert changes.keys() <= DEFAULTS[operator].keys(), (operator, name)
    return [Case(operator, name, changes) for name, changes in rows.items()]


def _of_attention() -> dict[str, dict[str, Any]]:
    """Cases of all operators whose operands are [B, H, N, D]."""
    lengths = {
        f"{n} queries, {m} keys": {"queries": n, "keys": m}
        for n, m in ((1, 1), (1, 50), (2, 197), (63, 100), (64, 64), (65, 17), (100, 3), (111, 111),
                     (5, 641), (50, 1), (197, 197))
    }  # fmt: skip
    widths = {
        f"head dimensions {d} and {dv}": {"dim": d, "value_dim": dv, "queries": 21, "keys": 37}
        for d, dv in ((8, 8), (1, 1), (3, 256), (16, 5), (24, 40), (64, 64), (72, 80), (88, 16),
                      (96, 96), (128, 128), (160, 33), (256, 256))
    }  # fmt: skip
    dtypes = {
        f"{dtype}, {n} tokens, {d} channels": {"dtype": dtype, "queries": n, "dim": d}
        for dtype in ("float16", "bfloat16", "float64")
        for n, d in ((17, 64), (130, 40))
    }
    strides = {
        f"layout {layout}, {dtype}": {"layout": layout, "dtype": dtype, "queries": 49, "dim": 40}
        for layout in LAYOUTS
        for dtype in ("float32", "float16")
        if layout != "dense"
    }
    masks = {f"mask {kind}": {"mask": kind, "keys": 49} for kind in MASKS}
    half_masks = {
        f"mask {kind}, {dtype}": {"mask": kind, "dtype": dtype, "queries": 20, "keys": 70}
        for kind, dtype in (("bool", "float16"), ("float", "bfloat16"), ("own dtype", "float16"),
                            ("hidden row", "bfloat16"), ("odd rows", "float16"))
    }  # fmt: skip
    scales = {
        f"scale {scale}{', causal' * causal}, {dtype}": {
            "scale": scale, "causal": causal, "dtype": dtype}
        for scale in (0.0, -0.3, 1.7)
        for causal in (False, True)
        for dtype in ("float32", "float16")
    }  # fmt: skip
    data = {
        f"data {kind}": {"data": kind, "queries": 40, "keys": 70}
        for kind in DATA
        if kind not in ("normal", "small", "tiny", "huge", "far channel")
    }
    return {
        **lengths, **widths, **dtypes, **strides, **masks, **half_masks, **scales, **data,
        "no query": {"queries": 0, "keys": 5},
        "no key": {"queries": 5, "keys": 0},
        "no key, half": {"queries": 5, "keys": 0, "dtype": "float16"},
        "no key, one number": {"batch": (1,), "heads": 1, "queries": 1, "keys": 0, "dim": 1},
        "no batch": {"batch": (0,)},
        "batch of one": {"batch": (1,), "heads": 1},
        "two batch axes": {"batch": (2, 3), "heads": 2, "queries": 17},
        "causal": {"causal": True, "queries": 77},
        "causal, fewer queries": {"causal": True, "queries": 20, "keys": 70},
        "causal, fewer keys": {"causal": True, "queries": 70, "keys": 20},
        "causal, half": {"causal": True, "queries": 70, "dtype": "bfloat16"},
        "groups of three": {"heads": 6, "kv_heads": 2, "queries": 50, "keys": 70},
        "one key head, causal": {"heads": 4, "kv_heads": 1, "causal": True, "dim": 16},
        "one key head, half": {"heads": 4, "kv_heads": 1, "dtype": "float16", "mask": "bool"},
        "keys hidden that hold NaN": {"mask": "nan keys", "queries": 20, "keys": 70},
        "keys hidden that hold infinity": {"mask": "nan infinity", "queries": 20, "keys": 18},
        "ieee": {"precision": "ieee", "queries": 70, "keys": 130, "dim": 64},
        "lean": {"precision": "lean", "queries": 70, "keys": 130, "dim": 64},
        "packed, causal, half": {"layout": "packed", "causal": True, "dtype": "float16"},
    }  # fmt: skip


def _some(*beginnings: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Those of `_of_attention` whose names begin so."""
    return {
        name: {**row, **changes}
        for name, row in _of_attention().items()
        if name.startswith(beginnings)
    }


def _grids() -> dict[str, dict[str, Any]]:
    """Windows: images that are multiples of the window and odd ones, shifts, terms and layouts."""
    swin = {"size": (14, 21), "window": (7, 7), "shift": (3, 3), "dim": 32}
    odd = {"size": (5, 11), "window": (4, 4), "shift": (2, 1)}
    volume = {"size": (3, 6, 5), "window": (2, 3, 3), "shift": (1, 1, 1)}
    images = {
        f"{image}, {dtype}{', ' * bool(name)}{name}": row | change | {"dtype": dtype}
        for image, row in {"swin": swin, "odd": odd, "volume": volume}.items()
        for dtype in ("float32", "float16", "bfloat16")
        for name, change in {
            "": {}, "padding with a bias": {"pad": True}, "table": {"bias": "table"},
            "cosine": {"cosine": True}, "head first": {"channels": "head", "pad": True},
        }.items()
    }  # fmt: skip
    return {
        **images,
        "float64": swin | {"dtype": "float64", "pad": True, "cosine": True},
        "no shift": {}, "no bias": {"bias": None}, "transposed bias": {"bias": "transposed"},
        "one window": {"size": (7, 7), "window": (7, 7), "shift": (3, 3)},
        "image smaller than a window": {"size": (2, 3), "window": (4, 5), "shift": (1, 2)},
        "windows of one token": {"size": (3, 5), "window": (1, 1)},
        "rows of windows": {"size": (4, 9), "window": (1, 5), "shift": (0, 2)},
        "large windows": {"size": (13, 24), "window": (12, 12), "shift": (6, 6), "heads": 1},
        "larger windows, half": {"size": (17, 16), "window": (17, 16), "dtype": "float16"},
        "windows of 400 tokens": {"size": (20, 20), "window": (20, 20), "heads": 1, "batch": 1},
        "grid": {"size": (8, 12), "grid": True}, "grid, half": {
            "size": (14, 14), "window": (7, 7), "grid": True, "dtype": "float16"},
        "grid of a volume": {"size": (4, 6, 6), "window": (2, 3, 2), "grid": True},
        "minus infinity across regions": swin | {"mask_value": -math.inf},
        "minus infinity, odd, half": odd | {"mask_value": -math.inf, "dtype": "float16"},
        "nothing across regions": swin | {"mask_value": 0.0},
        "scale 0": odd | {"scale": 0.0}, "negative scale": odd | {"scale": -0.7, "pad": True},
        "scale 0, half": odd | {"scale": 0.0, "dtype": "float16"},
        "terms in float32, half": swin | {
            "dtype": "float16", "terms": "float32", "pad": True, "cosine": True},
        "table in float32, half": odd | {
            "dtype": "bfloat16", "terms": "float32", "bias": "table"},
        **{f"{d} channels a head": odd | {"dim": d} for d in (1, 3, 8, 24, 40, 64, 80, 128)},
        **{f"layout {kind}": odd | {"layout": kind, "dim": 20} for kind in (
            "guarded", "odd rows", "unaligned", "sliced", "channels first", "expanded", "flipped")},
        **{f"layout {kind}, half": odd | {"layout": kind, "dim": 20, "dtype": "float16"}
           for kind in ("guarded", "odd rows", "unaligned")},
        **{f"data {kind}": odd | {"data": kind, "pad": True} for kind in (
            "large", "constant", "zeros", "shifted")},
        "cosine of small rows": swin | {"cosine": True, "data": "small"},
        "cosine of tiny rows": odd | {"cosine": True, "data": "tiny"},
        "cosine of zeros": odd | {"cosine": True, "data": "zeros"},
        "many windows": {"batch": 1, "size": (260, 260), "window": (1, 1), "heads": 1, "dim": 4},
        "no image": {"batch": 0},
        "a far channel of values": {"data": "far channel"},
        "a far channel of values, long": {
            "data": "far channel", "size": (9, 9), "window": (9, 9), "heads": 1},
        "seven heads": {"heads": 7, "dim": 5}, "ieee": swin | {"precision": "ieee"},
        "ieee, long": {
            "size": (9, 9), "window": (9, 9), "shift": (4, 4), "heads": 1, "precision": "ieee"},
        "lean": swin | {"precision": "lean"},
    }  # fmt: skip


def _layers() -> dict[str, dict[str, Any]]:
    shapes = {
        f"{m} x {k} -> {n}": {"batch": (m,), "depth": k, "width": n}
        for m, k, n in ((1, 1, 1), (1, 192, 100), (7, 33, 65), (197, 96, 384), (64, 768, 5),
                        (300, 257, 130))
    }  # fmt: skip
    terms = {
        f"{activation}, {dtype}": {"activation": activation, "dtype": dtype, "scale": scale,
                                   "residual": residual}
        for activation, scale, residual in (
            ("none", True, True), ("gelu", False, False), ("gelu_tanh", False, True),
            ("quick_gelu", False, False), ("silu", True, False), ("relu", True, True))
        for dtype in ("float32", "float16", "bfloat16")
    }  # fmt: skip
    return {
        **shapes, **terms,
        "plain": {}, "no bias": {"bias": False}, "float64": {"dtype": "float64", "scale": True},
        "no row": {"batch": (0,)}, "no batch axis": {"batch": ()}, "four axes": {
            "batch": (2, 3, 5)},
        "gated": {"value": True, "activation": "silu"}, "gated, half": {
            "value": True, "activation": "gelu", "dtype": "float16", "residual": True},
        "gated, no bias": {"value": True, "activation": "silu", "bias": False},
        **{f"layout {kind}": {"layout": kind} for kind in (
            "guarded", "odd rows", "unaligned", "sliced", "channels first", "every second")},
        "layout odd rows, bfloat16": {"layout": "odd rows", "dtype": "bfloat16", "depth": 62},
        **{f"data {kind}": {"data": kind} for kind in ("constant", "zeros", "shifted")},
        "ieee": {"precision": "ieee", "batch": (130,), "depth": 128},
        **{f"many rows, {m} x {k} -> {n}": {"batch": (m,), "depth": k, "width": n} for m, k, n in (
            (25088, 96, 288), (1576, 768, 2304), (3153, 768, 3072), (197, 3072, 768),
            (1000, 776, 1004), (70, 6144, 64))},
        "70 x 40 -> 24, half": {
            "batch": (70,), "depth": 40, "width": 24, "dtype": "float16"},
        "many rows, half": {"batch": (25088,), "depth": 96, "width": 288, "dtype": "float16",
                            "activation": "gelu", "residual": True},
        "many rows, all terms": {"batch": (1576,), "depth": 768, "width": 768, "scale": True,
                                 "activation": "gelu", "residual": True},
        "many rows, turbo": {"batch": (1576,), "depth": 768, "width": 768, "precision": "turbo"},
        "many rows, gated": {"batch": (1370,), "depth": 1536, "width": 512, "value": True,
                             "activation": "silu"},
    }  # fmt: skip


def _packs() -> dict[str, dict[str, Any]]:
    """Packed sequences."""
    lengths = {
        f"lengths {' '.join(map(str, n))}": {"lengths": n}
        for n in ((1,), (5, 33, 1, 64), (130, 7), (0, 9, 0, 0, 12), (0,), (17,) * 5, (3, 300))
    }
    crossed = {"lengths": (5, 0, 20, 3), "key_lengths": (7, 4, 0, 70)}
    return {
        **lengths,
        "no sequence": {"lengths": ()},
        "other keys": crossed, "other keys, causal": crossed | {"causal": True},
        "other keys, half": crossed | {"dtype": "float16"},
        "causal": {"causal": True}, "causal, half": {"causal": True, "dtype": "bfloat16"},
        "groups": {"heads": 6, "kv_heads": 2}, "one key head, causal": {
            "heads": 4, "kv_heads": 1, "causal": True},
        "64-bit lengths": {"index": "int64"}, "longest lengths unsaid": {"longest": False},
        "longest lengths unsaid, crossed": crossed | {"longest": False},
        **{f"head dimensions {d} and {dv}": {"dim": d, "value_dim": dv} for d, dv in (
            (1, 1), (8, 8), (40, 24), (64, 64), (72, 80), (128, 33), (256, 256))},
        **{f"{dtype}": {"dtype": dtype, "dim": 64} for dtype in (
            "float16", "bfloat16", "float64")},
        **{f"scale {scale}{', causal' * causal}": {"scale": scale, "causal": causal}
           for scale in (0.0, -0.3) for causal in (False, True)},
        "scale 0.0, half": {"scale": 0.0, "dtype": "float16", "dim": 40},
        "scale -0.3, half": {"scale": -0.3, "dtype": "bfloat16", "dim": 40},
        "data shifted, half": {"data": "shifted", "dtype": "float16", "dim": 40},
        **{f"layout {kind}": {"layout": kind, "dim": 40} for kind in LAYOUTS if kind not in (
            "packed", "expanded")},
        **{f"layout {kind}, half": {"layout": kind, "dim": 40, "dtype": "float16"}
           for kind in ("guarded", "odd rows", "channels first", "unaligned")},
        **{f"data {kind}": {"data": kind} for kind in (
            "large", "constant", "zeros", "shifted", "balanced channels")},
        "ieee": {"precision": "ieee"}, "lean": {"precision": "lean"},
    }  # fmt: skip


_TURBO = {"precision": "turbo", "queries": 70, "keys": 130, "dim": 64}
_ALPHAS = {
    f"alpha {alpha}{', causal' * causal}": {"alpha": alpha, "causal": causal, "keys": 90}
    for alpha in (1.0, 1.01, 1.25, 2.0, 3.0, 4.0, "heads", "batch and heads")
    for causal in (False, True)
}
CASES: dict[str, list[Case]] = {
    "attention": _rows("attention", {
        **_of_attention(),
        "turbo": _TURBO, "turbo, masked": _TURBO | {"mask": "float"},
        "turbo, a hidden row": _TURBO | {"mask": "infinity hides a row"},
        "data tiny": {"data": "tiny", "scale": 1.0},
        "data huge": {"data": "huge", "scale": 1e-30},
        "scores of 1e30": {"data": "huge"},
        "long rows": {"queries": 9, "keys": 3000, "heads": 1},
        "keys in halves, masked": {
            "batch": (1,), "queries": 80, "keys": 272, "value_dim": 48, "mask": "minus infinity"},
        "many heads": {"batch": (70_000,), "heads": 1, "queries": 2, "dim": 8},
        "causal before a short last block": {
            "batch": (1,), "heads": 1, "queries": 1100, "dim": 4, "causal": True},
    }),
    "window_attention": _rows("window_attention", _grids() | {
        "turbo": {"size": (14, 14), "window": (7, 7), "precision": "turbo"}}),
    "linear": _rows("linear", _layers()),
    "varlen_attention": _rows("varlen_attention", _packs()),
    "entmax_attention": _rows("entmax_attention", {
        **_of_attention(), **_ALPHAS,
        "sparsemax, half": {"alpha": 2.0, "dtype": "float16", "queries": 70},
        "alpha of heads, half": {"alpha": "heads", "dtype": "bfloat16", "queries": 70},
        "sparsemax, masked": {"alpha": 2.0, "mask": "float", "keys": 90},
        "alpha of heads, masked": {"alpha": "heads", "mask": "hidden row"},
        "long rows": {"queries": 9, "keys": 1500, "heads": 1},
    }),
    "entmax_varlen_attention": _rows("entmax_varlen_attention", {
        **_packs(),
        **{f"alpha {a}": {"alpha": a} for a in (1.0, 2.0, "heads", "batch and heads")},
    }),
    "sparsity": _rows("sparsity", {
        **_some("causal", "groups", "one key", "keys hidden", "mask hidden", "mask float",
                "mask bool",
                "mask least", "layout", "2 queries", "5 queries", "no ", "data", "float16",
                "bfloat16", "scale"),
        **{f"{name}, long rows{', causal' * causal}": {
            "sparsity": value, "queries": 130, "keys": 700, "heads": 1, "data": "large",
            "causal": causal}
           for name, value in (("exact", "exact"), ("1e-6", 1e-6), ("0.001", 1e-3))
           for causal in (False, True)},
        "1e-6, half": {"sparsity": 1e-6, "queries": 100, "keys": 700, "dtype": "float16"},
    }),
    "dropout": _rows("dropout", {
        **_some("causal", "groups", "one key", "mask", "layout", "63 queries", "1 queries",
                "65 queries", "5 queries", "no ", "float16", "bfloat16", "head dimensions", "two"),
        **{f"probability {p}": {"dropout": p, "keys": 70} for p in (0.01, 0.5, 0.9)},
        "everything is dropped": {"dropout": 1.0},
    }),
}  # fmt: skip
