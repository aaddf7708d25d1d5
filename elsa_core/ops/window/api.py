"""`window_attention`: attention within (shifted) windows of an image, from roll to un-roll."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index, is_
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch, ops
from elsa_core.backends.support import Request
from elsa_core.base import calls
from elsa_core.base.operands import require_inside, require_tensor
from elsa_core.dispatch import Route, launches
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import explain_types

LAYOUTS = ("qkv", "head")
_HALF = (torch.float16, torch.bfloat16)
_Triple = tuple[int, int, int]
_required = torch._C._any_requires_grad


def window_attention(
    qkv: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int] = (0, 0),
    scale: float | None = None,
    bias_index: Tensor | None = None,
    pad_qkv: Tensor | None = None,
    logit_scale: Tensor | None = None,
    mask_value: float = -100.0,
    layout: str = "qkv",
    grid: bool = False,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """Exact softmax attention within windows, read from the projection's output as it lies.

    The image is rolled by -shift_size, padded at the end of each axis to a multiple of the window,
    cut into windows of T tokens, attended within each, cropped and rolled back, all by index
    arithmetic inside the kernels.

    On each shifted axis of padded size P (in rolled coordinates) the regions are [0, P - window),
    [P - window, P - shift) and [P - shift, P); `mask_value` is added to the scores of tokens of
    different regions.

    Args:
        qkv: [B, H, W, 3 * C] for 2-D windows, [B, D, H, W, 3 * C] for 3-D ones, floating, the last
            dim dense; C = num_heads * head_dim.
        bias: added to the scores of every window: [num_heads, T, T], or with `bias_index` a table
            [L, num_heads]; half precision, float32 or qkv's dtype, as pad_qkv and logit_scale.
        num_heads: heads; must divide C.
        window_size: (height, width) or (depth, height, width), in tokens.
        shift_size: as many numbers, each at least 0 and smaller than the window.
        scale: factor on the scores; default 1 / sqrt(head_dim). Unused with `logit_scale`.
        bias_index: [T, T] int64, entries of the table (Swin's relative_position_index). Entries
            outside [0, L) are refused on the CPU; on a GPU, and under a transform of `torch.func`,
            they make their scores NaN.
        pad_qkv: [3 * C], what the projection makes of a padded token (its bias); default zeros.
            Padded tokens take part as keys, as they do in Swin.
        logit_scale: [num_heads], cosine attention (Swin-V2): queries and keys are L2-normalised
            and the scores multiplied with this instead of `scale`.
        mask_value: what the shift adds across regions: -100 in Swin, or -inf.
        layout: order of the 3 * C channels: "qkv" (3, heads, head_dim) or "head" (heads, 3,
            head_dim).
        grid: cut the grid of MaxViT instead: tokens of a window lie size / window apart. The sizes
            must be multiples of the window and nothing is shifted.
        precision: "strict", "ieee", "turbo" or "lean", see `elsa_core.precision`.
        backend: "auto" or one of `elsa_core.dispatch.names("window_attention")`.

    Returns:
        [B, (D,) H, W, C], dense, in qkv's dtype. Differentiable once in qkv, bias, pad_qkv and
        logit_scale; forward-mode AD and the derivatives of `torch.func` are served by the eager
        backend.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Reference:
        W-ELSA (arXiv 2604.23798); Swin Transformer (arXiv 2103.14030), Sec. 3.2.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    traced = calls.traced()
    try:
        # traced first: a compiler would guard on the others
        cached = launches.WINDOW_ATTENTION.find
        if (
            not traced
            and backend == "auto"
            and cached is not None
            and not launches.is_seen(qkv, bias, pad_qkv, logit_scale)
        ):
            found = cached(
                qkv, bias, bias_index, pad_qkv, logit_scale,
                num_heads, window_size, shift_size, scale, mask_value, layout, grid, precision,
            )  # fmt: skip
            if found is not None:
                return found
        head_dim, window, shift = _geometry(qkv, num_heads, window_size, shift_size, layout, grid)
        terms = read = bias, bias_index, pad_qkv, logit_scale
        if not (bias is bias_index is pad_qkv is logit_scale is None):
            _check_terms(qkv, terms, num_heads, math.prod(window))
            # half precision beside another dtype (a model in one half precision under autocast to
            # the other) in float32, in which a sum of both would be
            dtype = qkv.dtype
            read = tuple(  # type: ignore[assignment]  # four each
                t.float() if t is not None and t.dtype in _HALF and t.dtype != dtype else t
                for t in terms
            )
        if not mask_value <= 0:  # NaN too
            raise ArgumentError(f"mask_value={mask_value} must be negative, 0 or -inf")
        image = qkv if qkv.dim() == 5 else qkv.unsqueeze(1)
        if image.stride(-1) != 1:  # an empty image counts as contiguous in any strides
            image = image.clone(memory_format=torch.contiguous_format)
        arguments = (
            image, *read, num_heads, window, shift, head_dim**-0.5 if scale is None else scale,
            mask_value, layout, grid, precision,
        )  # fmt: skip
        kind = (qkv.dtype, head_dim, head_dim, precision, backend)
        if traced:
            out = _traced(qkv, kind, arguments)
        else:
            choice = dispatch.chosen("window_attention", qkv.device, *kind)
            if torch.is_grad_enabled() and _required(qkv, bias, pad_qkv, logit_scale):
                out = dispatch.recorded("window_attention", choice)(*arguments)
            else:
                out = calls.below_autograd(choice.run, *arguments)
                # the operator's kernel read the terms as they were given
                kept = choice.run is ops.WINDOW_ATTENTION.overload and all(map(is_, terms, read))
                if qkv.is_cuda and backend == "auto" and kept:
                    launches.WINDOW_ATTENTION.admit(
                        arguments,
                        (qkv, *terms, num_heads, window_size, shift_size, scale, mask_value, layout,
                         grid, precision),
                    )  # fmt: skip
        return out if qkv.dim() == 5 else out.squeeze(1)
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise


def _traced(qkv: Tensor, kind: tuple[Any, ...], arguments: tuple[Any, ...]) -> Tensor:
    name = dispatch.choose("window_attention", calls.place(qkv), *kind)
    run: Callable[..., Tensor] = ops.WINDOW_ATTENTION.reference
    if calls.exporting_onnx():
        run = ops.WINDOW_ATTENTION.exported
    elif not dispatch.plain_alone(kind[-1]):
        run = dispatch.RUNS["window_attention", name]
    return run(*arguments)


def explain_window_attention(
    qkv: Tensor, bias: Tensor | None = None, *, num_heads: int, window_size: Sequence[int],
    shift_size: Sequence[int] = (0, 0), scale: float | None = None,
    bias_index: Tensor | None = None, pad_qkv: Tensor | None = None,
    logit_scale: Tensor | None = None, mask_value: float = -100.0, layout: str = "qkv",
    grid: bool = False, precision: str = "strict", backend: str = "auto",
) -> Route:  # fmt: skip
    """Say which backend and arithmetic would serve `window_attention` with these arguments, and
    who its gradients; takes and raises what it does."""
    head_dim, window, _ = _geometry(qkv, num_heads, window_size, shift_size, layout, grid)
    _check_terms(qkv, (bias, bias_index, pad_qkv, logit_scale), num_heads, math.prod(window))
    request = Request(
        qkv.device.type, qkv.dtype, head_dim, head_dim, precision, "window_attention",
        "none" if bias is None else "additive", "dense" if qkv.stride(-1) == 1 else "strided",
        calls.wanted(qkv=qkv, bias=bias, pad_qkv=pad_qkv, logit_scale=logit_scale),
        math.prod(window), qkv.get_device(),
    )  # fmt: skip
    return dispatch.route(request, backend, schedule=(qkv,))


def _geometry(
    qkv: Tensor, num_heads: int, window_size: Sequence[int], shift_size: Sequence[int],
    layout: str, grid: bool,
) -> tuple[int, _Triple, _Triple]:  # fmt: skip
    """head_dim, and window and shift on three axes; a 2-D image has depth 1."""
    require_tensor("qkv", qkv)
    if not qkv.dtype.is_floating_point:
        raise ArgumentError(f"qkv must be floating, not {qkv.dtype}")
    if not isinstance(num_heads, int) and not hasattr(num_heads, "__index__"):
        raise TypeError(f"num_heads must be a whole number, not {type(num_heads).__name__}")
    whole = []
    for name, sizes in (("window_size", window_size), ("shift_size", shift_size)):
        try:
            whole.append(tuple(map(index, sizes)))
        except TypeError:
            said = f"{name} must be whole numbers for each axis, not {sizes!r}"
            raise ArgumentError(said) from None
    window, shift = whole
    axes = len(window)
    if axes not in (2, 3) or qkv.dim() != axes + 2:
        raise ArgumentError(
            f"qkv of shape {list(qkv.shape)} and window_size {window}: expected "
            "[B, H, W, 3 * C] and (height, width), or [B, D, H, W, 3 * C] and three sizes"
        )
    if len(shift) != axes and any(shift):
        raise ArgumentError(f"shift_size {shift} must have {axes} numbers, like window_size")
    shift = shift if len(shift) == axes else (0,) * axes
    if min(window) < 1:
        raise ArgumentError(f"window_size {window} must be positive")
    if not all(0 <= moved < size for size, moved in zip(window, shift, strict=True)):
        raise ArgumentError(
            f"shift_size {shift} must be at least 0 and smaller than window_size {window}"
        )
    image = qkv.shape[1:-1]
    if grid and (any(shift) or any(n % w for n, w in zip(image, window, strict=True))):
        raise ArgumentError(
            f"grid=True needs an image of a multiple of window_size {window} and no "
            f"shift, not {list(image)} shifted by {shift}"
        )
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout={layout!r} is unknown: choose one of {', '.join(LAYOUTS)}")
    channels = index(qkv.shape[-1])  # a constant for the compiler
    if num_heads < 1 or channels == 0 or channels % (3 * num_heads):
        raise ArgumentError(
            f"num_heads={num_heads} does not divide C: qkv has {channels} channels, which must be "
            "3 * num_heads * head_dim"
        )
    if axes == 2:
        window, shift = (1, *window), (0, *shift)
    return channels // (3 * num_heads), window, shift  # type: ignore[return-value]  # three each


def _check_terms(
    qkv: Tensor, terms: tuple[Tensor | None, ...], num_heads: int, tokens: int
) -> None:
    bias, places, pad_qkv, logit_scale = terms
    if places is not None:
        if bias is None:
            raise ArgumentError("bias_index needs bias: the table [L, num_heads] that it reads")
        require_tensor("bias_index", places)
        require_tensor("bias", bias)
        if places.dtype != torch.int64:
            raise ArgumentError(f"bias_index must be int64, not {places.dtype}")
        _check(qkv, "bias_index", places, (tokens, tokens), any_dtype=True)
        if bias.dim() != 2 or bias.shape[1] != num_heads or not bias.shape[0]:
            raise ArgumentError(
                f"bias of shape {list(bias.shape)} is no table [L, {num_heads}], which "
                "bias_index asks for"
            )
        _check(qkv, "bias", bias, tuple(bias.shape))
        require_inside(places, bias.shape[0])
    else:
        _check(qkv, "bias", bias, (num_heads, tokens, tokens))
    _check(qkv, "pad_qkv", pad_qkv, (qkv.shape[-1],))
    _check(qkv, "logit_scale", logit_scale, (num_heads,))


def _check(
    qkv: Tensor, name: str, given: Any, shape: tuple[int, ...], *, any_dtype: bool = False
) -> None:
    if given is None:
        return
    require_tensor(name, given)
    if tuple(given.shape) != shape:
        raise ArgumentError(f"{name} of shape {list(given.shape)} must be {list(shape)}")
    if given.device != qkv.device:
        raise ArgumentError(f"{name} is on {given.device}, qkv on {qkv.device}")
    if not any_dtype and given.dtype not in (*_HALF, torch.float32, qkv.dtype):
        raise ArgumentError(
            f"{name} must be half precision, float32 or qkv's {qkv.dtype}, not {given.dtype}"
        )
