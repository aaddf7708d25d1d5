"""The arithmetic of split products on tensor cores, simulated on a CPU for whole models.

    python -m elsa_core.bench.truncation [MODEL] --size 448

Tensor cores add the exact products of 16 channels to their accumulator and truncate the sum to 24
bits. Each row printed is one way to sum, or one group of linear layers that sums so while the rest
is PyTorch's: the error of the model's output against float64, and the original's as its unit.
Attention, norms and activations are PyTorch's. Needs timm; minutes at large sizes.

Source: measured on an H200, as `elsa_core.backends.triton.linear.product` says.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsa_core import reference
from elsa_core.errors import UnavailableError
from elsa_core.operators.linear import plain_split

STEP = 16  # channels of one instruction
ROWS = 4096  # at once
_CUT = 52 - 23  # bits of a float64's fraction beyond those of a float32


class Sum(NamedTuple):
    """How a product is summed.

    Attributes:
        channels: of one accumulator of the tensor cores; float32 additions sum them.
        centred: every so many accumulators one is made larger by 2**-23; 0: none.
        truncates: whether the accumulators truncate; else they are exact.
    """

    channels: int
    centred: int = 0
    truncates: bool = True


SUMS = {
    "64 channels": Sum(64), "32 channels": Sum(32), "64 channels, centred": Sum(64, 1),
    "32 channels, centred": Sum(32, 2), "64 channels, not truncated": Sum(64, 0, False),
}  # fmt: skip


def truncated(x: Tensor) -> Tensor:
    """float64 values cut to the 24 bits of a float32, towards zero."""
    return (x.view(torch.int64) >> _CUT << _CUT).view(torch.float64)


def product(x: Tensor, weight: Tensor, way: Sum) -> Tensor:
    """x [..., K] times weight [N, K], transposed, float32: [..., N]."""
    flat = x.reshape(-1, x.shape[-1])
    (right, right_low), right_powers = _split(weight)
    found = []
    for rows in flat.split(ROWS):
        (left, left_low), left_powers = _split(rows)
        total = torch.zeros(len(rows), len(weight))
        for i, first in enumerate(range(0, x.shape[-1], way.channels)):
            at = slice(first, first + way.channels)
            part = left_low[:, at] @ right[:, at].T + left[:, at] @ right_low[:, at].T
            for k in range(first, min(at.stop, x.shape[-1]), STEP):
                of = slice(k, min(k + STEP, at.stop))
                part.addmm_(left[:, of], right[:, of].T)
                part = truncated(part) if way.truncates else part
            factor = 1 + 2**-23 if way.centred and i % way.centred == 0 else 1.0
            total = (total.double() + part * factor).float()
        found.append((total.double() * left_powers[:, None] * right_powers).float())
    return torch.cat(found).reshape(*x.shape[:-1], -1)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    halves, powers = plain_split(x)
    return halves[..., : x.shape[-1]].double(), powers.double()


@contextmanager
def summing(weights: set[int], way: Sum) -> Iterator[None]:
    """Within, `torch.nn.functional.linear` sums products of these weights (by id) as `way` says."""
    original: Callable[..., Tensor] = functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in weights or input.dtype != torch.float32:
            return original(input, weight, bias)
        out = product(input, weight, way)
        return out if bias is None else out + bias

    functional.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = original  # type: ignore[assignment]


def measure(model: nn.Module, x: Tensor) -> Iterator[tuple[str, float, float]]:
    """Name, error against float64 and that over the original's, for all layers in every way of
    `SUMS`, then for the layers of each name alone, in sums of 64 channels.
    """
    layers: dict[str, set[int]] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            layers.setdefault(path.rpartition(".")[2], set()).add(id(module.weight))
    runs: list[tuple[str, set[int], Sum]] = [
        (name, set().union(*layers.values()), way) for name, way in SUMS.items()
    ]
    runs += [(f"{name} alone", ids, Sum(64)) for name, ids in layers.items()]
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        original = reference.relative_l2(model(x), exact)
        yield "original", original, 1.0
        for name, ids, way in runs:
            with summing(ids, way):
                error = reference.relative_l2(model(x), exact)
            yield name, error, error / original


def main(arguments: list[str]) -> None:
    """Simulate one model with random weights.

    Raises:
        UnavailableError: timm is not installed.
    """
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.truncation")
    parser.add_argument("model", nargs="?", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--size", type=int, default=448)
    given: Any = parser.parse_args(arguments)
    try:
        import timm
    except ImportError as error:
        raise UnavailableError("truncation: timm is needed: pip install timm") from error
    torch.manual_seed(0)
    model = timm.create_model(given.model, img_size=given.size).eval()
    x = torch.randn(1, 3, given.size, given.size)
    sys.stdout.write("| sums | error | over the original's |\n|---|---:|---:|\n")
    for name, distance, ratio in measure(model, x):
        sys.stdout.write(f"| {name} | {distance:.2e} | {ratio:.2f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
