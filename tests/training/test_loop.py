"""timm's way to train, on a patched model: its loader's parts, optimizer, schedule, scaler, EMA."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import Tensor, nn

from elsa_core.patching.rewrite import patched_sites

from .conftest import CLASSES, subject


def trained(model: nn.Module, images: Tensor, labels: Tensor, folder: Path, *, half: bool) -> float:
    """Ten epochs as timm's train.py runs them, its mixup and clipping included; the last loss."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.01, layer_decay=0.9)
    schedule = CosineLRScheduler(optimizer, t_initial=10, warmup_t=1, warmup_lr_init=1e-4)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=CLASSES, label_smoothing=0.1)
    criterion, scaler = SoftTargetCrossEntropy(), NativeScaler("cpu") if half else None
    ema = ModelEmaV3(model, decay=0.9)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(folder),
                            recovery_dir=str(folder))  # fmt: skip
    loss = torch.zeros(())
    for epoch in range(10):
        model.train()
        mixed, targets = mixup(images.clone(), labels)
        precision = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
        with precision:
            loss = criterion(model(mixed), targets.to(images.device))
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=epoch)
        schedule.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=float(loss.detach()))
    return float(loss.detach())


@pytest.mark.parametrize(("kind", "half"), [("vit", True), ("swin", False)], ids=["amp", "fp32"])
def test_a_loop_as_timm_trains(kind: str, half: bool, tmp_path: Path) -> None:
    """The same draws and nearly the same losses as of the original; checkpoints load into both."""
    found = subject(kind, "auto", drop_path_rate=0.1)
    losses = []
    for name, model in (("plain", found.plain), ("patched", found.patched)):
        torch.manual_seed(5)
        np.random.seed(5)  # what timm's mixup draws from
        folder = tmp_path / name
        folder.mkdir()
        losses.append(trained(model, found.images, found.labels, folder, half=half))
    assert losses[1] == pytest.approx(losses[0], rel=0.05 if half else 0.01)
    assert len(patched_sites(found.patched)) == 2
    held = torch.load(tmp_path / "patched" / "last.pth.tar", weights_only=False)
    found.plain.load_state_dict(held["state_dict"])
    found.patched.load_state_dict(held["state_dict_ema"])
