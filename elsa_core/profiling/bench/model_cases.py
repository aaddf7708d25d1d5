"""What is measured of a model: one case, what it is called with, and its plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from elsa_core.precision import DTYPES
from elsa_core.profiling.runs.runs import ModelRuns

Document = dict[str, Any]


@dataclass(frozen=True)
class ModelCase:
    """One model at one size.

    Attributes:
        table: "batch8" (the paper's tables), "resolution" (sweeps) or "families".
        label: what the tables call the model.
        model: `timm:...` or `open_clip:...` (its image tower).
        image_size: side in pixels.
        window: window size of a Swin, None for its own.
        quick: whether --quick includes it.
    """

    table: str
    label: str
    model: str
    image_size: int
    batch: int
    dtype: str = "fp32"
    precision: str = "strict"
    window: int | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique in its device's tables: `batch8/ViT-B-224x8-fp32`."""
        label = self.label.replace(" ", "-")
        return f"{self.table}/{label}-{self.image_size}x{self.batch}-{self.dtype}"

    def to_dict(self) -> Document:
        """Plain data for JSON."""
        return {"name": self.name, **asdict(self)}


def images(case: ModelCase, device: torch.device, seed: int) -> torch.Tensor:
    """The batch of a case, [batch, 3, image_size, image_size]: normal numbers from `seed`."""
    shape = (case.batch, 3, case.image_size, case.image_size)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, DTYPES[case.dtype])


def result(case: ModelCase, found: ModelRuns, failures: list[str]) -> Document:
    """The plain data of a measured case.

    `measurements` are runs (`elsa_core.profiling.runs.runs.Run`) without `ratio`, which becomes
    `ratio_to_best` for elsa's; `errors` are (the fastest elsa run's, "eager"'s) relative errors
    against float64 of the very calls that were timed, None where they are not known; `wrong` are
    the elsa runs whose error is too large, and "patched" where a site failed its check.
    """
    runs = []
    own, original = (found.run(name).error for name in (found.best_patched, "eager"))
    wrong = ["patched"] if failures else []
    wrong += [run.name for run in found.runs if run.patched and run.name in found.wrong]
    for run_ in found.runs:
        plain = run_.to_dict()
        plain["contender"] = plain.pop("name")
        plain["precision"] = case.precision if plain.pop("patched") else None
        runs.append(plain)
    return {
        "case": case.to_dict(),
        "measurements": runs,
        "best_peer": found.best_baseline,
        "best_own": found.best_patched,
        "gain": found.gain.to_dict(),
        "sites": [found.patched, found.patched + found.kept],
        "errors": None if original is None else [own, original],
        "wrong": list(dict.fromkeys(wrong)),
        "left_out": dict(found.left_out),
        "warnings": [*found.warnings, *failures],
    }


def empty(case: ModelCase, reason: str) -> Document:
    """The plain data of a case that was not measured."""
    return {
        "case": case.to_dict(), "measurements": [], "best_peer": "", "best_own": "", "gain": None,
        "sites": [0, 0], "errors": None, "wrong": [], "left_out": {"all": reason}, "warnings": [],
    }  # fmt: skip
