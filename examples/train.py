"""Fine-tune a timm model with elsa's attention on a folder of images, with timm's own parts.

    python examples/train.py DATA -o RUN --model vit_tiny_patch16_224 --pretrained

DATA holds `train/CLASS/IMAGE` and `val/CLASS/IMAGE`. RUN gets `last.pt`, from which the same
command goes on after an interruption, `log.jsonl` with a line for each epoch, and at the end
`model/`, the averaged weights in timm's layout, which elsa opens too:

    elsa check RUN/model && elsa export RUN/model -o bundle
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data import Mixup, create_transform, resolve_model_data_config
from timm.data.dataset import ImageDataset
from timm.loss import SoftTargetCrossEntropy
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader

import elsa_core as elsa

AUTOCAST = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line. What it says about the model and the schedule is kept in the checkpoint."""
    parser = argparse.ArgumentParser(description="Fine-tune a timm model with elsa's attention.")
    parser.add_argument("data", type=Path, help="folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="any of timm")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--drop-path", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--opt", default="adamw", help="any optimizer of timm")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--layer-decay", type=float, help="of the learning rate, by layer")
    parser.add_argument("--sched", default="cosine", help="any schedule of timm")
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--aa", default="rand-m9-mstd0.5-inc1", help="timm's augmentation")
    parser.add_argument("--reprob", type=float, default=0.25, help="of random erasing")
    parser.add_argument("--mixup", type=float, default=0.8)
    parser.add_argument("--cutmix", type=float, default=1.0)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--ema-decay", type=float, default=0.999)
    parser.add_argument("--amp", choices=AUTOCAST, default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-patch", action="store_true", help="the original, for comparison")
    given = parser.parse_args(arguments)
    for part in ("train", "val"):
        if not (given.data / part).is_dir():
            parser.error(f"{given.data / part}: no such folder")
    return given


def seeded(seed: int) -> None:
    """Every source of random numbers that the loop uses."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Run:
    """A model in training and all that belongs to its state."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device, self.epoch = given, torch.device(given.device), 0
        seeded(given.seed)
        self.train_set = ImageDataset(str(given.data / "train"))
        self.classes = sorted(self.train_set.reader.class_to_idx)
        self.val_set = ImageDataset(
            str(given.data / "val"), class_map=self.train_set.reader.class_to_idx
        )
        size = {} if given.img_size is None else {"img_size": given.img_size}
        self.model: Any = timm.create_model(
            given.model, pretrained=given.pretrained, num_classes=len(self.classes),
            drop_path_rate=given.drop_path, **size,
        ).to(self.device)  # fmt: skip
        self.model_args = size
        self.augmented()
        if not given.no_patch:
            elsa.patch(self.model)
        self.optimizer = create_optimizer_v2(
            self.model, opt=given.opt, lr=given.lr, weight_decay=given.weight_decay,
            layer_decay=given.layer_decay,
        )  # fmt: skip
        self.schedule, _ = create_scheduler_v2(
            self.optimizer, sched=given.sched, num_epochs=given.epochs,
            warmup_epochs=given.warmup_epochs, warmup_lr=given.lr / 100,
        )  # fmt: skip
        self.scaler = NativeScaler(self.device.type) if given.amp == "fp16" else None
        self.ema = ModelEmaV3(self.model, decay=given.ema_decay, use_warmup=True)

    def augmented(self) -> None:
        """timm's transforms for training and validation, and its mixup."""
        given, data = self.given, resolve_model_data_config(self.model)
        same = {name: data[name] for name in ("input_size", "interpolation", "mean", "std")}
        self.train_set.transform = create_transform(
            **same, is_training=True, auto_augment=given.aa or None, re_prob=given.reprob
        )
        self.val_set.transform = create_transform(**same, crop_pct=data["crop_pct"])
        self.mixup = Mixup(
            given.mixup, given.cutmix, label_smoothing=given.smoothing,
            num_classes=len(self.classes),
        )  # fmt: skip

    def batches(self, *, training: bool) -> DataLoader[Any]:
        """Batches in an order that the epoch's seed gives. timm's mixup takes even ones alone."""
        data = self.train_set if training else self.val_set
        size = min(self.given.batch_size, len(data))
        return DataLoader(
            data, size - size % 2 if training else size, shuffle=training, drop_last=training,
            num_workers=self.given.workers, pin_memory=self.device.type == "cuda",
            worker_init_fn=lambda i: seeded(torch.initial_seed() % 2**32 + i),
        )  # fmt: skip

    def train(self) -> float:
        """One epoch; the mean loss."""
        seeded(self.given.seed + 1 + self.epoch)
        self.model.train()
        criterion, total, count = SoftTargetCrossEntropy(), 0.0, 0
        for images, labels in self.batches(training=True):
            mixed, targets = self.mixup(images.to(self.device), labels.to(self.device))
            with self.precision():
                loss = criterion(self.model(mixed), targets)
            self.update(loss)
            self.ema.update(self.model)
            total, count = total + float(loss.detach()), count + 1
        self.schedule.step(self.epoch + 1)
        return total / max(count, 1)

    def update(self, loss: Tensor) -> None:
        clip = self.given.clip_grad
        if self.scaler is not None:
            self.scaler(loss, self.optimizer, clip_grad=clip, parameters=self.model.parameters())
        else:
            loss.backward()
            dispatch_clip_grad(self.model.parameters(), clip)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST[self.given.amp]
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Top-1 on the validation images."""
        model.eval()
        right = 0
        for images, labels in self.batches(training=False):
            with self.precision():
                logits = model(images.to(self.device))
            right += int((logits.argmax(1).cpu() == labels).sum())
        return right / len(self.val_set)

    def told(self) -> dict[str, Any]:
        """The settings that a checkpoint goes on with; where it runs is free."""
        free = ("output", "data", "workers", "device")
        return {k: v for k, v in vars(self.given).items() if k not in free}

    def keep(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        state = {
            "epoch": self.epoch, "settings": self.told(), "classes": self.classes,
            "model": self.model.state_dict(), "ema": self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }  # fmt: skip
        staging = path.with_suffix(".new")
        torch.save(state, staging)
        staging.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same settings and classes."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if (state["settings"], state["classes"]) != (self.told(), self.classes):
            raise SystemExit(f"error: {path} is of other settings or classes; use another -o")
        self.epoch = state["epoch"]
        self.model.load_state_dict(state["model"])
        self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.schedule.step(self.epoch)


def main(arguments: list[str] | None = None) -> None:
    """Train, keep a checkpoint of each epoch, and write the averaged model."""
    given = parsed(arguments)
    run = Run(given)
    given.output.mkdir(parents=True, exist_ok=True)
    checkpoint = given.output / "last.pt"
    if checkpoint.exists():
        run.resume(checkpoint)
    while run.epoch < given.epochs:
        loss = run.train()
        figures = {"epoch": run.epoch, "loss": loss, "accuracy": run.accuracy(run.model),
                   "accuracy_ema": run.accuracy(run.ema.module)}  # fmt: skip
        run.epoch += 1
        run.keep(checkpoint)
        with (given.output / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(figures) + "\n")
        sys.stderr.write(json.dumps(figures) + "\n")
    save_for_hf(
        run.ema.module, str(given.output / "model"), model_args=run.model_args,
        model_config={"label_names": run.classes}, safe_serialization=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
