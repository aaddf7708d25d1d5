"""One small model, profiled once for all tests that look at a report."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elsa_core.profiling import sweep
from elsa_core.profiling.profile import ProfileReport, profile

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell",
)  # fmt: skip


def small_vit(depth: int = 2) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=depth)
    return model.eval()


@pytest.fixture
def chromium() -> str:
    """The browser of this machine."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("Chromium is not installed: the page was not shown in a browser")
    return found


@pytest.fixture(scope="package")
def report() -> ProfileReport:
    """A model of two blocks against itself and its patched self, for tests that run alone."""
    model = small_vit()
    images = torch.randn(1, 3, 96, 96)
    return profile(
        model, images, baselines=["eager", "control", "sdpa"], budget_seconds=4, sites=True
    )


@pytest.fixture(scope="session")
def profiled(once: Callable[[str, Callable[[Path], None]], Path]) -> str:
    """Such a report as JSON, for tests that do not look at its times."""

    def fill(folder: Path) -> None:
        found = profile(
            small_vit(), torch.randn(1, 3, 96, 96), baselines=["eager", "control", "sdpa"],
            budget_seconds=1, sites=True,
        )  # fmt: skip
        folder.joinpath("profile.json").write_text(json.dumps(found.to_dict()))

    return once("profiled", fill).joinpath("profile.json").read_text()


@pytest.fixture
def document(profiled: str) -> dict[str, Any]:
    """A finished sweep of two sizes, made of that report; plain JSON data of the test's own."""
    rows = [
        {
            "configuration": sweep.Configuration((side, side)).to_dict(),
            "status": "done",
            "reason": "",
            "profile": json.loads(profiled) | {"image_size": [side, side]},
        }
        for side in (96, 192)
    ]
    return {
        "schema_version": 1, "elsa_version": "0", "command": "profile",
        "environment": {
            "cpu": "A <CPU> & more", "threads": 1, "gpu": None, "isa": "AVX2",
            "packages": {"torch": "2.15.0"}, "date": "2026-01-02T03:04:05",
        },
        "results": {
            "model": {"given": "vit_tiny", "name": "vit_tiny_patch16_224", "alias": ""},
            "settings": {"include": [], "exclude": []}, "complete": True, "points": rows,
        },
    }  # fmt: skip
