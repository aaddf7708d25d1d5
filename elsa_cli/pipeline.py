"""The steps that inspect, patch and check share: load, build inputs, check; with progress."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names
from elsa_cli.console import Session
from elsa_cli.errors import ModelFileError
from elsa_cli.lazy_imports import import_flop_counter, import_timm
from elsa_cli.options import Options, resolve_device, typed

if TYPE_CHECKING:
    from elsa_core.dispatch import Route
    from elsa_core.loading import Loaded, ModelSpec
    from elsa_core.patching import PatchReport
    from elsa_core.proof import CheckReport

    Routes = dict[int, Route]

_TIMM_NAME = re.compile(r"(timm:)?[\w.-]+")
CHOICES = (
    "precision", "backend", "include", "exclude", "scope", "all_sites", "sparsity", "offload",
)  # fmt: skip


def import_torch(session: Session) -> None:
    """Import torch where Ctrl-C ends the process at once: it takes seconds, on a cold disk tens."""
    with session.stage("importing torch", imports=True):
        import torch  # noqa: F401


def import_ahead(session: Session, *modules: str) -> None:
    """Import what a later step imports anyway, while Ctrl-C may still end the process at once:
    nothing where something was written already. What is missing the later step says itself."""
    missing = [name for name in modules if name not in sys.modules]
    if session.written or not missing:
        return
    with session.stage("importing " + ", ".join(missing), imports=True):
        for name in missing:
            with suppress(ImportError):
                importlib.import_module(name)


def open_model(
    session: Session, text: str, options: Options, *, shapes_alone: bool = False
) -> Loaded:
    """Load the model that MODEL and the options name, in evaluation mode on its device. With
    `shapes_alone` random weights are left as their memory was found, which saves their time."""
    names.check(text)
    if (folder := options.images) is not None and not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder of images"
        raise ModelFileError(f"{folder}: {what}")
    if (options.inputs is not None or options.input_size is not None) and typed(("images",)):
        raise click.UsageError("--images and --inputs or --input-size exclude each other")
    import_torch(session)
    # The device is asked for first: a missing one is known before seconds go into loading.
    device = resolve_device(options.device)
    with session.stage(f"looking up {text}", imports=True):
        import_flop_counter()
        import_timm(hub=options.pretrained or not _TIMM_NAME.fullmatch(text.strip()))
        from elsa_core.loading import UninitialisedParameters, parse

        if options.paths is not None:  # one that the device cannot take is known before loading too
            import torch

            from elsa_core.proof import chosen

            chosen(options.paths, torch.device(device))
        spec = parse(text)
    of_library = spec.path is None and spec.source != "hub" and not options.pretrained
    unfilled = UninitialisedParameters() if shapes_alone and of_library else nullcontext()
    with session.stage(f"loading {spec.name}", drawn=not options.pretrained), unfilled:
        loaded = load(session, spec, options, device, options.img_size, options.dtype)
    if loaded.weights.startswith("random") and (spec.tag or spec.source == "hub"):
        session.warn(
            f"the weights of {spec.given} are RANDOM: add --pretrained for the published ones",
            even_quiet=True,
        )
    return loaded


def load(
    session: Session, spec: ModelSpec, options: Options, device: Any,
    size: tuple[int, int] | None, dtype: str,
) -> Loaded:  # fmt: skip
    """Load one model, with the arguments of --inputs and --input-size to run on."""
    if options.inputs is not None and options.input_size is not None:
        raise click.UsageError("--inputs and --input-size exclude each other")
    import torch

    from elsa_core.base.inputs import read_inputs
    from elsa_core.loading import Given, load_model
    from elsa_core.precision import DTYPES

    loaded = load_model(
        spec, image_size=size, pretrained=options.pretrained, device=device, dtype=DTYPES[dtype],
        seed=options.seed, arch=options.arch, weights=options.weights,
        model_kwargs=dict(options.model_kwargs),
        preprocess=Given(options.mean, options.std, options.crop_pct, options.interpolation),
    )  # fmt: skip
    loaded.example_size = options.input_size
    if options.inputs is not None:
        names.check_file(options.inputs, "inputs")
        like = loaded.weight
        loaded.example = tuple(
            one.to(like.device, like.dtype if one.is_floating_point() else None)
            if isinstance(one, torch.Tensor)
            else one
            for one in read_inputs(options.inputs, loaded.model)
        )
    for line in loaded.warnings:
        session.warn(line, even_quiet=True)
    return loaded


def patch_model(
    session: Session, loaded: Loaded, options: Options, *, strict: bool = False,
    plan: Path | None = None,
) -> tuple[PatchReport, Routes]:  # fmt: skip
    """Patch the loaded model in place, exactly the sites that `plan` names where one is given.

    A directory that was saved patched keeps its plan, unless an option about sites or kernels was
    typed. Also which backend serves the attention sites, by their head dimensions (64 where it is
    not known before a run). Asking compiles the native library at its first use.
    """
    report = loaded.report
    if report is None or plan is not None or typed(CHOICES):
        with session.stage("patching"):
            from elsa_core.loading import apply_plan, read_plan
            from elsa_core.patching import patch, unpatch

            given = None if plan is None else read_plan(plan)
            # The options describe the whole result, not what is added to an earlier plan.
            unpatch(loaded.model)
            example = loaded.example_inputs() if loaded.is_watched else None
            if plan is not None and given is not None:
                report = apply_plan(loaded.model, given, plan, example)
            else:
                report = patch(
                    loaded.model, example, precision=options.precision, backend=options.backend,
                    include=list(options.include) or None, exclude=list(options.exclude) or None,
                    strict=strict, scope=options.scope, sparsity=options.sparsity,
                    offload=options.offload,
                )  # fmt: skip
    with session.stage("preparing the kernels (compiled at their first use)"):
        import torch

        from elsa_core.dispatch import PLAIN
        from elsa_core.ops.attention.api import explain
        from elsa_core.patching import LAYERS

        place = loaded.weight
        found: Routes = {}
        for dim in sorted({s.head_dim or 64 for s in report.patched if s.kind not in LAYERS}):
            one = torch.zeros(1, 1, 1, dim, device=place.device, dtype=place.dtype)
            found[dim] = explain(one, one, one, precision=report.precision, backend=report.backend)
    slow = [dim for dim, route in found.items() if route.backend == PLAIN]
    reasons = "; ".join(found[slow[0]].reasons) if slow else ""
    # What the native backend logged when it failed to load is not said twice.
    said = any(text.rpartition(": ")[2] in reasons for text in session.warned)
    if slow and report.backend == "auto" and not said:
        dims = ", ".join(map(str, slow))
        session.warn(f"head_dim {dims} runs on plain PyTorch, which is slower: {reasons}")
    return report, found


def check_inputs(session: Session, loaded: Loaded, options: Options) -> dict[str, Any]:
    """Generated inputs by name, and the images of --images."""
    from elsa_core.base.images import read_folder
    from elsa_core.base.inputs import generated_inputs, text_shape
    from elsa_core.precision import DTYPES

    if loaded.tower == "text":
        from elsa_core.exporting.export_target import token_cases

        return dict(token_cases(loaded.model, options.batch_size, options.seed))
    if loaded.is_given:
        return {"inputs": loaded.example_inputs(options.batch_size, options.seed)}
    with session.stage("preparing inputs"):
        inputs: dict[str, Any] = generated_inputs(
            loaded.input_size, options.batch_size, seed=options.seed, dtype=DTYPES[options.dtype],
            device=loaded.weight.device, text=text_shape(loaded.model),
        )  # fmt: skip
        if options.images is None:
            return inputs
        batch = read_folder(options.images, **loaded.preprocess.transform)
        if batch.left_out:
            session.warn(f"{options.images}: the first {len(batch.files)} images are used, "
                         f"{batch.left_out} are left out")  # fmt: skip
        return {"images": batch.images, **inputs}


def check_model(session: Session, loaded: Loaded, options: Options) -> CheckReport:
    from elsa_core.proof import check

    inputs = check_inputs(session, loaded, options)
    compiles = any(path.startswith("compile") for path in options.paths or ())
    compiler = ("torch._inductor.compile_fx",) if compiles else ()
    import_ahead(session, "torch._dynamo", *compiler)
    with session.stage("checking") as update:
        return check(
            loaded.model, inputs, batch_size=options.batch_size, paths=options.paths,
            grad=options.grad, sparsity_bound=options.sparsity_bound, progress=update,
        )  # fmt: skip
