"""`export`: a patched model as a bundle, verified in fresh processes, whole or not at all."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elsa_core import files
from elsa_core.backends import compile as compiling
from elsa_core.backends import native
from elsa_core.errors import ArgumentError, ElsaError, ExportError, ModelError, UnavailableError
from elsa_core.exporting import exported_program, operators, ort_library, torchscript
from elsa_core.exporting.archive import unpacked, write_zip
from elsa_core.exporting.manifest import (
    FORMATS,
    KIND,
    MANIFEST_NAME,
    REFERENCE_NAME,
    SCHEMA_VERSION,
    files_in,
    hashed,
)
from elsa_core.exporting.readme import readme
from elsa_core.exporting.reference import (
    Reference,
    flat,
    judge,
    make_reference,
    write_reference,
)
from elsa_core.exporting.subject import Subject, subject_of
from elsa_core.exporting.support import support
from elsa_core.exporting.templates import load as template
from elsa_core.exporting.verify import ArtefactReport, platform_tag, run_artefact
from elsa_core.models import save as saving
from elsa_core.models.sources.plan import PLAN_NAME
from elsa_core.version import __version__

if TYPE_CHECKING:
    from elsa_core.models.check import CheckReport
    from elsa_core.models.load import Loaded

DEFAULT_FORMATS = ("torchscript", "onnx", "pt2")
ONNX_MODES = ("custom", "standard", "custom-only")
ONNX_OPSETS = (18, 23)
FILES = {
    "torchscript": "model.ts",
    "onnx": "model.onnx",
    "pt2": "model.pt2",
    "aoti": "model.aoti.pt2",
}
TORCH_LIBRARY = "lib/libelsa_torch.so"
ONNX_LIBRARY = "lib/libelsa_onnxruntime.so"
# Less room than this on the target's disk means that a failed write ran out of it.
_NO_ROOM = 1 << 20
_PACKAGES = ("torch", "timm", "open_clip_torch", "torchvision", "onnx", "onnxruntime", "numpy")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bundle:
    """A bundle that `export` wrote.

    Attributes:
        path: the directory or zip.
        manifest: what manifest.json says.
        artefacts: how each format did in its fresh process; "skipped" where its runtime is missing.
    """

    path: Path
    manifest: dict[str, Any]
    artefacts: tuple[ArtefactReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"path": str(self.path), "manifest": self.manifest}


@dataclass(frozen=True)
class _Choices:
    """The arguments of `export` that shape the artefacts."""

    formats: tuple[str, ...]
    onnx_mode: str
    opset: int
    dynamic_size: bool


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
    zip: bool = False,
    force: bool = False,
    loaded: Loaded | None = None,
    check: CheckReport | None = None,
    seed: int = 0,
    progress: Say | None = None,
) -> Bundle:
    """Write a patched model as files that run without this package.

    Everything is written beside the target and renamed into place after each artefact has been
    loaded in a fresh process and has reproduced the model at three batch sizes: after a failure or
    an interrupt at any point the target is as it was before.

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
        zip: write one file.
        force: replace a bundle that is there.
        loaded: what `load_model` returned, for preprocessing, provenance and reloading.
        check: the report of `check` for this model; default: it is run now.
        seed: of generated inputs.
        progress: called with one line before each step.

    Returns:
        The bundle.

    Raises:
        ExportError: the model disagrees with the original, cannot be traced or exported, or an
            artefact does not reproduce it.
        ArgumentError: an argument, or the target, cannot be used.
        NothingPatchedError: no site of the model is patched.
        UnavailableError: a package, a compiler or room on the disk is missing.
    """
    chosen = _choices(formats, onnx_mode, opset, dynamic_size, aoti)
    given = Path(directory).expanduser()
    if zip and given.suffix != ".zip":
        given = given.with_name(given.name + ".zip")
    say = progress or (lambda line: None)
    try:
        target = given.resolve()
        _check_target(target, given, zip, force)
        subject = subject_of(model, loaded, inputs, seed)
        _check_support(subject, chosen)
        _check_room(subject, chosen, target, given)
        check = _checked(subject, check, say)
        say("computing the reference in float64")
        reference = make_reference(subject.model, subject.inputs)
        with _staged(target, zip) as staging:
            manifest, reports = _write(subject, chosen, reference, check, staging, say)
    except OSError as error:
        raise files.explained(error, given) from error
    return Bundle(given, manifest, tuple(reports))


def _choices(
    formats: Sequence[str], onnx_mode: str, opset: int, dynamic_size: bool, aoti: bool
) -> _Choices:
    names = (formats,) if isinstance(formats, str) else tuple(dict.fromkeys(formats))
    unknown = [name for name in names if name not in DEFAULT_FORMATS]
    if unknown or not names:
        what = repr(unknown[0]) if unknown else "nothing"
        raise ArgumentError(f"formats: {what}; choose among {', '.join(DEFAULT_FORMATS)}")
    if onnx_mode not in ONNX_MODES:
        raise ArgumentError(f"onnx_mode={onnx_mode!r}: choose one of {', '.join(ONNX_MODES)}")
    if opset not in ONNX_OPSETS:
        raise ArgumentError(f"opset={opset}: choose 18 or 23")
    if dynamic_size and "pt2" not in names:
        raise ArgumentError("dynamic_size concerns model.pt2: name pt2 among the formats")
    if aoti:
        names = (*names, "aoti")
    return _Choices(tuple(n for n in FORMATS if n in names), onnx_mode, opset, dynamic_size)


def _check_target(target: Path, given: Path, zip: bool, force: bool) -> None:
    if not zip:
        saving.check_target(target, given, force)
        return
    if not target.exists():
        return
    if not force:
        raise ArgumentError(f"{given} (-o) exists: use --force to replace it, or another file")
    try:
        with unpacked(target):
            pass
    except ModelError:
        raise ArgumentError(f"{given} (-o) is not a bundle that elsa wrote: not replaced") from None


def _check_support(subject: Subject, chosen: _Choices) -> None:
    for name in chosen.formats:
        answer = support(name, subject.device, str(subject.dtype).removeprefix("torch."))
        if not answer.ok:
            raise ArgumentError(f"format {name}: {answer.reason}, or leave it out of --formats")


def _check_room(subject: Subject, chosen: _Choices, target: Path, given: Path) -> None:
    """Say at once, not after minutes, that the disk cannot hold the bundle."""
    needed = (1 + len(chosen.formats)) * subject.weight_bytes()
    place = next(p for p in (target.parent, *target.parents) if p.exists())
    total, _, free = shutil.disk_usage(place)
    if total and needed > free:  # a file system without a size (/proc) says why by itself
        raise UnavailableError(
            f"{given} (-o) needs about {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free "
            f"there; free some space, or name fewer --formats"
        )


def _checked(subject: Subject, given: CheckReport | None, say: Say) -> CheckReport:
    if given is None:
        from elsa_core.models.check import check

        say("checking the patched model against the original")
        given = check(subject.model, tuple(t[:1] for t in subject.inputs), stress=True)
    if not given.ok:
        raise ExportError(
            f"the patched model does not agree with the original: {given.failures[0]}"
        )
    return given


@contextmanager
def _staged(target: Path, zip: bool) -> Iterator[Path]:
    """A fresh directory that becomes the target on success and vanishes otherwise."""
    if not zip:
        with files.staged(target) as staging:
            yield staging
        return
    with (
        files.parents_made(target),
        tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
        ) as scratch,
    ):
        staging = Path(scratch) / "bundle"
        staging.mkdir()
        yield staging
        packed = Path(scratch) / "bundle.zip"
        write_zip(staging, packed)
        packed.replace(target)


def _write(
    subject: Subject,
    chosen: _Choices,
    reference: Reference,
    check: CheckReport,
    staging: Path,
    say: Say,
) -> tuple[dict[str, Any], list[ArtefactReport]]:
    say("writing weights")
    _write_weights(subject, staging)
    write_reference(reference, staging / REFERENCE_NAME)
    used = {}
    for name in chosen.formats:
        used[name] = _write_artefact(name, subject, chosen, staging, say)
    libraries = _write_libraries(chosen, staging, say)
    manifest = _manifest(subject, chosen, reference, check, used, libraries)
    shutil.copyfile(Path(template.__file__), staging / "load.py")
    (staging / "README.md").write_text(readme(manifest), encoding="utf-8")
    # load.py reads the manifest, which can name hashes only when every file is final.
    files.write_json(staging / MANIFEST_NAME, manifest)
    reports = []
    for name in chosen.formats:
        say(f"running {FILES[name]} in a fresh process")
        reports.append(run_artefact(staging, name, reference, subject.device))
        if reports[-1].status == "failed":
            raise ExportError(f"{FILES[name]} does not reproduce the model: {reports[-1].reason}")
        manifest["artefacts"][name]["verification"] = reports[-1].to_dict()
    entries = {p.relative_to(staging).as_posix(): hashed(p) for p in files_in(staging)}
    entries.pop(MANIFEST_NAME)
    manifest["files"] = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
    files.write_json(staging / MANIFEST_NAME, manifest)
    for path in files_in(staging):
        # safetensors writes for its owner alone.
        path.chmod(0o666 & ~files.umask())
        files.flush(path)
    return manifest, reports


def _write_weights(subject: Subject, staging: Path) -> None:
    if subject.loaded is not None:
        saving.write_files(subject.loaded, subject.plan, staging)
        return
    tensors = saving.separate(subject.model.state_dict())
    saving.write_tensors(tensors, staging / saving.WEIGHTS_NAME, {"format": "pt"})
    files.write_json(staging / PLAN_NAME, subject.plan.to_dict())


def _write_artefact(
    name: str, subject: Subject, chosen: _Choices, staging: Path, say: Say
) -> tuple[str, ...]:
    """Write one artefact; returns elsa's operators in its graph, torch's or ONNX's names."""
    path = staging / FILES[name]
    say(f"exporting {FILES[name]}")
    try:
        if name == "torchscript":
            return torchscript.export_torchscript(
                subject.model, subject.first, path, facts=_facts(subject)
            )
        if name == "onnx":
            return _write_onnx(subject, chosen, path)
        program = exported_program.export_program(
            subject.model,
            subject.first,
            dynamic_size=chosen.dynamic_size and name == "pt2",
            step=_step(subject),
        )
        if name == "pt2":
            if chosen.dynamic_size:
                _prove_other_size(subject, program)
            exported_program.save_program(program, path)
        else:
            exported_program.compile_program(program, path)
        return operators.in_program(program)
    except (ElsaError, OSError):
        raise
    except Exception as error:
        # PyTorch's writers report a full disk as a RuntimeError of their own words.
        if shutil.disk_usage(staging).free < _NO_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device") from error
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"{FILES[name]} cannot be written: {line[:300]}") from error


