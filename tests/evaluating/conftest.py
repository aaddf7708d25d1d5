"""A small ViT that has learnt scikit-learn's digits, saved; and digits that it has not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import Given
from elsa_core.loading.saving import save
from elsa_core.patching.rewrite import patch

_SIZES = {"patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 2,
          "num_heads": 2}  # fmt: skip


def held_out(count: int) -> np.ndarray:
    return np.arange(count) % 5 == 0


@pytest.fixture(scope="session")
def trained(learnt_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model, trained on four fifths of the digits."""
    loaded = load_model(
        "vit_tiny_patch16_224", image_size=8, model_kwargs=_SIZES,
        preprocess=Given((0.3,), (0.375,), 1.0, "nearest"),
    )  # fmt: skip
    loaded.model.load_state_dict(load_file(learnt_digits))
    report = patch(loaded.model.eval())
    return save(loaded, report, tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits it has not seen as PNGs of 8 x 8, in one folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data, root = load_digits(), tmp_path_factory.mktemp("digits")
    for index in np.flatnonzero(held_out(len(data.images))):
        folder = root / str(data.target[index])
        folder.mkdir(exist_ok=True)
        pixels = np.round(data.images[index] / 16.0 * 255.0).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:04}.png")
    return root
