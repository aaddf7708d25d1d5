"""Random training scripts: the options of a loop, drawn from a seed, and the loop itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5
SIZE = 32


class Block(nn.Module):
    """Drop path and dropout as timm has them, a norm with statistics, a parameter without use."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.second, self.unused = nn.Conv2d(width, width, 1), nn.Parameter(torch.ones(width))
        self.dropout, self.drop = nn.Dropout(drop), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.dropout(self.first(self.norm(x)).relu()))
        if self.training and self.drop:
            y = y * x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.drop) / (1 - self.drop)
        return x + y


def convolutions(drop: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 8, 8), Block(8, drop), Block(8, drop),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One training loop.

    Attributes:
        autocast: its dtype; fp16 scales the loss.
        accumulate: backwards a step.
        clip: "norm", "value" or none.
        zero: before or after the forward.
        frozen: the first parameters do not learn; from the middle of the loop they do.
        input_gradients: the images want gradients too.
    """

    seed: int
    steps: int
    autocast: torch.dtype | None
    accumulate: int
    clip: str
    optimizer: str
    set_to_none: bool
    zero: str
    batches: tuple[int, ...]
    frozen: bool
    input_gradients: bool
    evaluates: bool
    trains_in_eval: bool
    drop: float

    @classmethod
    def of(cls, seed: int, *, steps: int = 20, cuda: bool, drop: bool = True) -> Script:
        draw = random.Random(seed)
        halves = [torch.float16, torch.bfloat16] if cuda else [torch.bfloat16]
        return cls(
            seed, steps, draw.choice([None, *halves]), draw.choice([1, 1, 2, 3]),
            draw.choice(["", "norm", "value"]),
            draw.choice(["adamw fused", "adamw foreach", "adamw", "sgd"]),
            draw.random() < 0.5, draw.choice(["before", "after"]),
            draw.choice([(4,), (4, 3), (2, 4, 3)]), draw.random() < 0.4, draw.random() < 0.3,
            draw.random() < 0.4, draw.random() < 0.3, draw.choice([0.0, 0.3]) if drop else 0.0,
        )  # fmt: skip


def optimizer_of(script: Script, model: nn.Module) -> torch.optim.Optimizer:
    given = list(model.parameters())
    if script.optimizer == "sgd":
        return torch.optim.SGD(given, lr=0.05, momentum=0.9)
    name = script.optimizer.partition(" ")[2]
    return torch.optim.AdamW(given, lr=1e-3, **({name: True} if name else {}))


def run(
    script: Script,
    model: nn.Module,
    wrapped: Callable[[nn.Module], Any],
    device: str,
    *,
    exact: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses, and the parameters, buffers and gradients at the end.

    Args:
        script: the loop.
        model: trained in place.
        wrapped: what is called of it.
        exact: in float64, without autocast.
    """
    held = wrapped(model)
    data = torch.Generator().manual_seed(script.seed)
    torch.manual_seed(script.seed)
    params = list(model.parameters())
    if script.frozen:
        for each in params[: len(params) // 3]:
            each.requires_grad_(False)
    optimizer = optimizer_of(script, model)
    scaled = script.autocast is torch.float16 and not exact
    scaler = torch.amp.GradScaler(device, enabled=scaled)
    losses: list[Tensor] = []
    model.train()
    for step in range(script.steps):
        if script.frozen and step == script.steps // 2:
            for each in params:
                each.requires_grad_(True)
        model.train(not (script.trains_in_eval and step % 3 == 1))
        for part in range(script.accumulate):
            batch = script.batches[(step + part) % len(script.batches)]
            images, labels = _drawn(batch, data, device, exact)
            images.requires_grad_(script.input_gradients)
            if script.zero == "before" and part == 0:
                optimizer.zero_grad(set_to_none=script.set_to_none)
            with _autocast(script, device, exact):
                loss = nn.functional.cross_entropy(held(images), labels)
            if script.zero == "after" and part == 0:
                optimizer.zero_grad(set_to_none=script.set_to_none)
            scaler.scale(loss / script.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            if script.input_gradients:
                assert images.grad is not None
                losses.append(images.grad.float().norm())
        scaler.unscale_(optimizer)
        if script.clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.5)
        elif script.clip:
            nn.utils.clip_grad_value_(params, 0.05)
        scaler.step(optimizer)
        scaler.update()
        if script.evaluates and step % 5 == 4:
            losses.append(_evaluated(held, model, script, data, device, exact))
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, {**state, **{name: grad.clone() for name, grad in grads.items()}}


def _evaluated(
    held: Any, model: nn.Module, script: Script, data: torch.Generator, device: str, exact: bool
) -> Tensor:
    model.eval()
    with torch.no_grad(), _autocast(script, device, exact):
        found: Tensor = held(_drawn(2, data, device, exact)[0]).double().norm()
    model.train()
    return found


def _autocast(script: Script, device: str, exact: bool) -> Any:
    if script.autocast is None or exact:
        return nullcontext()
    return torch.autocast(device, dtype=script.autocast)


def _drawn(batch: int, data: torch.Generator, device: str, exact: bool) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, SIZE, SIZE, generator=data)
    labels = torch.randint(CLASSES, (batch,), generator=data)
    return images.to(device, torch.float64 if exact else torch.float32), labels.to(device)