def _write_onnx(subject: Subject, chosen: _Choices, path: Path) -> tuple[str, ...]:
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"format onnx needs a package: {error}; pip install onnx onnxscript, or name other "
            "--formats"
        ) from None
    from elsa_core.exporting.onnx import export_onnx

    export_onnx(
        subject.model,
        subject.first,
        path,
        mode=chosen.onnx_mode,
        opset=chosen.opset,
        input_names=subject.input_names,
        output_names=_output_names(subject),
        dynamic_batch=True,
    )
    graph = onnx.load(str(path), load_external_data=False).graph
    names = sorted({node.op_type for node in graph.node if node.domain == "elsa"})
    if not names and chosen.onnx_mode != "standard":
        raise ExportError("model.onnx calls none of elsa's operators: no patched site was reached")
    return tuple(names)


def _prove_other_size(subject: Subject, program: torch.export.ExportedProgram) -> None:
    """The program reproduces the model at a larger image too, by the same criterion."""
    shape = list(subject.inputs[0].shape)
    shape[2:] = [side + _step(subject) for side in shape[2:]]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(shape, generator=generator).to(subject.inputs[0])
    reference = make_reference(subject.model, (images,))
    module = program.module()
    with torch.no_grad():
        outputs = {
            size: [t.cpu().double().numpy() for t in flat(module(images[:size]))]
            for size in reference.norms
        }
    bad = next((each for each in judge(reference, outputs) if each.reason), None)
    if bad is not None:
        raise ExportError(f"model.pt2 does not reproduce the model at {shape[2:]}: {bad.reason}")


