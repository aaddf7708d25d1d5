"""Operands of attention that the tests of streamed and of distributed calls draw."""

from typing import Any

import torch
from torch import Tensor

Operands = tuple[Tensor, Tensor, Tensor, "Tensor | None", Tensor]


def operands(
    case: Any, rows: int, columns: int, of_mask: tuple[int, ...], large: slice = slice(None)
) -> Operands:
    """Query, key, value, mask and the gradient of the output of a case, on the CPU.

    of_mask: the mask's shape; large: the queries that the case's factor multiplies.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(case.batch, case.heads, rows, case.head_dim)
    query[:, :, large] *= case.factor
    key = draw(case.batch, case.kv_heads, columns, case.head_dim)
    value = draw(case.batch, case.kv_heads, columns, case.value_dim)
    grad = draw(case.batch, case.heads, rows, case.value_dim)
    mask = None if case.mask == "none" else draw(*of_mask).to(case.dtype)
    if mask is not None and case.mask == "bool":
        mask = mask > -0.5
        mask[0, :, 1::4] = False
    elif mask is not None and case.mask == "hidden":
        mask[0, :, ::3, 1::2] = -torch.inf
        mask[:, :, 2] = -torch.inf
    query, key, value, grad = (t.to(case.dtype) for t in (query, key, value, grad))
    return query, key, value, mask, grad


def tokens_first(tensor: Tensor) -> Tensor:
    """Tokens before heads in memory, as a projection leaves them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
