"""`export`: a patched model as a bundle, verified in fresh processes, whole or not at all."""

from __future__ import annotations

import dataclasses
import operator
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elsa_core.base import files
from elsa_core.base.processes import environment_kept
from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ArgumentError, ExportError, ModelError, UnavailableError
from elsa_core.exporting import gpu_library
from elsa_core.exporting.archive import unpacked, write_zip
from elsa_core.exporting.artefacts import (
    Choices,
    Say,
    require_onnx,
    write_artefacts,
    write_libraries,
)
from elsa_core.exporting.description import describe, readme, write_labels
from elsa_core.exporting.export_target import ExportTarget, export_target
from elsa_core.exporting.manifest import (
    FILES,
    LARGEST_BATCH,
    MANIFEST_NAME,
    REFERENCE_NAME,
    files_in,
    hashed,
)
from elsa_core.exporting.onnx import MODES as ONNX_MODES
from elsa_core.exporting.onnx import OPSETS as ONNX_OPSETS
from elsa_core.exporting.reference import (
    BATCH_SIZES,
    Exact,
    Reference,
    exact_outputs,
    make_reference,
    norms_of,
    write_arrays,
)
from elsa_core.exporting.signature import SIGNATURE_NAME
from elsa_core.exporting.templates import load as template
from elsa_core.exporting.verify import INT8, ArtefactReport, judged, run_all
from elsa_core.loading import Given, assumed_text, check_target, write_model
from elsa_core.precision import dtype_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from elsa_core.loading import Loaded
    from elsa_core.proof import CheckReport

DEFAULT_FORMATS = ("torchscript", "onnx", "pt2")


@dataclass(frozen=True, repr=False)
class Bundle(Summarised):
    """A bundle that `export` wrote.

    Attributes:
        path: the directory or zip.
        manifest: what manifest.json says.
        artefacts: how each format did in its fresh process: "ok", or there would be no bundle.
    """

    path: Path
    manifest: dict[str, Any]
    artefacts: tuple[ArtefactReport, ...]

    @property
    def preprocess(self) -> dict[str, Any] | None:
        """How images become inputs: input_size, mean, std, interpolation, crop_pct, and which of
        them are assumed; None for a model that takes no images."""
        found: dict[str, Any] | None = self.manifest["preprocess"]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"path": str(self.path), "manifest": self.manifest}

    def summary(self) -> Summary:
        """Five lines: what it holds, of which model, how exact, and how it runs."""
        model, formats = self.manifest["model"], ", ".join(each.format for each in self.artefacts)
        where = f"{model['dtype']} on {model['device']}"
        errors = [max(each.batches.values()) for each in self.artefacts if each.format != INT8]
        error, allowed = max(errors, default=(0.0, 0.0))
        sizes = [each["size"] for each in self.manifest["files"].values()]
        zipped = self.path.suffix == ".zip"
        return Summary(
            f"bundle {self.path} · {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB",
            lines=[
                f"model: {model['name']} · {model['weights']} · {where}",
                f"formats: {formats}",
                f"each reproduces the model: error {error:.1e}, allowed {allowed:.1e}",
                f"run: python {'load.py of it' if zipped else self.path / 'load.py'} IMAGE",
            ],
        )


