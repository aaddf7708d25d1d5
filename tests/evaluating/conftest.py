"""A small ViT that has learnt scikit-learn's digits, saved; and digits that it has not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import Given
from elsa_core.loading.saving import save
from elsa_core.patching.rewrite import patch

_SIZES = {"patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 2,
          "num_heads": 2}  # fmt: skip


def held_out(count: int) -> np.ndarray:
    return np.arange(count) % 5 == 0


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model, trained for some seconds on four fifths of the digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    seen = ~held_out(len(data.images))
    images = (torch.from_numpy(data.images[seen]).float().unsqueeze(1) / 16.0 - 0.3) / 0.375
    labels = torch.from_numpy(data.target[seen]).long()
    loaded = load_model(
        "vit_tiny_patch16_224", image_size=8, model_kwargs=_SIZES,
        preprocess=Given((0.3,), (0.375,), 1.0, "nearest"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(loaded.model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=18 * 29)
        for _ in range(18):
            for rows in torch.randperm(len(images)).split(50):
                optimizer.zero_grad()
                F.cross_entropy(loaded.model(images[rows]), labels[rows]).backward()
                optimizer.step()
                schedule.step()
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
