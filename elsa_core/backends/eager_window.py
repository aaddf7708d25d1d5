"""Window attention in plain PyTorch: the geometry of windows, and attention chunk by chunk.

It serves every device and dtype, and the backward of every backend. The three steps are apart so
that the backward can take them one by one: `partition` (roll, pad, cut), attention within the
windows, `reverse` (join, crop, un-roll). Axes are always three; a 2-D image has depth 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.backends.window_call import WindowCall
from elsa_core.base.operands import require_inside

_NORM_EPS = 1e-12  # of torch.nn.functional.normalize, which cosine attention is defined with


class Windows(NamedTuple):
    """How an image [B, size..., C] is cut.

    `size` is the image's depth, height and width; `window` and `shift` are per axis. `grid` cuts
    the grid of MaxViT: the tokens of a window lie size / window apart instead of side by side.
    """

    size: Sequence[int]
    window: Sequence[int]
    shift: Sequence[int]
    grid: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """Windows along each axis, the last one padded where the axis is no multiple."""
        # Not -(-size // window): ONNX rounds a negative quotient towards zero.
        pairs = zip(self.size, self.window, strict=True)
        return tuple((size + window - 1) // window for size, window in pairs)


def partition(x: Tensor, cut: Windows, pad: Tensor | None = None) -> Tensor:
    """[B, D, H, W, C] -> [B * windows, T, C]: roll by -shift, pad with `pad` [C] or zeros, cut."""
    if any(cut.shift):
        x = x.roll([-s for s in cut.shift], (1, 2, 3))
    axes = zip(cut.counts, cut.window, cut.size, strict=True)
    for axis, (count, window, size) in enumerate(axes, start=1):
        extra = count * window - size  # tokens added at its end, in rolled coordinates
        if extra:
            shape = [*x.shape]
            shape[axis] = extra
            fill = x.new_zeros(()) if pad is None else pad.to(x.dtype)
            x = torch.cat([x, fill.expand(shape)], dim=axis)
    (nd, nh, nw), (wd, wh, ww) = cut.counts, cut.window
    batch, channels = x.shape[0], x.shape[-1]
    if cut.grid:
        x = x.reshape(batch, wd, nd, wh, nh, ww, nw, channels).permute(0, 2, 4, 6, 1, 3, 5, 7)
    else:
        x = x.reshape(batch, nd, wd, nh, wh, nw, ww, channels).permute(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(batch * math.prod(cut.counts), math.prod(cut.window), channels)


def reverse(windows: Tensor, cut: Windows, batch: int) -> Tensor:
    """[B * windows, T, C] -> [B, D, H, W, C]: join, crop the padding, roll back."""
    (nd, nh, nw), (wd, wh, ww) = cut.counts, cut.window
    channels = windows.shape[-1]
    x = windows.reshape(batch, nd, nh, nw, wd, wh, ww, channels)
    order = (0, 4, 1, 5, 2, 6, 3, 7) if cut.grid else (0, 1, 4, 2, 5, 3, 6, 7)
    x = x.permute(*order).reshape(batch, nd * wd, nh * wh, nw * ww, channels)
    depth, height, width = cut.size
    x = x[:, :depth, :height, :width]
    if any(cut.shift):
        x = x.roll(list(cut.shift), (1, 2, 3))
    return x.contiguous()


def region_mask(cut: Windows, mask_value: float, like: Tensor) -> Tensor | None:
    """What the shift adds to scores, [windows, T, T]: 0 within a region, `mask_value` across.

    None where nothing is shifted. The roll brings tokens side by side that were far apart; on each
    shifted axis of padded size P the regions are [0, P - window), [P - window, P - shift) and
    [P - shift, P).
    """
    if not any(cut.shift):
        return None
    padded = [n * w for n, w in zip(cut.counts, cut.window, strict=True)]
    region = torch.zeros(padded, device=like.device, dtype=torch.int64)
    for axis, (size, window, shift) in enumerate(zip(padded, cut.window, cut.shift, strict=True)):
        if shift:
            position = torch.arange(size, device=like.device)
            label = (position >= size - window).long() + (position >= size - shift).long()
            shape = [1, 1, 1]
            shape[axis] = size
            region = region * 3 + label.view(shape)
    whole = Windows(padded, cut.window, (0, 0, 0), cut.grid)
    flat = partition(region[None, ..., None], whole)
    label = flat.squeeze(-1)
    return torch.where(
        label[:, :, None] == label[:, None, :],
        torch.zeros((), dtype=like.dtype, device=like.device),
        torch.full((), mask_value, dtype=like.dtype, device=like.device),
    )


def attention(*arguments: Any, **named: Any) -> Tensor:
    """The operator `elsa::window_attention`: takes a `WindowCall`'s fields.

    Scores and sums are float32, or float64 for float64 inputs; scores exist for a chunk of windows
    at a time.
    """
    call = WindowCall(*arguments, **named)
    qkv = call.qkv
    with torch.autocast(qkv.device.type, enabled=False):
        cut = Windows(call.qkv.shape[1:4], call.window_size, call.shift_size, call.grid)
        windows = partition(qkv, cut, call.pad_qkv)
        terms = _Terms.of(call, cut)
        # Joined, not written into one tensor: `vmap` cannot write into what it has not batched.
        parts = [
            _attend(windows[chunk], terms, chunk, call)
            for chunk in _chunks(windows, call.num_heads)
        ]
        if not parts:
            parts = [qkv.new_empty((0, windows.shape[1], qkv.shape[-1] // 3))]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return reverse(out, cut, qkv.shape[0])


def backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv, bias, pad_qkv and logit_scale, dense; empty where `needs` wants none.

    Takes a `WindowCall`'s fields, then `needs`.

    Each chunk of windows is computed again and differentiated alone, so that the scores of no more
    than one chunk are alive.
    """
    call, needs = WindowCall(*arguments[:-1]), arguments[-1]
    with torch.autocast(call.qkv.device.type, enabled=False), _recording(), torch.enable_grad():
        cut = Windows(call.qkv.shape[1:4], call.window_size, call.shift_size, call.grid)
        leaves = [
            None if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(call.differentiable, needs, strict=True)
        ]
        image, bias, pad, logit_scale = leaves
        assert image is not None  # qkv is a tensor
        windows = partition(image, cut, pad)
        terms = _Terms.of(call._replace(bias=bias, logit_scale=logit_scale), cut)
        if terms.bias is not None and terms.bias.device.type == "cpu":  # elsewhere a look waits
            terms = terms._replace(holes=bool(terms.bias.isneginf().any()))
        ends = [t for t in (terms.bias, terms.logit_scale) if t is not None and t.requires_grad]
        sums = [torch.zeros_like(t) for t in ends]
        grad_windows = torch.empty_like(windows) if windows.requires_grad else None
        grad_rows = partition(grad_out, cut)
        for chunk in _chunks(windows, call.num_heads):
            part = windows[chunk].detach().requires_grad_(grad_windows is not None)
            wanted = [*ends, part] if part.requires_grad else ends
            if not wanted:
                break
            out = _attend(part, terms, chunk, call)
            grads = torch.autograd.grad(out, wanted, grad_rows[chunk], retain_graph=True)
            if grad_windows is not None:
                grad_windows[chunk] = grads[-1]
            for total, grad in zip(sums, grads, strict=False):
                total.add_(grad)
        if grad_windows is not None:
            ends, sums = [*ends, windows], [*sums, grad_windows]
        return _to_leaves(grad_out, leaves, ends, sums)


