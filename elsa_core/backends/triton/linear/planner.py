"""float32 linear layers and their gradients by `product.py`: what serves, plans, runs.

Everything is planned by layouts, never by data, and kept in the cache of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.linear import LEAST_WEIGHT
from elsa_core.backends.triton.linear.launches import (
    Epilogue,
    Multiply,
    Shape,
    Turned,
    cut_for,
    gpu_of,
    join_launch,
    split_launch,
)
from elsa_core.backends.triton.shared.device import on_device_of
from elsa_core.backends.triton.shared.plans import PLANS

# With fewer rows PyTorch's library, which then cuts the sums over channels, is faster.
LEAST_ROWS = 64
# Sums of fewer products round so little that what 22 bits leave out would show.
LEAST_DEPTH = 64


class Forward:
    """The launches of a linear layer."""

    def __init__(
        self, input: Tensor, weight: Tensor, epilogue: Epilogue, single: bool,
        frozen: bool,
    ):  # fmt: skip
        columns, depth = weight.shape
        rows = input.numel() // depth
        shape = Shape(rows, columns, depth)
        self.frozen = frozen
        others = 0 if frozen else columns
        self.split = split_launch((rows, others, depth), depth, weight.stride(0), single)
        self.multiply = Multiply(
            shape, (depth, 1), (weight.stride(0), 1), input.device, single=single,
            epilogue=epilogue,
        )  # fmt: skip
        self.rows, self.columns, self.depth = rows, columns, depth

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
        residual: Tensor | None, halves: Tensor | None, powers: Tensor | None,
    ) -> Tensor:  # fmt: skip
        half = torch.float16
        left = input.new_empty((2, self.rows, self.depth), dtype=half)
        left_powers = input.new_empty(self.rows)
        if halves is None or powers is None:
            halves = input.new_empty((2, self.columns, self.depth), dtype=half)
            powers = input.new_empty(self.columns)
        absent = left_powers
        self.split(input, left, left_powers, weight, halves, powers)
        out = input.new_empty((*input.shape[:-1], self.columns))
        self.multiply.launch(
            left, left_powers, halves, powers, input, weight, absent if bias is None else bias,
            absent if scale is None else scale, absent if residual is None else residual, out,
        )  # fmt: skip
        return out


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
    halves: Tensor | None = None, powers: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """The float32 CUDA kernel of `elsa::linear`.

    Returns:
        [..., N], dense; None where this is PyTorch's to compute, or to refuse: few rows or
        channels, rows that do not begin at multiples of 16 bytes, shapes, dtypes or devices that do
        not fit together.
    """
    frozen = halves is not None
    key = (
        "linear", layout(input), layout(weight), layout(bias), activation, layout(residual),
        layout(scale), precision, frozen,
    )  # fmt: skip
    epilogue = (bias is not None, activation, scale is not None, residual is not None)

    def plan() -> Forward | None:
        if not serves(input, weight, (bias, scale), residual):
            return None
        return Forward(input, weight, epilogue, precision == "turbo", frozen)

    call: Forward | None = PLANS.get(key, plan)
    if call is None:
        return None
    with on_device_of(input):
        return call(input, weight, bias, scale, residual, halves, powers)


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


class Backward:
    """The launches of the gradients of input @ weight.T."""

    def __init__(self, grad_out: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool]):
        columns = grad_out.shape[-1]
        rows = grad_out.numel() // columns
        device = grad_out.device
        if needs[0]:
            depth = weight.shape[1]
            self.rows = split_launch((rows, 0, columns), columns, columns)
            self.weight = Turned(columns, depth, weight.stride(0))
            self.of_input = Multiply(
                Shape(rows, depth, columns), (columns, 1), (1, weight.stride(0)), device
            )
        if needs[1]:
            depth = input.shape[-1]
            shape = Shape(columns, depth, rows)
            self.grad = Turned(rows, columns, columns)
            self.input = Turned(rows, depth, depth)
            tile, parts = cut_for(shape, gpu_of(device))
            self.of_weight = Multiply(
                shape, (1, columns), (1, depth), device, tile=tile, parts=parts
            )
            self.join = join_launch(self.of_weight.parts, columns * depth)

    def grad_input(self, grad_out: Tensor, weight: Tensor) -> Tensor:
        """grad_out @ weight."""
        columns, depth = weight.shape
        rows = grad_out.numel() // columns
        left = grad_out.new_empty((2, rows, columns), dtype=torch.float16)
        powers = grad_out.new_empty(rows)
        self.rows(grad_out, left, powers, grad_out, left, powers)
        right, right_powers = self.weight(weight)
        out = grad_out.new_empty((*grad_out.shape[:-1], depth))
        self.of_input.launch(
            left, powers, right, right_powers, grad_out, weight, *(powers,) * 3, out
        )
        return out

    def grad_weight(self, grad_out: Tensor, input: Tensor) -> Tensor:
        """The rows of grad_out, transposed, times those of input."""
        left, powers = self.grad(grad_out)
        right, right_powers = self.input(input)
        parts = self.of_weight.parts
        out = input.new_empty((parts, grad_out.shape[-1], input.shape[-1]))
        self.of_weight.launch(
            left, powers, right, right_powers, grad_out, input, *(powers,) * 3, out
        )
        if parts == 1:
            return out[0]
        joined = input.new_empty(out.shape[1:])
        self.join(out, joined)
        return joined


def backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The float32 CUDA kernel of `elsa::linear_backward`; None where PyTorch's products serve."""
    key = ("linear_backward", layout(grad_out), layout(input), layout(weight), tuple(needs))
    call = PLANS.get(key, _plan_backward, grad_out, input, weight, needs)
    if call is None:
        return None
    none = grad_out.new_empty(0)
    with on_device_of(grad_out):
        return (
            call.grad_input(grad_out, weight) if needs[0] else none,
            call.grad_weight(grad_out, input) if needs[1] else none,
            grad_out.flatten(0, -2).sum(0) if needs[2] else none,
        )


