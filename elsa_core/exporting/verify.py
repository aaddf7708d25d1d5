"""`verify`: a bundle's files against its manifest, its artefacts against the model's numbers."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_core.base import files
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.exporting import gpu_library
from elsa_core.exporting import reference as references
from elsa_core.exporting.archive import unpacked
from elsa_core.exporting.artefact_runs import ArtefactReport, judged, run_all
from elsa_core.exporting.manifest import (
    MANIFEST_NAME,
    REFERENCE_NAME,
    Manifest,
    files_in,
    hashed,
    read_bounded,
    read_manifest,
)
from elsa_core.exporting.signature import SIGNATURE_BYTES, SIGNATURE_NAME, matches

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Say = Callable[[str], None]


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
        key: whose signature the bundle must have, of `signature.read_public_key`; without a
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
            manifest.raw, read_bounded(signature, SIGNATURE_BYTES), key
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
    """One line for each file that is missing, extra, or not what the manifest says; a link or a
    device is a ModelError: it may lead outside. The bytes that were compared are written to the
    folder `copy`."""
    present = {}
    for path in files_in(directory):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not path.is_file():
            raise ModelError(f"{path} is a link or a device: a bundle holds plain files alone")
        present[name] = path
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
    """Run every artefact in a process of its own and judge what it computes."""
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
    """Why this machine cannot run an artefact at all; empty where it can be tried."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "it needs a CUDA GPU, and none is here"
        major, minor = torch.cuda.get_device_capability()
        return gpu_library.missing(manifest.content, f"sm_{major}{minor}")
    here = platform_tag()
    libraries = manifest.content.get("libraries")
    runtime = "onnxruntime" if name.startswith("onnx") else "torch"
    for one in libraries.values() if isinstance(libraries, dict) else ():
        if isinstance(one, dict) and one.get("runtime") == runtime:
            made = str(one.get("platform"))[:60]
            if made != here:
                return f"its library is for {made}, this machine is {here}"
    return ""


def platform_tag() -> str:
    """Operating system and architecture, as libraries are made for them: "linux-x86_64"."""
    return f"{platform.system().lower()}-{platform.machine().lower()}"
