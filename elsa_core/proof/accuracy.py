"""`evaluate`: top-1, top-5 and throughput of a patched model and of its original."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import Progress
from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.measuring.intervals import FEWEST_ROUNDS, NO_DIFFERENCE, Ratio, ratio
from elsa_core.patching import original, patched_sites, plain_model

TOP = 5
_SHOWN = 10  # changed images in a table


@dataclass(frozen=True)
class Changed:
    """An image (its place in the order of evaluation) that the patched model puts into another
    class; `label` is -1 where it has none.

    `margin` is how far the original's logit of its own class lies above that of the other. One of
    the size of the rounding errors is a tie.
    """

    index: int
    label: int
    original: int
    patched: int
    margin: float


@dataclass(frozen=True, repr=False)
class EvalReport(Summarised):
    """What `evaluate` found.

    Attributes:
        images: how many were run; `labelled` of them have a class, one of `classes` outputs.
        top1_original, top1_patched: labelled images whose class the model names first.
        top5_original, top5_patched: those with their class among the first five; None for a model
            of five classes or fewer.
        changed: the images whose class changed, in order.
        rate_original, rate_patched: images per second of the forwards alone, the median of
            `timed_batches`, without the first. An indication: `elsa_core.profile` measures.
        speed: the throughput of the patched model over the original's, with the interval of the
            batches; None for fewer of them than decide anything (6).
    """

    images: int
    labelled: int
    classes: int
    top1_original: int
    top1_patched: int
    top5_original: int | None
    top5_patched: int | None
    changed: tuple[Changed, ...]
    rate_original: float
    rate_patched: float
    timed_batches: int
    speed: Ratio | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> Summary:
        count = len(self.changed)
        title = f"{self.images} images · {count or 'no'} class{'es' * (count != 1)} changed"
        changed = self.changed_rows(str)
        columns = (">image", ">label", ">original", ">patched", ">margin")
        then = Summary("classes that changed", columns, changed) if changed else None
        return Summary(title, ("", ">original", ">patched"), self.rows(), then=then)

    def changed_rows(self, name: Callable[[int], str]) -> list[tuple[str, ...]]:
        """The first images whose class changed, as text; `name` names the image at a place."""
        return [
            (name(one.index), str(one.label) if one.label >= 0 else "", str(one.original),
             str(one.patched), f"{one.margin:.1e}")
            for one in self.changed[:_SHOWN]
        ]  # fmt: skip

    @property
    def speed_text(self) -> str:
        """The throughput of both compared, in words."""
        if self.speed is None:
            return "too few batches to compare throughput"
        one = self.speed
        interval = f"({one.low:.2f} to {one.high:.2f})"
        if one.verdict == NO_DIFFERENCE:
            return f"no difference in throughput found {interval}"
        return f"{one.value:.2f}x the throughput {interval}"

    def rows(self) -> list[tuple[str, str, str]]:
        """What was measured, of the original and of the patched model, as text."""
        tops = {"top-1": (self.top1_original, self.top1_patched),
                "top-5": (self.top5_original, self.top5_patched)}  # fmt: skip
        rows = [
            (name, *(f"{(value or 0) / self.labelled:.2%}" for value in values))
            for name, values in tops.items()
            if self.labelled and None not in values
        ]
        rates = (f"{rate:,.1f}" for rate in (self.rate_original, self.rate_patched))
        return [*rows, ("images per second", *rates)]  # type: ignore[list-item]


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    total: int = 0,
    progress: Progress | None = None,
) -> EvalReport:
    """Run labelled images through a patched model and through its original, in turns.

    Both run each batch, the one that goes first alternating, in evaluation mode and without
    gradients. The model comes back patched, in its mode.

    Args:
        model: patched by `elsa_core.patch`; one tensor of logits [B, classes] comes out of it.
        batches: (images [B, C, H, W], classes int64 [B]); a class of -1 is not known. Any
            `torch.utils.data.DataLoader` of a labelled dataset is such an iterable.
        total: images in all, for `progress`; 0 where it is not known.
        progress: called with (what, images done, images in all).

    Raises:
        TypeError: `model` is no `nn.Module`, or `batches` gives no pairs of tensors, of which the
            labels are whole numbers.
        NothingPatchedError: no site of the model is patched.
        ArgumentError: there is no batch, or a label is none of the model's classes.
        ModelError: the model's output is no [B, classes].
    """
    model = plain_model(model)
    if not patched_sites(model):
        raise NothingPatchedError("evaluate: no site of this model is patched; call patch first")
    weights = (weight for weight in model.parameters() if weight.is_floating_point())
    home = next(weights, torch.empty(0))
    sides: dict[str, Any] = {"original": original, "patched": nullcontext}
    hits: Counter[tuple[str, int]] = Counter()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    changed: list[Changed] = []
    classes = done = labelled = 0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for number, (images, labels) in enumerate(_pairs(batches)):
            given = images.to(home.device, home.dtype)
            logits: dict[str, Tensor] = {}
            # In turns: the one that goes first alternates.
            for name in sorted(sides, reverse=number % 2 == 1):
                with sides[name](model):
                    logits[name], seconds = _run(model, given)
                rates[name].append(len(images) / seconds)
            classes = logits["original"].shape[1]
            known = _known(labels, len(images), classes)
            for name, values in logits.items():
                best = values.topk(min(TOP, classes)).indices
                right = best[known] == labels[known, None]
                for top in (1, TOP):
                    hits[name, top] += int(right[:, :top].any(-1).sum())
            before = logits["original"]
            old, new = before.argmax(-1), logits["patched"].argmax(-1)
            changed += [
                Changed(done + row, int(labels[row]), int(old[row]), int(new[row]),
                        float(before[row, old[row]] - before[row, new[row]]))
                for row in (old != new).nonzero().flatten().tolist()
            ]  # fmt: skip
            done += len(labels)
            labelled += int(known.sum())
            if progress is not None:
                progress("images", done, total)
    finally:
        for module, training in modes:
            module.training = training
    if not done:
        raise ArgumentError("evaluate: batches holds no image")
    several = classes > TOP
    # The first forward allocates and, on a GPU, compiles.
    first, second = (rates[name][1:] or rates[name] for name in sides)
    speed = None
    if len(first) >= FEWEST_ROUNDS:  # images per second, from both runs of each batch
        speed = ratio([1 / rate for rate in first], [1 / rate for rate in second])
    return EvalReport(
        images=done, labelled=labelled, classes=classes, top1_original=hits["original", 1],
        top1_patched=hits["patched", 1],
        top5_original=hits["original", TOP] if several else None,
        top5_patched=hits["patched", TOP] if several else None, changed=tuple(changed),
        rate_original=median(first), rate_patched=median(second), timed_batches=len(first),
        speed=speed,
    )  # fmt: skip


def _pairs(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        kind = type(batches).__name__
        raise TypeError(f"batches must be an iterable of (images, labels), not {kind}")
    for batch in batches:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(each, Tensor) for each in batch):
            raise TypeError("batches must give pairs of torch.Tensor: (images, labels)")
        if batch[1].is_floating_point():
            raise TypeError(f"labels must be whole numbers, not {batch[1].dtype}")
        yield batch[0], batch[1].cpu().long()  # unsigned ones have no -1


def _run(model: nn.Module, images: Tensor) -> tuple[Tensor, float]:
    start = time.perf_counter()
    with torch.inference_mode():
        out = model(images)
        out = out.get("logits") if isinstance(out, Mapping) else out  # of transformers
    if not isinstance(out, Tensor) or out.dim() != 2 or out.shape[0] != images.shape[0]:
        what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(f"evaluate: needs logits [{images.shape[0]}, classes], not {what}")
    found = out.float().cpu()  # which waits for a GPU
    return found, time.perf_counter() - start


def _known(labels: Tensor, rows: int, classes: int) -> Tensor:
    """Which rows have a class; labels that do not fit are refused."""
    if list(labels.shape) != [rows]:
        raise ArgumentError(f"labels of shape {list(labels.shape)} must be [{rows}]")
    outside = labels[(labels < -1) | (labels >= classes)]
    if outside.numel():
        raise ArgumentError(
            f"a label of {int(outside[0])}: the model has classes 0 to {classes - 1}"
        )
    return labels >= 0
