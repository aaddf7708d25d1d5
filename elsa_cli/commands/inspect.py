"""`elsa inspect`: every attention site of a model, and what can be patched."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import click

from elsa_cli import names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session, version
from elsa_cli.errors import VerdictError
from elsa_cli.options import Options, elsa_command, typed


@elsa_command(
    "inspect",
    *shared.model_options(required=False),
    *shared.EXAMPLE,
    shared.flag("--all", "everything", text="Every architecture; MODEL is a glob."),
    shared.flag("--check", "checked", text="With --all: prove a small version of each."),
    shared.path_option(
        "--state", metavar=None,
        text="With --all: continue the run that this file holds (JSON lines).",
    ),
    shared.SCOPE,
    shared.path_option("--html", text="Write the sites as a page."),
    shared.flag("--force", text="Replace the file of --html."),
)  # fmt: skip
def command(session: Session, /, model: str | None, **values: Any) -> None:
    """List every attention site of MODEL, with --scope model also its layers: class, kind, heads,
    tokens, share of the FLOPs, and whether it can be patched or why not.

    Of a bundle that `elsa export` wrote its manifest is shown. With --all, every architecture of
    timm, open_clip and torchvision is examined, or those whose name a glob selects
    ('timm:swin*', 'open_clip:*').
    """
    options = Options(**values)
    if options.everything:
        if alone := typed((*Options.SHARED, "html", "force")):
            raise click.UsageError(f"{alone[0]} is not for --all: it takes models as they are")
        pipeline.import_torch(session)
        _show_all(session, model, options)
        return
    if alone := typed(("checked", "state")):
        raise click.UsageError(f"{alone[0]} goes with --all")
    if model is None:
        raise click.UsageError("missing MODEL; --all inspects every architecture")
    if options.html is not None:
        names.check_new(options.html, options.force)
    elif typed(("force",)):
        raise click.UsageError("--force goes with --html")
    # Whatever MODEL is, these never raise; what it is otherwise is said where it is loaded.
    path = os.path.expanduser(model)  # noqa: PTH111
    manifest = os.path.join(path, "manifest.json")  # noqa: PTH118
    if os.path.isfile(manifest) or (path.endswith(".zip") and os.path.isfile(path)):  # noqa: PTH113
        if options.html is not None:
            raise click.UsageError("--html is a page of sites: of a bundle its manifest is shown")
        _show_bundle(session, Path(model))
        return
    loaded = pipeline.open_model(session, model, options, shapes_alone=True)
    with session.stage("inspecting"):
        from elsa_cli import render
        from elsa_core.patching import inspect

        size = loaded.example_inputs() if loaded.is_watched else loaded.input_size
        found = inspect(loaded.model, size, scope=options.scope)
    results = render.document(loaded, options) | {"inspection": found.to_dict()}
    session.document("inspect", results)
    render.header(session, loaded, options)
    render.inspection(session, found)
    good = sum(site.patchable for site in found.sites)
    said = f"{good} of {len(found.sites)} sites can be patched"
    if not found.sites:
        said = f"no attention found in {loaded.name}"
    work = f" · {found.total_flops / 1e9:.2f} GFLOPs an image" if found.total_flops else ""
    session.verdict(said + work)
    if options.html is not None:
        from elsa_core.patching import write_page

        about = f"weights: {loaded.weights} · {options.dtype} · elsa {version()}"
        session.written.append(write_page(loaded.name, about, found, options.html))
        session.line(f"html: {options.html}")
    if good:
        step = session.again("patch", "--check", without=("--force",), valued=("--html",))
        session.line(f"Next: {step}", "dim")
    elif not found.sites:
        session.line("Next: elsa list (models with attention)", "dim")


def _show_bundle(session: Session, path: Path) -> None:
    """What a bundle says of itself; nothing of it is run."""
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
    session.verdict(f"{count} artefact{'s' if count != 1 else ''}, {len(manifest.files)} files")
    session.line(f"Next: elsa verify {shlex.quote(str(path))}", "dim")


def _show_all(session: Session, match: str | None, options: Options) -> None:
    """Examine the architectures that the glob `match` selects, and show what was found.

    Raises: click.UsageError (nothing matches), TargetError (--state cannot be written),
    ModelError (--state), VerdictError (a model differs, or fails).
    """
    state = options.state
    if state is not None:
        names.check_writable(state)
    with session.stage("listing architectures"):
        from elsa_core.proof import coverage

        known = coverage.architectures(match or "*")
    if not known:
        raise click.UsageError(
            f"no architecture matches {match!r}: with --all, MODEL is a glob like 'timm:swin*'"
        )
    with session.stage("examining") as update:
        records = []
        for record in coverage.examine_all(
            known, checked=options.checked, state=state, progress=update
        ):
            records.append(record)
            session.written += [state] if state is not None else []
    total = coverage.summarise(records)
    results = {"summary": total, "architectures": [record.to_dict() for record in records]}
    session.document("inspect --all", results)
    rows = []
    for family, members in coverage.by_family(records).items():
        kept: Counter[str] = Counter()
        for record in members:
            for one in record.kept:
                kept[one.module_class.rpartition(".")[2]] += one.sites
        verdicts = Counter(record.verdict for record in members)
        counts = (len(members), sum(r.sites for r in members), sum(r.patchable for r in members))
        rows.append([
            family, *map(str, counts),
            ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
            ", ".join(f"{count} {name}" for name, count in kept.items()),
        ])  # fmt: skip
    titles = ["family", ">models", ">sites", ">patched", "verdicts", "kept"]
    session.table(titles, rows, wrap=5)
    session.line()
    bad = [record for record in records if record.verdict in (coverage.DIFFERS, coverage.FAILED)]
    for record in records:
        if record.reason and record.verdict not in (coverage.AGREES, coverage.NOT_CHECKED):
            session.line(f"{record.name}: {record.verdict}: {record.reason}", "yellow")
    said = ", ".join(f"{n} {verdict}" for verdict, n in sorted(total["verdicts"].items()))
    session.verdict(
        f"{total['complete']} of {total['attentive']} architectures with softmax attention are "
        f"patched whole ({total['share']:.1%}) · {said}",
        good=not bad,
    )  # fmt: skip
    if bad:
        raise VerdictError(f"{len(bad)} architectures differ or fail, {bad[0].name} first")
    if not options.checked:
        session.line(f"Next: {session.again('inspect', '--check')}", "dim")
