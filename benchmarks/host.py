"""Host time of warm calls: `python -m elsa_core.bench.host` prints a JSON document.

What is timed is the host's way to a launch, not the kernel: of few calls, which the GPU's queue
holds. Each operator stands beside PyTorch's or timm's own call of the same run.
Nothing is recorded for gradients.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

import elsa_core as elsa
from elsa_core.backends import cuda
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, interleaved, synchronize
from elsa_core.precision import dtype_name

# Calls between two synchronisations: their launches fit into a device's queue.
CALLS = 100
# Of the peer's host time, what ours is to stay below.
BARS = {"attention": 0.6, "window_attention": 0.5, "linear": 1.0}
# [images, tokens, channels] of a linear layer that its gate takes for a large one, on a GPU.
ROWS = (16, 197, 768)


class Pair(NamedTuple):
    """One call of ours and the peer's."""

    operator: str
    dtype: str
    ours: Callable[[], object]
    peer: Callable[[], object]


def pairs(device: torch.device) -> Iterator[Pair]:
    """What is compared: half and single precision of each operator."""
    for dtype in (torch.float16, torch.float32):
        name, like = dtype_name(dtype), {"device": device, "dtype": dtype}
        qkv = [torch.randn(1, 12, 197, 64, **like) for _ in range(3)]  # type: ignore[call-overload]
        peer: Any = functional.scaled_dot_product_attention
        yield Pair("attention", name, partial(elsa.attention, *qkv), partial(peer, *qkv))
        model = elsa.load("swin_tiny_patch4_window7_224", device=device, dtype=dtype)
        patched = copy.deepcopy(model)
        elsa.patch(patched)
        x = torch.randn(1, 56, 56, 96, **like)  # type: ignore[call-overload]
        shifted = [cast(Any, m).layers[0].blocks[1]._attn for m in (patched, model)]
        yield Pair("window_attention", name, *(partial(block, x) for block in shifted))
        shape = ROWS if device.type == "cuda" else (1, 64, 768)
        layer = nn.Linear(768, 3072, **like)  # type: ignore[arg-type]
        terms = torch.randn(shape, **like), layer.weight, layer.bias  # type: ignore[call-overload]
        linear: Any = functional.linear
        yield Pair("linear", name, partial(elsa.linear, *terms), partial(linear, *terms))


def measure(device: torch.device, rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """One row for each pair: medians of rounds in which both take turns, in microseconds."""

    def sample(contender: Contender) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            contender.call()
        took = time.perf_counter() - started
        synchronize(device)
        return took / calls * 1e6

    for operator, dtype, ours, peer in pairs(device):
        contenders = [Contender("elsa", ours), Contender("peer", peer)]
        interleaved(contenders, 2, sample)
        found = interleaved(contenders, rounds, sample)
        medians = {name: statistics.median(times) for name, times in found.items()}
        yield {
            "operator": operator, "dtype": dtype, "elsa_us": round(medians["elsa"], 2),
            "peer_us": round(medians["peer"], 2),
            "ratio": round(medians["elsa"] / medians["peer"], 3), "bar": BARS[operator],
        }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.host")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=CALLS)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    with torch.no_grad():
        results = list(measure(device, given.rounds, given.calls))
    document = {
        "schema_version": 1,
        "environment": environment.describe(device),
        "cuda_library": cuda.status()._asdict(),
        "results": results,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
