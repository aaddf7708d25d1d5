"""PyTorch's own layers on `elsa_core.linear`: `nn.Linear`, the convolution of a patch embedding.

Read against torch 2.10 to 2.15. On a CPU a recorded program holds PyTorch's own operators: bundles
of a model patched as a whole need no library for its layers there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.ops.linear.api import served
from elsa_core.patching.adapters.common import is_small, project_by, why_no_weight

_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state


class ElsaLinear(nn.Linear):
    """A linear layer: [..., K] -> [..., N], any floating dtype."""

    elsa_base = nn.Linear
    elsa_why_not = staticmethod(why_no_weight)
    elsa_precision: str
    elsa_backend: str

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        # `common.is_small` with fewer questions: every layer of a small eager call passes here
        if (
            not isinstance(input, Tensor)  # of torch.fx
            or (not input.is_cuda and calls.recorded() and not calls.keeps_products())
            or (
                input.is_cuda
                and not is_dynamo_compiling()  # which may read no length
                # other compilers work within a mode; most calls are spared the longer question
                and (_modes() == 0 or not is_compiling())
                and input.numel() * weight.shape[0] < dispatch.eager_least("linear", input.dtype)
                and not calls.capturing()
                and _tracing() is None
            )
        ):
            return functional.linear(input, weight, self.bias)
        return served(
            input, weight, self.bias, "none", None, None, self.elsa_precision, self.elsa_backend
        )


class ElsaPatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel, as a product: [B, C, H, W] -> [B, N, H/h, W/w]. The
    result lies in memory as [B, H/h, W/w, N], which is the tokens that embeddings make of it."""

    elsa_base = nn.Conv2d
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        reason = why_no_weight(module)
        if reason or _cuts_patches(module):
            return reason
        return "its windows overlap, are padded or grouped"

    def forward(self, input: Tensor) -> Tensor:
        if (
            not isinstance(input, Tensor)  # of torch.fx
            or (not input.is_cuda and calls.recorded())
            or is_small(self, input, input.numel() * self.out_channels, "linear")
            or input.dim() != 4
            or not _cuts_patches(self)  # its settings may have changed since `patch`
        ):
            return super().forward(input)
        height, width = self.weight.shape[2:]
        rows, columns = input.shape[2] // height, input.shape[3] // width
        cut = input[:, :, : rows * height, : columns * width]
        tiles = cut.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, H/h, W/w, C * h * w]
        return project_by(self, patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def _cuts_patches(layer: nn.Conv2d) -> bool:
    size = tuple(layer.weight.shape[2:])
    return (
        tuple(layer.stride) == size
        and math.prod(size) > 1
        and layer.groups == 1
        and all(step == 1 for step in layer.dilation)
        and layer.padding in ((0, 0), "valid")
        and layer.padding_mode == "zeros"
    )
