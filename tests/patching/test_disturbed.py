"""A patched model computes what the original does, whatever was done to its parts, and when.

Hooks that change what passes, wrappers that hand attributes on (activation checkpointing, LoRA),
subclasses and other settings: of one part of each name in each family, before `patch`, after it,
and after a call.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from conformance.models import DISTURBANCES, MODELS, SIDES, parts
from originals import torchvision_swin
from sampling import taken
from timm.layers import set_fused_attn
from torch import Tensor, nn

import elsa_core as elsa

SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "num_classes": 5}
# A block of each kind is enough here: of more, `parts` takes the first.
SHALLOW: dict[str, dict[str, Any]] = {
    "crossvit_tiny_240": {"depth": ((1, 1, 0),) * 3},
    "efficientformer_l1": {"depths": (1, 1, 1, 2)},
    "maxvit_rmlp_pico_rw_256": {"depths": (1, 1, 1, 1)},
}


def _maxvit() -> nn.Module:
    maxvit = pytest.importorskip("torchvision.models.maxvit")
    return maxvit.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5)  # type: ignore[no-any-return]


def _clip() -> nn.Module:
    tower = pytest.importorskip("open_clip.transformer")
    return tower.VisionTransformer(32, 8, 32, 2, 2, 2.0, output_dim=16)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """PyTorch's encoder on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.patches(x).flatten(2).transpose(1, 2))
        return out


# Of other libraries: how each is made, and its side.
OTHERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "torchvision vit": (
        lambda: pytest.importorskip("torchvision").models.VisionTransformer(32, 8, 2, 2, 32, 64),
        32,
    ),
    "torchvision swin": (lambda: torchvision_swin(1, **SWIN), 64),
    "torchvision swin v2": (lambda: torchvision_swin(2, **SWIN), 64),
    "torchvision maxvit": (_maxvit, 64),
    "open_clip vit": (_clip, 32),
    "torch encoder": (Encoder, 32),
}
# In inference PyTorch's fast path reads the weights of an encoder's parts and calls none, whatever
# stands in their places; hooks turn it off. Patched layers call their parts, as in training.
ONLY_HOOKS = ("torch encoder",)
# Changed by name of the part, attribute and value; of the first part of that name.
SETTINGS = (
    ("proj", "stride", lambda conv: tuple(s // 2 for s in conv.stride)),
    ("norm1", "eps", lambda _: 0.3),
    ("attn", "scale", lambda _: 0.7),
    ("attn", "fused_attn", lambda attn: not attn.fused_attn),
    ("softmax", "dim", lambda _: 0),
    ("1", "shift_size", lambda _: (1, 1)),
    ("0", "window_size", lambda _: (2, 2)),
    ("self_attention", "add_zero_attn", lambda _: True),
    ("1", "size", lambda attn: attn.size // 2),
)
WAYS = tuple(itertools.product(("model", "attention"), ("after", "before", "warm")))


@pytest.fixture(autouse=True)
def fused():
    yield
    set_fused_attn(True)


def made(name: str, fuses: bool) -> nn.Module:
    set_fused_attn(fuses)
    torch.manual_seed(0)
    other = OTHERS.get(name)
    options = MODELS.get(name, {}) | SHALLOW.get(name, {})
    model: nn.Module = other[0]() if other else timm.create_model(name, **options)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.3)
    return model


def outcome(model: nn.Module, x: Tensor) -> Any:
    """The output, or the kind of an error."""
    try:
        out = model(x)
    except Exception as error:
        return type(error)
    return torch.cat([t.flatten() for t in (out if isinstance(out, tuple) else (out,))])


def differ(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, type):  # elsa may take what the original refuses
        return False
    if isinstance(found, type):
        return True
    if found.shape != wanted.shape:
        return True
    return bool((found - wanted).norm() > 2e-5 * wanted.norm())


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@torch.no_grad()
def test_disturbed_parts(name: str) -> None:
    of_timm = MODELS.get(name, {})
    side = OTHERS[name][1] if name in OTHERS else SIDES.get(name, of_timm.get("img_size", 64))
    x = torch.randn(1, 3, side, side)
    bases = {fuses: made(name, fuses) for fuses in (True, False)}
    changes: list[tuple[str, str, Callable[[nn.Module], None]]] = [
        (way.__name__, path, lambda model, way=way, path=path: way(model, path))
        for path in parts(bases[True])
        for way in DISTURBANCES[: 1 if name in ONLY_HOOKS else None]
    ]
    sampled = len(changes)
    for last, attribute, value in SETTINGS:
        named = ((p, m) for p, m in bases[True].named_modules() if p.rpartition(".")[2] == last)
        found = ((path, part) for path, part in named if hasattr(part, attribute))
        for path, part in itertools.islice(found, 1):
            changed = value(part)
            changes += [
                (f"{attribute}={changed}", path,
                 lambda model, path=path, attribute=attribute, changed=changed: setattr(
                     model.get_submodule(path), attribute, changed))
            ] * 2  # fmt: skip
    wrong = []
    for index, (said, path, change) in enumerate(changes):
        if index < sampled and not taken(index + [*MODELS, *OTHERS].index(name), one_in=12):
            continue
        base = bases[index % 3 == 1]  # attention weights exist where it is off
        scope, when = WAYS[index // 2 % len(WAYS)]
        original, patched = copy.deepcopy(base), copy.deepcopy(base)
        change(original)
        wanted = outcome(original, x)
        if when == "before":
            change(patched)
        # where a precision is named no call is too small to be recognised
        elsa.patch(patched, scope=scope, precision=("strict", "ieee")[index % 2])
        if when == "warm":
            patched(x)
        if when != "before":
            change(patched)
        if differ(outcome(patched, x), wanted):
            wrong.append((said, path, scope, when, base is bases[True]))
    assert not wrong, wrong
