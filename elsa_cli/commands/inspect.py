"""`elsa inspect`: every attention site of a model, and what can be patched."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.options import (
    Command,
    FilePath,
    Options,
    example_options,
    optional_model_options,
    output_options,
    pass_session,
    typed,
)
from elsa_cli.site_options import scope_option


@click.command("inspect", cls=Command)
@optional_model_options
@example_options
@click.option("--all", "everything", is_flag=True, help="Every architecture; MODEL is a glob.")
@click.option("--check", "checked", is_flag=True, help="With --all: prove a small version of each.")
@click.option(
    "--state",
    type=FilePath(),
    help="With --all: continue the run that this file holds (JSON lines).",
)
@click.option(
    "--page",
    type=FilePath(),
    help="With --all: write the table as Markdown.",
)
@scope_option
@click.option("--html", type=FilePath(), metavar="FILE", help="Write the sites as a page.")
@click.option("--force", is_flag=True, help="Replace the file of --page or --html.")
@output_options
@pass_session
def command(
    session: Session,
    /,
    model: str | None,
    everything: bool,
    checked: bool,
    state: Path | None,
    page: Path | None,
    html: Path | None,
    force: bool,
    **given: Any,
) -> None:
    """List every attention site of MODEL, with --scope model also its layers: class, kind, heads,
    tokens, share of the FLOPs, and whether it can be patched or why not.

    Of a bundle that `elsa export` wrote its manifest is shown. With --all, every architecture of
    timm, open_clip and torchvision is examined, or those whose name a glob selects
    ('timm:swin*', 'open_clip:*').
    """
    from elsa_cli import coverage_view, pipeline, render, targets
    from elsa_cli.lazy_imports import one_thread
    from elsa_cli.probes import environment
    from elsa_cli.version import version

    if everything:
        if alone := typed((*(field.name for field in fields(Options)), "html")):
            raise click.UsageError(f"{alone[0]} is not for --all: it takes models as they are")
        pipeline.import_torch(session)
        coverage_view.run(session, model, checked, state, page, force)
        return
    if alone := typed(("checked", "state", "page")):
        raise click.UsageError(f"{alone[0]} goes with --all")
    if model is None:
        raise click.UsageError("missing MODEL; --all inspects every architecture")
    if html is not None:
        targets.check_new(html, force)
    elif typed(("force",)):
        raise click.UsageError("--force goes with --html, or with --all and --page")
    options = Options.of(given)
    if _is_bundle(model):
        _show_bundle(session, Path(model))
        return
    loaded = pipeline.open_model(session, model, options, shapes_alone=True)
    with session.stage("inspecting"), one_thread():
        from elsa_core.patching import inspect

        size = loaded.example_inputs() if loaded.is_watched else loaded.input_size
        found = inspect(loaded.model, size, scope=options.scope)
    results = {"model": render.described(loaded, options), "inspection": found.to_dict()}
    session.document("inspect", environment(), results)
    render.header(session, loaded, options)
    render.inspection(session, found)
    good = [site for site in found.sites if site.patchable]
    session.line(_verdict(loaded.name, len(good), len(found.sites), found.total_flops),
                 "bold", even_quiet=True)  # fmt: skip
    if html is not None:
        from elsa_core.patching import write_page

        about = f"weights: {loaded.weights} · {options.dtype} · elsa {version()}"
        session.written.append(write_page(loaded.name, about, found, html))
        session.line(f"html: {html}")
    if good:
        session.line(
            f"Next: {session.again('patch', '--check', without=('--force',), valued=('--html',))}",
            "dim",
        )


def _is_bundle(model: str) -> bool:
    # Whatever MODEL is, these never raise; what it is otherwise is said where it is loaded.
    path = os.path.expanduser(model)  # noqa: PTH111
    manifest = os.path.join(path, "manifest.json")  # noqa: PTH118
    return os.path.isfile(manifest) or (path.endswith(".zip") and os.path.isfile(path))  # noqa: PTH113


def _show_bundle(session: Session, path: Path) -> None:
    """What a bundle says of itself; nothing of it is run."""
    from elsa_cli import pipeline
    from elsa_cli.probes import environment

    pipeline.import_torch(session)
    from elsa_core.exporting.archive import unpacked
    from elsa_core.exporting.manifest import read_manifest

    with session.stage(f"reading {path}"), unpacked(path.expanduser()) as directory:
        manifest = read_manifest(directory)
    content = manifest.content
    session.document("inspect", environment(), {"bundle": content})
    model = content["model"]
    session.line(f"{model.get('name')} · weights: {model.get('weights')}", "bold")
    session.line(f"{model['dtype']} · {model['device']} · elsa {content.get('elsa_version')}")
    session.line()
    tensors = [
        [kind, str(one.get("name")), "x".join(map(str, one.get("shape", ()))), str(one["dtype"])]
        for kind, key in (("input", "inputs"), ("output", "outputs"))
        for one in content[key]
    ]
    session.table(["tensor", "name", "shape", "dtype"], tensors)
    session.line()
    rows = [
        [one["file"], ", ".join(one.get("operators", ())), _runtime(one),
         f"{manifest.files[one['file']].size / 1e6:.1f}"]
        for one in manifest.artefacts.values()
    ]  # fmt: skip
    session.table(["artefact", "operators", "runtime", ">MB"], rows, wrap=1)
    session.line()
    count = len(manifest.artefacts)
    session.line(f"{count} artefact{'s' if count != 1 else ''}, {len(manifest.files)} files",
                 "bold", even_quiet=True)  # fmt: skip
    session.line(f"Next: elsa verify {path}", "dim")


def _runtime(artefact: dict[str, Any]) -> str:
    given = artefact.get("runtime", {})
    return ", ".join(f"{name} {given[name]}" for name in ("torch", "onnxruntime") if name in given)


def _verdict(name: str, good: int, total: int, flops: int | None) -> str:
    work = f" · {flops / 1e9:.2f} GFLOPs an image" if flops else ""
    if not total:
        return f"no attention found in {name}{work}"
    return f"{good} of {total} sites can be patched{work}"
