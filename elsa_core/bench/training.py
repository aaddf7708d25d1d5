"""Training steps of whole models, patched against original, in turns.

`python -m elsa_core.bench.training --device cuda -o training.json` measures the table and writes a
document; without `-o` it prints rows alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from elsa_core.errors import ArgumentError
from elsa_core.files import write_text
from elsa_core.loading.load import load
from elsa_core.measuring import environment
from elsa_core.measuring.intervals import percentile
from elsa_core.patching.patch import patch

SCHEMA_VERSION: Final = 1
WAYS: Final = ("original", "patched")


@dataclass(frozen=True)
class Case:
    """A model, its image side in pixels, its batch, and "fp32" or "bf16" (autocast)."""

    model: str
    image_size: int
    batch: int
    dtype: str


GPU: Final = (
    Case("vit_tiny_patch16_224", 224, 8, "fp32"),
    Case("vit_base_patch16_224", 224, 16, "fp32"),
    Case("vit_base_patch16_224", 512, 4, "fp32"),
    Case("vit_base_patch16_224", 1024, 2, "fp32"),
    Case("vit_base_patch16_224", 224, 64, "bf16"),
    Case("vit_base_patch16_224", 512, 16, "bf16"),
    Case("swin_tiny_patch4_window7_224", 224, 32, "fp32"),
    Case("swin_tiny_patch4_window7_224", 224, 32, "bf16"),
    Case("swinv2_tiny_window8_256", 256, 16, "bf16"),
)
CPU: Final = (
    Case("vit_tiny_patch16_224", 224, 4, "fp32"),
    Case("swin_tiny_patch4_window7_224", 224, 4, "fp32"),
)


class Step:
    """One training step of a model: forward, backward, AdamW."""

    def __init__(self, model: nn.Module, case: Case, device: torch.device) -> None:
        self.model, self.case, self.device = model.train(), case, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        half = self.case.dtype == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, images: Tensor, labels: Tensor) -> float:
        """Of one step, the device's queue included."""
        _wait(self.device)
        start = time.perf_counter()
        self(images, labels)
        _wait(self.device)
        return time.perf_counter() - start


def measure(case: Case, device: torch.device, *, rounds: int, warm_up: int = 4) -> dict[str, Any]:
    """Both ways in turns, with the peak of device memory of a step (CUDA).

    Returns:
        case; for each way seconds (median), seconds_p10, seconds_p90 and memory_bytes (None on a
        CPU); ratio: the median over the rounds of original / patched, with its p10 and p90.
    """
    size = case.image_size
    model = load(case.model, image_size=size, device=device)
    models = {"original": model, "patched": copy.deepcopy(model)}
    patch(models["patched"])
    steps = {way: Step(models[way], case, device) for way in WAYS}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.batch, 3, size, size, generator=generator).to(device)
    labels = torch.randint(1000, (case.batch,), generator=generator).to(device)
    memory = {way: _peak(steps[way], images, labels, warm_up) for way in WAYS}
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            samples[way].append(steps[way].seconds(images, labels))
    ratios = [a / b for a, b in zip(samples["original"], samples["patched"], strict=True)]
    ways = {way: _spread("seconds", samples[way]) | {"memory_bytes": memory[way]} for way in WAYS}
    return {"case": asdict(case), **ways, **_spread("ratio", ratios)}


def _spread(name: str, samples: list[float]) -> dict[str, float]:
    shares = {name: 0.5, f"{name}_p10": 0.1, f"{name}_p90": 0.9}
    return {key: percentile(samples, share) for key, share in shares.items()}


def _peak(step: Step, images: Tensor, labels: Tensor, warm_up: int) -> int | None:
    """The most memory that a warm step holds beyond what was held before it."""
    for _ in range(warm_up):
        step(images, labels)
    if step.device.type != "cuda":
        return None
    _wait(step.device)
    held = torch.cuda.memory_allocated(step.device)
    torch.cuda.reset_peak_memory_stats(step.device)
    step(images, labels)
    _wait(step.device)
    return torch.cuda.max_memory_allocated(step.device) - held


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(result: dict[str, Any]) -> str:
    """A result in one line."""
    case = Case(**result["case"])
    times = " ".join(f"{way} {result[way]['seconds'] * 1e3:.1f} ms" for way in WAYS)
    memory = " / ".join(
        "-" if result[way]["memory_bytes"] is None else f"{result[way]['memory_bytes'] / 2**20:.0f}"
        for way in WAYS
    )
    name = f"{case.model} {case.image_size} px, batch {case.batch}, {case.dtype}"
    spread = f"{result['ratio_p10']:.2f} to {result['ratio_p90']:.2f}"
    return f"{name}: {times}, {result['ratio']:.2f}x ({spread}), MiB {memory}"


def table(document: dict[str, Any]) -> str:
    """A document's steps in Markdown."""
    lines = [
        "| model | px | batch | dtype | original, ms | patched, ms | ratio (10 to 90%) | MiB |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for result in document["results"]:
        case, ways = Case(**result["case"]), [result[way] for way in WAYS]
        times = " | ".join(f"{way['seconds'] * 1e3:.1f}" for way in ways)
        ratio = f"{result['ratio']:.2f} ({result['ratio_p10']:.2f} to {result['ratio_p90']:.2f})"
        held = [way["memory_bytes"] for way in ways]
        memory = "-" if None in held else " / ".join(f"{size / 2**20:.0f}" for size in held)
        lines.append(
            f"| {case.model} | {case.image_size} | {case.batch} | {case.dtype} | {times} | {ratio} "
            f"| {memory} |"
        )
    return "\n".join(lines) + "\n"


def gradients_table(document: dict[str, Any]) -> str:
    """The calls of `tuning/backward/measured_*.json` in Markdown."""
    lines = [
        "| B,H,N,D | dtype | mask | elsa, ms | fastest peer, ms | ratio |",
        "|---|---|---|---:|---:|---:|",
    ]
    for case in document["cases"]:
        shape = ",".join(str(case[name]) for name in ("batch", "heads", "tokens", "head_dim"))
        name, peer = min(case["peers_forward_backward_ms"].items(), key=lambda item: item[1])
        lines.append(
            f"| {shape} | {case['dtype']} | {case['mask']} | {case['forward_backward_ms']:.3f} | "
            f"{peer:.3f} ({name}) | {case['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, say each row on stderr, and write the document.

    Raises:
        ArgumentError: the file exists.
    """
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="", help="only models whose name begins so")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.exists():
        raise ArgumentError(f"{given.output} exists")
    device = torch.device(given.device)
    results = []
    for case in GPU if device.type == "cuda" else CPU:
        if not case.model.startswith(given.model):
            continue
        results.append(measure(case, device, rounds=given.rounds))
        sys.stderr.write(row(results[-1]) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    command = ["python", "-m", "elsa_core.bench.training", *arguments]
    document = {
        "schema_version": SCHEMA_VERSION, "command": command,
        "environment": environment.describe(device), "results": results,
    }  # fmt: skip
    if given.output is not None:
        write_text(json.dumps(document, indent=1) + "\n", given.output)


if __name__ == "__main__":
    main(sys.argv[1:])
