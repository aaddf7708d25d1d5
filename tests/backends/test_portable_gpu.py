"""The portable kernels on a real GPU, by twice the error of PyTorch's own operator."""

import pytest
import torch
import torch.nn.functional as F
from test_portable import make, relative
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference
from elsa_core.precision import theorem1_bound

pytestmark = pytest.mark.gpu


def portable(*arguments: object, **named: object) -> tuple[Tensor, Tensor]:
    found = elsa.attention(*arguments, backend="portable", return_lse=True, **named)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_long_rows(tokens: int, dim: int) -> None:
    """Where the maximum stays from tile to tile: no more than twice PyTorch's error."""
    q, k, v = (make(1, 1, tokens, dim, seed=seed).cuda() for seed in range(3))
    exact = reference.attention(q, k, v)[0]
    theirs = relative(F.scaled_dot_product_attention(q, k, v), exact)
    assert relative(portable(q, k, v)[0], exact) <= 2 * theirs
    k = k[:, :, :1].expand_as(k).contiguous()
    v = torch.zeros_like(v)
    v[:, :, : tokens // 2] = 1.0
    assert (portable(q, k, v)[0].double() - 0.5).abs().max() <= theorem1_bound(tokens, 64)
