"""The portable kernels on a GPU, against Triton's `ieee`, PyTorch and the FMA rate of cuBLAS.

    python -m elsa_core.bench.portable [--seconds 40] [--tune] > portable.json

Times are medians under CUDA graphs, all contenders of a case in turns; rates count the products
alone, 4 B H Nq Nk D operations; errors are relative, against float64. `--tune` times other tiles
too. One JSON document on stdout; cases for which no time is left are named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import reference
from elsa_core.attention import attention
from elsa_core.backends.portable import attention as portable
from elsa_core.backends.portable.driver import driver
from elsa_core.backends.portable.tiling import TILES, Tile
from elsa_core.errors import UnavailableError
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, time_cuda

SHAPES: Final = ((8, 12, 1025, 64), (8, 12, 4096, 64), (8, 12, 197, 64), (4, 16, 2048, 128),
                 (8, 16, 729, 72), (2, 8, 2048, 256), (1, 3, 197, 64), (1, 12, 197, 64),
                 (1, 8, 16384, 64), (1, 3, 1025, 64), (4, 16, 1024, 80), (8, 12, 1024, 32),
                 (1, 12, 4097, 128))  # fmt: skip
# Tiles beside those of the table.
OTHERS: Final = (
    Tile(64, 8, 4, 8, 4, 3), Tile(64, 8, 8, 4, 8, 1), Tile(64, 8, 8, 8, 8, 1),
    Tile(64, 16, 8, 4, 4, 3), Tile(64, 16, 8, 4, 8, 2),
    Tile(80, 16, 8, 4, 8, 1),
    Tile(128, 16, 8, 2, 4, 2), Tile(128, 16, 4, 4, 8, 2),
    Tile(256, 16, 4, 2, 4, 2),
)  # fmt: skip
_ROUNDS: Final = 15
# Side of the matrices whose product says what FMA rate cuBLAS reaches.
_SIDE: Final = 8192


def cublas_rate() -> float:
    """Operations a second of a large float32 product without tensor cores."""
    a = torch.randn(_SIDE, _SIDE, device="cuda")
    return 2.0 * _SIDE**3 / _seconds({"cublas": partial(torch.mm, a, a)})["cublas"]


def measure(shape: tuple[int, ...], tiles: tuple[Tile, ...], rate: float) -> dict[str, Any]:
    """One case: milliseconds, operations a second as a share of `rate`, and errors."""
    batch, heads, tokens, dim = shape
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    scale = dim**-0.5
    exact = reference.attention(q[:1, :1], k[:1, :1], v[:1, :1])[0]
    calls: dict[str, Callable[[], Tensor]] = {
        "portable": lambda: portable.attention(q, k, v, None, False, scale)[0],
        "triton ieee": partial(_triton, q, k, v),
        "pytorch": partial(F.scaled_dot_product_attention, q, k, v),
    }
    for tile in tiles:
        calls[f"tile {tuple(tile)}"] = partial(_by_tile, q, k, v, scale, tile)
    served, errors, notes = {}, {}, {}
    for name, call in calls.items():
        try:
            out = call()[:1, :1].double()
        except UnavailableError as error:
            notes[name] = str(error)
            continue
        served[name] = call
        errors[name] = float((out - exact).norm() / exact.norm())
    operations = 4.0 * batch * heads * tokens * tokens * dim
    seconds = _seconds(served)
    return {
        "shape": shape, "tile": portable.instance_of(q, k, v, None, False)._asdict(),
        "ms": {name: round(s * 1e3, 4) for name, s in seconds.items()},
        "tflops": {name: round(operations / s / 1e12, 2) for name, s in seconds.items()},
        "share_of_cublas": {n: round(operations / s / rate, 3) for n, s in seconds.items()},
        "error": errors, "notes": notes,
    }  # fmt: skip


def _triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, precision="ieee", backend="triton")
    assert isinstance(out, Tensor)
    return out


def _by_tile(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> Tensor:
    return portable.attention(q, k, v, None, False, scale, (tile,))[0]


def _fitting(dim: int) -> tuple[Tile, ...]:
    """Other tiles for a head_dim: of the table and of `OTHERS`, for the narrowest class."""
    widest = min(tile.widest for tile in TILES if tile.widest >= dim)
    return tuple(tile for tile in (*TILES, *OTHERS) if tile.widest == widest)


def _seconds(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    contenders = [Contender(name, call) for name, call in calls.items()]
    samples, _ = time_cuda(contenders, rounds=_ROUNDS, budget_seconds=2.0)
    return {name: statistics.median(times) for name, times in samples.items()}


def results(seconds: float, tune: bool, rate: float) -> Iterator[dict[str, Any]]:
    """A row for each shape; of those for which no time is left the shape alone."""
    end = time.monotonic() + seconds
    for shape in SHAPES:
        if time.monotonic() > end:
            yield {"shape": shape, "left_out": "no time was left"}
            continue
        sys.stderr.write(f"{shape}\n")
        yield measure(shape, _fitting(shape[3]) if tune else (), rate)


def main(arguments: list[str]) -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.portable")
    parser.add_argument("--seconds", type=float, default=40.0, help="no case begins after these")
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    rate = cublas_rate()
    document = {
        "schema_version": 1,
        "environment": environment.describe("cuda"),
        "arch": f"sm_{driver().arch(torch.cuda.current_device())}",
        "cublas_tflops": round(rate / 1e12, 2),
        "results": list(results(given.seconds, given.tune, rate)),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