def _plan_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> Backward | None:
    used = [grad_out, *([weight] if needs[0] else []), *([input] if needs[1] else [])]
    columns = grad_out.shape[-1]
    if any(t.dtype != torch.float32 or t.data_ptr() % 16 for t in used) or grad_out.dim() < 2:
        return None
    if columns % 8 or not grad_out.is_contiguous() or not (needs[0] or needs[1]):
        return None
    fits = (
        LEAST_ROWS * columns <= grad_out.numel() < columns << 31
        and (not needs[0] or _turns(columns, weight.shape[1], weight.stride(0)))
        and (not needs[0] or weight.stride(1) == 1)
        and (not needs[1] or _turns(columns, input.shape[-1], input.shape[-1]))
        and (not needs[1] or input.is_contiguous())
    )
    return Backward(grad_out, input, weight, needs) if fits else None


def _turns(columns: int, depth: int, stride: int) -> bool:
    large = columns * depth >= LEAST_WEIGHT and min(columns, depth) >= LEAST_DEPTH
    return large and depth % 4 == 0 and stride % 4 == 0


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """The CUDA kernel of `elsa::split_weight`; None where rows do not fit it."""
    rows, depth = weight.shape
    fits = rows > 0 and depth > 0 and depth % 8 == 0 and weight.stride(1) == 1
    if not fits or weight.stride(0) % 4 or weight.data_ptr() % 16:
        return None
    halves = weight.new_empty((2, rows, depth), dtype=torch.float16)
    powers = weight.new_empty(rows)
    key = ("split_weight", layout(weight))
    with on_device_of(weight):
        launch = PLANS.get(key, split_launch, (rows, 0, depth), weight.stride(0), 0)
        launch(weight, halves, powers, weight, halves, powers)
    return halves, powers