def _step(subject: Subject) -> int:
    """Pixels that a side of the image must be a multiple of, 1 where it is not known.

    timm says by how much each stage of a model shrinks the image; the last one says it for all.
    """
    stages = getattr(subject.model, "feature_info", None)
    if isinstance(stages, list) and stages and isinstance(stages[-1], dict):
        shrunk = stages[-1].get("reduction")
        if isinstance(shrunk, int) and shrunk > 0:
            return shrunk
    return 1


def _facts(subject: Subject) -> str:
    """What a C++ program needs beside model.ts, in words that `std::istream` reads."""
    given = subject.preprocess
    if given is None:
        return ""
    rows = {"input_size": given.input_size, "mean": given.mean, "std": given.std}
    return "\n".join(f"{name} {' '.join(map(str, row))}" for name, row in rows.items()) + "\n"


def _write_libraries(chosen: _Choices, staging: Path, say: Say) -> dict[str, dict[str, Any]]:
    """Copy the operator libraries that the artefacts need into lib/."""
    found: dict[str, dict[str, Any]] = {}
    place = {
        "platform": platform_tag(),
        "isa": [name.lower() for name in compiling.kernels()],
        "gpu_archs": [],
        "elsa_version": __version__,
    }
    (staging / "lib").mkdir()
    if set(chosen.formats) - {"onnx"}:
        say("building the operator library")
        shutil.copyfile(native.build(), staging / TORCH_LIBRARY)
        found[TORCH_LIBRARY] = {"runtime": "torch", "minimum": "2.10", **place}
    if "onnx" in chosen.formats and chosen.onnx_mode != "standard":
        say("building the ONNX Runtime library")
        shutil.copyfile(ort_library.build(), staging / ONNX_LIBRARY)
        found[ONNX_LIBRARY] = {
            "runtime": "onnxruntime",
            "minimum": ort_library.OLDEST_RUNTIME,
            **place,
        }
    if not found:
        (staging / "lib").rmdir()
    return found


