"""Host time of warm calls, in turns with PyTorch's or timm's own: `python -m benchmarks.host`.

What is timed is the host's way to a launch, not the kernel: of few calls, which the GPU's queue
holds. Nothing is recorded for gradients.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import elsa_core as elsa
from benchmarks.harness import Row, in_turns, main, row
from elsa_core.measuring.timing import Contender

# Calls between two synchronisations: their launches fit into a device's queue.
CALLS = 100
# Of the peer's host time, what ours is to stay below.
BARS = {"attention": 0.6, "window_attention": 0.5, "linear": 1.0}
# [images, tokens, channels] of a linear layer that counts as a large one on a GPU.
ROWS = (16, 197, 768)
Pair = tuple[Callable[[], object], Callable[[], object]]


def cases(given: Namespace) -> dict[str, Any]:
    """Half and single precision of each operator."""
    found = {}
    for dtype in (torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for operator, make in (
            ("attention", attention), ("window_attention", window), ("linear", linear)
        ):  # fmt: skip
            found[f"{operator}-{name}"] = partial(make, {"device": given.device, "dtype": dtype})
    return found


def attention(like: dict[str, Any]) -> Pair:
    qkv = [torch.randn(1, 12, 197, 64, **like) for _ in range(3)]
    peer: Any = F.scaled_dot_product_attention
    return partial(elsa.attention, *qkv), partial(peer, *qkv)


def window(like: dict[str, Any]) -> Pair:
    model = elsa.load("swin_tiny_patch4_window7_224", **like)
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    x = torch.randn(1, 56, 56, 96, **like)
    ours, peer = (cast(Any, m).layers[0].blocks[1]._attn for m in (patched, model))
    return partial(ours, x), partial(peer, x)


def linear(like: dict[str, Any]) -> Pair:
    shape = ROWS if like["device"].type == "cuda" else (1, 64, 768)
    layer = nn.Linear(768, 3072, **like)
    terms = torch.randn(shape, **like), layer.weight, layer.bias
    peer: Any = F.linear
    return partial(elsa.linear, *terms), partial(peer, *terms)


@torch.no_grad()
def measure(name: str, make: Callable[[], Pair], given: Namespace) -> list[Row]:
    """Seconds of the host for a call; `ratio`: the peer's over ours."""
    contenders = [Contender(*each) for each in zip(("elsa", "peer"), make(), strict=True)]
    calls = 1 if given.quick else CALLS
    found = in_turns(contenders, given, calls=calls, launched=True)
    rows = [row(name, each, seconds) for each, seconds in found.items()]
    rows[0]["ratio"] = rows[1]["median"] / rows[0]["median"]
    rows[0]["bar"] = 1 / BARS[name.partition("-")[0]]
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure)
