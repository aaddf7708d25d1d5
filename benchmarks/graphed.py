"""Whole models as CUDA graphs, in training and in inference: `python -m benchmarks.graphed`.

Each model stands in one process, in turns, as four contenders: the original and the patched model,
each eager and through `elsa.graphed`. Training: wall time of a step (forward, loss, backward, fused
AdamW), peak memory of a step, measured with one contender alone, and seconds to the first step.
Inference at batch 1: wall time of a call, what a graphed call takes beside its replay, seconds to
the first result, and `torch.compile(mode="reduce-overhead")` of the original. A table goes to
stderr, a JSON document to stdout or to `--output`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import elsa_core as elsa
from elsa_core.base.messages import first_line
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, interleaved, synchronize
from elsa_core.precision import DTYPES


class Case(NamedTuple):
    """A model at its own size; the dtype of a step is autocast's."""

    model: str
    dtype: str
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}-b{self.batch}"


STEPS: Final = (
    Case("swin_tiny_patch4_window7_224", "bf16", 32),
    Case("vit_small_patch16_224", "bf16", 32),
    Case("vit_tiny_patch16_224", "bf16", 8),
    Case("vit_base_patch16_224", "fp32", 16),
    Case("swin_tiny_patch4_window7_224", "fp32", 32),
)
FAMILIES: Final = (
    "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "levit_256", "tiny_vit_11m_224",
    "vit_base_patch16_224", "beit_base_patch16_224", "pvt_v2_b1", "mvitv2_tiny",
    "maxvit_tiny_tf_224", "twins_svt_small", "convnext_tiny", "eva02_tiny_patch14_224",
    "hiera_tiny_224", "vit_small_patch14_dinov2",
)  # fmt: skip
_QUICK_STEPS: Final = 3
_QUICK_FAMILIES: Final = 4
_EAGER: Final = "original eager"
_COMPILED: Final = "original compiled"
_KINDS: Final = (_EAGER, "patched eager", "original graphed", "patched graphed")
Result = dict[str, Any]


class Step:
    """A training step of one contender, with weights and an optimizer of its own."""

    def __init__(self, case: Case, model: nn.Module, kind: str, images: Any) -> None:
        own = copy.deepcopy(model).train()
        if kind.startswith("patched"):
            elsa.patch(own)
        self.held: Callable[..., Any] = elsa.graphed(own) if kind.endswith("graphed") else own
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=1e-6, fused=True)
        self.images = images
        self.labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        self.dtype = None if case.dtype == "fp32" else DTYPES[case.dtype]

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.optimizer.zero_grad(set_to_none=True)
            cast = nullcontext() if self.dtype is None else torch.autocast("cuda", self.dtype)
            with cast:
                loss = F.cross_entropy(self.held(self.images), self.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


def steps(case: Case, device: torch.device, rounds: int) -> Result:
    """One row of training."""
    model, images = _loaded(case, device, torch.float32)
    first: dict[str, float] = {}
    memory: dict[str, dict[str, float]] = {}
    for kind in _KINDS:  # each alone
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device)
        step = Step(case, model, kind, images)
        first[kind] = _seconds(step, device)
        memory[kind] = _memory(step, device, base)
        del step
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    contenders = [Contender(kind, Step(case, model, kind, images)) for kind in _KINDS]
    return _row(case, _times(contenders, device, rounds, 4), first, memory_mb=memory)


def calls(case: Case, device: torch.device, rounds: int, *, compiled: bool) -> Result:
    """One row of inference."""
    model, images = _loaded(case, device, DTYPES[case.dtype])
    model.eval()
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    graphs = {
        "original graphed": elsa.graphed(copy.deepcopy(model)),
        "patched graphed": elsa.graphed(copy.deepcopy(patched)),
    }
    runs: dict[str, Callable[..., Any]] = {_EAGER: model, "patched eager": patched, **graphs}
    if compiled:
        torch._dynamo.reset()
        runs[_COMPILED] = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    contenders, first, left_out = [], {}, {}
    for kind, run in runs.items():

        def call(run: Callable[..., Any] = run) -> object:
            with torch.inference_mode():
                return run(images)

        try:
            first[kind] = _seconds(call, device)
            for _ in range(3):  # what fails in later calls is left out too
                call()
            synchronize(device)
        except Exception as error:  # compilers fail in many ways
            left_out[kind] = first_line(error)
            continue
        contenders.append(Contender(kind, call))
    replays = {kind: replay for kind, held in graphs.items() for replay in held.replays()}
    found = [Contender(f"{kind}: replay", replay) for kind, replay in replays.items()]
    times = _times([*contenders, *found], device, rounds, 5, awaited=True)
    beside = {
        kind: round((median(times[kind]) - median(times[f"{kind}: replay"])) * 1e6, 1)
        for kind in replays
    }
    return _row(case, times, first, beside_replay_us=beside, left_out=left_out)


