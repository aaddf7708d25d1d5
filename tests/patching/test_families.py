"""Every family that can be patched passes the check, in float32 or in bfloat16, by turns.

Small images and few blocks: what differs between families is in one block.
"""

import copy
from typing import Any

import pytest
import timm
import torch
from originals import of_original
from sampling import thinned
from torch import nn

from elsa_core.base.inputs import generated_inputs, text_shape
from elsa_core.patching.rewrite import patch
from elsa_core.proof.checking import CheckReport, check

SMALL = {"depth": 2, "embed_dim": 192, "num_heads": 3}  # heads of 64, as the families have

# Written adapters.
ADAPTED: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {"img_size": 64, **SMALL},
    "deit3_base_patch16_224": {"img_size": 64, **SMALL},
    "vit_base_patch16_siglip_224": {"img_size": 64, **SMALL},
    "eva02_base_patch14_224": {"img_size": 56, **SMALL},
    "vit_base_patch16_dinov3": {"img_size": 64, **SMALL},
    "vit_base_patch16_rope_224": {"img_size": 64, **SMALL},
    "vit_base_patch16_rope_mixed_224": {"img_size": 64, **SMALL},
    "vit_small_patch14_dinov2": {"img_size": 56, **SMALL},
    "mobilevit_xxs": {"img_size": 64},
    "samvit_base_patch16_224": {"img_size": 64, **SMALL},
}
# Their own forward, watched: relative bias, reduced keys, windows (5-D and 4-D),
# multi-query with one key head, convolutional layout.
WATCHED: dict[str, dict[str, Any]] = {
    "levit_128s": {"img_size": 112},
    "beit_base_patch16_224": {"img_size": 64, **SMALL},
    "pvt_v2_b0": {"img_size": 64},
    "vit_relpos_small_patch16_224": {"img_size": 64, **SMALL},
    "hiera_tiny_224": {"img_size": 64, "stages": (1, 1, 1, 1)},
    "mobilenetv4_hybrid_medium": {"img_size": 64},
    "fastvit_sa12": {"img_size": 64, "layers": (1, 1, 1, 1)},
}
# Their constructors take no image size.
FREE_SIZE = {"mobilevit_xxs", "pvt_v2_b0", "mobilenetv4_hybrid_medium", "fastvit_sa12"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def create(name: str, options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    if name in FREE_SIZE:
        options = {key: value for key, value in options.items() if key != "img_size"}
    model: nn.Module = timm.create_model(name, **options)
    for parameter_name, parameter in model.named_parameters():
        # Freshly made, layer scales of 1e-5 and heads of zeros would hide what attention does.
        if "gamma" in parameter_name:
            nn.init.normal_(parameter, 0.5, 0.1)
        elif parameter_name.endswith(("head.weight", "head.fc.weight")):
            nn.init.normal_(parameter, 0.0, 0.05)
    return model.to(dtype).eval()


def run(model: nn.Module, size: int, dtype: torch.dtype, batch: int = 2) -> CheckReport:
    text = text_shape(model)
    given = generated_inputs((3, size, size), batch, seed=0, dtype=dtype, device="cpu", text=text)
    report = check(model, given)
    assert report.ok, report.failures
    assert all(site.operator_calls == site.calls > 0 for site in report.sites)
    assert all(site.drift is not None for site in report.sites)
    assert not any("zero" in note for case in report.cases for note in case.notes)
    return report


@pytest.mark.parametrize(("name", "kind"), [*thinned(ADAPTED, DTYPES), *thinned(WATCHED, DTYPES)])
def test_family(name: str, kind: str) -> None:
    dtype, options = DTYPES[kind], (ADAPTED | WATCHED)[name]
    model, size = create(name, options, dtype), options["img_size"]
    wide = copy.deepcopy(model).double()
    of_original(lambda: wide(torch.zeros(1, 3, size, size, dtype=torch.float64)))
    report = patch(model, strict=name in ADAPTED)
    recognised = {site.adapter == "recognised" for site in report.patched}
    assert recognised == {True} if name in WATCHED else False in recognised
    assert len(run(model, size, dtype).sites) == len(report.patched)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_clip_with_image_and_text(dtype: torch.dtype) -> None:
    """Two inputs, a tuple of outputs, a causal mask that holds -inf in a buffer."""
    open_clip = pytest.importorskip("open_clip")
    tower: dict[str, Any] = {"layers": 2, "width": 64, "block_type": "custom"}
    model = open_clip.CLIP(
        64,
        {"image_size": 64, "patch_size": 16, **tower},
        {"context_length": 20, "vocab_size": 100, "heads": 2, **tower},
    )
    report = patch(model.to(dtype).eval(), strict=True)
    assert len(report.patched) == 4
    assert {case.output for case in run(model, 64, dtype).cases} <= {"output[0]", "output[1]"}
