"""Patched models of timm against the originals: called until caches are warm, then disturbed.

`python -m tests.conformance.draw --models`. A difference is judged as in `judge.py`: both are
compared with the original in float64.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

import elsa_core as elsa

FAMILIES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2)},
    "swinv2_tiny_window8_256": {
        "img_size": 64, "depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2)},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "hiera_tiny_224": {"stages": (1, 1, 1, 1)},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "pvt_v2_b0": {},
    "twins_svt_small": {},
    "levit_128s": {},
}  # fmt: skip
Model = nn.Module


def _weights(r: random.Random, *models: Model) -> None:
    """Write a weight past its version counter, as fused optimizers do."""
    name = r.choice([name for name, p in models[0].named_parameters() if p.dim() > 1])
    for model in models:
        model.get_parameter(name).data.mul_(1.5)


def _hook(r: random.Random, *models: Model) -> None:
    """Halve what a layer inside of a block gives."""
    named = [n for n, m in models[0].named_modules() if isinstance(m, nn.Linear) and "." in n]
    name = r.choice(named)
    for model in models:
        model.get_submodule(name).register_forward_hook(lambda m, i, out: out * 0.5)


class _Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def _replaced(r: random.Random, *models: Model) -> None:
    """Put a module of another class in the place of a layer's."""
    named = [n for n, m in models[0].named_modules() if isinstance(m, nn.Linear) and "." in n]
    name = r.choice([n for n in named if n.rpartition(".")[2] in ("proj", "fc1", "fc2")] or named)
    for model in models:
        home, _, last = name.rpartition(".")
        inner = model.get_submodule(name)
        setattr(model.get_submodule(home), last, _Doubled(inner))


def _train_and_back(r: random.Random, *models: Model) -> None:
    """A step of training, the same of all."""
    for model in models:
        model.train()
        for p in model.parameters():
            p.data.add_(1e-3)
        model.eval()


DISTURB: dict[str, Callable[..., None]] = {
    "nothing": lambda r, *models: None, "weights": _weights, "hook": _hook,
    "replaced": _replaced, "train and back": _train_and_back,
}  # fmt: skip


def _differs(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype) -> str:
    size = exact.norm().item()
    error, other = ((t.double() - exact).norm().item() for t in (ours, theirs))
    band = 4 * torch.finfo(dtype).eps * size
    return "" if error <= 2 * other + band else f"error {error:.1e}, original {other:.1e}"


def one(r: random.Random, device: str) -> str:
    """A model, disturbed once; what is wrong, in words."""
    name, how = r.choice(list(FAMILIES)), r.choice(list(DISTURB))
    half = device == "cuda" and r.random() < 0.5
    cast, graphed = r.random() < 0.2, device == "cuda" and r.random() < 0.5
    dtype = torch.float16 if half else torch.float32
    torch.manual_seed(r.randrange(1 << 30))
    original = timm.create_model(name, num_classes=8, **FAMILIES[name]).eval().to(device, dtype)
    for p in original.parameters():
        if p.dim() > 1 and not p.any():  # heads that start at zero show nothing
            nn.init.normal_(p, std=0.02)
    patched = copy.deepcopy(original)
    elsa.patch(patched, scope=r.choice(("attention", "model")))
    side = FAMILIES[name].get("img_size", 224)
    said = f"{name} {dtype} {how}{', autocast' * cast}{', graph' * graphed}"

    def agree(when: str, models: tuple[Model, Model, Model]) -> str:
        exact, theirs, ours = models
        for batch in (1, 3, 1):
            x = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
            with torch.no_grad():
                right = exact(x.double())
                with torch.autocast(device, torch.bfloat16, enabled=cast):
                    try:
                        peer = theirs(x)
                    except RuntimeError:  # batch norm of half weights on a GPU, say
                        return ""
                    found = ours(x)
            wrong = _differs(found, peer, right, torch.bfloat16 if cast else dtype)
            if wrong:
                return f"{said}: {when}, batch {batch}: {wrong}"
        return ""

    def doubled() -> Model:
        return copy.deepcopy(original).double()

    served = elsa.graphed(patched) if graphed else patched
    for _ in range(2):
        wrong = agree("before", (doubled(), original, served))
        if wrong:
            return wrong
    DISTURB[how](r, original, patched)
    return agree("after", (doubled(), original, served))


def main(seconds: float, seed: int, device: str) -> int:
    """Models for so long; 1 where one differed."""
    torch.backends.cudnn.allow_tf32 = False  # convolutions whose error would hide all others
    end, count, failed = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        own = seed * 100_000 + count
        try:
            wrong = one(random.Random(own), device)
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        count += 1
        if wrong:
            failed += 1
            print(
                f"{wrong}\n  again: tests.conformance.models.one(random.Random({own}), {device!r})"
            )
    print(f"{count} models, {failed} faults")
    return failed > 0
