"""`elsa eval`: accuracy and throughput on labelled images, before and after patching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.options import Options, elsa_command

if TYPE_CHECKING:
    from elsa_core.proof import EvalReport, LabelledImages

_SHOWN = 10  # images that are named one by one; --json has all


@elsa_command(
    "eval",
    *shared.model_options(),
    shared.path_option(
        "--images", metavar="DIR", required=True,
        text="Images in one folder a class: its name, number, or ImageNet's synset.",
    ),
    shared.path_option(
        "--labels",
        text="Names of the classes, one a line [default: those that came with the weights].",
    ),
    shared.path_option(
        "--annotations",
        text="Classes of the images: lines of FILE CLASS or FILE,CLASS. Folders do not matter "
        "then.",
    ),
    click.option(
        "--limit", type=click.IntRange(1), metavar="N",
        help="Take N of the images, at equal distances.",
    ),
    click.option(
        "--batch-size", "-b", type=click.IntRange(1, shared.LARGEST_BATCH), default=32,
        help="Images a batch.",
    ),
    shared.flag(
        "--skip-unreadable",
        text="Leave out images that cannot be read, and name them, instead of ending there.",
    ),
    *shared.SITES,
    *shared.KERNELS,
)  # fmt: skip
def command(session: Session, /, model: str, **values: Any) -> None:
    """Run the images of DIR through MODEL as it is and patched: top-1, top-5, the images whose
    class changed, and the throughput of both.

    Folders are classes by their names, by ImageNet's synsets (n01440764), by their numbers, or, for
    a model without names of classes, in sorted order. Reading and preparing images takes no part in
    the throughput.
    """
    options = Options(**values)
    names.check(model)
    named = names.classes(options.labels)
    names.check_file(options.annotations, "file of annotations")
    loaded = pipeline.open_model(session, model, options)
    from elsa_cli import render
    from elsa_core.base.images import reader
    from elsa_core.errors import ModelError
    from elsa_core.proof import evaluate, labelled_images

    count = loaded.num_classes
    if count < 1:
        raise ModelError(f"{loaded.name} has no classifier: eval needs one output a class")
    own = loaded.recipe.labels if len(loaded.recipe.labels) == count else ()
    found = labelled_images(options.images, count, named or own, options.annotations, options.limit)
    report, routes = pipeline.patch_model(session, loaded, options)
    unreadable: list[int] | None = [] if options.skip_unreadable else None
    read = reader(**loaded.preprocess.transform)
    with session.stage("evaluating") as update:
        batches = found.batches(read, options.batch_size, unreadable)
        outcome = evaluate(loaded.model, batches, total=len(found.files), progress=update)
    left = sorted(unreadable or ())
    for place in left[:_SHOWN]:
        session.warn(f"{found.files[place]} cannot be read: left out")
    if left[_SHOWN:]:
        session.warn(f"{len(left) - _SHOWN} more images cannot be read: left out")
    skipped = [found.name(place) for place in left]
    found = found.without(left)
    if loaded.weights.startswith("random"):
        session.warn("weights are random: the accuracy says nothing; give --pretrained or a file")
    evaluation = outcome.to_dict()
    for entry in evaluation["changed"]:
        entry["file"] = found.name(entry["index"])
    results = render.document(loaded, options, report, routes) | {
        "images": str(options.images), "classes_from": found.how, "unreadable": skipped,
        "evaluation": evaluation,
    }  # fmt: skip
    session.document("eval", results)
    render.header(session, loaded, options, routes, batch=True)
    _show(session, outcome, found)


def _show(session: Session, outcome: EvalReport, found: LabelledImages) -> None:
    session.line(f"{outcome.images} images, {outcome.labelled} with a class ({found.how})")
    session.table(["", ">original", ">patched"], outcome.rows())
    session.line()
    rows = outcome.changed_rows(found.name)
    session.table(["class changed", ">label", ">original", ">patched", ">margin"], rows)
    if rows:
        more = len(outcome.changed) - len(rows)
        session.line(f"and {more} more: --json names them" if more > 0 else "")
    said = []
    if outcome.labelled:
        before, after = (
            f"{hits / outcome.labelled:.2%}"
            for hits in (outcome.top1_original, outcome.top1_patched)
        )
        said = [f"top-1 {before} before, {after} after"]
    said.append(f"{len(outcome.changed)} of {outcome.images} images changed their class")
    session.verdict(" · ".join([*said, outcome.speed_text]))
