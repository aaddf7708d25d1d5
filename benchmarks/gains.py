"""The tables of docs/gains.md: one dated figure for each model, dtype and way to run it.

A cell is the original's time over the patched model's, both run the same way. Where several files
have the case, the newest counts, then the larger batch, then the smaller gain.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from typing import Final, NamedTuple

from elsa_core.profiling.bench.published import ENVIRONMENTS, RESULTS

GPU: Final = {
    "ViT-T": ("vit_tiny_patch16_224",),
    "ViT-S": ("vit_small_patch16_224",),
    "ViT-B": ("vit_base_patch16_224",),
    "DINOv2, DINOv3": ("vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3"),
    "DeiT": ("deit3_small_patch16_224", "deit_small_patch16_224"),
    "BEiT": ("beit_base_patch16_224",),
    "EVA-02": ("eva02_tiny_patch14_224", "eva02_small_patch14_336"),
    "CLIP": ("ViT-B-32",),
    "SAM 2": ("sam2_hiera_tiny",),
    "Swin": ("swin_tiny_patch4_window7_224", "swin_t"),
    "Swin V2": ("swinv2_tiny_window8_256",),
    "NesT": ("nest_tiny",),
    "Twins": ("twins_svt_small",),
    "Hiera": ("hiera_base_224", "hiera_tiny_224"),
    "MViTv2": ("mvitv2_tiny",),
    "MaxViT": ("maxvit_tiny_tf_224", "maxvit_tiny_rw_224"),
    "DaViT": ("davit_tiny",),
    "GC ViT": ("gcvit_tiny",),
    "PVT v2": ("pvt_v2_b1", "pvt_v2_b2"),
    "CaiT": ("cait_xxs24_224",),
    "LeViT": ("levit_256",),
}
CPU: Final = {
    "ViT-T": ("vit_tiny_patch16_224",),
    "ViT-S": ("vit_small_patch16_224",),
    "ViT-B": ("vit_base_patch16_224",),
    "CLIP B/16": ("ViT-B-16",),
    "SAM-B, 1024 px": ("samvit_base_patch16",),
    "Swin-T": ("swin_tiny_patch4_window7_224",),
    "Swin-B": ("swin_base_patch4_window7_224",),
    "Swin V2-T": ("swinv2_tiny_window8_256",),
}


class Figure(NamedTuple):
    """A gain: when, of how many images, how much."""

    date: str
    batch: int
    gain: float


class Source(NamedTuple):
    """Where figures come from: a file, its two contenders, and a part of its cases' names."""

    file: str
    original: str
    patched: str
    case: str = ""


EAGER: Final = (Source("eager_h200", "original", "patched"),)
GRAPHED: Final = (
    Source("models_h100_families", "eager+graph", "patched+graph"),
    Source("models_h200", "eager+graph", "patched+graph", "fp16"),
)
STEPS: Final = (
    Source("training_steps_h200", "eager", "patched"),
    Source("graphed_steps_h200", "original eager", "patched eager"),
)
GRAPHED_STEPS: Final = (Source("graphed_steps_h200", "original graphed", "patched graphed"),)
ATTENTION, MODEL, STEPS_AVX2, STEPS_AVX512, AVX2 = (
    (Source(*each),)
    for each in (
        ("profiles_cpu_avx512", "eager", "patched", "scope attention"),
        ("profiles_cpu_avx512", "eager", "patched", "scope model"),
        ("training_steps_cpu", "eager", "patched"),
        ("training_steps_cpu_avx512", "eager", "patched"),
        ("models_cpu", "eager", "patched"),
    )
)
TABLES: Final = {
    "gpu": (GPU, {
        "eager, fp32, H200": (EAGER, "fp32"), "eager, fp16, H200": (EAGER, "fp16"),
        "graphed, fp32, H100": (GRAPHED, "fp32"), "graphed, fp16, H100 or H200": (GRAPHED, "fp16"),
    }),
    "training": (GPU, {
        "eager, fp32": (STEPS, "fp32"), "eager, bf16": (STEPS, "bf16"),
        "graphed, fp32": (GRAPHED_STEPS, "fp32"), "graphed, bf16": (GRAPHED_STEPS, "bf16"),
    }),
    "cpu": (CPU, {
        "AVX2": (AVX2, "fp32"), "AVX-512": (ATTENTION, "fp32"),
        "AVX-512, scope model": (MODEL, "fp32"), "training, AVX2": (STEPS_AVX2, "fp32"),
        "training, AVX-512": (STEPS_AVX512, "fp32"),
    }),
}  # fmt: skip


def table(name: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table; models without a figure are left out."""
    models, columns = TABLES[name]
    figures = [list(_figures(*found)) for found in columns.values()]
    rows = []
    for model, names in models.items():
        cells = [_cell(each for name, each in column if name in names) for column in figures]
        if any(cell != "-" for cell in cells):
            rows.append([model, *cells])
    return ["model", *columns], rows


def _figures(sources: Iterable[Source], wanted: str) -> Iterable[tuple[str, Figure]]:
    """Every figure of a dtype, with its architecture."""
    environments = json.loads((RESULTS / ENVIRONMENTS).read_text(encoding="utf-8"))
    for source in sources:
        cases: dict[str, dict[str, dict[str, str]]] = {}
        with (RESULTS / f"{source.file}.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if source.case in row["case"] and row["median"]:
                    cases.setdefault(row["case"], {})[row["contender"]] = row
        for case, members in cases.items():
            if not {source.original, source.patched} <= members.keys():
                continue
            old, new = members[source.original], members[source.patched]
            if old.get("batch"):
                name = old.get("model") or old["label"].partition(",")[0]
                architecture, batch, dtype = name.rpartition(":")[2], old["batch"], old["dtype"]
            else:  # by a study's name
                architecture, batch, dtype = case.rsplit("-", 2)
            if dtype.replace("float", "fp") == wanted:
                gain = float(old["median"]) / float(new["median"])
                date = environments[old["environment"]]["date"][:10]
                yield architecture, Figure(date, int(batch), gain)


def _cell(figures: Iterable[Figure]) -> str:
    best = max(figures, default=None, key=lambda each: (each.date, each.batch, -each.gain))
    return "-" if best is None else f"**{best.gain:.2f}** (B{best.batch}, {best.date})"
