"""One architecture of every family, for `elsa bench models --table families`.

The families are those of docs/coverage.md of which something is patched; a test compares the two.
Cases come in passes (batch 1 in fp32 first), so that a run that is cut short has seen each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from elsa_core.errors import ArgumentError
from elsa_core.measuring.documents import Document

TABLE: Final = "families"
GOAL: Final = 0.99
PROTOCOL: Final[dict[str, Any]] = {"rounds": 9, "budget_seconds": 2.0}
PEERS: Final = {"cpu": ("eager",), "cuda": ("eager", "eager+graph")}
PAIRS: Final = (
    ("eager", "patched"), ("compile", "patched+compile"), ("eager+graph", "patched+graph"),
    ("compile+graph", "patched+compile+graph"),
)  # fmt: skip
_NAMED: Final = 5  # of the slowest

FAMILIES: Final = (
    ("beit", "timm:beit_base_patch16_224", 224),
    ("byoanet", "timm:halonet50ts", 256),
    ("byobnet", "timm:resnet50_clip", 224),
    ("cait", "timm:cait_xxs24_224", 224),
    ("convit", "timm:convit_small", 224),
    ("cpubone", "timm:cpubone_b2_bfrobust", 224),
    ("crossvit", "timm:crossvit_15_240", 240),
    ("csatv2", "timm:csatv2", 512),
    ("davit", "timm:davit_tiny", 224),
    ("deepseek_vit", "timm:deepseek_vit_412m", 546),
    ("deit", "timm:deit_small_patch16_224", 224),
    ("efficientformer", "timm:efficientformer_l3", 224),
    ("efficientvit_msra", "timm:efficientvit_m5", 224),
    ("eva", "timm:eva02_small_patch14_336", 336),
    ("fastvit", "timm:fastvit_sa24", 256),
    ("gcvit", "timm:gcvit_tiny", 224),
    ("gemma4_vit", "timm:gemma4_vit_167m", 768),
    ("hiera", "timm:hiera_tiny_224", 224),
    ("hieradet_sam2", "timm:sam2_hiera_tiny", 896),
    ("iformer", "timm:iformer_l", 224),
    ("levit", "timm:levit_256", 224),
    ("lowformer", "timm:lowformer_b1", 224),
    ("maxxvit", "timm:maxvit_tiny_rw_224", 224),
    ("metaformer", "timm:caformer_s18", 224),
    ("mobilenetv3", "timm:mobilenetv4_hybrid_medium", 256),
    ("mobilenetv5", "timm:mobilenetv5_base", 256),
    ("mobilevit", "timm:mobilevit_s", 256),
    ("mvitv2", "timm:mvitv2_tiny", 224),
    ("naflexvit", "timm:naflexvit_base_patch16_gap", 384),
    ("nest", "timm:nest_tiny", 224),
    ("nextvit", "timm:nextvit_small", 224),
    ("open_clip", "open_clip:ViT-B-32", 224),
    ("pit", "timm:pit_s_224", 224),
    ("pvt_v2", "timm:pvt_v2_b2", 224),
    ("qwen3_vit", "timm:qwen3_vit_88m", 768),
    ("shvit", "timm:shvit_s4", 256),
    ("swin_transformer", "timm:swin_tiny_patch4_window7_224", 224),
    ("swin_transformer_v2", "timm:swinv2_tiny_window8_256", 256),
    ("swin_transformer_v2_cr", "timm:swinv2_cr_tiny_224", 224),
    ("tiny_vit", "timm:tiny_vit_21m_224", 224),
    ("tnt", "timm:tnt_s_patch16_224", 224),
    ("torchvision", "torchvision:swin_t", 224),
    ("twins", "timm:twins_svt_small", 224),
    ("visformer", "timm:visformer_small", 224),
    ("vision_transformer", "timm:vit_small_patch16_224", 224),
    ("vision_transformer_hybrid", "timm:vit_small_r26_s32_224", 224),
    ("vision_transformer_relpos", "timm:vit_relpos_small_patch16_224", 224),
    ("vision_transformer_sam", "timm:samvit_base_patch16_224", 224),
    ("vitamin", "timm:vitamin_small_224", 224),
    ("volo", "timm:volo_d1_224", 224),
    ("xcit", "timm:xcit_small_12_p16_224", 224),
)
"""(family, architecture, side of its default image), in the order of docs/coverage.md."""


def protocol(device: torch.device, cases: Sequence[Any], asked: Document) -> Document:
    """How to measure these cases; `asked` is None where the user named nothing."""
    kinds = {case.table == TABLE for case in cases}
    if len(kinds) > 1:
        raise ArgumentError("table: families have a protocol of their own: measure them alone")
    given = {key: value for key, value in asked.items() if value is not None}
    own = {**PROTOCOL, "baselines": PEERS.get(device.type)} if kinds == {True} else {}
    return {**own, **given}


def pairs(case: Document) -> dict[str, float]:
    """How many times as fast a patched run is as the original's run of its kind, by the latter."""
    seconds = {each["contender"]: each["seconds"] for each in case["measurements"]}
    return {
        peer: seconds[peer] / seconds[own]
        for peer, own in PAIRS
        if peer in seconds and own in seconds
    }


def summary(document: Document) -> str:
    """The slowest of each kind of run by name, and how many are under the goal.

    Empty for a document without this table.
    """
    cases = [each for each in document["results"]["cases"] if each["case"]["table"] == TABLE]
    cases = [case for case in cases if not case["wrong"]]
    text = ""
    for peer, own in PAIRS:
        found = sorted(
            (pairs(case)[peer], case["case"]["name"]) for case in cases if peer in pairs(case)
        )
        if not found:
            continue
        under = sum(ratio < GOAL for ratio, _ in found)
        named = ", ".join(
            f"{name.partition('/')[2]} ({ratio:.2f})" for ratio, name in found[:_NAMED]
        )
        text += f" {own} against {peer}: {under} of {len(found)} under {GOAL}; slowest: {named}."
    return text
