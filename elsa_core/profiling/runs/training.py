"""A model's training step in several ways in the same rounds: forward, backward and optimizer.

The ways are those of `variants` without graphs of compiled models. They share one copy of the
model's weights and one AdamW, so that they differ in what computes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise, starmap
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elsa_core.base.inputs import ModelInput, as_cases
from elsa_core.errors import ArgumentError
from elsa_core.measuring.intervals import digits, middle_means
from elsa_core.measuring.rounds import Settings
from elsa_core.measuring.timing import between, mark
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import ProfileReport, Progress, Run, prepare, timed
from elsa_core.profiling.runs.variants import first_tensor, on_device
from elsa_core.proof import Comparison, floating_outputs, map_floating

PARTS: Final = ("forward", "backward", "optimizer")
AUTOCAST: Final = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of a step, weights float32: the dtype of autocast, None without it."""
chosen: Final = partial(variants.chosen, trains=True)
_RATE: Final = 1e-6  # small: the weights stay what they are, and the optimizer's work is the same
_FACTOR: Final = 2.0  # times the original's error, which a gradient may have


class StepClock:
    """Seconds of each part of one step: the host's on a CPU, the GPU's between events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def reset(self) -> None:
        """Forget the steps so far."""
        self._marks.clear()

    def mark(self) -> None:
        """A part begins or ends here."""
        self._marks.append(mark(self._device))

    def read(self) -> dict[str, float]:
        """Seconds by part of the step since `reset`; the GPU has come to its end."""
        spans = starmap(between, pairwise(self._marks[-len(PARTS) - 1 :]))
        return dict(zip(PARTS, spans, strict=True))


@dataclass
class Step:
    """One training step of a model, or of its compiled form: forward and loss, backward, AdamW.

    `dtype` is a key of `AUTOCAST`; fp16 scales the loss. The optimizer is shared by all ways.
    """

    module: Callable[..., object]
    arguments: tuple[Any, ...]
    loss: Callable[[object], Tensor]
    optimizer: torch.optim.Optimizer
    dtype: str
    device: torch.device
    clock: StepClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.device)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")
        if isinstance(self.module, nn.Module):
            self.module.train()

    def __call__(self) -> None:
        # Contenders are called in inference mode, in which nothing has a gradient.
        with torch.inference_mode(False), torch.enable_grad():
            self.clock.reset()
            self.clock.mark()
            loss = computed_loss(self.module, self.arguments, self.loss, self.dtype, self.device)
            self.clock.mark()
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self.clock.mark()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.clock.mark()


def computed_loss(
    module: Callable[..., object],
    arguments: tuple[Any, ...],
    loss: Callable[[object], Tensor],
    dtype: str,
    device: torch.device,
) -> Tensor:
    """The loss of one call under the autocast of `dtype` (a key of `AUTOCAST`)."""
    with torch.autocast(device.type, AUTOCAST[dtype], enabled=AUTOCAST[dtype] is not None):
        return loss(module(*arguments))


@dataclass(frozen=True)
class TrainingRun(Run):
    """`Run` of a training step.

    Attributes:
        parts: seconds of forward, backward and optimizer, means over the middle half of the rounds:
            the host's on a CPU, the GPU's on CUDA, idle time included.
    """

    parts: dict[str, float]


def measure_training(
    model: nn.Module,
    inputs: ModelInput,
    settings: Settings,
    *,
    dtype: str = "fp32",
    baselines: Sequence[str] | None = None,
    progress: Progress | None = None,
    **patching: Any,
) -> ProfileReport:
    """Measure training steps of a model, patched against the ways one would otherwise train it.

    A step is a forward in training mode, a backward, and a fused AdamW over all parameters that
    want gradients. The loss is the cross entropy with random labels where the output is [B, K], and
    otherwise the mean square of every floating tensor of the output. The model itself, in float32,
    is not changed. `memory_bytes` is beyond weights and the optimizer's state.
    """
    tell = progress or (lambda what, done, total: None)
    arguments = next(iter(as_cases(inputs).values()))
    first = first_tensor(arguments)
    names = chosen(baselines, first.device)
    own = own_copy(model)
    wanted = [each for each in own.parameters() if each.requires_grad]
    if not wanted:
        raise ArgumentError("training: no parameter of this model requires a gradient")
    optimizer = torch.optim.AdamW(wanted, lr=_RATE, fused=True)
    loss = loss_for(first.shape[0], settings.seed)

    def step(module: Callable[..., object]) -> Step:
        return Step(module, arguments, loss, optimizer, dtype, first.device)

    with on_device(first.device):
        ready = prepare(own, arguments, names, tell, step=step, **patching)
        clocks = {c.name: c.call.clock for c in ready.built.contenders if isinstance(c.call, Step)}
        found, samples = timed(ready, settings, tell, clocks)
    runs = []
    for run in found.runs:
        taken = samples[run.name]
        spans = middle_means(
            [sample.seconds for sample in taken],
            [[sample.sites[part] for sample in taken] for part in PARTS],
        )
        own_fields = {each.name: getattr(run, each.name) for each in fields(run)}
        runs.append(
            TrainingRun(**own_fields, parts=dict(zip(PARTS, map(digits, spans), strict=True)))
        )
    return replace(found, runs=tuple(runs))


def own_copy(model: nn.Module) -> nn.Module:
    """A copy with weights of its own and without gradients."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    try:
        own = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"training: this model cannot be copied ({error})") from error
    own.zero_grad(set_to_none=True)
    return own


def loss_for(batch: int, seed: int) -> Callable[[object], Tensor]:
    """The loss of a step: see `measure_training`. Labels are drawn from `seed` at each first use
    of a number of classes."""
    labels: dict[int, Tensor] = {}

    def loss(output: object) -> Tensor:
        if isinstance(output, Tensor) and output.dim() == 2 and output.shape[0] == batch:
            classes = output.shape[1]
            if classes not in labels:
                generator = torch.Generator().manual_seed(seed)
                drawn = torch.randint(classes, (batch,), generator=generator)
                labels[classes] = drawn.to(output.device)
            return F.cross_entropy(output, labels[classes])
        parts = floating_outputs(output).values()
        if not parts:
            raise ArgumentError("training: the model's output has no floating tensor")
        wide = [torch.promote_types(part.dtype, torch.float32) for part in parts]
        pairs = zip(parts, wide, strict=True)
        return torch.stack([part.square().mean(dtype=dtype) for part, dtype in pairs]).sum()

    return loss


def gradient_comparison(
    original: nn.Module, patched: nn.Module, inputs: ModelInput, dtype: str, seed: int = 0
) -> Comparison:
    """All gradients of both models' parameters beside the original's in float64, as one vector.

    Both have the same weights; they run in eval mode, so that nothing is dropped.
    """
    arguments = next(iter(as_cases(inputs).values()))
    first = first_tensor(arguments)
    exact = own_copy(original).double()
    cases = ((exact, "fp32", map_floating(arguments, torch.float64)),
             (original, dtype, arguments), (patched, dtype, arguments))  # fmt: skip
    gradients = []
    for model, cast, given in cases:
        model.eval()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss = computed_loss(model, given, loss_for(first.shape[0], seed), cast, first.device)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients.append(dict(zip(named, found, strict=True)))
    comparison = Comparison(_FACTOR)
    for name, oracle in gradients[0].items():
        others = [each[name] for each in gradients[1:]]
        if oracle is not None and None not in others:
            comparison.add(oracle, *others)
    return comparison
