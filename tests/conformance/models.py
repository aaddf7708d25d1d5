"""Patched models of timm against the originals: called until caches are warm, then disturbed.

`python -m tests.conformance.draw --models`. A difference is judged as in `judge.py`: both are
compared with the original in float64.
"""

import copy
import random
import re
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

import elsa_core as elsa

VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {**VIT, "init_values": 0.5, "drop_path_rate": 0.1},
    "vit_relpos_small_patch16_224": VIT,
    "vit_base_patch16_rope_224": VIT,
    "eva02_tiny_patch14_224": VIT,
    "beit_base_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "cait_xxs24_224": VIT,
    "convit_tiny": {"img_size": 32, "patch_size": 8, "depth": 12, "embed_dim": 8, "num_heads": 4},
    "samvit_base_patch16_224": {
        **VIT, "img_size": 64, "window_size": 3, "global_attn_indexes": (1,),
    },
    "xcit_tiny_12_p8_224": {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2),
    },
    "swinv2_cr_tiny_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2),
    },
    "twins_svt_small": {"img_size": 64, "depths": (1, 1, 1, 1), "wss": (2, 2, 2, 2)},
    "tnt_s_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "crossvit_tiny_240": {},
    "volo_d1_224": {"img_size": 64},
    "nest_tiny": {"img_size": 64},
    "levit_128s": {},
    "mvitv2_tiny": {"img_size": 64},
    "hiera_tiny_224": {"img_size": 64, "stages": (1, 1, 1, 1)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "visformer_tiny": {"img_size": 64, "depth": (1, 1, 1)},
    "gcvit_xxtiny": {"img_size": 224},
    "tiny_vit_5m_224": {"depths": (1, 1, 1, 1)},
    "efficientformer_l1": {},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
}  # fmt: skip
SIDES = {"crossvit_tiny_240": 240, "levit_128s": 224, "gcvit_xxtiny": 224, "pvt_v2_b0": 64,
         "davit_tiny": 64, "tiny_vit_5m_224": 224, "efficientformer_l1": 224}  # fmt: skip
FACTOR = 1.25
Model = nn.Module


def parts(model: nn.Module) -> list[str]:
    """The first module of each name, which no other module contains alone."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        name = re.sub(r"\d+", "", path.rpartition(".")[2])
        callable_ = type(module).forward is not nn.Module.forward
        if path and callable_ and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.setdefault(name or path, path)
    return list(found.values())


def scaled(out: Any) -> Any:
    if isinstance(out, Tensor):
        return FACTOR * out
    return (FACTOR * out[0], *out[1:]) if isinstance(out, tuple) else out


class Wrapped(nn.Module):
    """As activation checkpointing wraps a module: what it lacks it asks the module for."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, *given: Any, **named: Any) -> Any:
        return scaled(self.part(*given, **named))


def hook(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda part, given, out: scaled(out))


def wrap(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Wrapped(model.get_submodule(path)))


def derive(model: nn.Module, path: str) -> None:
    part: Any = model.get_submodule(path)
    base = type(part)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return scaled(base.forward(self, *given, **named))

    part.__class__ = type(base.__name__, (base,), {"forward": forward})


DISTURBANCES: tuple[Callable[[nn.Module, str], None], ...] = (hook, wrap, derive)


def _weights(r: random.Random, *models: Model) -> None:
    """Write a weight past its version counter, as fused optimizers do."""
    name = r.choice([name for name, p in models[0].named_parameters() if p.dim() > 1])
    for model in models:
        model.get_parameter(name).data.mul_(1.5)


def _train_and_back(r: random.Random, *models: Model) -> None:
    """A step of training, the same of all."""
    for model in models:
        model.train()
        for p in model.parameters():
            p.data.add_(1e-3)
        model.eval()


def _part(r: random.Random, *models: Model) -> None:
    """Change one part."""
    path, change = r.choice(parts(models[0])), r.choice(DISTURBANCES)
    for model in models:
        change(model, path)


DISTURB: dict[str, Callable[..., None]] = {
    "nothing": lambda r, *models: None, "weights": _weights, "part": _part,
    "train and back": _train_and_back,
}  # fmt: skip


def _differs(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype) -> str:
    size = exact.norm().item()
    error, other = ((t.double() - exact).norm().item() for t in (ours, theirs))
    band = 4 * torch.finfo(dtype).eps * size
    return "" if error <= 2 * other + band else f"error {error:.1e}, original {other:.1e}"


def one(r: random.Random, device: str) -> str:
    """A model, disturbed once; what is wrong, in words."""
    name, how = r.choice(list(MODELS)), r.choice(list(DISTURB))
    half = device == "cuda" and r.random() < 0.5
    cast, graphed = r.random() < 0.2, device == "cuda" and r.random() < 0.5
    dtype = torch.float16 if half else torch.float32
    torch.manual_seed(r.randrange(1 << 30))
    original = timm.create_model(name, num_classes=8, **MODELS[name]).eval().to(device, dtype)
    for p in original.parameters():
        if p.dim() > 1 and not p.any():  # heads that start at zero show nothing
            nn.init.normal_(p, std=0.02)
    patched = copy.deepcopy(original)
    elsa.patch(patched, scope=r.choice(("attention", "model")))
    side = SIDES.get(name, MODELS[name].get("img_size", 64))
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
