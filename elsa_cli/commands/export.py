"""`elsa export`: a patched model as a bundle that runs without elsa."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from elsa_cli import bundle_view, completion, names
from elsa_cli.architectures import Known
from elsa_cli.console import Session
from elsa_cli.options import (
    Command,
    FilePath,
    Listed,
    Options,
    example_options,
    input_options,
    kernel_options,
    model_options,
    output_options,
    pass_session,
)
from elsa_cli.site_options import site_options
from elsa_cli.targets import check_folder, check_writable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from elsa_core.exporting.accuracy import Exact
    from elsa_core.loading import Loaded
    from elsa_core.proof import CheckReport

_EXACT = "computing float64 of the fp32 model"
FORMATS = ("torchscript", "onnx", "pt2")


class Formats(click.ParamType):  # type: ignore[type-arg]  # generic in new Clicks only
    """Some of the formats, with commas between them."""

    name = "formats"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "A,B,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names; a usage error for one that is unknown."""
        if isinstance(value, tuple):
            return value
        given = tuple(name.strip() for name in str(value).lower().split(","))
        for name in given:
            if name not in FORMATS:
                self.fail(f"{name!r} is no format; choose among {', '.join(FORMATS)}", param, ctx)
        return given

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return completion.among(FORMATS, incomplete)


# What writing a format imports, which takes seconds.
_MODULES = {
    "torchscript": (), "pt2": ("torch._inductor.utils",),
    "onnx": ("onnx", "onnxscript", "onnxruntime", "torch.onnx"),
}  # fmt: skip


