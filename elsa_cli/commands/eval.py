"""`elsa eval`: accuracy and throughput on labelled images, before and after patching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names
from elsa_cli.console import Session
from elsa_cli.options import (
    LARGEST_BATCH,
    Command,
    FilePath,
    Options,
    kernel_options,
    model_options,
    output_options,
    pass_session,
)
from elsa_cli.site_options import site_options

if TYPE_CHECKING:
    from elsa_core.loading import Loaded
    from elsa_core.proof import EvalReport, LabelledImages

_SHOWN = 10  # images of which the table tells; --json has all


@click.command("eval", cls=Command)
@model_options
@click.option(
    "--images", type=FilePath(folder=True), required=True, metavar="DIR",
    help="Images in one folder a class: its name, number, or ImageNet's synset.",
)  # fmt: skip
@click.option(
    "--labels", type=FilePath(), metavar="FILE",
    help="Names of the classes, one a line [default: those that came with the weights].",
)  # fmt: skip
@click.option(
    "--annotations", type=FilePath(), metavar="FILE",
    help="Classes of the images: lines of FILE CLASS or FILE,CLASS. Folders do not matter then.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1), metavar="N",
    help="Take N of the images, at equal distances.",
)  # fmt: skip
@click.option(
    "--batch-size", "-b", type=click.IntRange(1, LARGEST_BATCH), default=32, show_default=True,
    help="Images a batch.",
)  # fmt: skip
@click.option(
    "--skip-unreadable", is_flag=True,
    help="Leave out images that cannot be read, and name them, instead of ending there.",
)  # fmt: skip
@site_options
@kernel_options
@output_options
@pass_session
def command(
    session: Session,
    /,
    model: str,
    images: Path,
    labels: Path | None,
    annotations: Path | None,
    limit: int | None,
    batch_size: int,
    skip_unreadable: bool,
    **given: Any,
) -> None:
    """Run the images of DIR through MODEL as it is and patched: top-1, top-5, the images whose
    class changed, and the throughput of both.

    Folders are classes by their names, by ImageNet's synsets (n01440764), by their numbers, or, for
    a model without names of classes, in sorted order. Reading and preparing images takes no part in
    the throughput.
    """
    from elsa_cli import pipeline, render
    from elsa_cli.probes import environment

    options = Options.of(given | {"batch_size": batch_size})
    names.check(model)
    names.check_images(images)
    names.check_file(labels, "file of labels")
    names.check_file(annotations, "file of annotations")
    named = () if labels is None else names.classes(labels)
    loaded = pipeline.open_model(session, model, options)
    found = _labelled(loaded, images, named, annotations, limit)
    report = pipeline.patch_model(session, loaded, options, strict=False)
    routes = pipeline.routes(session, loaded, report)
    unreadable: list[int] | None = [] if skip_unreadable else None
    outcome = _evaluate(session, loaded, found, batch_size, unreadable)
    left = sorted(unreadable or ())
    for place in left[:_SHOWN]:
        session.warn(f"{found.files[place]} cannot be read: left out")
    if left[_SHOWN:]:
        session.warn(f"{len(left) - _SHOWN} more images cannot be read: left out")
    skipped = [found.name(place) for place in left]
    found = found.without(left)
    if loaded.weights.startswith("random"):
        session.warn("weights are random: the accuracy says nothing; give --pretrained or a file")
    results = {
        "model": render.described(loaded, options),
        "patch": report.to_dict(),
        "routes": {str(dim): route.to_dict() for dim, route in routes.items()},
        "images": str(images),
        "classes_from": found.how,
        "unreadable": skipped,
        "evaluation": _named(outcome, found),
    }
    session.document("eval", environment(), results)
    render.header(session, loaded, options, f"{render.kernels(routes)} · batch {batch_size}")
    _show(session, outcome, found)


def _labelled(
    loaded: Loaded,
    images: Path,
    named: tuple[str, ...],
    annotations: Path | None,
    limit: int | None,
) -> LabelledImages:
    from elsa_core.errors import ModelError
    from elsa_core.proof import labelled_images

    if loaded.num_classes < 1:
        raise ModelError(f"{loaded.name} has no classifier: eval needs one output a class")
    own = loaded.recipe.labels if len(loaded.recipe.labels) == loaded.num_classes else ()
    return labelled_images(images, loaded.num_classes, named or own, annotations, limit)


def _evaluate(
    session: Session,
    loaded: Loaded,
    found: LabelledImages,
    batch_size: int,
    unreadable: list[int] | None,
) -> EvalReport:
    from elsa_core.base.images import reader
    from elsa_core.proof import evaluate

    read = reader(loaded.input_size, loaded.mean, loaded.std, crop_pct=loaded.crop_pct,
                  crop_mode=loaded.crop_mode, interpolation=loaded.interpolation)  # fmt: skip
    with session.stage("evaluating") as update:
        batches = found.batches(read, batch_size, unreadable)
        return evaluate(loaded.model, batches, total=len(found.files), progress=update)


def _named(outcome: EvalReport, found: LabelledImages) -> dict[str, Any]:
    """The result for JSON, changed images by their names."""
    result = outcome.to_dict()
    for entry in result["changed"]:
        entry["file"] = found.name(entry["index"])
    return result


def _show(session: Session, outcome: EvalReport, found: LabelledImages) -> None:
    session.line(f"{outcome.images} images, {outcome.labelled} with a class ({found.how})")
    session.table(["", ">original", ">patched"], outcome.rows())
    session.line()
    rows = [
        [found.name(one.index), str(one.label) if one.label >= 0 else "", str(one.original),
         str(one.patched), f"{one.margin:.1e}"]
        for one in outcome.changed[:_SHOWN]
    ]  # fmt: skip
    session.table(["class changed", ">label", ">original", ">patched", ">margin"], rows)
    if rows:
        more = len(outcome.changed) - len(rows)
        session.line(f"and {more} more: --json names them" if more > 0 else "")
    session.line(_verdict(outcome), "bold", even_quiet=True)


def _verdict(outcome: EvalReport) -> str:
    parts = []
    if outcome.labelled:
        before, after = (
            f"{hits / outcome.labelled:.2%}"
            for hits in (outcome.top1_original, outcome.top1_patched)
        )
        parts.append(f"top-1 {before} before, {after} after")
    parts.append(f"{len(outcome.changed)} of {outcome.images} images changed their class")
    return " · ".join([*parts, outcome.speed_text])
