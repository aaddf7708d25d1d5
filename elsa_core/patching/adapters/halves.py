"""The halves of float32 weights, which `elsa_core.freeze` keeps for kernels that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.ops import SPLIT_WEIGHT
from elsa_core.patching.adapters.derived import Derivation

Halves = tuple[Tensor | None, Tensor | None]
NONE: Halves = (None, None)


def of_layer(layer: Any) -> Derivation | None:
    """Halves and powers of a patched layer's weight, of a convolution's as [N, C * h * w].

    None where no kernel reads them: another device, dtype, precision or backend.
    """
    weight: Tensor = layer.weight
    if not are_read(layer, weight):
        return None
    return Derivation(layer, layer, _split, (weight,))


def are_read(site: Any, weight: Tensor) -> bool:
    """Whether a kernel that serves the site's products with this weight reads halves."""
    if weight.dtype != torch.float32 or site.elsa_precision == "ieee":
        return False
    device_type = weight.device.type
    if device_type != "cuda" or ("linear", device_type, site.elsa_backend) not in dispatch.SERVING:
        return False
    kernels = dispatch.kernels_of("linear", device_type)
    depth, columns = weight[0].numel(), weight.shape[0]
    request = Request(device_type, weight.dtype, depth, columns, site.elsa_precision, "linear")
    return dispatch.support(request, kernels).ok


def split(weight: Tensor) -> Halves:
    """Halves [2, N, K] and powers [N] of a weight [N, ...]."""
    halves, powers = SPLIT_WEIGHT.overload(weight.detach().flatten(1))
    return halves, powers


def _split(layer: Any) -> Halves:
    return split(layer.weight)