def _recording() -> AbstractContextManager[None]:
    """Let autograd record here too: an operator's kernel and a dispatch mode run below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(included, excluded)
    return guard


def _to_leaves(
    grad_out: Tensor, leaves: list[Tensor | None], ends: list[Tensor], sums: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found: Sequence[Tensor | None] = (None,) * len(wanted)
    if ends:
        found = torch.autograd.grad(ends, wanted, sums, allow_unused=True)
    grads, results = iter(found), []
    for leaf in leaves:
        if leaf is None or not leaf.requires_grad:
            results.append(grad_out.new_empty(0))
            continue
        grad = next(grads)
        # that of a padding is a view of the padded image: the fake promises dense ones
        results.append(leaf.new_zeros(leaf.shape) if grad is None else grad.contiguous())
    return results[0], results[1], results[2], results[3]


class _Terms(NamedTuple):
    """What is added to scores or multiplies them, in the computing dtype."""

    bias: Tensor | None  # [heads, T, T]
    logit_scale: Tensor | None  # [heads, 1, 1]
    mask: Tensor | None  # [windows, T, T]
    holes: bool  # the bias may hide all keys from a row; the mask never hides a token from itself

    @classmethod
    def of(cls, call: WindowCall, cut: Windows) -> _Terms:
        compute = torch.promote_types(call.qkv.dtype, torch.float32)
        bias, logit_scale = call.bias, call.logit_scale
        if bias is not None:
            bias = dense_bias(bias, call.bias_index).to(compute, copy=True)
        if logit_scale is not None:
            logit_scale = logit_scale.to(compute, copy=True).view(-1, 1, 1)
        mask = region_mask(cut, call.mask_value, call.qkv.new_empty(0, dtype=compute))
        return cls(bias, logit_scale, mask, holes=bias is not None)


def dense_bias(bias: Tensor, bias_index: Tensor | None) -> Tensor:
    """The bias as [heads, T, T]: itself, or a table [L, heads] read at `bias_index` [T, T].

    An entry outside the table is refused, or NaN where a look at it would wait or trace.
    """
    if bias_index is None:
        return bias
    if require_inside(bias_index, bias.shape[0]):
        return bias[bias_index].permute(2, 0, 1)
    # PyTorch takes a negative one from the end, and stops a GPU's process at a large one.
    inside = bias_index.clamp(0, bias.shape[0] - 1)
    outside = (inside != bias_index).unsqueeze(-1)
    return bias[inside].masked_fill(outside, math.nan).permute(2, 0, 1)


def largest_score(call: WindowCall) -> float:
    """The largest |score| that the operator sees, masked ones left out; 0 where none is finite."""
    cut = Windows(call.qkv.shape[1:4], call.window_size, call.shift_size, call.grid)
    windows = partition(call.qkv, cut, call.pad_qkv)
    terms = _Terms.of(call, cut)._replace(mask=None)
    largest = 0.0
    for chunk in _chunks(windows, call.num_heads):
        scores, _ = _scores(windows[chunk], terms, chunk, call)
        largest = max(largest, float(scores.abs().nan_to_num(0.0, 0.0).max()))
    return largest


def _attend(windows: Tensor, terms: _Terms, chunk: slice, call: WindowCall) -> Tensor:
    """Attention within windows [n, T, 3C] -> [n, T, C]; `chunk` says which windows they are."""
    scores, v = _scores(windows, terms, chunk, call)
    if terms.holes:  # a row that sees no key gives zeros and no gradient, where softmax gives NaN
        dead = scores.detach().amax(-1, keepdim=True).isneginf()
        out = (scores.masked_fill(dead, 0.0).softmax(-1) @ v).masked_fill(dead, 0.0)
    else:
        out = scores.softmax(-1) @ v
    joined: Tensor = out.transpose(1, 2).flatten(2).to(windows.dtype)
    return joined


def _scores(
    windows: Tensor, terms: _Terms, chunk: slice, call: WindowCall
) -> tuple[Tensor, Tensor]:
    """Scores [n, heads, T, T] and values [n, heads, T, head_dim] of windows [n, T, 3C]."""
    compute = torch.promote_types(windows.dtype, torch.float32)
    first = call.layout == "qkv"
    shape = (3, call.num_heads, -1) if first else (call.num_heads, 3, -1)
    packed = windows.to(compute).unflatten(-1, shape)
    q, k, v = packed.unbind(2 if first else 3)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [n, heads, T, head_dim]
    if terms.logit_scale is None:
        scores = (q @ k.mT) * call.scale
    else:
        q, k = (F.normalize(t, dim=-1, eps=_NORM_EPS) for t in (q, k))
        scores = (q @ k.mT) * terms.logit_scale
    if terms.bias is not None:
        scores = scores + terms.bias
    if terms.mask is not None:
        number = torch.arange(chunk.start, chunk.stop, device=windows.device)
        scores = scores + terms.mask[number % terms.mask.shape[0]].unsqueeze(1)
    return scores, v


def _chunks(windows: Tensor, num_heads: int) -> Iterator[slice]:
    tokens = windows.shape[1]
    size = max(1, eager.SCORES_ALIVE // max(1, num_heads * tokens * tokens))
    return eager._blocks(windows.shape[0], size)