@environment_kept()
def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    inputs: Tensor | tuple[Tensor, ...] | None = None,
    onnx_mode: str = "custom",
    opset: int = 18,
    dynamic_size: bool = False,
    aoti: bool = False,
    quantize: str | None = None,
    batches: Sequence[int] = BATCH_SIZES,
    gpu_archs: Sequence[str] = (),
    exact: Exact | None = None,
    zip: bool = False,
    force: bool = False,
    key: Ed25519PrivateKey | None = None,
    labels: Sequence[str] = (),
    loaded: Loaded | None = None,
    check: CheckReport | None = None,
    seed: int = 0,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    progress: Say | None = None,
) -> Bundle:
    """Write a patched model as files that run without this package.

    Everything is written beside the target. Each artefact is loaded in a fresh process and must
    reproduce the model at each batch size; then all are renamed into place. After a failure or an
    interrupt the target is as it was before.

    Args:
        model: patched by `elsa_core.patch`, in eval mode, on the CPU or one GPU.
        directory: the target; missing parents are made. With `zip` a file, ".zip" added if absent.
        formats: some of "torchscript", "onnx", "pt2".
        inputs: example arguments, batch first; default: images of the model's size, or token ids.
        onnx_mode: "custom" (elsa's nodes and a body of standard operators), "standard" (none of
            elsa's) or "custom-only" (elsa's nodes alone).
        opset: 18 or 23.
        dynamic_size: let the image size vary too in model.pt2, where the model allows it.
        aoti: also compile model.aoti.pt2 with AOTInductor for this machine's kind of CPU or GPU.
        quantize: "int8": also write model.int8.onnx, an approximation, beside model.onnx.
        batches: the batch sizes that artefacts are verified at, 1 to 64. A bundle of a model on a
            GPU that holds the CUDA library serves these alone; others take any.
        gpu_archs: of a model on a GPU: hold the CUDA library, with verified kernels for this GPU.
            Those for these architectures ("sm_80") are compiled and not run. Default: for this
            GPU alone, where ELSA_CUDA_LIBRARY is 1 or model.onnx has elsa's nodes; else none.
        exact: `reference.exact_outputs` of the float32 model: what a float16 or bfloat16 model, or
            INT8, is compared with. Default: this model's, where it is float32.
        zip: write one file.
        force: replace a bundle that is there.
        key: sign the bundle with this key, of `signature.read_key`.
        labels: names of the classes, in their order, for load.py; default: ImageNet's, where the
            weights are published ones of as many classes.
        loaded: what `load_model` returned, for preprocessing, provenance and reloading.
        check: the report of `check` for this model; default: it is run now.
        seed: of generated inputs.
        mean: one number or one a channel, on images scaled to 0..1; likewise `std`. What neither
            the model nor an argument says is assumed: a `UserWarning` and the bundle say so.
        crop_pct: the share of the resized image that the centre crop keeps.
        interpolation: how images are resized ("bicubic", ...).
        progress: called with one line before each step.

    Raises:
        TypeError: `model` is no `nn.Module`, directory, formats, labels or gpu_archs no text, or
            batches no whole numbers.
        ExportError: the model disagrees with the original, cannot be traced or exported, or an
            artefact does not reproduce it.
        ArgumentError: an argument, or the target, cannot be used.
        NothingPatchedError: no site of the model is patched.
        UnavailableError: a package, a compiler or disk space is missing.
    """
    chosen = _choices(
        directory, formats, onnx_mode, opset, dynamic_size, aoti, quantize, batches, labels,
        gpu_archs,
    )  # fmt: skip
    given = files.located(directory)
    if zip and given.name in ("", ".."):
        raise ArgumentError(f"{given} (-o) is a directory: with --zip it names a file")
    if zip and given.suffix != ".zip":
        given = files.located(f"{given}.zip")
    say = progress or (lambda line: None)
    try:
        target = given.resolve()
        check_output(target, given, zip, force)
        above = next(path for path in target.parents if os.path.lexists(path))
        with files.scratch(".elsa-", folder=above):  # OSError: nothing can be made there
            pass
        stated = Given(mean, std, crop_pct, interpolation)
        exported = export_target(model, loaded, inputs, seed, chosen.batches, stated)
        if loaded is None and exported.preprocess is not None and exported.preprocess.assumed:
            text = assumed_text(exported.preprocess)
            warnings.warn(f"the model does not say its preprocessing: {text} assumed", stacklevel=3)
        plans = _require(exported, chosen, target, given)
        if check is None:
            from elsa_core import proof

            say("checking the patched model against the original")
            first = tuple(tensor[:1] for tensor in exported.inputs)
            check = proof.check(exported.model, first, stress=True, progress=False)
        if not check.ok:
            why = check.failures[0]
            raise ExportError(f"the patched model does not agree with the original: {why}")
        if not check.shows_sites:
            text = (
                "with these weights the output depends on no site: that the artefacts reproduce it"
            )
            warnings.warn(f"{text} shows nothing of their attention", stacklevel=3)
        say("computing the reference in float64")
        reference = make_reference(exported.model, exported.inputs, chosen.batches)
        if exact is None and INT8 in chosen.formats:
            exact = exact_outputs(exported.model, {"example": exported.inputs})
        with _staged(target, zip) as staging:
            say("writing weights")
            write_model(staging, exported.model, exported.plan, exported.loaded)
            arrays = {"input": reference.inputs, "oracle": reference.oracle}
            write_arrays(staging / REFERENCE_NAME, **arrays)
            used = write_artefacts(exported, chosen, staging, say)
            libraries = write_libraries(exported, chosen, staging, say, plans=plans)
            manifest = describe(exported, chosen, reference, check, used, libraries)
            manifest["labels"] = write_labels(exported, chosen.labels, staging)
            shutil.copyfile(Path(template.__file__), staging / "load.py")
            files.write_json(staging / MANIFEST_NAME, manifest)  # load.py reads it
            reports = _run(manifest, reference, exact, staging, say)
            _finish(manifest, staging, key)
    except OSError as error:
        raise files.explained(error, given) from error
    return Bundle(given, manifest, tuple(reports))


