"""`verify`: a bundle's files against its manifest, its artefacts against the model's numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elsa_core.base import files
from elsa_core.base.processes import running
from elsa_core.base.reading import read_bytes
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.exporting import gpu_library, replay
from elsa_core.exporting import reference as references
from elsa_core.exporting.archive import unpacked
from elsa_core.exporting.manifest import (
    MANIFEST_NAME,
    PLATFORM,
    REFERENCE_NAME,
    Manifest,
    files_in,
    hashed,
    read_manifest,
)
from elsa_core.exporting.signature import SIGNATURE_BYTES, SIGNATURE_NAME, matches
from elsa_core.exporting.templates import load as template
from elsa_core.measuring.documents import finite

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

INT8 = "onnx-int8"
_SECONDS = 3600
_BLOCKED = ("elsa_core", "elsa_cli", "timm", "open_clip", "torchvision")
_OPENVINO = "openvino"
# Above this an artefact runs alone: each process holds the weights once more.
_SIDE_BY_SIDE_BYTES = 1 << 30
# What takes longest begins first.
_ORDER = ("aoti", "pt2", "torchscript", "onnx", INT8)
Say = Callable[[str], None]


@dataclass(frozen=True)
class ArtefactReport:
    """What became of one artefact."""

    format: str  # "torchscript", "onnx", "pt2", "aoti" or "onnx-int8"
    status: str  # "ok", "failed", or "skipped" where its runtime is not installed
    reason: str  # why not ok, one line
    # The largest relative error and what is allowed, by batch size. To onnx-int8 twice the error
    # that was measured as it was exported is allowed.
    batches: dict[int, tuple[float, float]]
    # "ok" where OpenVINO reproduces the model too, else why not; empty where it was not tried.
    openvino: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "status": self.status,
            "reason": self.reason,
            "batches": {
                str(size): {"error": finite(error), "allowed": finite(allowed)}
                for size, (error, allowed) in self.batches.items()
            },
            "openvino": self.openvino,
        }


@dataclass(frozen=True)
class Run:
    """One run of an artefact, and what came back, or why nothing did."""

    runtime: str
    library: bool  # with the bundle's
    outputs: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)  # by batch size
    further: np.ndarray[Any, Any] | None = None  # the first output for the further inputs
    failure: str = ""  # one line
    missing: str = ""  # the runtime, or its provider, that is not installed


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        path: the bundle.
        files: how many files were compared with the manifest.
        artefacts: each artefact; empty where files failed or were all that was asked for.
        failures: one line each; the bundle verifies where there is none.
        manifest: what the bundle says of itself.
        signed: whether the bundle has a signature and it matches the key that was given.
    """

    path: Path
    files: int
    artefacts: tuple[ArtefactReport, ...]
    failures: tuple[str, ...]
    manifest: dict[str, Any]
    signed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing failed. A skipped artefact is no failure."""
        return not self.failures

    @property
    def skipped(self) -> tuple[str, ...]:
        """The formats whose runtime is missing."""
        return tuple(each.format for each in self.artefacts if each.status == "skipped")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "path": str(self.path),
            "ok": self.ok,
            "files": self.files,
            "signed": self.signed,
            "artefacts": {each.format: each.to_dict() for each in self.artefacts},
            "failures": list(self.failures),
            "model": self.manifest.get("model"),
        }


def verify(
    path: str | os.PathLike[str],
    *,
    run: bool = True,
    key: Ed25519PublicKey | None = None,
    before_run: Callable[[bool], None] | None = None,
    progress: Say | None = None,
) -> VerifyReport:
    """Verify a bundle: directory or zip.

    Every file must have the size and SHA-256 of the manifest, with nothing missing, nothing extra
    and no link. Then each artefact runs in a fresh process, on the CPU or GPU it was made for, and
    must reproduce the model within the criterion of `check`. What runs is a private copy of the
    bytes that were compared: nobody can exchange them in between. That runs the bundle's own
    libraries: hashes in a manifest show damage, not intent, so run bundles only of those whom you
    trust.

    Args:
        path: what `export` wrote.
        run: False compares the files alone and runs nothing of the bundle.
        key: whose signature the bundle must have, of `signature.read_key`; without a
            matching one nothing of the bundle runs. Default: none is asked for.
        before_run: called when the files match, before anything of the bundle runs, with whether
            it is signed; what it raises ends the verification.
        progress: called with one line before each step.

    Returns:
        What was found; `ok` is the verdict.

    Raises:
        ModelError: no bundle, or a malformed or hostile one.
        UnavailableError: no disk space for the copy.
    """
    given = files.located(path, ModelError)
    say = progress or (lambda line: None)
    say("reading the manifest")
    with ExitStack() as stack:
        directory = stack.enter_context(unpacked(given))
        manifest = read_manifest(directory)
        say("comparing files")
        failures, copy, signature = [], None, directory / SIGNATURE_NAME
        if key is not None and not signature.exists():
            failures = [f"it is not signed: there is no {SIGNATURE_NAME}"]
        elif key is not None and not matches(
            manifest.raw, read_bytes(signature, SIGNATURE_BYTES), key
        ):
            words = "does not match the key: changed, or signed by another"
            failures = [f"{SIGNATURE_NAME} {words}"]
        signed = key is not None and not failures
        # A zip has been unpacked into a private folder.
        if run and not failures and directory == given:
            copy = stack.enter_context(files.scratch("elsa-bundle-"))
            total, free = sum(e.size for e in manifest.files.values()), shutil.disk_usage(copy).free
            if total > free:
                raise UnavailableError(
                    f"a copy of the bundle takes {total / 1e6:.0f} MB and {free / 1e6:.0f} MB are "
                    f"free in {copy.parent}: set TMPDIR to another folder"
                )
            (copy / MANIFEST_NAME).write_bytes(manifest.raw)
        failures += _compare_files(directory, manifest, copy)
        reports: Sequence[ArtefactReport] = ()
        if run and not failures:
            if before_run is not None:
                before_run(signed)
            reports = _run_artefacts(copy or directory, manifest, say)
            failures = [f"{r.format}: {r.reason}" for r in reports if r.status == "failed"]
    return VerifyReport(
        given, len(manifest.files), tuple(reports), tuple(failures), manifest.content, signed
    )


def _compare_files(directory: Path, manifest: Manifest, copy: Path | None = None) -> list[str]:
    """One line for each file that is missing, extra, or not what the manifest says. The bytes that
    were compared are written to the folder `copy`."""
    present = {path.relative_to(directory).as_posix(): path for path in files_in(directory)}
    for name in (MANIFEST_NAME, SIGNATURE_NAME):
        present.pop(name, None)
    failures = [f"{name} is missing" for name in manifest.files if name not in present]
    for name in (each for each in present if each not in manifest.files):
        # Bytecode runs in load.py's place; Python writes it where load.py is imported.
        hint = ": delete __pycache__" if name.startswith("__pycache__/") else ""
        failures.append(f"{name} is not in the manifest{hint}")
    for name, entry in manifest.files.items():
        if name not in present:
            continue
        try:
            if copy is not None:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
            found = hashed(present[name], entry.size, None if copy is None else copy / name)
        except OSError as error:
            failures.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if found.size != entry.size:
            size = f"more than {entry.size}" if found.size > entry.size else found.size
            failures.append(f"{name} has {size} bytes, the manifest says {entry.size}")
        elif found != entry:
            failures.append(f"{name} differs from its sha256: damaged or changed")
    return failures


def _run_artefacts(directory: Path, manifest: Manifest, say: Say) -> list[ArtefactReport]:
    reference = references.read_reference(directory / REFERENCE_NAME, manifest.content)
    device = str(manifest.content["model"]["device"])
    elsewhere = {name: _made_for_elsewhere(manifest, name, device) for name in manifest.artefacts}
    here = {name: one for name, one in manifest.artefacts.items() if not elsewhere[name]}
    answers = run_all(directory, here, device, say)
    return [
        judged(name, one, answers[name], reference)
        if name in here
        else ArtefactReport(name, "skipped", elsewhere[name], {})
        for name, one in manifest.artefacts.items()
    ]


def _made_for_elsewhere(manifest: Manifest, name: str, device: str) -> str:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "it needs a CUDA GPU, and none is here"
        major, minor = torch.cuda.get_device_capability()
        return gpu_library.missing(manifest.content, f"sm_{major}{minor}")
    libraries = manifest.content.get("libraries")
    runtime = "onnxruntime" if name.startswith("onnx") else "torch"
    for one in libraries.values() if isinstance(libraries, dict) else ():
        if isinstance(one, dict) and one.get("runtime") == runtime:
            made = str(one.get("platform"))[:60]
            if made != PLATFORM:
                return f"its library is for {made}, this machine is {PLATFORM}"
    return ""


def run_all(
    directory: Path, artefacts: Mapping[str, Mapping[str, Any]], device: str,
    say: Callable[[str], None], further: Path | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Run artefacts of a bundle, two processes at a time where that is no question of memory.

    `artefacts` are the manifest's entries of those to run; `further` is a file of more inputs for
    each. ONNX with elsa's nodes and bodies runs with the bundle's library and without; of standard
    operators alone it runs in OpenVINO too, which reads no functions.
    """
    if artefacts:
        say(f"running {', '.join(artefacts)} in fresh processes")
    sizes = [(directory / str(one["file"])).stat().st_size for one in artefacts.values()]
    together = 2 if device == "cpu" and max(sizes, default=0) < _SIDE_BY_SIDE_BYTES else 1
    runs: dict[str, list[Run]] = {name: [] for name in artefacts}
    waiting: deque[tuple[str, Callable[[], Run]]] = deque()
    with ExitStack() as stack:
        for name in sorted(artefacts, key=_ORDER.index):
            onnx, mode = name.startswith("onnx"), artefacts[name].get("mode")
            ways = [("onnxruntime" if onnx else "torch", True)]
            if onnx and mode == "custom":
                ways.append(("onnxruntime", False))
            if onnx and mode == "standard" and importlib.util.find_spec(_OPENVINO):
                ways.append((_OPENVINO, False))
            for runtime, library in ways:
                if len(waiting) == together:
                    first, answer = waiting.popleft()
                    runs[first].append(answer())
                begun = _fresh_run(directory, name, runtime, library, device, further)
                waiting.append((name, stack.enter_context(begun)))
        for name, answer in waiting:
            runs[name].append(answer())
    return runs


