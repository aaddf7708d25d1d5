"""`attention`: exact softmax attention behind the signature of PyTorch's own operator."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from elsa_core import calls, ops  # noqa: F401  (ops registers the operators)
from elsa_core import precision as precisions
from elsa_core.backends import eager
from elsa_core.backends.support import Backend, Request, Support
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.operands import autocast, checked_mask, leading_dims, operands, require_dense

_ATTENTION = torch.ops.elsa.attention.default
_EAGER = torch.ops.elsa.attention_eager.default

NO_TENSOR_SCALE = "scale must be a number, not a tensor: multiply query by it to learn it"
BACKENDS = ("auto", "native", "triton", "eager")
# Which backends `auto` asks, in order. A device type that is not listed is served by eager.
_PREFERENCE = {"cpu": ("native", "eager"), "cuda": ("triton", "eager")}


@dataclass(frozen=True)
class Route:
    """How a call would be served, and why.

    Attributes:
        backend: "native", "triton" or "eager".
        schedule: how keys and queries are cut, in words.
        precision: the precision asked for.
        arithmetic: what that precision means on this backend.
        reasons: one line for each backend that was asked first and could not serve the call, and
            for anything the caller should know (a gradient path, dropout).
    """

    backend: str
    schedule: str
    precision: str
    arithmetic: str
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str = "strict",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention: `softmax(query key^T * scale + attn_mask) value`.

    The signature, layout and meaning of `torch.nn.functional.scaled_dot_product_attention`. Inputs
    may have any strides and are never made contiguous. Scores, softmax and sums are float32, or
    float64 for float64 inputs. Differentiable once in query, key, value and an additive mask;
    forward-mode AD and the derivatives of `torch.func` are served by the eager backend.

    Args:
        query: [..., Hq, Nq, D], floating; `...` is any number of batch dims.
        key: [..., Hkv, Nk, D], the query's dtype and device.
        value: [..., Hkv, Nk, Dv]; Dv may differ from D, Nk from Nq.
        attn_mask: broadcastable to [..., Hq, Nq, Nk] and never expanded in memory. bool (True takes
            part) or additive, float32 or the query's dtype.
        dropout_p: probability of dropping an attention weight; above 0 the eager backend serves.
        is_causal: query i sees keys 0..i (top-left aligned); excludes `attn_mask`.
        scale: factor on the scores; default 1 / sqrt(D). A scale of 0.0 is a scale.
        enable_gqa: allow fewer key/value heads than query heads (Hq a multiple of Hkv).
        precision: "strict", "ieee", "turbo" or "lean", see `elsa_core.precision`.
        backend: "auto", "native" (CPU library), "triton" (GPU) or "eager" (plain PyTorch).
        return_lse: also return the natural log of the softmax normaliser.

    Returns:
        out [..., Hq, Nq, Dv] in the query's dtype, whose memory is [..., Nq, Hq, Dv], so that
        `out.transpose(-3, -2).flatten(-2)` is a view; with `return_lse` also lse [..., Hq,
        Nq], float32 (float64 for float64 inputs). A row that sees no key gives zeros and lse -inf.

    Raises:
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Reference:
        ELSA (arXiv 2604.23798), Eq. 4 and Theorem 1.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(NO_TENSOR_SCALE)
    if not calls.watched() and not torch._C._is_any_autocast_enabled() and dropout_p == 0.0:
        try:
            answer = _direct(query, key, value, attn_mask, is_causal, scale, precision, backend)
        except RuntimeError:
            require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
            raise
        if answer is not None:
            return answer if return_lse else answer[0]
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    chosen = _backend_name(
        q.device.type, q.dtype, index(q.shape[-1]), index(v.shape[-1]), precision, backend
    )
    if _eager_alone(backend, dropout_p):
        out, lse = eager.attention(q, k, v, mask, is_causal, scale, dropout_p=dropout_p)
    else:
        operator = _EAGER if chosen == "eager" else _ATTENTION
        out, lse = operator(q, k, v, mask, is_causal, scale, precision)
    if not query.dim() == key.dim() == value.dim() == 4:
        leading = leading_dims(query, key, value)
        out = out.reshape(*leading, *out.shape[2:])
        lse = lse.reshape(*leading, *lse.shape[2:])
    return (out, lse) if return_lse else out


def _direct(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor] | None:
    """Serve an ordinary call that nobody watches, with the least host time; None for any other.

    Ordinary are plain tensors [B, H, N, D] of one dtype and device, whose heads are equal and that
    pass every check of `operands` as they are, where autograd has nothing to record.
    """
    shape, others, dtype, device = query.shape, key.shape, query.dtype, query.device
    if not (
        len(shape) == 4
        and value.shape == others
        and (others == shape or (others[:2] == shape[:2] and others[3:] == shape[3:]))
        and key.dtype == dtype
        and value.dtype == dtype
        and dtype.is_floating_point
        and key.device == device
        and value.device == device
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
    ) or calls.differentiates(query, key, value, attn_mask):
        return None
    if attn_mask is not None:
        attn_mask = checked_mask(attn_mask, query, key, is_causal)
    head_dim = shape[3]
    if scale is None:
        scale = head_dim**-0.5 if head_dim else 1.0
    chosen = _cached_name(device, dtype, head_dim, head_dim, precision, backend)
    arguments = (query, key, value, attn_mask, is_causal, scale, precision)
    result: tuple[Tensor, Tensor]
    if chosen == "triton" and not torch._C._autograd._profiler_enabled():
        from elsa_core.backends import triton

        result = triton.attention_forward(*arguments)
    else:
        result = calls.below_autograd(_EAGER if chosen == "eager" else _ATTENTION, *arguments)
    return result


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str = "strict",
    backend: str = "auto",
) -> Route:
    """Say which backend, schedule and arithmetic would serve `attention` with these arguments.

    Takes the arguments of `attention` (tensors' shapes, strides, dtypes and devices matter, their
    values do not) and raises what it would raise. Where the published results show a loss near this
    call, a reason says so.
    """
    from elsa_core.measuring.losses import losing_case

    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    request = Request(q.device.type, q.dtype, q.shape[-1], v.shape[-1], precision)
    name, reasons = _select(request, backend)
    alone = _eager_alone(backend, dropout_p)
    if alone and name != "eager":
        reasons = (*reasons, f"{name}: has no {alone}")
        name = "eager"
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        reasons = (*reasons, "gradients: recomputed block by block in plain PyTorch from the lse")
    if name != "eager":
        masked = mask is not None or is_causal
        shape = (q.shape[0], q.shape[1], q.shape[2], q.shape[3])
        lost = losing_case(q.device.type, shape, k.shape[2], q.dtype, masked, precision)
        reasons = (*reasons, lost) if lost else reasons
    implementation = _implementation(name)
    return Route(
        backend=name,
        schedule=implementation.schedule(q, k, v, mask, is_causal, precision),
        precision=precision,
        arithmetic=_arithmetic(name, q.dtype, precision),
        reasons=reasons,
    )


def supports(request: Request, backend: str) -> Support:
    """Ask one backend by name whether it can serve a request, and why not."""
    return _implementation(backend).support(request)


def _arithmetic(name: str, dtype: torch.dtype, precision: str) -> str:
    if dtype in (torch.float16, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} products, float32 state and accumulation"
    if name == "eager":
        return f"PyTorch's {str(dtype).removeprefix('torch.')} matrix products"
    if name == "native":
        return "float32 FMA"
    return precisions.PRECISIONS[precision].met_by


def _implementation(name: str) -> Backend:
    if name == "native":
        from elsa_core.backends import native

        return native
    if name == "triton":
        from elsa_core.backends import triton

        return triton
    return eager


def _select(request: Request, backend: str) -> tuple[str, tuple[str, ...]]:
    """The backend that serves `request`, with the reasons why those asked before it cannot, and
    what it has to say itself.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    precisions.validate(request.precision, request.dtype)
    if backend != "auto":
        answer = _ask(request, backend)
        if not answer.ok:
            raise UnavailableError(f"backend={backend!r} cannot serve this call: {answer.reason}")
        return backend, (f"{backend}: {answer.reason}",) if answer.reason else ()
    reasons: list[str] = []
    for name in _PREFERENCE.get(request.device_type, ("eager",)):
        answer = _ask(request, name)
        if answer.reason:
            reasons.append(f"{name}: {answer.reason}")
        if answer.ok:
            return name, tuple(reasons)
    raise UnavailableError("no backend can serve this call: " + "; ".join(reasons))


