"""`elsa export`: a patched model as a bundle that runs without elsa."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.options import Options, elsa_command
from elsa_cli.values import ARCHITECTURE, FORMAT_LIST, Listed

if TYPE_CHECKING:
    from elsa_core.exporting.bundle import Bundle
    from elsa_core.exporting.reference import Exact
    from elsa_core.exporting.verify import ArtefactReport
    from elsa_core.loading import Loaded

# What writing a format imports, which takes seconds.
_MODULES = {
    "torchscript": (), "pt2": ("torch._inductor.utils",),
    "onnx": ("onnx", "onnxscript", "onnxruntime", "torch.onnx"),
}  # fmt: skip


@elsa_command(
    "export",
    *shared.model_options(),
    click.option(
        "--formats", type=FORMAT_LIST, metavar="A,B,...", default="torchscript,onnx,pt2",
        help="What to write.",
    ),
    shared.path_option(
        "--output", "-o", metavar="DIR", text="The bundle's directory [default: NAME-elsa]."
    ),
    shared.flag("--zip", "zipped", text="Write one .zip file instead of a directory."),
    shared.flag("--force", text="Replace a bundle that is there."),
    shared.path_option(
        "--sign", metavar="KEY",
        text="Sign the bundle with this Ed25519 private key (PEM or OpenSSH), for `elsa verify "
        "--key`.",
    ),
    click.option(
        "--tower", type=click.Choice(("image", "text")),
        help="Which tower of a CLIP to export: open_clip models need it.",
    ),
    click.option(
        "--onnx-mode", type=click.Choice(("custom", "standard", "custom-only")), default="custom",
        help="custom: nodes of elsa, with bodies that any runtime runs. standard: standard "
        "operators. custom-only: nodes of elsa without bodies.",
    ),
    click.option(
        "--opset", type=click.Choice(("18", "23")),
        help="ONNX opset [default: 18; 23 for standard].",
    ),
    shared.path_option(
        "--labels",
        text="Names of the classes for load.py, one a line [default: those of the weights].",
    ),
    shared.flag("--aoti", text="Also compile model.aoti.pt2 (AOTInductor)."),
    click.option(
        "--quantize", type=click.Choice(("int8",)),
        help="Also write model.int8.onnx: an approximation, with what it costs in accuracy.",
    ),
    click.option(
        "--batches", type=Listed(click.IntRange(1, 64), "N"), default="1,2,3",
        help="Batch sizes to verify; those that a bundle for a GPU without elsa serves.",
    ),
    click.option(
        "--gpu-archs", type=Listed(ARCHITECTURE, "sm_NN"),
        help="With --device cuda: kernels for this GPU, verified, and these, not run; no elsa "
        "needed.",
    ),
    shared.flag("--dynamic-size", text="Let the image size vary in model.pt2, if the model can."),
    *shared.EXAMPLE,
    *shared.INPUT,
    *shared.SITES,
    *shared.KERNELS,
)  # fmt: skip
def command(session: Session, /, model: str, **values: Any) -> None:
    """Patch MODEL and write it as a bundle that runs without elsa: TorchScript, ONNX and pt2 with
    the operator library, the weights, load.py and a manifest.

    Each file is loaded in a fresh process and must reproduce the model at each of --batches, or
    nothing is written (exit code 5, or 3 where the package that runs it is missing). With
    --dtype fp16 or bf16 and with --quantize, what the rounding costs against float64 of the fp32
    model is measured on the check's inputs, and on --images, and shown.
    """
    options = Options(**values)
    formats, mode, output = options.formats, options.onnx_mode, options.output
    labels = _check_early(model, options)
    key = exact = None
    if options.sign is not None:
        from elsa_core.exporting.signature import read_key

        key = read_key(options.sign, "private")
    if options.dtype != "fp32":
        wide = Options(**(values | {"dtype": "fp32"}))
        exact = _exact(session, _opened(session, model, wide), wide)
    loaded = _opened(session, model, options)
    archs = tuple(f"sm_{arch}" for arch in options.gpu_archs or ())
    _check_gpu(archs, (*formats, *["aoti"] * options.aoti), mode, loaded)
    pipeline.import_ahead(session, "torch._dynamo", *(m for f in formats for m in _MODULES[f]))
    from elsa_cli import render
    from elsa_core.exporting.bundle import check_output, export
    from elsa_core.patching import ATTENTION, AUTO, MODEL, scope_of

    output = output or Path(f"{loaded.name}{f'-{options.tower}' if options.tower else ''}-elsa")
    # what elsa did not write is refused before minutes go into the check
    target = names.check_folder(output, options.force, zipped=options.zipped)
    check_output(target.resolve(), target, options.zipped, options.force)
    if options.quantize:
        exact = _exact(session, loaded, options)
    # One scope for all processors, said where this one would take another for the model in Python.
    one_form = (
        options.scope == AUTO and loaded.weight.device.type == "cpu"
        and scope_of(loaded.model, AUTO) == MODEL
    )  # fmt: skip
    options.scope = ATTENTION if one_form else options.scope
    _, routes = pipeline.patch_model(session, loaded, options)
    outcome = pipeline.check_model(session, loaded, options)
    with session.stage("exporting") as update:
        bundle = export(
            loaded.model, output, formats=formats, onnx_mode=mode,
            opset=int(options.opset) if options.opset else 23 if mode == "standard" else 18,
            dynamic_size=options.dynamic_size, aoti=options.aoti, quantize=options.quantize,
            batches=options.batches, gpu_archs=archs, exact=exact, zip=options.zipped,
            force=options.force, key=key, labels=labels, loaded=loaded, check=outcome,
            seed=options.seed, progress=update,
        )  # fmt: skip
        session.written.append(bundle.path)
    session.document("export", bundle.to_dict())
    render.header(session, loaded, options, routes)
    _show(session, bundle)
    if one_form:
        session.line(
            "Linear layers are standard operators, one form for all processors; --scope model "
            "writes them as elsa::Linear nodes of model.onnx. In Python elsa computes them on this "
            "processor.", "dim",
        )  # fmt: skip


def _check_early(model: str, options: Options) -> tuple[str, ...]:
    """Refuse what cannot end well before anything heavy is imported; gives the names of classes."""
    if options.dynamic_size and "pt2" not in options.formats:
        raise click.UsageError("--dynamic-size concerns model.pt2: name pt2 in --formats")
    if options.output is None:  # its name is the model's
        names.check_writable(Path("bundle"))
    else:
        names.check_folder(options.output, options.force, zipped=options.zipped)
    if options.quantize and ("onnx" not in options.formats or options.dtype != "fp32"):
        raise click.UsageError(
            "--quantize is made of model.onnx in fp32: name onnx in --formats and leave --dtype out"
        )
    if options.dtype == "bf16" and "onnx" in options.formats:
        raise click.UsageError(
            "model.onnx cannot be verified in bfloat16: use --dtype fp16, or leave onnx out "
            "of --formats"
        )
    names.check(model)
    names.check_file(options.sign, "private key")
    if options.gpu_archs and options.device == "cpu":
        raise click.UsageError("--gpu-archs concerns bundles for a GPU: use --device cuda")
    return names.classes(options.labels)


def _check_gpu(
    archs: tuple[str, ...], formats: tuple[str, ...], onnx_mode: str, loaded: Loaded
) -> None:
    """Refuse what cannot be served on a GPU before minutes go into checking."""
    device = loaded.weight.device.type
    onnx = device == "cuda" and "onnx" in formats
    if onnx:
        from elsa_core.exporting.artefacts import require_onnx

        require_onnx(device)
    if onnx or archs or "aoti" in formats:
        from elsa_core.exporting import gpu_library

        gpu_library.check(archs, device, onnx and onnx_mode != "standard", formats)


def _opened(session: Session, model: str, options: Options) -> Loaded:
    """The model; of a CLIP the tower that --tower names in its place."""
    loaded, tower = pipeline.open_model(session, model, options), options.tower
    from elsa_core.exporting.export_target import TOWERS, tower_of

    if tower is None and loaded.recipe.library == "open_clip":
        raise click.UsageError(
            f"{loaded.name} is two towers: choose one with --tower {' or --tower '.join(TOWERS)}"
        )
    if tower is None:
        return loaded
    if tower == "text" and options.images is not None:
        raise click.UsageError("--images: a text tower takes token ids, not images")
    # The plan of a saved directory is about the whole CLIP.
    return replace(loaded, model=tower_of(loaded.model, tower), tower=tower, report=None)


def _exact(session: Session, loaded: Loaded, options: Options) -> Exact:
    """What float64 makes of the model before its weights are rounded."""
    from elsa_core.exporting.reference import exact_outputs

    cases = pipeline.check_inputs(session, loaded, options)
    with session.stage("computing float64 of the fp32 model"):
        return exact_outputs(loaded.model, cases)


def _show(session: Session, bundle: Bundle) -> None:
    rows, manifest = [], bundle.manifest
    for each in bundle.artefacts:
        entry = manifest["artefacts"][each.format]
        size = manifest["files"][entry["file"]]["size"]
        rows.append([*artefact_row(each, entry["file"]), f"{size / 1e6:.1f}"])
    session.table(["  artefact", "fresh process", ">error", ">allowed", ">MB"], rows, wrap=1)
    session.line()
    for name in manifest["artefacts_libraries"]["cuda"][1:]:  # which GPUs its kernels are for
        entry, size = manifest["libraries"][name], manifest["files"][name]["size"]
        ran = entry["gpu_archs_verified"]
        rest = [arch for arch in entry["gpu_archs"] if arch not in ran]
        also = f"; compiled and not run: {', '.join(rest)}" if rest else ""
        session.line(f"{name}: {size / 1e6:.1f} MB, run on {', '.join(ran)}{also}")
        session.line()
    if (cost := manifest.get("accuracy")) is not None:  # of fp16, bf16 or INT8
        from elsa_core.exporting.reference import cost_rows

        heads = [f"  against {cost['against']}", ">mean error", ">largest", ">class changed"]
        table = [[f"  {name}", *cells] for name, *cells in cost_rows(cost)]
        session.table(heads, table, wrap=1)
        yours = "" if "images " in cost["inputs"] else "; --images DIR measures it on yours"
        session.line(f"{cost['rows']} inputs: {cost['inputs']}; the exact "
                     f"{manifest['outputs'][0]['name']} spread by {cost['output_std']:.2g} "
                     f"(standard deviation){yours}", "dim")  # fmt: skip
        session.line()
    for each in bundle.artefacts:
        if each.openvino not in ("", "ok"):
            session.warn(f"OpenVINO does not reproduce the model: {each.openvino}")
    if "torchscript" in manifest["artefacts"]:
        session.warn(manifest["artefacts"]["torchscript"]["note"])
    exact = [each for each in bundle.artefacts if each.format != "onnx-int8"]
    count = len(exact)
    also = " and in OpenVINO" if any(each.openvino == "ok" for each in exact) else ""
    rounded = "; model.int8.onnx approximates it" if count < len(bundle.artefacts) else ""
    dtype = manifest["model"]["dtype"]
    of = "the model" if dtype == "float32" else f"the {dtype} model"
    session.verdict(
        f"{bundle.path}: {count} of {count} artefacts reproduce {of} "
        f"in a fresh process{also}{rounded}"
    )
    zipped = bundle.path.suffix == ".zip"
    page = "README.md in it" if zipped else str(bundle.path / "README.md")
    session.line(f"Next: elsa verify {shlex.quote(str(bundle.path))}, or see {page}", "dim")


def artefact_row(report: ArtefactReport, file: str) -> list[str]:
    """One artefact for a table: its mark, verdict, largest error and what is allowed."""
    if report.status == "ok":
        sizes = ", ".join(map(str, report.batches))
        error, allowed = max(report.batches.values())
        # An approximation is allowed twice what was measured of it: no promise that it is close.
        limit = "" if report.format == "onnx-int8" else f"{allowed:.1e}"
        also = ", OpenVINO" if report.openvino == "ok" else ""
        return [f"✓ {file}", f"batch {sizes}{also}", f"{error:.1e}", limit]
    mark = "-" if report.status == "skipped" else "✗"
    return [f"{mark} {file}", f"{report.status}: {report.reason}", "", ""]
