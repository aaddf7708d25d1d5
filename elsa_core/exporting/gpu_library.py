"""What a bundle of a CUDA model needs to run without this package and Triton: lib/libelsa_cuda.so
and the plans and kernels of the artefacts' own calls. The library for ONNX Runtime reads the same
file.

Not chosen by default until it was measured on a GPU: it is written where the CUDA library serves
the exporting process (ELSA_CUDA_LIBRARY=1), where architectures are asked for, and where model.onnx
has elsa's nodes. The plans are of the batch sizes that the export verifies (`--batches`), for the
GPU that is here, on which they are recorded, and for the other architectures: the same calls,
planned for a GPU that `pack/devices.json` describes, compiled and not run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core.backends import compiler, cuda
from elsa_core.errors import ArgumentError, ExportError, UnavailableError

LIBRARY: Final = "lib/libelsa_cuda.so"
PLANS: Final = "lib/plans.elsa"


def is_asked_for(device: str, archs: Sequence[str] = (), nodes: bool = False) -> bool:
    """Whether an export of a model on this kind of device holds the GPU library: architectures that
    were asked for, and whether model.onnx has elsa's nodes, are what `check` has accepted."""
    wanted = bool(archs) or nodes or cuda.is_asked_for()
    return device == "cuda" and wanted and cuda.status().ok


def check(
    archs: Sequence[str], device: str, nodes: bool = False, formats: Sequence[str] = ()
) -> None:
    """Refuse architectures that no plans can be made for, before anything heavy is done; and "aoti"
    on a GPU without the library, which serves it by the plans of "pt2". `nodes` as in
    `is_asked_for`."""
    if nodes and device == "cuda" and not cuda.status().ok:
        raise UnavailableError(
            f"format onnx on a GPU needs the CUDA library: {cuda.status().reason}; leave it out of "
            "--formats"
        )
    compiled = device == "cuda" and "aoti" in formats
    if compiled and ("pt2" not in formats or not is_asked_for(device, archs, nodes)):
        raise ArgumentError(
            "aoti on a GPU needs model.pt2 and the CUDA library in the bundle: name pt2 among the "
            "formats, and give gpu_archs or set ELSA_CUDA_LIBRARY=1"
        )
    if not archs:
        return
    from elsa_core.backends.triton.pack import build, cases

    known = cases.architectures()
    unknown = next((a for a in archs if a not in {f"sm_{n}" for n in known}), None)
    if unknown is not None:
        names = ", ".join(f"sm_{n}" for n in known)
        raise ArgumentError(f"gpu_archs: {unknown[:60]!r}; choose among {names}")
    if device != "cuda":
        raise ArgumentError("gpu_archs: the model is on the CPU: export it with --device cuda")
    if not cuda.status().ok:
        raise UnavailableError(f"gpu_archs needs the CUDA library: {cuda.status().reason}")
    build.require_compiler()


def write(
    artefacts: Sequence[tuple[str, Path]],
    inputs: tuple[Tensor, ...],
    batches: Sequence[int],
    staging: Path,
    archs: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    precision: str = "",
) -> dict[str, Any]:
    """Run the artefacts on the GPU at each batch size and write the library and their plans into
    lib/.

    Args:
        artefacts: (format, file), of "torchscript", "pt2", and "onnx" with elsa's nodes.
        inputs: of the model, max(batches) rows or more.
        archs: architectures beside this GPU's own, that `check` has accepted.
        precision: of the model's sites.

    Returns:
        What the manifest says of both files: "gpu_archs"; "gpu_archs_verified", those that the
        export runs; "gpus", the GPU that each was planned for.

    Raises:
        ExportError: a call is not by kernels of this package alone, or a kernel cannot be compiled.
    """
    from elsa_core.backends.cuda import library, planfile
    from elsa_core.exporting import onnx_calls

    device = inputs[0].device
    major, minor = torch.cuda.get_device_capability(device)
    own, loaded, parts = 10 * major + minor, library.load(), []
    for format, path in artefacts:
        run = _runner(format, path, inputs, precision)
        for rows in batches:
            try:
                with torch.cuda.device(device), torch.no_grad():
                    parts.append(planfile.recorded(loaded, partial(run, rows)))
            except UnavailableError as error:
                asked_by = "onnx" if format == "onnx" else "ELSA_CUDA_LIBRARY, gpu_archs and onnx"
                raise ExportError(
                    f"{path.name} cannot run by the CUDA library alone: {error}; patch it with "
                    f"scope='attention', or leave out {asked_by}"
                ) from error
    plans = {own: planfile.joined(parts)}
    gpus = {f"sm_{own}": torch.cuda.get_device_name(device)}
    for arch in archs:
        if arch not in gpus:
            number = int(arch.removeprefix("sm_"))
            plans[number], gpus[arch] = planned(plans[own], number, say)
    if any(format == "onnx" for format, _ in artefacts):
        plans = {n: onnx_calls.without_precision(each, precision) for n, each in plans.items()}
    names = [f"sm_{number}" for number in sorted(plans)]
    sizes = ", ".join(map(str, batches))
    served = f"this bundle serves batches of {sizes} on {', '.join(names)}"
    (staging / PLANS).write_bytes(planfile.write(plans, served))
    shutil.copyfile(compiler.build(library.recipe()), staging / LIBRARY)
    return {"gpu_archs": names, "gpu_archs_verified": [f"sm_{own}"], "gpus": gpus}


def planned(recorded: Any, arch: int, say: Callable[[str], None]) -> tuple[Any, str]:
    """Recorded calls for an architecture of `pack/devices.json`, and its GPU that is planned for:
    the first. Raises ExportError where a call is not by kernels alone there."""
    from elsa_core.backends.cuda import other_gpus
    from elsa_core.backends.triton.pack import cases

    def progress(done: int, total: int) -> None:
        if done < total:
            say(f"compiling for sm_{arch} (kernel {done + 1} of {total})")

    gpu = cases.gpus(arch)[0]
    try:
        found = other_gpus.planned(recorded, gpu, cuda.offered(), progress)
    except UnavailableError as error:
        raise ExportError(f"{error}; leave sm_{arch} out of gpu_archs") from error
    return found, gpu.facts.name


def missing(manifest: Mapping[str, Any], here: str) -> str:
    """Why the plans of a bundle serve no GPU of the architecture `here`; empty where they do, and
    of a bundle without plans. The manifest's libraries may say anything.
    """
    libraries = manifest.get("libraries")
    entry = libraries.get(PLANS) if isinstance(libraries, dict) else None
    archs = entry.get("gpu_archs") if isinstance(entry, dict) else None
    if not isinstance(archs, list) or here in archs:
        return ""
    held = ", ".join(str(arch)[:20] for arch in archs[:20])
    return f"its kernels are for {held}, and the GPU here is {here}"


def _runner(
    format: str, path: Path, inputs: tuple[Tensor, ...], precision: str
) -> Callable[[int], object]:
    """What makes an artefact's calls of so many rows."""
    device = inputs[0].device
    if format == "onnx":
        from elsa_core.exporting import onnx_calls

        def run(rows: int) -> None:
            for call in onnx_calls.of_nodes(path, rows, precision, device):
                call()

        return run
    model: Callable[..., object] = (
        torch.jit.load(str(path), map_location=device)
        if format == "torchscript"
        else torch.export.load(str(path)).module()
    )
    return lambda rows: model(*(tensor[:rows] for tensor in inputs))
