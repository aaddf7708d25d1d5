"""What beside its arguments decides which kernels a call runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Final

import torch

from elsa_core import dispatch


def _precisions() -> Iterator[Callable[[], Hashable]]:
    for place in ("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"):
        yield partial(torch._C._get_fp32_precision_getter, *place)
    try:
        torch._C._get_fp32_precision_getter("cuda", "rnn")
    except RuntimeError:  # an older PyTorch knows no precision of recurrent layers
        return
    yield partial(torch._C._get_fp32_precision_getter, "cuda", "rnn")


def _attention_backends() -> Iterator[Callable[[], Hashable]]:
    yield torch._C._get_flash_sdp_enabled
    yield torch._C._get_mem_efficient_sdp_enabled
    yield torch._C._get_math_sdp_enabled
    yield torch._C._get_cudnn_sdp_enabled
    # its name is not the same in every PyTorch that is supported
    order: Any = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is not None:
        yield lambda: tuple(order())


SETTINGS: Final[tuple[Callable[[], Hashable], ...]] = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
    *_precisions(),
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_accumulation, torch._C._get_deterministic_algorithms,
    torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic,
    *_attention_backends(), torch.backends.mha.get_fastpath_enabled, dispatch.switched,
)  # fmt: skip
"""Each gives what is set now: PyTorch's settings, and what this package switches itself."""
