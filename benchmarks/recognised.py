"""Models of several libraries, whose attention is recognised, as CUDA graphs:
`python -m benchmarks.recognised`.

The original, the model patched in its attention alone, and in its linear layers too, each through
`elsa.graphed`, in turns: the replay of each graph, or the whole call of a model without one.
`ratio`: the time of the original over that of the contender; `error`: relative to the original in
float64. Needs transformers and MONAI.
"""

from __future__ import annotations

import copy
import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import elsa_core as elsa
from benchmarks.harness import FAILURES, Row, in_turns, left_out, main, options, row
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES


class Case(NamedTuple):
    """A model with random weights, and the size of its input."""

    make: Callable[[], nn.Module]
    size: tuple[int, ...]
    dtype: str


class First(nn.Module):
    """A model that returns the first of its results alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(images)[0]


def segformer(attention: str = "sdpa") -> nn.Module:
    """b2, whose keys are reduced by 8, 4, 2 and 1; `attention`: of transformers' names."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512],
                             decoder_hidden_size=768, attn_implementation=attention)  # fmt: skip
    return First(SegformerForSemanticSegmentation(config))


def swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    model: nn.Module = SwinUNETR(in_channels=1, out_channels=14, feature_size=48)
    return model


def of_timm(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    return model


MODELS = {
    "segformer_b2": (segformer, (2, 3, 1024, 1024)),
    "segformer_b2_eager": (partial(segformer, "eager"), (2, 3, 1024, 1024)),
    "swin_unetr": (swin_unetr, (1, 1, 96, 96, 96)),
    "nest_tiny": (partial(of_timm, "nest_tiny_jx"), (32, 3, 224, 224)),
    "sam_vit_b": (partial(of_timm, "samvit_base_patch16"), (1, 3, 1024, 1024)),
}


def cases(given: Namespace) -> dict[str, Case]:
    """Each in both precisions."""
    del given
    return {
        f"{name}-{'x'.join(map(str, size))}-{dtype}": Case(make, size, dtype)
        for name, (make, size) in MODELS.items() for dtype in ("fp32", "fp16")
    }  # fmt: skip


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """The rows of a case."""
    torch.manual_seed(0)
    model = case.make().eval().to(given.device, DTYPES[case.dtype])
    images = torch.randn(case.size, device=given.device, dtype=DTYPES[case.dtype])
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(images.double()) if case.dtype == "fp32" else None
    rows, contenders, about = [], [], {}
    kept: list[nn.Module] = []  # a replay reads the weights of its model
    for contender, scope in (("original", ""), ("attention", "attention"), ("model", "model")):
        try:
            own = copy.deepcopy(model)
            report = elsa.patch(own, images, scope=scope) if scope else None
            held = elsa.graphed(own)
            kept.append(held)
            with torch.inference_mode():
                out = held(images)
            replays = held.replays()
        except FAILURES as error:
            rows.append(left_out(name, contender, error))
            continue
        error = None if exact is None else ((out.double() - exact).norm() / exact.norm()).item()
        about[contender] = {"error": error, "sites": len(report.patched) if report else None}
        if not replays:  # the model copies between host and GPU in its forward
            about[contender]["note"] = "no graph: its own call"
        call = torch.inference_mode()(partial(held, images))
        contenders.append(Contender(contender, replays[0] if replays else call))
    del exact
    rows += [row(name, each, seconds, **about[each])
             for each, seconds in in_turns(contenders, given, calls=5).items()]  # fmt: skip
    first = next((each.get("median") for each in rows if each["contender"] == "original"), None)
    for each in rows:
        if first and "median" in each:
            each["ratio"] = first / each["median"]
    gc.collect()
    torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=10, seconds=1e9))