@contextmanager
def _fresh_run(
    bundle: Path, format: str, runtime: str, library: bool, device: str, further: Path | None
) -> Iterator[Callable[[], Run]]:
    """Start one artefact of a bundle on its own reference inputs, by the template of load.py, in a
    process that cannot import this package nor the model libraries.

    This runs the bundle's libraries: its code has the rights of this user. What is yielded waits
    for the process, which is killed where the block ends before. On a GPU the package itself is let
    in where the bundle needs its Triton kernels.
    """
    libraries = template.manifest(bundle)["artefacts_libraries"]
    alone = device == "cpu" or format.startswith("onnx") or bool(libraries.get("cuda"))
    with files.scratch("elsa-verify-") as folder:
        output = folder / "outputs.npz"
        how = {
            "blocked": [name for name in _BLOCKED if alone or not name.startswith("elsa")],
            "script": str(Path(template.__file__).resolve()), "format": format,
            "folder": str(bundle.resolve()), "output": str(output), "runtime": runtime,
            "library": library, "further": "" if further is None else str(further.resolve()),
        }  # fmt: skip
        program = Path(replay.__file__).read_text(encoding="utf-8")
        # The working directory comes first in the path of `-c`: it must hold no module.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        with running([sys.executable, "-c", program, json.dumps(how)], cwd=folder, env=environment,
                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # fmt: skip
            yield lambda: _answer(process, Run(runtime, library), output)


