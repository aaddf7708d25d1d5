"""`elsa bench models`: whole models, patched against every way one would otherwise run them.

The models and sizes of the ELSA paper's tables, at batch 8 and over sweeps of resolution, and one
architecture of every family (`families`).
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch import Tensor, nn

from elsa_core.errors import ElsaError
from elsa_core.measuring.documents import Document
from elsa_core.measuring.rounds import Settings
from elsa_core.patching import patch, shared_copy
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench import families
from elsa_core.profiling.bench.runner import ModelCase, Runner, result
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import Progress, prepare, timed
from elsa_core.proof import check

_PEERS: Final = {"cpu": ("eager", "sdpa")}  # more than a profile measures by default
_PAPER: Final = (
    # label, model, side, window, too long for a CPU at batch 8
    ("ViT-T", "timm:vit_tiny_patch16_224", 224, None, False),
    ("ViT-S", "timm:vit_small_patch16_224", 224, None, False),
    ("ViT-M", "timm:vit_medium_patch16_gap_256", 256, None, False),
    ("ViT-B", "timm:vit_base_patch16_224", 224, None, False),
    ("Swin-T W8", "timm:swin_tiny_patch4_window7_224", 256, 8, False),
    ("Swin-T W16", "timm:swin_tiny_patch4_window7_224", 256, 16, False),
    ("Swin-S W8", "timm:swin_small_patch4_window7_224", 256, 8, False),
    ("Swin-S W16", "timm:swin_small_patch4_window7_224", 256, 16, False),
    ("Swin-B W8", "timm:swin_base_patch4_window7_224", 256, 8, True),
    ("Swin-B W16", "timm:swin_base_patch4_window7_224", 256, 16, True),
    ("SwinV2-T W8", "timm:swinv2_tiny_window8_256", 256, None, False),
    ("CLIP B/32", "open_clip:ViT-B-32", 224, None, False),
    ("CLIP B/16", "open_clip:ViT-B-16", 224, None, False),
    ("CLIP L/14", "open_clip:ViT-L-14", 224, None, True),
    ("CLIP L/14@336", "open_clip:ViT-L-14-336", 336, None, True),
    ("SAM B", "timm:samvit_base_patch16", 1024, None, True),
)
_SWEPT: Final = (
    ("ViT-T", "timm:vit_tiny_patch16_224", (224, 384, 512, 768, 1024)),
    ("ViT-B", "timm:vit_base_patch16_224", (224, 384, 512, 768, 1024)),
    ("Swin-T", "timm:swin_tiny_patch4_window7_224", (224, 448, 672, 896)),
)
_QUICK: Final = ("ViT-T", "Swin-T W8", "CLIP B/32")


def _tables(device_type: str) -> dict[str, tuple[ModelCase, ...]]:
    dtypes = ("fp32", "fp16") if device_type == "cuda" else ("fp32",)
    paper = (
        ModelCase("batch8", label, model, side, 1 if long and device_type == "cpu" else 8, dtype,
                  window=window, quick=label in _QUICK)
        for dtype in dtypes
        for label, model, side, window, long in _PAPER
    )  # fmt: skip
    sweeps = (
        ModelCase("resolution", label, model, side, 1, dtype,
                  quick=label == "ViT-T" and side in (224, 384))
        for dtype in dtypes
        for label, model, sides in _SWEPT
        for side in sides
    )  # fmt: skip
    of_families = (  # in passes
        ModelCase(families.TABLE, *each, batch, dtype)
        for batch in (1, 8)
        for dtype in dtypes
        for each in families.FAMILIES
    )
    return {
        "batch8": tuple(paper), "resolution": tuple(sweeps), families.TABLE: tuple(of_families)
    }  # fmt: skip


TABLES: Final = {device_type: _tables(device_type) for device_type in ("cpu", "cuda")}


def build(case: ModelCase, device: torch.device, seed: int) -> tuple[nn.Module, Tensor]:
    """The model of a case with random weights from `seed`, of a CLIP the image tower, and images
    [batch, 3, image_size, image_size] of normal numbers.

    Families have their default size, and are filled where the model runs.
    """
    from elsa_core.loading import UninitialisedParameters, load

    filled = case.table == families.TABLE
    if filled:
        with UninitialisedParameters():
            tower: Any = load(case.model, dtype=DTYPES[case.dtype])
    elif case.window is None:
        tower = load(case.model, image_size=case.image_size, seed=seed)
    else:
        import timm

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            tower = timm.create_model(
                case.model.removeprefix("timm:"), img_size=case.image_size,
                window_size=case.window,
            )  # fmt: skip
    model: nn.Module = tower.visual if case.model.startswith("open_clip:") else tower
    model = model.eval().to(device=device, dtype=DTYPES[case.dtype])
    if filled:  # so that activations stay near one: gains near one, no bias at zero
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                fan_in = weight[0].numel() if weight.ndim > 1 else 100
                gain = weight.ndim < 2 and name.rpartition(".")[2] in ("weight", "gamma", "scale")
                weight.normal_(float(gain), 0.5 * fan_in**-0.5, generator=generator)
    shape = (case.batch, 3, case.image_size, case.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return model, images.to(device, DTYPES[case.dtype])


def measure(case: ModelCase, device: torch.device, settings: Document, tell: Progress) -> Document:
    """One case as plain data.

    Of families memory, energy and the GPU's share are not measured, and errors are those of batch 1
    in fp32: coverage proves every family anyway.
    """
    few = case.table == families.TABLE
    tell("building", 0, 0)
    model, given = build(case, device, settings["seed"])
    ready = prepare(
        model, (given,), settings["baselines"], tell, precision=case.precision,
        backend=settings["backend"],
    )  # fmt: skip
    found, _ = timed(
        ready, Settings(settings["rounds"], settings["budget_seconds"], settings["seed"]), tell,
        errors=not few or (case.batch, case.dtype) == (1, "fp32"), costs=not few,
    )  # fmt: skip
    if few:
        return result(case, found, [])
    tell("checking", 0, 0)
    patched, failures = shared_copy(model), list[str]()
    patch(patched, precision=case.precision, backend=settings["backend"])
    # which sites disagree on one image, each alone: the runs' own errors show less of one site
    with contextlib.suppress(ElsaError, RuntimeError, MemoryError):
        judged = check(
            patched, given[:1], stress=False, batch_size=1, paths=("eager",), progress=False
        )
        failures += judged.failures
    return result(case, found, failures)


RUNNER: Final = Runner(
    "bench models",
    TABLES,
    measure,
    families.TABLE,
    lambda names, device: variants.chosen(names or _PEERS.get(device.type), device),
)
