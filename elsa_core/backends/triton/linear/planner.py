"""float32 linear layers and their gradients by `product.py`: what serves, plans, runs.

Everything is planned by layouts, never by data, and kept in the cache of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.linear import LEAST_WEIGHT
from elsa_core.backends.triton.linear.launches import (
    BLOCK,
    Shape,
    Tile,
    cut_for,
    gpu_of,
    product_launch,
    split_launch,
    split_turned,
    tile_for,
)
from elsa_core.backends.triton.linear.product import join_parts
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.layout import on_device
from elsa_core.backends.triton.shared.plans import PLANS

# Elements that a program of `join_parts` adds.
JOINED = 1024
# With fewer rows PyTorch's library, which then cuts the sums over channels, is faster.
LEAST_ROWS = 64
# Sums of fewer products round so little that what 22 bits leave out would show.
LEAST_DEPTH = 64
# The second axis of a grid takes so many blocks of columns that are turned.
MOST_TURNED = BLOCK * ((1 << 16) - 1)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
) -> Tensor | None:  # fmt: skip
    """The float32 CUDA kernel of `elsa::linear`.

    Returns:
        [..., N], dense; None where this is PyTorch's to compute, or to refuse: few rows or
        channels, rows that do not begin at multiples of 16 bytes, shapes, dtypes or devices that do
        not fit together.
    """
    given = (input, weight, bias, scale, residual)
    key = ("linear", *map(layout, given), activation, precision)
    call = PLANS.get(key, plan, given, activation, precision == "turbo")
    if call is None:
        return None
    with on_device(input):
        out: Tensor = call(*given)
    return out


def plan(
    given: Sequence[Tensor | None], activation: str, single: bool, tile: Tile | None = None
) -> Callable[..., Tensor] | None:
    """What makes the launches of such calls of `linear`; None where that returns None."""
    input, weight, bias, scale, residual = given
    assert input is not None and weight is not None
    if not serves(input, weight, (bias, scale), residual):
        return None
    columns, depth = weight.shape
    rows = input.numel() // depth
    shape, steps = Shape(rows, columns, depth), (depth, weight.stride(0))
    split = split_launch((rows, columns, depth), *steps, single)
    multiply = product_launch(
        shape, (depth, 1), (weight.stride(0), 1), tile or tile_for(shape, gpu_of(input.device)),
        single=single,
        epilogue=(bias is not None, activation, scale is not None, residual is not None),
    )  # fmt: skip

    def run(input: Tensor, weight: Tensor, *terms: Tensor | None) -> Tensor:
        left, left_powers = halves_for(input, rows, depth)
        right, right_powers = halves_for(input, columns, depth)
        split(input, left, left_powers, weight, right, right_powers)
        out = input.new_empty((*input.shape[:-1], columns))
        there = (left_powers if term is None else term for term in terms)
        multiply(left, left_powers, right, right_powers, input, weight, *there, out)
        return out

    return run


def halves_for(t: Tensor, rows: int, depth: int) -> tuple[Tensor, Tensor]:
    """Memory for the halves [2, rows, depth] and the powers [rows] of a matrix."""
    return t.new_empty((2, rows, depth), dtype=torch.float16), t.new_empty(rows)


def layout(t: Tensor | None) -> tuple[Any, ...]:
    """What a plan depends on."""
    return () if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)


def serves(
    input: Tensor, weight: Tensor, vectors: Sequence[Tensor | None], residual: Tensor | None = None
) -> bool:  # fmt: skip
    """Whether these kernels take such a call: see `linear`."""
    if input.dtype != torch.float32 or not is_layer(input, weight, vectors, residual, 4):
        return False
    columns, depth = weight.shape
    return (
        depth >= LEAST_DEPTH
        and input.numel() >= LEAST_ROWS * depth
        and depth % 8 == 0
        and columns % 4 == 0
        and max(columns * weight.stride(0), input.numel() // depth) < 1 << 31
    )


def is_layer(
    input: Tensor, weight: Tensor, vectors: Sequence[Tensor | None], residual: Tensor | None,
    unit: int,
) -> bool:  # fmt: skip
    """Whether tensors fit together: of one dtype and device, dense but for the rows of the weight,
    which begin at multiples of 16 bytes, `unit` elements.
    """
    given = [t for t in (input, weight, *vectors, residual) if t is not None]
    if any(t.dtype != input.dtype or t.device != input.device for t in given):
        return False
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        return False
    columns = weight.shape[0]
    if any(v is not None and (v.shape != (columns,) or not v.is_contiguous()) for v in vectors):
        return False
    if residual is not None and not (
        residual.is_contiguous() and residual.shape == (*input.shape[:-1], columns)
    ):
        return False
    return (
        columns > 0
        and input.is_contiguous()
        and weight.stride(1) == 1
        and weight.stride(0) % unit == 0
        and not any(t.data_ptr() % 16 for t in given)
    )


def backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The float32 CUDA kernel of `elsa::linear_backward`; None where PyTorch's products serve."""
    key = ("linear_backward", layout(grad_out), layout(input), layout(weight), tuple(needs))
    found = PLANS.get(key, _plan_backward, grad_out, input, weight, needs)
    if found is None:
        return None
    of_input, of_weight = found
    none = grad_out.new_empty(0)
    with on_device(grad_out):
        return (
            of_input(grad_out, weight) if of_input is not None else none,
            of_weight(grad_out, input) if of_weight is not None else none,
            grad_out.flatten(0, -2).sum(0) if needs[2] else none,
        )