def _manifest(
    subject: Subject,
    chosen: _Choices,
    reference: Reference,
    check: CheckReport,
    used: dict[str, tuple[str, ...]],
    libraries: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    by_runtime = {
        runtime: [name for name, one in libraries.items() if one["runtime"] == runtime]
        for runtime in ("torch", "onnxruntime")
    }
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "elsa_version": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": subject.name,
            "class": f"{type(subject.model).__module__}.{type(subject.model).__qualname__}",
            "tower": subject.tower,
            "weights": "".join(c if c.isprintable() else "?" for c in subject.weights),
            "dtype": str(subject.dtype).removeprefix("torch."),
            "device": subject.device,
            "precision": subject.plan.precision,
            "sites": list(subject.plan.sites),
            "reloads_in_elsa": subject.loaded is not None,
        },
        "inputs": _described(subject, chosen),
        "outputs": [
            {
                "name": name,
                "dtype": str(subject.dtype).removeprefix("torch."),
                "shape": ["batch", *tensor.shape[1:]],
            }
            for name, tensor in zip(_output_names(subject), reference.oracle, strict=False)
        ],
        "preprocess": subject.preprocess_dict(),
        "artefacts": {name: _artefact(name, chosen, used[name]) for name in chosen.formats},
        "operators": operators.schemas(
            name for format, names in used.items() if format != "onnx" for name in names
        ),
        "libraries": libraries,
        "artefacts_libraries": by_runtime,
        "reference": reference.to_dict(),
        "check": check.to_dict(),
        "provenance": _provenance(),
        "files": {},
    }


def _described(subject: Subject, chosen: _Choices) -> list[dict[str, Any]]:
    result = []
    for name, tensor in zip(subject.input_names, subject.inputs, strict=True):
        shape: list[str | int] = ["batch", *tensor.shape[1:]]
        entry: dict[str, Any] = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": shape,
            "dynamic": {"0": "batch"},
        }
        if chosen.dynamic_size and tensor.ndim == 4:
            entry["dynamic_in_pt2"] = {"2": "height", "3": "width"}
        result.append(entry)
    return result


def _output_names(subject: Subject) -> tuple[str, ...]:
    """Names a person can read. Further outputs, which few models have, are numbered."""
    if subject.tower is not None:
        return (f"{subject.tower}_features",)
    classes = getattr(subject.model, "num_classes", 0)
    return ("logits",) if isinstance(classes, int) and classes > 0 else ("features",)


def _artefact(name: str, chosen: _Choices, used: tuple[str, ...]) -> dict[str, Any]:
    entry: dict[str, Any] = {"file": FILES[name], "operators": [f"elsa::{n}" for n in used]}
    if name == "onnx":
        entry["runtime"] = {"onnxruntime": f">={ort_library.OLDEST_RUNTIME}"}
        entry["mode"], entry["opset"] = chosen.onnx_mode, chosen.opset
        return entry
    torch_version = ".".join(torch.__version__.split(".")[:2])
    # Only TorchScript's files are meant to load in an older torch than the one that wrote them.
    oldest = "2.10" if name == "torchscript" else torch_version
    entry["runtime"] = {"torch": f">={oldest}", "exported_with": torch.__version__}
    if name == "torchscript":
        entry["note"] = torchscript.DEPRECATION
    if name == "aoti":
        entry["note"] = "compiled for this platform; elsa's library is loaded beside it, not inside"
    return entry


def _provenance() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
    }