@click.command("export", cls=Command)
@model_options
@click.option(
    "--formats", type=Formats(), default="torchscript,onnx,pt2", show_default=True,
    help="What to write.",
)  # fmt: skip
@click.option(
    "--output", "-o", type=FilePath(folder=True), metavar="DIR",
    help="The bundle's directory [default: NAME-elsa].",
)  # fmt: skip
@click.option("--zip", "zipped", is_flag=True, help="Write one .zip file instead of a directory.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@click.option(
    "--sign", type=FilePath(), metavar="KEY",
    help="Sign the bundle with this Ed25519 private key (PEM or OpenSSH), for `elsa verify --key`.",
)  # fmt: skip
@click.option(
    "--tower", type=click.Choice(("image", "text")),
    help="Which tower of a CLIP to export: open_clip models need it.",
)  # fmt: skip
@click.option(
    "--onnx-mode", type=click.Choice(("custom", "standard", "custom-only")), default="custom",
    show_default=True,
    help="custom: nodes of elsa, with bodies that any runtime runs. standard: standard operators. "
    "custom-only: nodes of elsa without bodies.",
)  # fmt: skip
@click.option(
    "--opset", type=click.Choice(("18", "23")), help="ONNX opset [default: 18; 23 for standard]."
)
@click.option(
    "--labels", type=FilePath(), metavar="FILE",
    help="Names of the classes for load.py, one a line [default: those of the weights].",
)  # fmt: skip
@click.option("--aoti", is_flag=True, help="Also compile model.aoti.pt2 (AOTInductor).")
@click.option(
    "--quantize", type=click.Choice(("int8",)),
    help="Also write model.int8.onnx: an approximation, with what it costs in accuracy.",
)  # fmt: skip
@click.option(
    "--batches", type=Listed(click.IntRange(1, 64), "N"), default="1,2,3", show_default=True,
    help="Batch sizes to verify; those that a bundle for a GPU without elsa serves.",
)  # fmt: skip
@click.option(
    "--gpu-archs", type=Listed(Known(), "sm_NN"),
    help="With --device cuda: kernels for this GPU, verified, and these, not run; no elsa needed.",
)  # fmt: skip
@click.option(
    "--dynamic-size", is_flag=True, help="Let the image size vary in model.pt2, if the model can."
)
@example_options
@input_options
@site_options
@kernel_options
@output_options
@pass_session
def command(
    session: Session,
    /,
    model: str,
    formats: tuple[str, ...],
    output: Path | None,
    zipped: bool,
    force: bool,
    sign: Path | None,
    tower: str | None,
    onnx_mode: str,
    opset: str | None,
    labels: Path | None,
    aoti: bool,
    quantize: str | None,
    batches: tuple[int, ...],
    gpu_archs: tuple[int, ...] | None,
    dynamic_size: bool,
    **given: Any,
) -> None:
    """Patch MODEL and write it as a bundle that runs without elsa: TorchScript, ONNX and pt2 with
    the operator library, the weights, load.py and a manifest.

    Each file is loaded in a fresh process and must reproduce the model at each of --batches, or
    nothing is written (exit code 5, or 3 where the package that runs it is missing). With
    --dtype fp16 or bf16 and with --quantize, what the rounding costs against float64 of the fp32
    model is measured on the check's inputs, and on --images, and shown.
    """
    from elsa_cli import pipeline, render
    from elsa_cli.probes import environment

    options = Options.of(given)
    _check_early(output, zipped, force, formats, dynamic_size)
    _check_quantize(quantize, formats, options)
    _check_inputs(model, options, labels, sign)
    archs = _archs(gpu_archs, options)
    key = None if sign is None else _private_key(sign)
    labelled = () if labels is None else names.classes(labels)
    steps, exact = Steps(), None
    if options.dtype != "fp32":
        steps.next(_EXACT)
        exact = _exact(session, model, replace(options, dtype="fp32"), tower)
        steps.next("loading")
    loaded = _tower(pipeline.open_model(session, model, options), tower, options)
    _check_gpu(archs, (*formats, *["aoti"] * aoti), onnx_mode, loaded)
    pipeline.import_ahead(session, "torch._dynamo", *(m for f in formats for m in _MODULES[f]))
    output = output or Path(f"{loaded.name}{f'-{tower}' if tower else ''}-elsa")
    _check_early(output, zipped, force, formats, dynamic_size)
    _require_own(output, zipped, force)
    if quantize:
        steps.next(_EXACT)
        exact = _exact_outputs(session, loaded, options)
    steps.next("patching")
    options, said = _one_form(options, loaded)
    report = pipeline.patch_model(session, loaded, options, strict=False)
    steps.next("preparing the kernels")
    routes = pipeline.routes(session, loaded, report)
    steps.next("checking")
    outcome = _check(session, loaded, options)
    with session.stage("exporting") as update:
        from elsa_core.exporting.bundle import export

        bundle = export(
            loaded.model,
            output,
            formats=formats,
            onnx_mode=onnx_mode,
            opset=int(opset) if opset else 23 if onnx_mode == "standard" else 18,
            dynamic_size=dynamic_size,
            aoti=aoti,
            quantize=quantize,
            batches=batches,
            gpu_archs=archs,
            exact=exact,
            zip=zipped,
            force=force,
            key=key,
            labels=labelled,
            loaded=loaded,
            check=outcome,
            seed=options.seed,
            progress=lambda text: update(steps.within(text), 0, 0),
        )
        steps.next("")
        session.written.append(bundle.path)
    session.document("export", environment(), bundle.to_dict())
    render.header(session, loaded, options, render.kernels(routes))
    bundle_view.show(session, bundle)
    if said:
        session.line(said, "dim")
    session.line(steps.said(), "dim")


def _one_form(options: Options, loaded: Loaded) -> tuple[Options, str]:
    """The options with one scope for all processors, and what to say where this one would take
    another for the model in Python."""
    from elsa_core.patching import ATTENTION, AUTO, MODEL, scope_of

    on_cpu = next(loaded.model.parameters()).device.type == "cpu"
    if options.scope != AUTO or not on_cpu or scope_of(loaded.model, AUTO) != MODEL:
        return options, ""
    return replace(options, scope=ATTENTION), (
        "Linear layers are standard operators, one form for all processors; --scope model writes "
        "them as elsa::Linear nodes of model.onnx. In Python elsa computes them on this processor."
    )


