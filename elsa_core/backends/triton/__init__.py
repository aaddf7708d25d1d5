"""The GPU backend: exact attention in Triton, for NVIDIA GPUs from sm_80 on (and AMD's matrix
cores).

Triton is imported by the first call that needs it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.attention import planner
from elsa_core.backends.triton.pack import lookup
from elsa_core.backends.triton.shared import device, layout
from elsa_core.base.limits import LARGEST_HEAD_DIM

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@lru_cache(maxsize=64)
def _environment(index: int) -> Support:
    """Whether Triton is here and serves a GPU; -1 is the current one."""
    try:
        import triton
    except ImportError as error:
        return Support(False, f"Triton cannot be imported ({error}); install triton>=3.4")
    if device.INTERPRETED:
        return Support(True)
    if not torch.cuda.is_available():
        return Support(False, "no CUDA device: PyTorch finds no GPU")
    if torch.version.hip is not None:
        return Support(True)
    capability = torch.cuda.get_device_capability(None if index < 0 else index)
    if capability < (8, 0):
        return Support(False, "the GPU is older than sm_80 (Ampere)")
    slower = ""
    if capability == (9, 0) and not device.gluon_known():
        known = " to ".join(f"{major}.{minor}" for major, minor in device.GLUON)
        slower = (
            f"the sm_90 kernels are for Triton {known}, this is {triton.__version__}: "
            "float32 is slower"
        )
    pack = lookup.summary(10 * capability[0] + capability[1])
    return Support(True, "; ".join(filter(None, (slower, pack))))


def support(request: Request) -> Support:
    """Whether this backend serves calls of this kind; `reason` says why not."""
    if request.device_type != "cuda" and not device.INTERPRETED:
        return Support(
            False, f"query lies on {request.device_type!r}: the Triton kernels need a GPU"
        )
    if request.dtype not in DTYPES:
        return Support(
            False, f"dtype {request.dtype} has no Triton kernel (float32, float16, bfloat16)"
        )
    dim = max(request.head_dim, request.value_dim)
    if dim > LARGEST_HEAD_DIM:
        return Support(
            False, f"head dimension {dim} is above {LARGEST_HEAD_DIM}, the Triton kernels' largest"
        )
    if request.value_dim < 1:  # a program writes the lse of rows of values
        return Support(False, "takes values of one channel or more, not 0")
    return _environment(request.ordinal)


def schedule(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str:
    """The schedule that would serve the call, in words; rest: mask, is_causal, precision."""
    operands = layout.in_rows(query, key, value)
    return planner.planned(*operands, *rest[:2], 1.0, rest[2]).words


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
    *,
    state: bool = False,
) -> tuple[Tensor, Tensor]:
    """Exact attention on the GPU, the CUDA kernel of `elsa::attention`.

    Args:
        query, key, value: [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv], float32, float16 or
        bfloat16, any strides; Hq is a multiple of Hkv; D and Dv up to 256.
        attn_mask: 4-D, each dimension full or 1; boolean (True takes part) or additive. is_causal:
        top-left.
        scale: the factor of the scores. precision: strict, ieee, turbo or lean, valid for the
        dtype. state: as `attention_state` needs it.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype, in the memory of [B, Nq, Hq, Dv]; lse [B, Hq, Nq],
        float32, natural logarithm. Rows that see no key: zeros and -inf. State and sums are
        float32.

    Split products (strict and turbo on float32) are guarded by a test on the data that the GPU
    itself decides (see `shared/helpers.py`): a head whose values spread too far for float16 pairs,
    or are not finite, is folded with float32 FMA in the same launch, or on sm_90 in one that
    follows. No finite input overflows. Half-precision operands whose channels do not lie side by
    side are copied first.

    Source: ELSA, Eq. 4 (the merge of partial states).
    """
    query, key, value = layout.in_rows(query, key, value)
    call = planner.planned(query, key, value, attn_mask, is_causal, scale, precision, state)
    with layout.on_device(query):
        return planner.execute(call, query, key, value, attn_mask)


def attention_state(*arguments: Any) -> tuple[Tensor, Tensor]:
    """As `attention_forward` for results that are merged with those of other keys.

    exp(lse - lse') weighs them: a float32 lse of about 14, as hundreds of thousands of keys have,
    is known to 1e-6 only. It is float64, of calls that have a few keys or one query float32.
    """
    return attention_forward(*arguments, state=True)