def _plan_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None] | None:
    used = [grad_out, *([weight] if needs[0] else []), *([input] if needs[1] else [])]
    columns = grad_out.shape[-1]
    if any(t.dtype != torch.float32 or t.data_ptr() % 16 for t in used) or grad_out.dim() < 2:
        return None
    if columns % 8 or not grad_out.is_contiguous() or not (needs[0] or needs[1]):
        return None
    if not LEAST_ROWS * columns <= grad_out.numel() < columns << 31:
        return None
    if (needs[0] and weight.stride(1) != 1) or (needs[1] and not input.is_contiguous()):
        return None
    # what is turned: its channels, and the step from row to row
    turned = [(weight.shape[1], weight.stride(0))] if needs[0] else []
    turned += [(input.shape[-1], input.shape[-1])] if needs[1] else []
    for depth, stride in turned:
        least, most = sorted((columns, depth))
        large = columns * depth >= LEAST_WEIGHT and least >= LEAST_DEPTH
        if not large or most > MOST_TURNED or depth % 4 or stride % 4:
            return None
    of_input = _of_input(grad_out, weight) if needs[0] else None
    return of_input, _of_weight(grad_out, input) if needs[1] else None


def _of_input(grad_out: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What computes grad_out @ weight."""
    columns, depth = weight.shape
    rows, stride = grad_out.numel() // columns, weight.stride(0)
    shape = Shape(rows, depth, columns)
    split, turn = split_launch((rows, 0, columns), columns), split_turned(columns, depth, stride)
    tile = tile_for(shape, gpu_of(grad_out.device))
    multiply = product_launch(shape, (columns, 1), (1, stride), tile)

    def run(grad_out: Tensor, weight: Tensor) -> Tensor:
        left, powers = halves_for(grad_out, rows, columns)
        split(grad_out, left, powers, grad_out, left, powers)
        right, right_powers = turn(weight)
        out = grad_out.new_empty((*grad_out.shape[:-1], depth))
        multiply(left, powers, right, right_powers, grad_out, weight, *(powers,) * 3, out)
        return out

    return run


def _of_weight(grad_out: Tensor, input: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What computes the rows of grad_out, transposed, times those of input."""
    columns, depth = grad_out.shape[-1], input.shape[-1]
    rows = grad_out.numel() // columns
    shape = Shape(columns, depth, rows)
    turn_left, turn_right = split_turned(rows, columns, columns), split_turned(rows, depth, depth)
    tile, parts = cut_for(shape, gpu_of(grad_out.device))
    multiply = product_launch(shape, (1, columns), (1, depth), tile, parts=parts)
    parts = multiply.grid[1]
    tail = {"count": columns * depth // 4, "parts": parts, "BLOCK": JOINED}
    join = Launch(join_parts, (-(-columns * depth // JOINED),), tail, {"num_warps": 4})

    def run(grad_out: Tensor, input: Tensor) -> Tensor:
        left, powers = turn_left(grad_out)
        right, right_powers = turn_right(input)
        out = input.new_empty((parts, columns, depth))
        multiply(left, powers, right, right_powers, grad_out, input, *(powers,) * 3, out)
        if parts == 1:
            return out[0]
        joined = input.new_empty(out.shape[1:])
        join(out, joined)
        return joined

    return run