def _choices(
    directory: object, formats: Sequence[str], onnx_mode: str, opset: int, dynamic_size: bool,
    aoti: bool, quantize: str | None, batches: Sequence[int], labels: Sequence[str],
    gpu_archs: Sequence[str],
) -> Choices:  # fmt: skip
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be text or a pathlib.Path, not {type(directory).__name__}")
    texts = {"formats": formats, "labels": labels, "gpu_archs": gpu_archs}
    for name, given in texts.items():
        if not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
            raise TypeError(f"{name} must be several texts, not {given!r}")
    names, archs = (
        (each,) if isinstance(each, str) else tuple(dict.fromkeys(each))
        for each in (formats, gpu_archs)
    )
    unknown = [name for name in names if name not in DEFAULT_FORMATS]
    what = repr(unknown[0]) if unknown else "nothing"
    for wrong, words in (
        (unknown or not names, f"formats: {what}; choose among {', '.join(DEFAULT_FORMATS)}"),
        (onnx_mode not in ONNX_MODES,
         f"onnx_mode={onnx_mode!r}: choose one of {', '.join(ONNX_MODES)}"),
        (opset not in ONNX_OPSETS, f"opset={opset}: choose 18 or 23"),
        (dynamic_size and "pt2" not in names,
         "dynamic_size concerns model.pt2: name pt2 among the formats"),
        (quantize not in (None, "int8"), f"quantize={quantize!r}: choose int8, or leave it out"),
        (quantize and "onnx" not in names,
         "quantize concerns model.onnx: name onnx among the formats"),
    ):  # fmt: skip
        if wrong:
            raise ArgumentError(words)
    try:
        sizes = sorted({operator.index(size) for size in batches})
    except TypeError:
        raise TypeError(f"batches must be whole numbers, not {batches!r}") from None
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= LARGEST_BATCH:
        raise ArgumentError(f"batches: name sizes from 1 to {LARGEST_BATCH}, not {sizes}")
    names += ("aoti",) * aoti + (INT8,) * bool(quantize)
    names = tuple(name for name in FILES if name in names)
    nodes = "onnx" in names and onnx_mode != "standard"
    return Choices(names, onnx_mode, opset, dynamic_size, tuple(sizes), tuple(labels), archs, nodes)


def check_output(target: Path, given: Path, zip: bool, force: bool) -> None:
    """Raise ArgumentError over a target that exists without `force`, or that elsa did not write."""
    if not zip:
        check_target(target, given, force)
        return
    if not target.exists():
        return
    if target.is_dir():
        raise ArgumentError(f"{given} (-o) is a directory: with --zip it names a file")
    if not force:
        raise ArgumentError(f"{given} (-o) exists: use --force to replace it, or another file")
    try:
        with unpacked(target):
            pass
    except ModelError:
        raise ArgumentError(f"{given} (-o) is not a bundle that elsa wrote: not replaced") from None


