"""Whole models as CUDA graphs, in training and in inference: `python -m benchmarks.graphed`.

Each model stands in one process, in turns, as four contenders: the original and the patched model,
each eager and through `elsa.graphed`. `steps`: wall time of a step (forward, loss, backward, fused
AdamW), peak memory of a step, measured with one contender alone. `calls`, at batch 1: wall time of
a call, the replay of a graph alone, and `torch.compile(mode="reduce-overhead")` of the original.
`first_seconds`: to the first step or result; `ratio`: over the patched graph's time.
"""

from __future__ import annotations

import copy
import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import elsa_core as elsa
from benchmarks.harness import Row, in_turns, left_out, main, options, row
from elsa_core.measuring.timing import Contender, synchronize, timed
from elsa_core.precision import DTYPES


class Case(NamedTuple):
    """A model at its own size; the dtype of a step is autocast's."""

    kind: str
    model: str
    dtype: str
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.model}-{self.batch}-{self.dtype}"


STEPS: Final = (
    Case("steps", "swin_tiny_patch4_window7_224", "bf16", 32),
    Case("steps", "vit_small_patch16_224", "bf16", 32),
    Case("steps", "vit_tiny_patch16_224", "bf16", 8),
    Case("steps", "vit_base_patch16_224", "fp32", 16),
    Case("steps", "swin_tiny_patch4_window7_224", "fp32", 32),
)
FAMILIES: Final = (
    "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "levit_256", "tiny_vit_11m_224",
    "vit_base_patch16_224", "beit_base_patch16_224", "pvt_v2_b1", "mvitv2_tiny",
    "maxvit_tiny_tf_224", "twins_svt_small", "convnext_tiny", "eva02_tiny_patch14_224",
    "hiera_tiny_224", "vit_small_patch14_dinov2",
)  # fmt: skip
_EAGER: Final = "original eager"
_OWN: Final = "patched graphed"
_KINDS: Final = (_EAGER, "patched eager", "original graphed", _OWN)


def cases(given: Namespace) -> dict[str, Case]:
    """Training steps, and calls in both precisions; `--quick`: the first of each."""
    steps = STEPS[:3] if given.quick else STEPS
    families = FAMILIES[:4] if given.quick else FAMILIES
    calls = (Case("calls", model, dtype) for model in families for dtype in ("fp32", "fp16"))
    return {case.name: case for case in (*steps, *calls)}


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """The rows of a case; `ratio`: a contender's time over the patched graph's."""
    rows = list((steps if case.kind == "steps" else calls)(name, case, given))
    own = next((r["median"] for r in rows if r["contender"] == _OWN and "median" in r), None)
    for each in rows:
        if own is not None and "median" in each:
            each["ratio"] = each["median"] / own
    gc.collect()
    torch.cuda.empty_cache()
    return rows


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


def steps(name: str, case: Case, given: Namespace) -> Iterator[Row]:
    """Training: each contender alone for its memory, then all in turns."""
    device = given.device
    model, images = _loaded(case, device, torch.float32)
    about: dict[str, Row] = {}
    for kind in _KINDS:
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device)
        step = Step(case, model, kind, images)
        about[kind] = {"first_seconds": _seconds(step, device), **_memory(step, device, base)}
        del step
    gc.collect()
    contenders = [Contender(kind, Step(case, model, kind, images)) for kind in _KINDS]
    for kind, seconds in in_turns(contenders, given, calls=4).items():
        yield row(name, kind, seconds, **about[kind])


def calls(name: str, case: Case, given: Namespace) -> Iterator[Row]:
    """Inference."""
    model, images = _loaded(case, given.device, DTYPES[case.dtype])
    model.eval()
    with torch.no_grad():
        model(images)  # some keep biases of their first call, which no compiled graph may own
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    graphs = {
        "original graphed": elsa.graphed(copy.deepcopy(model)),
        _OWN: elsa.graphed(copy.deepcopy(patched)),
    }
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    runs: dict[str, Callable[..., Any]] = {
        _EAGER: model, "patched eager": patched, **graphs, "original compiled": compiled,
    }  # fmt: skip
    contenders, about = [], {}
    for kind, run in runs.items():

        def call(run: Callable[..., Any] = run) -> object:
            with torch.inference_mode():
                return run(images)

        try:
            about[kind] = {"first_seconds": _seconds(call, given.device)}
            for _ in range(3):  # what fails in later calls is left out too
                call()
            synchronize(given.device)
        except Exception as error:  # compilers fail in many ways
            yield left_out(name, kind, error)
            continue
        contenders.append(Contender(kind, call))
    for kind, held in graphs.items():
        contenders += [Contender(f"{kind}: replay", replay) for replay in held.replays()]
    for kind, seconds in in_turns(contenders, given, calls=5, awaited=True).items():
        yield row(name, kind, seconds, **about.get(kind, {}))


def _loaded(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model = elsa.load(case.model, device=device, dtype=dtype)
    size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    return model, torch.randn((case.batch, *size), device=device, dtype=dtype)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    return timed(lambda: (call(), synchronize(device)), 1)


def _memory(step: Step, device: torch.device, base: int) -> dict[str, float]:
    """MB beyond the weights and the optimizer's state, in a step that follows others.

    `memory_mb` is what PyTorch takes from the GPU, a graph's pool in it; `allocated_mb` the peak of
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
    return {"memory_mb": round(reserved / 1e6, 1), "allocated_mb": round(allocated / 1e6, 1)}


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=14, seconds=1e9))
