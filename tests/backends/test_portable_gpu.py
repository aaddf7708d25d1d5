"""The portable kernels on a real GPU, by twice the error of PyTorch's own operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference
from elsa_core.precision import theorem1_bound

pytestmark = pytest.mark.gpu


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def portable(*arguments: object, **named: object) -> tuple[Tensor, Tensor]:
    found = elsa.attention(*arguments, backend="portable", return_lse=True, **named)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_long_rows(tokens: int, dim: int) -> None:
    """Where the maximum stays from tile to tile: no more than twice PyTorch's error."""
    q, k, v = (make(1, 1, tokens, dim, seed=seed) for seed in range(3))
    exact = reference.attention(q, k, v)[0]
    theirs = relative(F.scaled_dot_product_attention(q, k, v), exact)
    assert relative(portable(q, k, v)[0], exact) <= 2 * theirs
    k = k[:, :, :1].expand_as(k).contiguous()
    v = torch.zeros_like(v)
    v[:, :, : tokens // 2] = 1.0
    assert (portable(q, k, v)[0].double() - 0.5).abs().max() <= theorem1_bound(tokens, 64)
