"""PyTorch's own exact attention kernels: whole calls, and the gradients of calls of ours.

`attention` is `torch.nn.functional.scaled_dot_product_attention` with the meaning of
`elsa_core.attention`. `backward` hands our (out, lse) to the backward kernels of PyTorch's
attention, which need nothing else of a forward: on the CPU flash; on CUDA the memory-efficient
ones, and in half precision without a mask flash, which takes 0.37 of their time (1 x 8 x 32768 x 64
in fp16 on an H100), or, for long rows on Hopper and later, cuDNN's, which take 0.22 (`_by_cudnn`).
No CUDA kernel adds in one order unless PyTorch is told to: `torch.use_deterministic_algorithms`
keeps to the memory-efficient ones, which then give equal bits in every run. Preconditions:
ATen/native/transformers/cuda/attention_backward.cu, ATen/native/cudnn/MHA.cpp and
ATen/native/cpu/FlashAttentionKernel.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.backends.support import Request, Support, loses_digits
from elsa_core.base import calls

_WIDTH = 16  # bytes that the CUDA kernels load at once
_BIAS_KEYS = 16  # the rows of a bias are padded to a multiple of this
_LSE_ROWS = 32  # the rows of lse are padded to a multiple of this
# Multiply-adds of query key^T from which cuDNN's gradients take less time than flash by more than a
# copy and, after some hundred calls, the making of a plan: rows of 8192 tokens of 8 heads of 64.
_LONG = 1 << 35
_FLASH_DIM = 256  # the most channels of a head
_SEQUENCES = 65535  # the most programs along the second axis of a CUDA grid, one for each sequence
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ZEROS: dict[str, bool] = {}  # by device, see `_gives_zeros`


def support(request: Request) -> Support:
    """Whether `scaled_dot_product_attention` means what `elsa_core.attention` does."""
    if request.dtype not in (*_DTYPES, torch.float64):
        return Support(False, f"takes floating dtypes, not {request.dtype}")
    if request.precision not in ("strict", "ieee"):
        return Support(False, f"PyTorch's kernels have no precision {request.precision!r}")
    if request.precision == "ieee" and request.device_type == "cuda":
        return Support(False, "PyTorch's kernels take tensor cores: no precision 'ieee'")
    if min(request.head_dim, request.value_dim) < 1:
        return Support(False, "takes head_dim from 1, not 0")
    return Support(True)


def takes(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether PyTorch's kernels take a call without a loss; only shapes and dtypes are read."""
    if 0 in query.shape or key.shape[2] == 0:
        return False
    # A float32 mask beside half precision would be rounded, or served without a fused kernel.
    return attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str = "strict", dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """`elsa_core.attention` of 4-D operands by PyTorch's own operator; differentiable; no lse.

    A row that sees no key gives zeros and no gradient on every one of PyTorch's kernels: it is let
    see all keys, and its output is taken out. A NaN in a key reaches only the rows that see it:
    PyTorch adds minus infinity where a boolean mask hides a key, and NaN stays NaN. An infinity in
    a hidden key may still give NaN.
    """
    dead: Tensor | None = None
    spoilt: Tensor | None = None
    if query.is_cuda:
        # of rows that do not start at 16 bytes cuDNN gives wrong results and the memory-efficient
        # kernel raises (seen in torch 2.11)
        query, key, value = (_aligned(t) for t in (query, key, value))
        # the memory-efficient kernel reads any mask as one of the query's dtype
        if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
            attn_mask = attn_mask.to(query.dtype)
    if attn_mask is not None:
        if attn_mask.shape[-1] != key.shape[2]:  # a kernel wants the keys side by side
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2]).contiguous()
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask.detach() == -math.inf
        dead = hidden.all(-1, keepdim=True)
        if attn_mask.dtype == torch.bool:
            key, spoilt = _without_nan(query, key, attn_mask)
            attn_mask = attn_mask | dead
        else:
            attn_mask = attn_mask.masked_fill(dead, 0.0)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and (attn_mask is not None or query.dtype == torch.float32):
        # PyTorch has fused kernels for grouped heads only without a mask, in half precision
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    if spoilt is not None:
        out = out * spoilt
    return out if dead is None else out.masked_fill(dead, 0.0)


