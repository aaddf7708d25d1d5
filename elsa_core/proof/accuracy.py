"""`evaluate`: top-1, top-5 and throughput of a patched model and of its original."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.measuring.intervals import FEWEST_ROUNDS, NO_DIFFERENCE, Ratio, ratio
from elsa_core.patching import original, patched_sites, plain_model

Progress = Callable[[str, int, int], None]
TOP = 5
_SHOWN = 10  # changed images in a table


@dataclass(frozen=True)
class Changed:
    """An image that the patched model puts into another class.

    Attributes:
        index: its place in the order of evaluation, from 0.
        label: its class, -1 where it has none.
        original: the original model's class; `patched` the patched one's.
        margin: how far the original's logit of its own class lies above that of the other. A margin
            of the size of the rounding errors is a tie.
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
        images: how many were run; `labelled` of them have a class.
        classes: outputs of the model.
        top1_original, top1_patched: labelled images whose class the model names first.
        top5_original, top5_patched: those with their class among the first five; None for a model
            of five classes or fewer.
        changed: the images whose class changed, in order.
        rate_original, rate_patched: images per second of the forwards alone, the median of
            `timed_batches`; the first batch is left out where there are several. An indication:
            `elsa_core.profile` measures.
        speed: how many times the original's throughput the patched model has, with the interval of
            the batches; None for fewer of them than decide anything (6).
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
        """Plain data for JSON."""
        return asdict(self) | {"changed": [asdict(each) for each in self.changed]}

    def summary(self) -> Summary:
        """Accuracy and throughput of both, and the images whose class changed."""
        count = len(self.changed)
        title = f"{self.images} images · {count or 'no'} class{'es' * (count != 1)} changed"
        changed = [
            (str(one.index), str(one.label) if one.label >= 0 else "", str(one.original),
             str(one.patched), f"{one.margin:.1e}")
            for one in self.changed[:_SHOWN]
        ]  # fmt: skip
        columns = (">image", ">label", ">original", ">patched", ">margin")
        then = Summary("classes that changed", columns, changed) if changed else None
        return Summary(title, ("", ">original", ">patched"), self.rows(), then=then)

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
        rows = []
        for name, *values in (
            ("top-1", self.top1_original, self.top1_patched),
            ("top-5", self.top5_original, self.top5_patched),
        ):
            if self.labelled and None not in values:
                before, after = (f"{(value or 0) / self.labelled:.2%}" for value in values)
                rows.append((name, before, after))
        before, after = (f"{rate:,.1f}" for rate in (self.rate_original, self.rate_patched))
        return [*rows, ("images per second", before, after)]


@dataclass
class _Counts:
    """What is counted on the way."""

    classes: int = 0
    images: int = 0
    labelled: int = 0
    hits: dict[tuple[str, int], int] = field(default_factory=dict)
    changed: list[Changed] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


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
        TypeError: `model` is no `nn.Module`, or `batches` gives no pairs of tensors.
        NothingPatchedError: no site of the model is patched.
        ArgumentError: there is no batch, or a label is none of the model's classes.
        ModelError: the model's output is no [B, classes].
    """
    model = plain_model(model)
    if not patched_sites(model):
        raise NothingPatchedError("evaluate: no site of this model is patched; call patch first")
    home = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    counts = _Counts()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for number, (images, labels) in enumerate(_pairs(batches)):
            logits, seconds = _both(model, images.to(home.device, home.dtype), number % 2 == 1)
            _count(counts, logits, labels.cpu())
            for name, each in seconds.items():
                counts.rates.setdefault(name, []).append(len(images) / each)
            if progress is not None:
                progress("images", counts.images, total)
    finally:
        for module, training in modes:
            module.training = training
    if not counts.images:
        raise ArgumentError("evaluate: batches holds no image")
    return _report(counts)


def _pairs(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, each refused that is no pair of tensors."""
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        kind = type(batches).__name__
        raise TypeError(f"batches must be an iterable of (images, labels), not {kind}")
    for batch in batches:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(each, Tensor) for each in batch):
            raise TypeError("batches must give pairs of torch.Tensor: (images, labels)")
        yield batch[0], batch[1]


def _both(
    model: nn.Module, images: Tensor, patched_first: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Logits, float32 on the CPU, and seconds of the original and of the patched model."""
    logits: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for name in ("patched", "original") if patched_first else ("original", "patched"):
        if name == "original":
            with original(model):
                logits[name], seconds[name] = _run(model, images)
        else:
            logits[name], seconds[name] = _run(model, images)
    return logits, seconds


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


def _count(counts: _Counts, logits: dict[str, Tensor], labels: Tensor) -> None:
    before, after = logits["original"], logits["patched"]
    counts.classes = before.shape[1]
    if labels.shape != before.shape[:1]:
        raise ArgumentError(f"labels of shape {list(labels.shape)} must be [{before.shape[0]}]")
    outside = labels[(labels < -1) | (labels >= counts.classes)]
    if outside.numel():
        raise ArgumentError(
            f"a label of {int(outside[0])}: the model has classes 0 to {counts.classes - 1}"
        )
    known = labels >= 0
    for name, values in logits.items():
        best = values.topk(min(TOP, counts.classes)).indices
        hits = best[known] == labels[known, None]
        for top in (1, TOP):
            found = int(hits[:, :top].any(-1).sum())
            counts.hits[name, top] = counts.hits.get((name, top), 0) + found
    old, new = before.argmax(-1), after.argmax(-1)
    for row in (old != new).nonzero().flatten().tolist():
        margin = before[row, old[row]] - before[row, new[row]]
        counts.changed.append(
            Changed(counts.images + row, int(labels[row]), int(old[row]), int(new[row]),
                    float(margin))
        )  # fmt: skip
    counts.images += len(labels)
    counts.labelled += int(known.sum())


def _report(counts: _Counts) -> EvalReport:
    several = counts.classes > TOP
    # The first forward allocates and, on a GPU, compiles.
    timed = {name: rates[1:] or rates for name, rates in counts.rates.items()}
    return EvalReport(
        images=counts.images,
        labelled=counts.labelled,
        classes=counts.classes,
        top1_original=counts.hits["original", 1],
        top1_patched=counts.hits["patched", 1],
        top5_original=counts.hits["original", TOP] if several else None,
        top5_patched=counts.hits["patched", TOP] if several else None,
        changed=tuple(counts.changed),
        rate_original=median(timed["original"]),
        rate_patched=median(timed["patched"]),
        timed_batches=len(timed["original"]),
        speed=_speed(timed["original"], timed["patched"]),
    )


def _speed(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """The ratio of images per second, from both runs of each batch."""
    if len(before) < FEWEST_ROUNDS:
        return None
    return ratio([1 / rate for rate in before], [1 / rate for rate in after])
