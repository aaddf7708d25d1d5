"""Many profiles of one model: image sizes, batches, dtypes and precisions; kept as they come.

Every finished point goes into the result document at once, so that a sweep can be stopped and
resumed. A point that does not fit in memory is a row with its reason, not an end.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elsa_core.base.messages import first_line, side
from elsa_core.errors import ArgumentError, ModelError, TooLargeError
from elsa_core.exporting.manifest import hashed
from elsa_core.loading import Loaded, ModelSpec, files_of
from elsa_core.measuring import documents
from elsa_core.measuring.documents import Document, Plain
from elsa_core.measuring.environment import require_same
from elsa_core.measuring.memory_limit import is_out_of_memory, limited, release
from elsa_core.patching import patch, unpatch
from elsa_core.precision import DTYPES, validate
from elsa_core.profiling.document import COMMAND, DONE, NO_MEMORY, NOT_APPLICABLE, read
from elsa_core.profiling.profile import profile
from elsa_core.profiling.runs.runs import Progress
from elsa_core.profiling.runs.training import profile_training
from elsa_core.profiling.runs.variants import forget_compiled


@dataclass(frozen=True)
class Configuration(Plain):
    """One point of a sweep. `image_size` None is the model's own; `dtype` a key of `DTYPES`."""

    image_size: tuple[int, int] | None = None
    batch: int = 1
    dtype: str = "fp32"
    precision: str = "strict"


@dataclass(frozen=True)
class Plan:
    """What a sweep measures, apart from its points: `model` and `settings` name it in the document.

    `load` gives the model for an image size and a dtype; `options` go to `profile`, or where
    `train` is set to `profile_training`, for which the model is float32 and the dtype autocast's.
    """

    load: Callable[[tuple[int, int] | None, str], Loaded]
    model: Document
    settings: Document
    options: dict[str, Any]
    device: torch.device
    seed: int
    train: bool = False


def grid(
    sizes: Sequence[tuple[int, int] | None],
    batches: Sequence[int],
    dtypes: Sequence[str],
    precisions: Sequence[str],
) -> tuple[Configuration, ...]:
    """All combinations, those of one model (dtype, size) together."""
    combined = itertools.product(dtypes, sizes or [None], batches, precisions)
    found = tuple(
        dict.fromkeys(
            Configuration(size, batch, dtype, precision)
            for dtype, size, batch, precision in combined
        )
    )
    refusals = []
    for each in found:
        try:
            validate(each.precision, DTYPES[each.dtype])
        except ArgumentError as error:
            refusals.append(error)
    if len(refusals) == len(found):
        raise refusals[0]
    return found


def weights_sha256(spec: ModelSpec) -> str:
    """One hash over all that a file or a saved directory is built from; "" for a name.

    Whole files, not their headers: models of one architecture differ in their values alone.
    """
    if spec.path is None:
        return ""
    digest = hashlib.sha256()
    try:
        for path in files_of(spec):
            digest.update(f"{path.name} {hashed(path).sha256}\n".encode())
    except OSError as error:
        raise ModelError(f"{spec.path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def run(
    plan: Plan,
    points: Sequence[Configuration],
    document: Document,
    *,
    keep: Callable[[Document], None],
    progress: Progress = lambda what, done, total: None,
) -> Document:
    """Measure the points that the document does not hold yet, in order; it may hold others, of an
    earlier sweep."""
    present = [row["configuration"] for row in document["results"]["points"]]
    missing = [point for point in points if point.to_dict() not in present]
    document["results"]["complete"] = not missing
    loaded: Loaded | None = None
    of: tuple[Any, ...] = ()
    for i, point in enumerate(missing, 1):
        size = "own size" if point.image_size is None else side(point.image_size)
        label = f"{size}, batch {point.batch}, {point.dtype} {point.precision}: "
        label, found = label if len(points) > 1 else "", None
        try:
            validate(point.precision, DTYPES[point.dtype])
        except ArgumentError as error:
            status, reason = NOT_APPLICABLE, str(error)
        else:
            progress(f"{label}loading", 0, 0)
            forget_compiled()
            if of != (point.image_size, point.dtype):
                loaded, of = None, (point.image_size, point.dtype)
                gc.collect()
            loaded, found, reason = _measured(
                plan, point, loaded,
                lambda what, *steps, label=label: progress(label + what, *steps),
            )  # fmt: skip
            status = NO_MEMORY if found is None else DONE
        if loaded is not None:
            about = {"architecture": loaded.name, "weights": loaded.weights}
            document["results"]["model"] |= about
        document["results"]["points"].append(
            {"configuration": point.to_dict(), "status": status, "reason": reason,
             "profile": found}
        )  # fmt: skip
        document["results"]["complete"] = i == len(missing)
        keep(document)
    keep(document)
    return document


def only(points: Sequence[Configuration], document: Document) -> Document:
    """The document without the points that this sweep did not ask for."""
    asked = [point.to_dict() for point in points]
    results = document["results"]
    rows = [row for row in results["points"] if row["configuration"] in asked]
    return document | {"results": results | {"points": rows}}


def _measured(
    plan: Plan, point: Configuration, loaded: Loaded | None, tell: Progress
) -> tuple[Loaded | None, Document | None, str]:
    """The model, the profile, and why there is none: memory ran out."""
    try:
        with limited(plan.device):
            if loaded is None:
                loaded = plan.load(point.image_size, "fp32" if plan.train else point.dtype)
            arguments = loaded.example_inputs(point.batch, plan.seed)
            options: dict[str, Any] = {"precision": point.precision, "seed": plan.seed}
            options |= plan.options | ({"dtype": point.dtype} if plan.train else {})
            if loaded.is_watched and loaded.report is None:
                unpatch(loaded.model)
                keys = ("precision", "backend", "include", "exclude", "scope")
                patch(loaded.model, arguments, **{k: options[k] for k in keys if k in options})
            measure = profile_training if plan.train else profile
            found = measure(loaded.model, arguments, progress=tell, **options)
    except (TooLargeError, MemoryError, RuntimeError) as error:
        if not isinstance(error, TooLargeError) and not is_out_of_memory(error):
            raise
        reason = first_line(error)
        del error, loaded
        release(plan.device)
        return None, None, reason
    return loaded, found.to_dict(), ""


def started(plan: Plan, environment: Document, resume: Path | None = None) -> Document:
    """An empty document, or where there is a file `resume` the one that a sweep of this plan left
    in it, to go on with."""
    results = {
        "model": dict(plan.model), "settings": plan.settings, "complete": False, "points": [],
    }  # fmt: skip
    fresh = documents.started(COMMAND, environment, results)
    if resume is None or not resume.exists():
        return fresh
    document = read(resume)
    for name in ("model", "settings"):
        for key, value in fresh["results"][name].items():
            other = document["results"][name].get(key)
            if other != value:
                raise ArgumentError(
                    f"{resume} is of another sweep: its {key} is {str(other)[:60]}, now it is "
                    f"{str(value)[:60]}; give another file, or --force without --resume"
                )
    require_same(resume, document, fresh, "its figures cannot stand beside this one's")
    return document
