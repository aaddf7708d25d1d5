"""Tiles left out and their time: `python -m benchmarks.sparsity`.

Attention of several kinds of scores, causal and not: what `sparsity=` leaves out, its error against
float64, its time beside the same kernel that leaves out nothing, the ordinary call and PyTorch; and
what each part of the relief of maxima (summaries, order, frozen) removes and gives.

`trained`: queries, keys and values of the second layer of a ViT that is trained here for some
seconds on scikit-learn's digits, 64 tokens each, of as many digits one after another as the length
asks for; the first layer sees each digit alone. `runs`: tokens in 16 runs, each about a
direction of its own. `local`: scores fall with the distance. `random`: normal queries and keys.
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elsa_core as elsa
from benchmarks import convergence
from benchmarks.harness import Row, compared, main, options
from elsa_core import dispatch
from elsa_core.measuring.timing import Contender
from elsa_core.ops.sparse.api import relief_bits, threshold
from elsa_core.precision import DTYPES

HEADS, DIM = 2, 32
LENGTHS: Final = {"cpu": (1024, 2048, 4096, 8192), "cuda": (4096, 16384, 65536)}
SAMPLED_ROWS = 64
ALL = ("summaries", "order", "frozen")
# what is timed: name, sparsity, relief
ASKED: Final[tuple[tuple[str, str | float | None, tuple[str, ...]], ...]] = (
    ("nothing left out", None, ()),
    ("exact", "exact", ()),
    ("exact, order", "exact", ("order",)),
    ("1e-4, order", 1e-4, ("order",)),
    ("1e-2, order", 1e-2, ("order",)),
    ("1e-4, all relief", 1e-4, ALL),
    ("summaries", None, ("summaries",)),
    ("order", None, ("order",)),
    ("frozen", None, ("frozen",)),
    ("all relief", None, ALL),
)
Operands = tuple[Tensor, Tensor, Tensor]


class Case(NamedTuple):
    """One kind of scores."""

    kind: str
    length: int
    dtype: str
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.length}-{self.dtype}" + ("-causal" if self.causal else "")


@functools.lru_cache(maxsize=1)
def trained_model(epochs: int = 8) -> tuple[nn.Module, Tensor, float]:
    """A ViT of two layers, the images it was tested on, and its accuracy there."""
    from timm.models.vision_transformer import VisionTransformer

    data = convergence.split("digits", *convergence.arrays("digits"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=16, patch_size=2, in_chans=1, num_classes=10, embed_dim=HEADS * DIM, depth=2,
            num_heads=HEADS, class_token=False, global_pool="avg",
        )  # fmt: skip
        images, labels = data.train
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        images, labels = data.test
        right = (model(images).argmax(1) == labels).float().mean().item()
    return model, images, right


def trained(length: int) -> Operands:
    """Queries, keys and values [1, 2, length, 32] of the second layer."""
    model: Any
    model, images, _ = trained_model()
    count = math.ceil(length / 64)
    images = images[torch.arange(count) % len(images)]
    with torch.no_grad():
        tokens = model.blocks[0](model._pos_embed(model.patch_embed(images)))
        second = model.blocks[1]
        projected = second.attn.qkv(second.norm1(tokens)).reshape(1, -1, 3, HEADS, DIM)
    q, k, v = projected[:, :length].permute(2, 0, 3, 1, 4).contiguous()
    return q, k, v


def synthetic(kind: str, length: int) -> Operands:
    """Queries, keys and values [1, 2, length, 32] of one kind of scores."""
    g = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, HEADS, length, DIM, generator=g) for _ in range(3))
    if kind == "runs":
        centres = 16 * F.normalize(torch.randn(1, HEADS, 16, DIM, generator=g), dim=-1)
        of = torch.arange(length) * 16 // length
        q, k = q + centres[:, :, of], k + centres[:, :, of]
    if kind == "local":  # the scores of a kernel of the distance, by random frequencies
        frequency = torch.randn(DIM // 2, generator=g) * 40.0
        angle = torch.arange(length)[:, None] / length * frequency
        wave = torch.cat((angle.cos(), angle.sin()), -1)
        q, k = q * 0.1 + 4 * wave, k * 0.1 + 4 * wave
    return q, k, v


def operands(kind: str, length: int, dtype: torch.dtype, device: str) -> Operands:
    made = trained(length) if kind == "trained" else synthetic(kind, length)
    q, k, v = (t.to(device, dtype) for t in made)
    return q, k, v


def errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """The relative Euclidean error against float64 of some rows, evenly spread."""
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLED_ROWS, device=q.device).long()
    scores = q[:, :, rows].double() @ k.double().mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    exact = scores.softmax(-1) @ v.double()
    return float((out[:, :, rows].double() - exact).norm() / exact.norm())


def contenders(given: Operands, causal: bool, run: Callable[..., Any]) -> list[Contender]:
    """The kernel in each way of `ASKED`, the ordinary call and PyTorch's."""
    q, k, v = given
    scale = q.shape[-1] ** -0.5

    def asked(sparsity: str | float | None, relief: tuple[str, ...]) -> Callable[[], object]:
        terms = (None, causal, scale, "strict", threshold(sparsity), relief_bits(relief))
        return lambda: run(q, k, v, *terms)

    found = [Contender(name, asked(sparsity, relief)) for name, sparsity, relief in ASKED]
    found.append(Contender("elsa", lambda: elsa.attention(q, k, v, is_causal=causal)))
    sdpa = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return [*found, Contender("pytorch", sdpa)]


def cases(given: Namespace) -> dict[str, Case]:
    """Each kind of scores at each length, causal and not."""
    lengths = (256,) if given.quick else LENGTHS[given.device.type]
    dtypes = ("fp32", "fp16") if given.device.type == "cuda" else ("fp32",)
    kinds = ("trained", "runs", "local", "random")
    found = (Case(*each) for each in product(kinds, lengths, dtypes, (False, True)))
    return {case.name: case for case in found}


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """Each way of `ASKED`, the ordinary call and PyTorch; tiles and maxima counted."""
    device = given.device.type
    tensors = operands(case.kind, case.length, DTYPES[case.dtype], device)
    backend = dispatch.kernels_of("sparse_attention", device)
    # loads the kernels: an operator without them is plain PyTorch
    dispatch.choose("sparse_attention", device, DTYPES[case.dtype], DIM, DIM, "strict", backend)
    run = dispatch.RUNS["sparse_attention", backend]

    def judge(contender: Contender) -> Row:
        with torch.inference_mode():
            answer: Any = contender.call()
        if isinstance(answer, Tensor):
            return {"error": errors(answer, *tensors, case.causal)}
        counts = answer[2].sum((0, 1)).tolist()
        names = ("tiles", "left_out", "maxima", "rescaled", "again")
        counted = dict(zip(names, map(int, counts), strict=True))
        return {"error": errors(answer[0], *tensors, case.causal), **counted}

    return compared(name, contenders(tensors, case.causal, run), given, judge)


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=12))