def _loaded(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model = elsa.load(case.model, device=device, dtype=dtype)
    size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    return model, torch.randn((case.batch, *size), device=device, dtype=dtype)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _memory(step: Step, device: torch.device, base: int) -> dict[str, float]:
    """MB beyond the weights and the optimizer's state, in a step that follows others.

    `reserved` is what PyTorch takes from the GPU, a graph's pool in it; `allocated` the peak of
    tensors, which a graph's pool does not show.
    """
    for _ in range(2):
        step()
    step.optimizer.zero_grad(set_to_none=True)
    state = [x for each in step.optimizer.state.values() for x in each.values()]
    kept = [*(p for group in step.optimizer.param_groups for p in group["params"]), *state]
    own = sum(x.numel() * x.element_size() for x in kept if isinstance(x, torch.Tensor))
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        step()
    torch.cuda.synchronize(device)
    reserved = torch.cuda.max_memory_reserved(device) - base - own
    allocated = torch.cuda.max_memory_allocated(device) - base - own
    return {"reserved": round(reserved / 1e6, 1), "allocated": round(allocated / 1e6, 1)}


def _times(
    contenders: list[Contender], device: torch.device, rounds: int, calls: int, *,
    awaited: bool = False,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of a call, a sample a round: of `calls` in a row, each waited for if `awaited`."""

    def sample(contender: Contender) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            contender.call()
            if awaited:
                synchronize(device)
        synchronize(device)
        return (time.perf_counter() - start) / calls

    interleaved(contenders, 3, sample)
    return interleaved(contenders, rounds, sample)


def _row(case: Case, times: dict[str, list[float]], first: dict[str, float], **more: Any) -> Result:
    """Medians, and how many times as fast as each other contender the patched graph is: medians of
    the rounds' ratios."""
    own = times["patched graphed"]
    ratios = {
        other: round(median([a / b for a, b in zip(taken, own, strict=True)]), 3)
        for other, taken in times.items()
        if other != "patched graphed" and "replay" not in other
    }
    return {
        **case._asdict(), "ms": {name: round(median(own) * 1e3, 3) for name, own in times.items()},
        "first_seconds": {name: round(each, 3) for name, each in first.items()}, **more,
        "patched graphed over": ratios,
    }  # fmt: skip


def _table(row: Result) -> str:
    """Milliseconds of each contender, and what else a reader wants in one line a case."""
    title = f"{row['model']} {row['dtype']} b{row['batch']}"
    if "error" in row:
        return f"{title}: {row['error']}\n"
    times = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
    first = "  ".join(f"{name} {s:.2f}" for name, s in row["first_seconds"].items())
    lines = [title, f"  ms: {times}", f"  seconds to the first: {first}",
             f"  patched graphed over: {row['patched graphed over']}"]  # fmt: skip
    for name in ("beside_replay_us", "memory_mb", "left_out"):
        if row.get(name):
            lines.append(f"  {name}: {row[name]}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, print the table, write the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphed")
    parser.add_argument("what", choices=("steps", "calls", "all"), nargs="?", default="all")
    parser.add_argument("--match", default="", help="only cases whose model-dtype-batch holds this")
    parser.add_argument("--dtypes", default="fp32,fp16", help="of inference")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="the first cases, in 5 rounds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--output", "-o", type=Path)
    given = parser.parse_args(arguments)
    device = torch.device("cuda")
    training = STEPS[:_QUICK_STEPS] if given.quick else STEPS
    families = FAMILIES[:_QUICK_FAMILIES] if given.quick else FAMILIES
    if given.quick:
        given.rounds = min(given.rounds, 5)
    inference = tuple(Case(m, d) for m in families for d in given.dtypes.split(","))
    document: Result = {"schema_version": 1, "environment": environment.describe(device)}
    for kind, cases in (("steps", training), ("calls", inference)):
        rows: list[Result] = []
        for case in cases if given.what in (kind, "all") else ():
            if given.match in case.name:
                try:
                    if kind == "steps":
                        rows.append(steps(case, device, given.rounds))
                    else:
                        compiled = not given.no_compile
                        rows.append(calls(case, device, given.rounds, compiled=compiled))
                except Exception as error:  # one case that fails ends no benchmark
                    why = f"{type(error).__name__}: {first_line(error)}"
                    rows.append({**case._asdict(), "error": why})
                sys.stderr.write(_table(rows[-1]))
                gc.collect()
                torch.cuda.empty_cache()
        document[kind] = rows
    text = json.dumps(document, indent=1) + "\n"
    if given.output is None:
        sys.stdout.write(text)
    else:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