def _require(exported: ExportTarget, chosen: Choices, target: Path, given: Path) -> bool:
    """Whether the bundle holds the plans of a GPU; raises over what cannot be written here."""
    on_gpu, dtype, refusals = exported.device == "cuda", dtype_name(exported.dtype), {}
    if on_gpu or dtype != "float32":
        why = "INT8 is made and verified on the CPU: use --device cpu"
        refusals[INT8] = why if on_gpu else "INT8 is made from float32 weights: leave --dtype out"
    if dtype == "bfloat16":
        cpu = "ONNX Runtime's CPU kernels take no bfloat16"
        why = "numpy has no bfloat16 to verify it with" if on_gpu else cpu
        refusals["onnx"] = f"{why}: use float32 or float16"
    for name in chosen.formats:
        if name in refusals:
            raise ArgumentError(f"format {name}: {refusals[name]}, or leave it out of --formats")
    if "onnx" in chosen.formats:
        require_onnx(exported.device)
    plans = gpu_library.check(chosen.gpu_archs, exported.device, chosen.nodes, chosen.formats)
    held = (*exported.model.parameters(), *exported.model.buffers())
    needed = (1 + len(chosen.formats)) * sum(t.numel() * t.element_size() for t in held)
    place = next(p for p in (target.parent, *target.parents) if p.exists())
    total, _, free = shutil.disk_usage(place)
    if total and needed > free:  # a file system without a size (/proc) says why by itself
        raise UnavailableError(
            f"{given} (-o) needs about {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free "
            f"there; free some space, or name fewer --formats"
        )
    return plans


@contextmanager
def _staged(target: Path, zip: bool) -> Iterator[Path]:
    """A fresh directory that becomes the target on success and vanishes otherwise."""
    if not zip:
        with files.staged(target) as staging:
            yield staging
        return
    with (
        files.parents_made(target),
        files.scratch(files.hidden(target), ".tmp", target.parent) as folder,
    ):
        staging = folder / "bundle"
        staging.mkdir()
        yield staging
        packed = folder / "bundle.zip"
        write_zip(staging, packed)
        files.flush(packed)
        packed.replace(target)


def _run(
    manifest: dict[str, Any], reference: Reference, exact: Exact | None, staging: Path, say: Say
) -> list[ArtefactReport]:
    artefacts, reports, further = manifest["artefacts"], [], None
    with files.scratch("elsa-inputs-") as folder:
        if exact is not None:
            further = folder / "inputs.npz"
            write_arrays(further, input=exact.inputs)
        runs = run_all(staging, artefacts, manifest["model"]["device"], say, further)
    for name, artefact in artefacts.items():
        if name == INT8:  # the limits of INT8 are its own errors, on standard operators
            own = [run for run in runs[name] if run.runtime == "onnxruntime"]
            if plain := min(own, key=lambda run: run.library).outputs:
                artefact["norms"] = norms_of(reference, plain)
        report = judged(name, artefact, runs[name], reference)
        if report.status == "skipped":
            raise UnavailableError(
                f"{FILES[name]} cannot be verified: {report.reason}; install it, or name "
                "other --formats"
            )
        if report.status == "failed":
            raise ExportError(f"{FILES[name]} does not reproduce the model: {report.reason}")
        if name == INT8 and exact is not None:
            # One constant, the mean of the exact outputs, errs by no more than their deviation.
            most, firsts = exact.spread, (run.further for run in own)
            means = (exact.cost(each)["mean_error"] for each in firsts if each is not None)
            if (mean := max(means, default=0.0)) > most:
                raise ExportError(
                    f"{FILES[INT8]} is no approximation of the model: its mean error is "
                    f"{mean:.1e}, the outputs' standard deviation {most:.1e}"
                )
        artefact["verification"] = report.to_dict()
        reports.append(report)
    if exact is not None:
        found = {FILES[name]: each[0].further for name, each in runs.items()}
        costs = {name: exact.cost(first) for name, first in found.items() if first is not None}
        classes = manifest["outputs"][0]["name"] == "logits"
        manifest["accuracy"] = exact.to_dict(costs, classes)
    return reports


def _finish(manifest: dict[str, Any], staging: Path, key: Ed25519PrivateKey | None) -> None:
    """README.md, the hashes of every file, the signature: when every other file is final."""
    (staging / "README.md").write_text(readme(manifest), encoding="utf-8")
    entries = {p.relative_to(staging).as_posix(): hashed(p) for p in files_in(staging)}
    entries.pop(MANIFEST_NAME)
    manifest["files"] = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
    files.write_json(staging / MANIFEST_NAME, manifest)
    if key is not None:
        signature = key.sign((staging / MANIFEST_NAME).read_bytes())
        (staging / SIGNATURE_NAME).write_bytes(signature)
    for path in files_in(staging):
        files.flush(path)
