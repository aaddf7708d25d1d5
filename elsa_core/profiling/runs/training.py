"""A model's training step in several ways in the same rounds: forward, backward and optimizer.

The ways are those of `variants` without graphs of compiled models. They share one copy of the
model's weights and one AdamW, so that they differ in what computes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elsa_core.base.inputs import ModelInput, as_cases
from elsa_core.base.processes import environment_kept
from elsa_core.errors import ArgumentError
from elsa_core.measuring.intervals import digits, middle_means
from elsa_core.measuring.rounds import Settings
from elsa_core.measuring.timing import between, mark
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import ProfileReport, Progress, prepare, timed
from elsa_core.profiling.runs.variants import first_tensor, inputs_kept, on_device
from elsa_core.proof import Comparison, floating_outputs, map_floating

PARTS: Final = ("forward", "backward", "optimizer")
AUTOCAST: Final = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of a step, weights float32: the dtype of autocast, None without it."""
chosen: Final = partial(variants.chosen, trains=True)
_RATE: Final = 1e-6  # small: the weights stay what they are, and the optimizer's work is the same
_FACTOR: Final = 2.0  # times the original's error, which a gradient may have


class Step:
    """One training step of a model, or of its compiled form: forward and loss, backward, AdamW.

    It is its own clock: seconds of each part, the host's on a CPU, the GPU's between events on
    CUDA. `dtype` is a key of `AUTOCAST`; fp16 scales the loss. The optimizer is shared by all ways.
    """

    def __init__(
        self, module: Callable[..., object], arguments: tuple[Any, ...],
        loss: Callable[[object], Tensor], optimizer: torch.optim.Optimizer, dtype: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._compute = partial(computed_loss, module, arguments, loss, dtype, device)
        self._optimizer, self._device = optimizer, device
        self._marks: list[Any] = []
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
        if isinstance(module, nn.Module):
            module.train()

    def __call__(self) -> None:
        # Contenders are called in inference mode, in which nothing has a gradient.
        with torch.inference_mode(False), torch.enable_grad():
            self._marks = [mark(self._device)]
            loss = self._compute()
            self._marks.append(mark(self._device))
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._marks.append(mark(self._device))
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad(set_to_none=True)
            self._marks.append(mark(self._device))

    def read(self) -> dict[str, float]:
        """Seconds by part of the last step; the GPU has come to its end."""
        return dict(zip(PARTS, starmap(between, pairwise(self._marks)), strict=True))


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


@environment_kept()
def profile_training(
    model: nn.Module,
    inputs: ModelInput,
    *,
    rounds: int = 20,
    budget_seconds: float = 60.0,
    seed: int = 0,
    decide: bool = True,
    dtype: str = "fp32",
    baselines: Sequence[str] | None = None,
    progress: Progress | None = None,
    **patching: Any,
) -> ProfileReport:
    """Measure what patching a model gains in training, beside the ways one would otherwise train.

    A step is a forward in training mode, a backward, and a fused AdamW over all parameters that
    want gradients. The loss is the cross entropy with random labels where the output is [B, K], and
    otherwise the mean square of every floating tensor of the output. All ways take turns in the
    same rounds on copies of the model, which itself is not changed.

    Args:
        model: in float32, with attention sites that can be patched.
        inputs, rounds, budget_seconds, patching: as for `profile`.
        seed: of the labels and of the bootstrap.
        decide: end as soon as the intervals decide, else when they are narrow.
        dtype: "fp32", or "fp16" or "bf16" for autocast (fp16 with a scaled loss).
        baselines: of "eager", "control", "sdpa", "compile", "eager+graph", "sdpa+graph" or "all"
            (default: "eager" on a CPU, with "eager+graph" and "compile" on CUDA; these two are also
            measured patched).
        progress: called with (what, steps done, steps in all).

    Returns:
        The report: no sites, and runs whose `parts` are seconds of forward, backward and optimizer.
        Their `memory_bytes` is beyond weights and the optimizer's state.

    Raises:
        ArgumentError: an argument is wrong, no parameter wants a gradient, or the model cannot be
            copied.
        NothingPatchedError: no site of the model can be patched.
        UnavailableError: a backend that this machine lacks.
    """
    settings = Settings(rounds, budget_seconds, seed, decide)
    if dtype not in AUTOCAST:
        raise ArgumentError(f"training: dtype {dtype!r} is none of {', '.join(AUTOCAST)}")
    tell = progress or (lambda what, done, total: None)
    arguments = next(iter(as_cases(inputs).values()))
    first = first_tensor(arguments)
    own = own_copy(model)
    wanted = [each for each in own.parameters() if each.requires_grad]
    if not wanted:
        raise ArgumentError("training: no parameter of this model requires a gradient")
    optimizer = torch.optim.AdamW(wanted, lr=_RATE, fused=True)
    loss = loss_for(first.shape[0], seed)

    step = partial(
        Step, arguments=arguments, loss=loss, optimizer=optimizer, dtype=dtype, device=first.device
    )
    with on_device(first.device), inputs_kept(arguments):
        ready = prepare(own, arguments, baselines, tell, step=step, **patching)
        clocks = {c.name: c.call.read for c in ready.built.contenders if isinstance(c.call, Step)}
        found, samples = timed(ready, settings, tell, clocks)
    runs = []
    for run in found.runs:
        taken = samples[run.name]
        spans = middle_means(
            [sample.seconds for sample in taken],
            [[sample.sites[part] for sample in taken] for part in PARTS],
        )
        runs.append(replace(run, parts=dict(zip(PARTS, map(digits, spans), strict=True))))
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
    """The loss of a step: see `profile_training`. Labels are drawn from `seed` at each first use
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
    original: nn.Module, patched: nn.Module, inputs: ModelInput, dtype: str
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
        wanted = [each for each in model.parameters() if each.requires_grad]
        loss = computed_loss(model, given, loss_for(first.shape[0], 0), cast, first.device)
        # A gradient that is lost counts as zeros.
        gradients.append(torch.autograd.grad(loss, wanted, materialize_grads=True))
    comparison = Comparison(_FACTOR)
    for three in zip(*gradients, strict=True):
        comparison.add(*three)
    return comparison
