"""Tiles left out and their time: `python -m elsa_core.bench.sparsity` prints a JSON document.

Attention of several kinds of scores, causal and not: what `sparsity=` leaves out, its error against
float64, its time beside the same kernel that leaves out nothing, the ordinary call and PyTorch; and
what each part of the relief of maxima (summaries, order, frozen) removes and gives.

`trained`: queries, keys and values of the second layer of a ViT that is trained here for some
seconds on scikit-learn's digits, 64 tokens each, of as many digits one after another as the length
asks for; the first layer sees each digit alone. `runs`: tokens in 16 runs, each about a
direction of its own. `local`: scores fall with the distance. `random`: normal queries and keys.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import routing
from elsa_core.bench import convergence
from elsa_core.errors import ElsaError, UnavailableError
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, time_cpu, time_cuda
from elsa_core.precision import DTYPES
from elsa_core.sparsity import relief_bits, threshold

HEADS, DIM = 2, 32
LENGTHS: Final = {"cpu": (1024, 2048, 4096, 8192), "cuda": (4096, 16384, 65536)}
ROUNDS = 12
BUDGET = {"cpu": 6.0, "cuda": 1.0}  # seconds a row
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


@functools.lru_cache(maxsize=1)
def trained_model(epochs: int = 8) -> tuple[nn.Module, Tensor, float]:
    """A ViT of two layers, the images it was tested on, and its accuracy there.

    Raises:
        UnavailableError: scikit-learn is not installed.
    """
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


def measured(kind: str, length: int, dtype: str, causal: bool, device: str) -> dict[str, Any]:
    """One row: times in milliseconds, ratios to the kernel that leaves out nothing, counts."""
    given = operands(kind, length, DTYPES[dtype], device)
    backend = routing.kernels_of("sparse_attention", device)
    # loads the kernels: an operator without them is plain PyTorch
    routing.name_of("sparse_attention", device, DTYPES[dtype], DIM, DIM, "strict", backend)
    run = routing.RUNS["sparse_attention", backend]
    found = contenders(given, causal, run)
    rows: dict[str, Any] = {}
    for contender in found:
        with torch.inference_mode():
            answer = contender.call()
        out = answer if isinstance(answer, Tensor) else answer[0]  # type: ignore[index]
        rows[contender.name] = {"error": errors(out, *given, causal)}
        if not isinstance(answer, Tensor):
            counts = answer[2].sum((0, 1)).tolist()  # type: ignore[index]
            names = ("tiles", "left_out", "maxima", "rescaled", "again")
            rows[contender.name] |= dict(zip(names, counts, strict=True))
            rows[contender.name]["skip_rate"] = counts[1] / counts[0]
    if device == "cuda":
        seconds, notes = time_cuda(found, rounds=ROUNDS, budget_seconds=BUDGET[device])
    else:
        (seconds, notes) = time_cpu(found, rounds=ROUNDS, budget_seconds=BUDGET[device]), {}
    plain = statistics.median(seconds[ASKED[0][0]])
    for name, samples in seconds.items():
        middle = statistics.median(samples)
        rows[name] |= {"ms": middle * 1e3, "least_ms": min(samples) * 1e3}
        rows[name]["speed_up"] = plain / middle
    return {
        "kind": kind, "length": length, "dtype": dtype, "causal": causal, "backend": backend,
        "shape": list(given[0].shape), "notes": notes, "calls": rows,
    }  # fmt: skip


def document(
    device: str, dtypes: list[str], kinds: list[str], lengths: list[int], seconds: float
) -> dict[str, Any]:
    """All rows that fit in the time, and those left out."""
    begin = time.perf_counter()
    rows, left_out = [], []
    for length, dtype, kind, causal in product(lengths, dtypes, kinds, (False, True)):
        name = f"{kind}, {length}, {dtype}, {'causal' if causal else 'not causal'}"
        if time.perf_counter() - begin > seconds:
            left_out.append(name)
            continue
        sys.stderr.write(f"{name}\n")
        try:
            rows.append(measured(kind, length, dtype, causal, device))
        except (ImportError, UnavailableError) as error:
            left_out.append(f"{name}: {error}")
    found: dict[str, Any] = {
        "environment": environment.describe(device), "rows": rows, "left_out": left_out,
    }  # fmt: skip
    if any(row["kind"] == "trained" for row in rows):
        found["trained_accuracy"] = trained_model()[2]
    return found


def main() -> None:
    """Write the document to stdout."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.sparsity")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--dtypes", default="fp32", help="comma-separated: fp32, fp16, bf16")
    parser.add_argument("--kinds", default="trained,runs,local,random")
    parser.add_argument("--lengths", default="", help="comma-separated [1K to 8K, GPU 4K to 64K]")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no row begins after them")
    given = parser.parse_args()
    lengths = [int(n) for n in given.lengths.split(",") if n] or list(LENGTHS[given.device])
    try:
        found = document(
            given.device, given.dtypes.split(","), given.kinds.split(","), lengths, given.seconds
        )
    except ElsaError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