def _without_nan(query: Tensor, key: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys with zeros in the place of those that hold a NaN, and a factor [B, H, N, 1]: NaN for
    queries that a boolean mask lets see one of these, 1 for the others. None: no key holds one,
    which is looked at on the CPU alone: on a GPU the host would wait.
    """
    may_look = not calls.recorded() and key.is_cpu and type(key) in (Tensor, torch.nn.Parameter)
    if may_look and not bool(key.detach().sum().isnan()):
        return key, None
    bad = key.detach().amax(-1).isnan()
    of_heads = bad.repeat_interleave(query.shape[1] // key.shape[1], 1).to(query.dtype)
    seen = torch.einsum("bhnm,bhm->bhn", attn_mask.to(query.dtype), of_heads) > 0
    factor = query.new_ones(()).masked_fill(seen[..., None], math.nan)
    return key.masked_fill(bad[..., None], 0.0), factor


def gradient(request: Request) -> Support:
    """Whether `backward` takes gradients of calls like this one, as far as shapes do not decide."""
    reason, step = "", _WIDTH // request.dtype.itemsize
    if request.dtype not in _DTYPES:
        reason = f"has no gradients of {request.dtype}"
    elif request.device_type not in ("cpu", "cuda"):
        reason = f"has no gradients on {request.device_type}"
    elif min(request.head_dim, request.value_dim) < 1:
        reason = "takes head_dim from 1, not 0"
    elif request.device_type == "cuda":
        if torch.version.hip is not None:
            reason = "keeps lse in another form on AMD's GPUs"
        elif request.precision == "ieee":
            reason = "takes tensor cores: not for precision 'ieee'"
        elif request.head_dim % step or request.value_dim % step:
            reason = f"wants multiples of {step} channels"
    elif request.head_dim != request.value_dim:
        reason = "wants values as wide as keys"
    elif "attn_mask" in request.gradient:
        reason = "has no gradient of the mask on the CPU"
    return Support(not reason, reason)


def backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    precision: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
    """The gradients of `elsa::attention` by PyTorch's kernels; None where they do not serve.

    They read delta = rowsum(grad_out * out), so that a gradient of lse is not for them, and
    P = exp(score - lse): on the CPU a call whose lse has lost digits is left to the formulas in
    plain PyTorch; a GPU is not waited for, and its error is that of PyTorch's own training. There
    lse has to be padded with infinity, and operands aligned to 16 bytes.
    """
    inputs = (query, key, value)
    if 0 in query.shape or key.shape[2] == 0 or not any(needs):
        return None
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return None
    if query.is_cuda and attn_mask is not None and attn_mask.dtype == torch.bool:
        # zero times what a hidden key holds; a row that sees such a key has an lse of NaN
        key = key.masked_fill(~key.isfinite(), 0.0)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    lse_of_rows = lse.masked_fill(lse.isneginf(), torch.inf)  # exp(-inf - inf) = 0
    bias = None if attn_mask is None else attn_mask.detach()
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -math.inf)
    given = grad_out, query, key, value, out, lse_of_rows
    found: tuple[Tensor | None, ...]
    if query.is_cuda:
        if grad_lse.numel():  # whether it is zero is not known without waiting for the GPU
            return None
        found = _on_cuda(*given, bias, is_causal, scale, bias_needed=bool(needs[3]))
    else:
        if bool(grad_lse.any()) or loses_digits(lse):
            return None
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = (*flash(*given, 0.0, is_causal, attn_mask=bias, scale=scale), None)
    grad_query, grad_key, grad_value = (
        _laid_out_as(grad, t) if needed and grad is not None else query.new_empty(0)
        for grad, t, needed in zip(found[:3], inputs, needs, strict=False)
    )
    grad_mask = query.new_empty(0)
    if attn_mask is not None and needs[3] and found[3] is not None:
        grad_mask = found[3].sum_to_size(attn_mask.shape).contiguous()
    return grad_query, grad_key, grad_value, grad_mask


def _on_cuda(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, is_causal: bool, scale: float, *, bias_needed: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    query, key, value = (_aligned(t) for t in (query, key, value))
    # the rows of channels side by side, as a forward of these kernels gives it
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    no_seed = torch.empty(0, dtype=torch.int64, device=query.device)  # nothing is dropped
    plain = query.dtype != torch.float32 and bias is None
    if plain and not torch.are_deterministic_algorithms_enabled():
        # each element in a place of its own, and rows along the last dim aligned
        operands = [
            _aligned(t)
            if all(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)
            else t.clone(memory_format=torch.contiguous_format)
            for t in (grad_out, query, key, value, out, lse)
        ]
        for kernel in (_by_cudnn, _by_flash):
            found = kernel(operands, no_seed, is_causal=is_causal, scale=scale)
            if found is not None:
                return *found, None
    if bias is not None:
        keys = key.shape[2]
        bias = bias.expand(*bias.shape[:-1], keys)
        if keys % _BIAS_KEYS:
            # contiguous: padding keeps the order of heads and keys that it finds
            bias = F.pad(bias.contiguous(), (0, -keys % _BIAS_KEYS))[..., :keys]
        bias = _aligned(bias).expand(*query.shape[:3], keys)
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=torch.inf)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    grads: tuple[Tensor | None, ...] = efficient(
        grad_out, query, key, value, bias, out, lse,
        no_seed, no_seed, 0.0, [True, True, True, bias_needed], is_causal, scale=scale,
    )  # fmt: skip
    return grads


def _by_cudnn(
    operands: list[Tensor], no_seed: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, ...] | None:
    """By cuDNN's kernel; None where it has none, or flash takes no longer.

    PyTorch, until 2.13 at least, keeps plans by the shapes and strides of query, key and value
    alone, and one made for another layout of `grad_out`, `out` or `lse` gives wrong gradients. So
    the query gets strides that nobody else has (between heads lie 16 bytes, less than a row), and
    all plans for them are made here, for one layout.
    """
    grad_out, query, key, value, out, lse = operands
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    if query.numel() * keys < _LONG or (is_causal and queries != keys):
        return None
    if not 64 <= width <= 128 or value.shape[3] != width:
        return None
    major, _ = torch.cuda.get_device_capability(query.device)
    if major < 9 or not cudnn_takes(query, key, value):
        return None
    step = queries * width + _WIDTH // query.dtype.itemsize
    apart = query.new_empty(batch * heads * step)
    apart = apart.as_strided(query.shape, (heads * step, step, width, 1)).copy_(query)
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    found: tuple[Tensor, ...] = kernel(
        grad_out.contiguous(), apart, key, value, out, lse.contiguous().unsqueeze(-1),
        no_seed, no_seed, None, None, None, queries, keys, 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return found


def _by_flash(
    operands: list[Tensor], no_seed: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, ...] | None:
    _, query, key, value, _, _ = operands
    cuda, queries, keys = torch.backends.cuda, query.shape[2], key.shape[2]
    if not cuda.flash_sdp_enabled() or (is_causal and queries != keys):
        return None
    params = cuda.SDPAParams(query, key, value, None, 0.0, is_causal, False)
    if not cuda.can_use_flash_attention(params):
        return None
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    found: tuple[Tensor, ...] = kernel(
        *operands, None, None, queries, keys, 0.0, is_causal, no_seed, no_seed, scale=scale
    )
    return found


def cudnn_takes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> bool:  # fmt: skip
    cuda = torch.backends.cuda
    if not cuda.cudnn_sdp_enabled():
        return False
    params = cuda.SDPAParams(query, key, value, attn_mask, 0.0, is_causal, False)
    return bool(cuda.can_use_cudnn_attention(params))


def measured_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str,
) -> Tensor | None:  # fmt: skip
    """cuDNN's forward, where the shipped tables say that it is the faster exact kernel; None where
    it does not serve.

    attn_mask: of the query's dtype, or None. is_causal: of as many queries as keys.
    """
    masked = attn_mask is not None
    if (is_causal and masked) or not _reads(query, key, value, attn_mask):
        return None
    if torch.compiler.is_compiling():
        if not _compiles(calls.place(query), query.dtype, query.shape[-1], masked, is_causal):
            return None
    elif not cudnn_takes(query, key, value, attn_mask, is_causal) or (
        masked and not _gives_zeros(calls.place(query))
    ):
        return None
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = cudnn(query, key, value, attn_mask, False, 0.0, is_causal, scale=scale)[0]
    return out


def _reads(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether operands lie in memory as `measured_attention` takes them."""
    if not all(t.stride(-1) == 1 and starts_aligned(t) for t in (query, key, value)):
        return False
    if attn_mask is None:
        return True
    # rows one after another, from a multiple of 16 bytes on; compilers cannot read where a tensor
    # begins, see `starts_aligned`
    rows = attn_mask.stride(-1) == 1 and attn_mask.stride(-2) == attn_mask.shape[-1]
    begins = torch.compiler.is_compiling() or (
        attn_mask.storage_offset() % (_WIDTH // attn_mask.dtype.itemsize) == 0
    )
    return bool(rows and begins)


def cudnn_serves(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether `measured_attention` serves a call in eager mode, as far as this machine can tell."""
    if (is_causal and attn_mask is not None) or not _reads(query, key, value, attn_mask):
        return False
    if not torch.cuda.is_available():  # a call is described
        return True
    taken = cudnn_takes(query, key, value, attn_mask, is_causal)
    return taken and (attn_mask is None or _gives_zeros(calls.place(query)))


def _gives_zeros(place: str) -> bool:
    """Whether cuDNN takes a mask and gives zeros for a row that sees no key: looked at once on each
    GPU, not while a CUDA graph is recorded."""
    if place not in _ZEROS:
        if torch.cuda.is_current_stream_capturing():
            return False
        wanted = torch.ones(128, 64, dtype=torch.float16)
        wanted[1] = 0.0
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        try:
            with torch.no_grad():
                row = torch.ones(1, 1, 128, 64, dtype=torch.float16, device=place)
                mask = row.new_zeros(1, 1, 128, 128)
                mask[..., 1, :] = -math.inf
                out = cudnn(row, row, row, mask, False)[0][0, 0].cpu()
            _ZEROS[place] = torch.equal(out, wanted)
        except RuntimeError:  # this cuDNN has no plan for it
            _ZEROS[place] = False
    return _ZEROS[place]


def _compiles(place: str, dtype: torch.dtype, head_dim: int, masked: bool, is_causal: bool) -> bool:
    """`cudnn_takes` of a short row: a constant for compilers, who have no tensors to ask by."""
    row = torch.empty(1, 1, 128, head_dim, dtype=dtype, device=place)
    if not masked:
        return cudnn_takes(row, row, row, None, is_causal)
    mask = torch.empty(1, 1, 128, 128, dtype=dtype, device=place)
    return cudnn_takes(row, row, row, mask) and _gives_zeros(place)


_compiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def varlen_gradient(request: Request) -> Support:
    """Whether `varlen_backward` takes gradients of packed sequences like these."""
    reason, step = "", _WIDTH // request.dtype.itemsize
    if request.device_type != "cuda" or torch.version.hip is not None:
        reason = "PyTorch's kernels of packed sequences are for NVIDIA GPUs"
    elif request.dtype not in (torch.float16, torch.bfloat16):
        reason = "PyTorch's kernels of packed sequences take float16 and bfloat16"
    elif request.head_dim != request.value_dim or not 0 < request.head_dim <= _FLASH_DIM:
        reason = f"wants values as wide as keys, {_FLASH_DIM} channels at most"
    elif request.head_dim % step:
        reason = f"wants multiples of {step} channels"
    elif request.mask == "crossed":
        reason = "aligns causal limits to the bottom right"
    elif torch.backends.cuda.is_built() and not torch.backends.cuda.is_flash_attention_available():
        reason = "this PyTorch was built without flash attention"
    elif not torch.backends.cuda.flash_sdp_enabled():
        reason = "flash attention is switched off"
    return Support(not reason, reason)


def varlen_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The gradients of `elsa::varlen_attention` by PyTorch's flash kernel; None where it does not
    serve: it gives none of lse, and aligns causal limits to the bottom right.

    The longest lengths that the kernel asks for bound its grid: the number of tokens is one that
    the host knows without waiting for the device; programs beyond a sequence end at once.
    """
    if grad_lse.numel() or not (query.numel() and key.numel()):
        return None
    if cu_seqlens_q.shape[0] - 1 > _SEQUENCES:
        return None
    starts, others = cu_seqlens_q, cu_seqlens_k
    if is_causal and not (
        starts is others
        or (  # one tensor, which a dispatcher may have wrapped anew
            starts.shape == others.shape
            and starts.stride() == others.stride()
            and starts.dtype == others.dtype
            and starts.data_ptr() == others.data_ptr()
        )
    ):
        return None
    lse = lse.masked_fill(lse.isneginf(), torch.inf)  # exp(-inf - inf) = 0
    no_seed = torch.empty(0, dtype=torch.int64, device=query.device)  # nothing is dropped
    operands = [_aligned(t) for t in (grad_out, query, key, value, out)]
    starts, others = (t.int().contiguous() for t in (starts, others))
    grads = torch.ops.aten._flash_attention_backward.default(
        *operands, lse.contiguous(), starts, others, query.shape[0], key.shape[0], 0.0, is_causal,
        no_seed, no_seed, scale=scale,
    )  # fmt: skip
    return tuple(
        _laid_out_as(g, t) if needed else t.new_empty(0)
        for t, g, needed in zip((query, key, value), grads, needs, strict=True)
    )


def starts_aligned(t: Tensor) -> bool:
    """Whether each row along the last dim starts at a multiple of 16 bytes."""
    step = _WIDTH // t.dtype.itemsize
    # A compiler cannot read where a tensor begins; what it makes of a packed projection begins at a
    # multiple of its strides, and it copies inputs that begin elsewhere.
    begins = torch.compiler.is_compiling() or t.storage_offset() % step == 0
    return bool(begins and all(n % step == 0 for n in t.stride()[:-1]))


def _aligned(t: Tensor) -> Tensor:
    ready = t.stride(-1) == 1 and starts_aligned(t)
    return t if ready else t.clone(memory_format=torch.contiguous_format)


def _laid_out_as(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient in the shape and layout of query, key or value; heads of a group are summed."""
    if grad.shape[1] != like.shape[1]:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    wanted = torch.empty_like(like)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)