class Steps:
    """How long each step of an export took, in seconds."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._name = "loading"
        self._taken: dict[str, float] = {}

    def next(self, name: str) -> str:
        """End the running step; returns the name of the one that begins."""
        now = time.perf_counter()
        self._taken[self._name] = self._taken.get(self._name, 0.0) + now - self._begun
        self._name, self._begun = name, now
        return name

    def within(self, text: str) -> str:
        """`next`, of a step whose text may end with how far it is, in parentheses."""
        self.next(text.partition(" (")[0])
        return text

    def said(self) -> str:
        """Where the time went, the longest steps first."""
        longest = sorted(self._taken.items(), key=lambda item: -item[1])
        parts = [f"{name} {seconds:.0f} s" for name, seconds in longest if seconds >= 1.0]
        total = f"{sum(self._taken.values()):.0f} s"
        return f"Took {total}: {', '.join(parts[:6])}" if parts else f"Took {total}"


def _check_early(
    output: Path | None, zipped: bool, force: bool, formats: tuple[str, ...], dynamic_size: bool
) -> None:
    """Refuse what cannot end well before seconds go into loading; `export` checks again."""
    if dynamic_size and "pt2" not in formats:
        raise click.UsageError("--dynamic-size concerns model.pt2: name pt2 in --formats")
    if output is None:  # its name is the model's
        check_writable(Path("bundle"))
        return
    if zipped and output.suffix != ".zip":
        output = Path(f"{output}.zip")
    check_folder(output, force, zipped=zipped)


def _require_own(output: Path, zipped: bool, force: bool) -> None:
    """Refuse what elsa did not write before minutes go into the check."""
    from elsa_core.exporting.bundle import check_output

    if zipped and output.suffix != ".zip":
        output = Path(f"{output}.zip")
    check_output(output.resolve(), output, zipped, force)


def _check_quantize(quantize: str | None, formats: tuple[str, ...], options: Options) -> None:
    if quantize and ("onnx" not in formats or options.dtype != "fp32"):
        raise click.UsageError(
            "--quantize is made of model.onnx in fp32: name onnx in --formats and leave --dtype out"
        )


def _check_inputs(model: str, options: Options, labels: Path | None, sign: Path | None) -> None:
    """Refuse what is not there before anything heavy is imported."""
    names.check(model)
    names.check_images(options.images)
    names.check_file(labels, "file of labels")
    names.check_file(sign, "private key")


def _archs(given: tuple[int, ...] | None, options: Options) -> tuple[str, ...]:
    """The architectures of --gpu-archs by name."""
    if given and options.device == "cpu":
        raise click.UsageError("--gpu-archs concerns bundles for a GPU: use --device cuda")
    return tuple(f"sm_{arch}" for arch in given or ())


def _check_gpu(
    archs: tuple[str, ...], formats: tuple[str, ...], onnx_mode: str, loaded: Loaded
) -> None:
    """Refuse what cannot be served on a GPU before minutes go into checking."""
    device = next(loaded.model.parameters()).device.type
    onnx = device == "cuda" and "onnx" in formats
    if onnx:
        from elsa_core.exporting.artefacts import require_onnx

        require_onnx(device)
    if onnx or archs or "aoti" in formats:
        from elsa_core.exporting import gpu_library

        gpu_library.check(archs, device, onnx and onnx_mode != "standard", formats)


def _private_key(path: Path) -> Ed25519PrivateKey:
    from elsa_core.exporting.signature import read_private_key

    return read_private_key(path)


def _tower(loaded: Loaded, tower: str | None, options: Options) -> Loaded:
    """One tower in the place of the CLIP that was loaded; other models as they are."""
    from elsa_core.exporting.towers import TOWERS, tower_of

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


def _exact(session: Session, model: str, options: Options, tower: str | None) -> Exact:
    """What float64 makes of the model before its weights are rounded to --dtype."""
    from elsa_cli import pipeline

    loaded = _tower(pipeline.open_model(session, model, options), tower, options)
    return _exact_outputs(session, loaded, options)


def _exact_outputs(session: Session, loaded: Loaded, options: Options) -> Exact:
    from elsa_cli import pipeline
    from elsa_core.exporting.accuracy import exact_outputs
    from elsa_core.exporting.export_target import token_cases

    cases: dict[str, Any]
    if loaded.tower == "text":
        cases = dict(token_cases(loaded.model, options.batch_size, options.seed))
    else:
        cases = pipeline.check_inputs(session, loaded, options)
    with session.stage(_EXACT):
        return exact_outputs(loaded.model, cases)


def _check(session: Session, loaded: Loaded, options: Options) -> CheckReport:
    """The check that is recorded in the manifest."""
    from elsa_cli import pipeline

    if loaded.tower != "text":
        return pipeline.check_model(session, loaded, options)
    from elsa_core.exporting.export_target import token_cases
    from elsa_core.proof import check

    with session.stage("checking") as update:
        cases = token_cases(loaded.model, options.batch_size, options.seed)
        return check(loaded.model, cases, batch_size=options.batch_size, progress=update)
