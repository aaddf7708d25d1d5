"""`elsa inspect`: every attention site of a model, and what can be patched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.options import (
    EXAMPLE,
    SCOPE,
    Options,
    elsa_command,
    file_option,
    model_options,
    typed,
)


@elsa_command(
    "inspect",
    *model_options(required=False),
    *EXAMPLE,
    click.option("--all", "everything", is_flag=True, help="Every architecture; MODEL is a glob."),
    click.option(
        "--check", "checked", is_flag=True, help="With --all: prove a small version of each."
    ),
    file_option(
        "--state", metavar=None,
        text="With --all: continue the run that this file holds (JSON lines).",
    ),
    file_option("--page", metavar=None, text="With --all: write the table as Markdown."),
    SCOPE,
    file_option("--html", text="Write the sites as a page."),
    click.option("--force", is_flag=True, help="Replace the file of --page or --html."),
)  # fmt: skip
def command(session: Session, /, model: str | None, **values: Any) -> None:
    """List every attention site of MODEL, with --scope model also its layers: class, kind, heads,
    tokens, share of the FLOPs, and whether it can be patched or why not.

    Of a bundle that `elsa export` wrote its manifest is shown. With --all, every architecture of
    timm, open_clip and torchvision is examined, or those whose name a glob selects
    ('timm:swin*', 'open_clip:*').
    """
    from elsa_cli import coverage_view, pipeline, render, targets
    from elsa_cli.lazy_imports import one_thread
    from elsa_cli.version import version

    options = Options(**values)
    if options.everything:
        if alone := typed((*Options.SHARED, "html")):
            raise click.UsageError(f"{alone[0]} is not for --all: it takes models as they are")
        pipeline.import_torch(session)
        coverage_view.run(session, model, options)
        return
    if alone := typed(("checked", "state", "page")):
        raise click.UsageError(f"{alone[0]} goes with --all")
    if model is None:
        raise click.UsageError("missing MODEL; --all inspects every architecture")
    if options.html is not None:
        targets.check_new(options.html, options.force)
    elif typed(("force",)):
        raise click.UsageError("--force goes with --html, or with --all and --page")
    if _is_bundle(model):
        _show_bundle(session, Path(model))
        return
    loaded = pipeline.open_model(session, model, options, shapes_alone=True)
    with session.stage("inspecting"), one_thread():
        from elsa_core.patching import inspect

        size = loaded.example_inputs() if loaded.is_watched else loaded.input_size
        found = inspect(loaded.model, size, scope=options.scope)
    results = {"model": render.described(loaded, options), "inspection": found.to_dict()}
    session.document("inspect", results)
    render.header(session, loaded, options)
    render.inspection(session, found)
    good = sum(site.patchable for site in found.sites)
    said = f"{good} of {len(found.sites)} sites can be patched"
    if not found.sites:
        said = f"no attention found in {loaded.name}"
    work = f" · {found.total_flops / 1e9:.2f} GFLOPs an image" if found.total_flops else ""
    session.line(said + work, "bold", even_quiet=True)
    if options.html is not None:
        from elsa_core.patching import write_page

        about = f"weights: {loaded.weights} · {options.dtype} · elsa {version()}"
        session.written.append(write_page(loaded.name, about, found, options.html))
        session.line(f"html: {options.html}")
    if good:
        step = session.again("patch", "--check", without=("--force",), valued=("--html",))
        session.line(f"Next: {step}", "dim")


def _is_bundle(model: str) -> bool:
    # Whatever MODEL is, these never raise; what it is otherwise is said where it is loaded.
    path = os.path.expanduser(model)  # noqa: PTH111
    manifest = os.path.join(path, "manifest.json")  # noqa: PTH118
    return os.path.isfile(manifest) or (path.endswith(".zip") and os.path.isfile(path))  # noqa: PTH113


def _show_bundle(session: Session, path: Path) -> None:
    """What a bundle says of itself; nothing of it is run."""
    from elsa_cli import pipeline

    pipeline.import_torch(session)
    from elsa_core.exporting.archive import unpacked
    from elsa_core.exporting.manifest import read_manifest

    with session.stage(f"reading {path}"), unpacked(path.expanduser()) as directory:
        manifest = read_manifest(directory)
    content = manifest.content
    session.document("inspect", {"bundle": content})
    model = content["model"]
    session.line(f"{model.get('name')} · weights: {model.get('weights')}", "bold")
    session.line(f"{model['dtype']} · {model['device']} · elsa {content.get('elsa_version')}")
    session.line()
    tensors = [
        [kind, str(one.get("name")), "x".join(map(str, one.get("shape", ()))), str(one["dtype"])]
        for kind in ("input", "output")
        for one in content[f"{kind}s"]
    ]
    session.table(["tensor", "name", "shape", "dtype"], tensors)
    session.line()
    rows = []
    for one in manifest.artefacts.values():
        given = one.get("runtime", {})
        runtime = [f"{name} {given[name]}" for name in ("torch", "onnxruntime") if name in given]
        size = f"{manifest.files[one['file']].size / 1e6:.1f}"
        rows.append([one["file"], ", ".join(one.get("operators", ())), ", ".join(runtime), size])
    session.table(["artefact", "operators", "runtime", ">MB"], rows, wrap=1)
    session.line()
    count = len(rows)
    session.line(f"{count} artefact{'s' if count != 1 else ''}, {len(manifest.files)} files",
                 "bold", even_quiet=True)  # fmt: skip
    session.line(f"Next: elsa verify {path}", "dim")