def _answer(process: subprocess.Popen[str], run: Run, output: Path) -> Run:
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return replace(run, failure=f"no answer in {_SECONDS} s")
    code = process.returncode
    if code == replay.MISSING_RUNTIME:
        provider = f" with its {replay.PROVIDER}" * errors.endswith(replay.PROVIDER)
        return replace(run, missing=run.runtime + provider)
    if code != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        failure = f"the process ended with {'signal' if code < 0 else 'exit code'} {abs(code)}: "
        failure += lines[-1][:300] if lines else "it said nothing"
        if said := [line for line in lines if line.startswith("failed: ")]:
            failure = said[-1].removeprefix("failed: ")[:400]
        return replace(run, failure=failure)
    with np.load(output, allow_pickle=False) as stored:
        further = stored.get("further")
        for name in (each for each in stored.files if each != "further"):
            run.outputs.setdefault(int(name.partition(".")[0]), []).append(stored[name])
    return replace(run, further=further)


def judged(
    name: str, artefact: Mapping[str, Any], runs: Sequence[Run], reference: references.Reference
) -> ArtefactReport:
    """The verdict over the runs of one artefact; of several runs the larger errors count. Raises
    ModelError where the manifest's errors of onnx-int8 are malformed."""
    if name == INT8:
        reference = references.with_norms(reference, artefact.get("norms"))
    verdict, openvino = ("ok", ""), ""
    batches: dict[int, tuple[float, float]] = {}
    for run in runs:
        reason = run.failure
        found = [] if reason or run.missing else references.judge(reference, run.outputs)
        if bad := next((each for each in found if each.reason), None):
            reason = f"at batch {bad.batch}: {bad.reason}"
        absent = f"{run.missing} is not installed" if run.missing else ""
        if run.runtime == _OPENVINO:
            openvino = reason or absent or "ok"
            continue
        for each in found:
            if each.error > batches.get(each.batch, (-1.0, 0.0))[0]:
                batches[each.batch] = (each.error, each.allowed)
        if verdict[0] == "ok" and absent:
            verdict = "skipped", absent
        elif verdict[0] == "ok" and reason:
            verdict = "failed", reason if run.library else f"without the library, {reason}"
    return ArtefactReport(name, *verdict, batches, openvino)