def _ask(request: Request, name: str) -> Support:
    home = {"native": "cpu", "triton": "cuda"}.get(name)
    if home is not None and request.device_type != home:
        return Support(False, f"serves {home} tensors, these are on {request.device_type}")
    return supports(request, name)


@functools.lru_cache(maxsize=1024)
def _cached_name(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    backend: str,
) -> str:
    return _select(Request(device.type, dtype, head_dim, value_dim, precision), backend)[0]


def _backend_name(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    backend: str,
) -> str:
    return _cached_name(torch.device(device_type), dtype, head_dim, value_dim, precision, backend)


# A constant for the compiler: asking a backend may build or load a library, which cannot be traced.
# This is the mark of `torch.compiler.assume_constant_result`, set without importing the compiler.
_backend_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _eager_alone(backend: str, dropout_p: float = 0.0) -> str:
    """What of this call plain PyTorch alone can do, in words; empty where an operator serves."""
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(f"dropout_p={dropout_p} must be in [0, 1)")
    what = "dropout" if dropout_p > 0.0 else ""
    if not what and calls.differentiates_otherwise():
        what = "forward-mode AD or torch.func derivatives"
    if what and backend not in ("auto", "eager"):
        raise UnavailableError(f"backend={backend!r} has no {what}: use backend='auto' or 'eager'")
    return what
