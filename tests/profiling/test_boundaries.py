"""A site's time is its attention's: what a block computes besides is not in it."""

from typing import Any

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching.sites import find_sites
from elsa_core.profiling.sites import around, outermost, site_clock

CASES: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 32, "depths": (2,),
                                     "num_heads": (2,)},
    "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 32, "depths": (2,),
                                "num_heads": (2,)},
    "davit_tiny": {"depths": (1,), "embed_dims": (32,), "num_heads": (2,)},
    "tiny_vit_5m_224": {},
    "maxvit_pico_rw_256": {"img_size": 64},
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 1},
}  # fmt: skip


def built(name: str) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **CASES[name])
    return model.eval()


@pytest.mark.parametrize("patched", [False, True], ids=["original", "patched"])
@pytest.mark.parametrize("name", list(CASES))
def test_mlps_lie_outside_and_attention_inside(name: str, patched: bool) -> None:
    model = built(name)
    image = torch.randn(1, 3, 64, 64)[..., : CASES[name].get("img_size", 64), :]
    image = image[..., : image.shape[-2]].contiguous()
    with torch.inference_mode():
        before = model(image)
    if patched:
        assert elsa.patch(model).patched
        with torch.inference_mode():
            before = model(image)
    inside: list[str] = []
    heard: dict[str, set[bool]] = {"mlp": set(), "softmax": set()}
    paths = list(outermost(model, find_sites(model)))
    for path in paths:
        around(model.get_submodule(path), lambda path=path: inside.append(path), inside.clear)
    for own, module in model.named_modules():
        if own.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_: heard["mlp"].add(bool(inside)))

    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            words = ("softmax", "scaled_dot", "elsa::attention", "elsa::window_attention")
            if any(word in str(func._schema.name) for word in words):
                heard["softmax"].add(bool(inside))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Listening():
        after = model(image)
    assert heard == {"mlp": {False}, "softmax": {True}}
    assert inside == [] and torch.equal(before, after)


def test_the_clock_counts_attention_alone() -> None:
    """Of two Swin blocks with MLPs that take 0.2 s each, the sites take what is left at most."""
    import time

    model = built("swin_tiny_patch4_window7_224")
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    paths = list(outermost(model, find_sites(model)))
    clock = site_clock(model, paths, torch.device("cpu"))
    start = time.perf_counter()
    with torch.inference_mode():
        model(torch.randn(1, 3, 56, 56))
    left = time.perf_counter() - start - 2 * 0.2
    found = clock()
    assert len(found) == len(paths) == 2 and min(found.values()) > 0
    assert sum(found.values()) <= left


def test_the_clock_counts_what_a_forward_spends_in_calls_of_itself() -> None:
    """One that calls the model again, for the other way round say, kept its last call alone."""
    import time

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site = built("vit_tiny_patch16_224").blocks[0].attn

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            found = self.site(x)
            return found + self(x.flip(1), False) if again else found

    model = Twice()
    model.site.proj.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    clock = site_clock(model, ["site"], torch.device("cpu"))
    width = model.site.qkv.in_features
    for _ in range(2):  # of each call alone
        start = time.perf_counter()
        with torch.inference_mode():
            model(torch.randn(1, 5, width))
        taken = time.perf_counter() - start
        assert 0.1 < clock()["site"] <= taken
