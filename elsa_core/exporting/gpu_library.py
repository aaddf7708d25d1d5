"""What a bundle of a CUDA model needs to run without this package and Triton: lib/libelsa_cuda.so
and the plans and kernels of the artefacts' own calls. The library for ONNX Runtime reads the same
file.

It is written where the CUDA library serves the exporting process (ELSA_CUDA_LIBRARY=1), where
architectures are asked for, and where model.onnx has elsa's nodes. The plans are of the batch sizes
that the export verifies (`--batches`): recorded on the GPU that is here, and planned for the others
as `pack/devices.json` describes them, compiled and not run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core.backends import compiler, cuda
from elsa_core.backends.cuda.planfile import Recorded
from elsa_core.errors import ArgumentError, ExportError, UnavailableError
from elsa_core.exporting.onnx import BATCH
from elsa_core.exporting.onnx_operator import DOMAIN, DTYPES, static_shape

LIBRARY: Final = "lib/libelsa_cuda.so"
PLANS: Final = "lib/plans.elsa"
_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
_AXES = 4  # of a mask


def check(
    archs: Sequence[str], device: str, nodes: bool = False, formats: Sequence[str] = ()
) -> bool:
    """Whether an export of a model on this kind of device holds the GPU library; `nodes`: whether
    model.onnx has elsa's nodes. Refuses, before anything heavy is done, architectures that no plans
    can be made for, and "aoti" on a GPU without the library, which serves it by those of "pt2"."""
    on_gpu = device == "cuda"
    wanted = bool(archs) or nodes or os.environ.get(cuda.VARIABLE) == "1"
    held = on_gpu and wanted and cuda.status().ok
    if nodes and on_gpu and not held:
        raise UnavailableError(
            f"format onnx on a GPU needs the CUDA library: {cuda.status().reason}; leave it out of "
            "--formats"
        )
    if on_gpu and "aoti" in formats and ("pt2" not in formats or not held):
        raise ArgumentError(
            "aoti on a GPU needs model.pt2 and the CUDA library in the bundle: name pt2 among the "
            "formats, and give gpu_archs or set ELSA_CUDA_LIBRARY=1"
        )
    if not archs:
        return held
    from elsa_core.backends.triton.pack import build, cases

    known = [f"sm_{number}" for number in cases.ARCHITECTURES]
    if unknown := [arch for arch in archs if arch not in known]:
        names = ", ".join(known)
        raise ArgumentError(f"gpu_archs: {unknown[0][:60]!r}; choose among {names}")
    if not on_gpu:
        raise ArgumentError("gpu_archs: the model is on the CPU: export it with --device cuda")
    if not held:
        raise UnavailableError(f"gpu_archs needs the CUDA library: {cuda.status().reason}")
    build.require_compiler()
    return held


def write(
    artefacts: Sequence[tuple[str, Path]], inputs: tuple[Tensor, ...], batches: Sequence[int],
    staging: Path, archs: Sequence[str], say: Callable[[str], None], precision: str,
) -> dict[str, Any]:  # fmt: skip
    """Run the artefacts, (format, file), on the GPU at each batch size and write the library and
    their plans into lib/; `archs` are architectures beside this GPU's own, `precision` the sites'.

    Gives what the manifest says of both files: "gpu_archs"; "gpu_archs_verified", those that the
    export runs; "gpus", the GPU that each was planned for. Raises ExportError: a call is not by
    kernels of this package alone, or a kernel cannot be compiled.
    """
    from elsa_core.backends.cuda import library, planfile

    device = inputs[0].device
    major, minor = torch.cuda.get_device_capability(device)
    own, loaded, parts = 10 * major + minor, library.load(), []
    for format, path in artefacts:
        model: Any = None
        if format == "torchscript":
            model = torch.jit.load(str(path), map_location=device)
        elif format == "pt2":
            model = torch.export.load(str(path)).module()
        for rows in batches:
            calls: Iterable[Callable[[], object]] = (
                of_nodes(path, rows, precision, device)
                if format == "onnx"
                else [partial(model, *(tensor[:rows] for tensor in inputs))]
            )
            try:
                with torch.cuda.device(device), torch.no_grad():
                    parts.append(planfile.recorded(loaded, partial(_make, calls)))
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
        plans = {n: without_precision(each, precision) for n, each in plans.items()}
    names = [f"sm_{number}" for number in sorted(plans)]
    sizes = ", ".join(map(str, batches))
    served = f"this bundle serves batches of {sizes} on {', '.join(names)}"
    (staging / PLANS).write_bytes(planfile.write(plans, served))
    shutil.copyfile(compiler.build(library.recipe()), staging / LIBRARY)
    return {"gpu_archs": names, "gpu_archs_verified": [f"sm_{own}"], "gpus": gpus}


def planned(recorded: Any, arch: int, say: Callable[[str], None]) -> tuple[Any, str]:
    """Recorded calls for an architecture of `pack/devices.json`, and its GPU that is planned for:
    the first. Raises ExportError where a call is not by kernels alone there."""
    from elsa_core.backends.cuda import planfile
    from elsa_core.backends.triton.pack import cases

    def progress(done: int, total: int) -> None:
        if done < total:
            say(f"compiling for sm_{arch} (kernel {done + 1} of {total})")

    gpu = cases.gpus(arch)[0]
    try:
        found = planfile.planned(recorded, gpu, cuda.OFFERED, progress)
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


def _make(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:  # in one recording: equal layers are planned once
        call()


def of_nodes(
    path: Path, rows: int, precision: str, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Calls of PyTorch's operators with the layouts of a batch of model.onnx, on tensors of zeros
    that each call alone holds: `csrc/onnxruntime/gpu.h` serves a node by the plan of such a call.
    Raises ExportError where the library has no kernel of a node on GPUs, or a shape is not known.
    """
    import onnx_ir as ir
    import sympy

    for node in ir.load(path).graph:
        make = _CALLS.get(node.op_type.partition("_")[0])
        if node.domain != DOMAIN or make is None:  # elsa::Linear runs its body
            continue
        given: list[Tensor | None] = []
        for value in node.inputs:
            if value is None:
                given.append(None)
                continue
            if value.dtype is None or value.dtype.value not in _DTYPES:
                raise ExportError(f"ONNX: the exporter lost the type of {value.name}")
            shape = []
            for size in static_shape(value):
                # a number, or a formula of the batch: "(4*batch)//2"
                formula = size if isinstance(size, int) else size.value
                found = sympy.sympify(formula).subs(BATCH, rows)
                if not found.is_Integer:
                    raise ExportError(f"ONNX on a GPU: the size {formula} is known for no batch")
                shape.append(int(found))
            given.append(torch.zeros(shape, dtype=_DTYPES[value.dtype.value], device=device))
        yield make({one.name: one.value for one in node.attributes.values()}, precision, *given)


def without_precision(found: Recorded, precision: str) -> Recorded:
    """Every layout that ends with the precision once more without it: a node does not say it."""
    end = struct.pack("<QQ", len(precision), int.from_bytes(precision.encode(), "little"))
    more = tuple(
        (name, words.removesuffix(end), plan)
        for name, words, plan in found.layouts
        if words.endswith(end)
    )
    return dataclasses.replace(found, layouts=(*found.layouts, *more))


def _attention(
    terms: dict[str, Any], precision: str, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Callable[[], object]:
    """Every head is a batch entry of its own, so that the result is dense as ONNX has it."""
    batch, heads = q.shape[:2]
    if k.shape[1] != heads:
        raise ExportError(
            "ONNX on a GPU: grouped heads have no kernel; leave onnx out of --formats"
        )
    q, k, v = (t.reshape(batch * heads, 1, *t.shape[2:]) for t in (q, k, v))
    if mask is not None:
        mask = mask.reshape((1,) * (_AXES - mask.dim()) + tuple(mask.shape))
        if mask.shape[:2] not in ((1, 1), (batch, heads)):
            raise ExportError(
                "ONNX on a GPU: a mask must be one for all heads and images, or one for each; "
                "leave onnx out of --formats"
            )
        mask = mask.reshape(-1, 1, *mask.shape[2:])
    rest = (mask, bool(terms["is_causal"]), terms["scale"], precision)
    return partial(torch.ops.elsa.attention.default, q, k, v, *rest)


def _packed(
    terms: dict[str, Any], precision: str, qkv: Tensor, mask: Any = None
) -> Callable[[], object]:
    batch, tokens, width = qkv.shape
    heads, channels = terms["num_heads"], width // 3
    dim = channels // heads
    # As `Call::tensor` of gpu.h has the strides of one head.
    strides = (tokens * width, dim if heads > 1 else tokens * width, width, 1)
    size = (batch, heads, tokens, dim)
    q, k, v = (qkv.as_strided(size, strides, part * channels) for part in range(3))
    if mask is not None:
        mask = mask.reshape((1,) * (_AXES - mask.dim()) + tuple(mask.shape))
    rest = (mask, bool(terms["is_causal"]), terms["scale"], precision)
    return partial(torch.ops.elsa.attention.default, q, k, v, *rest)


def _window(
    terms: dict[str, Any], precision: str, qkv: Tensor, bias: Any = None, pad_qkv: Any = None,
    logit_scale: Any = None,
) -> Callable[[], object]:  # fmt: skip
    return partial(
        torch.ops.elsa.window_attention.default, qkv, bias, None, pad_qkv, logit_scale,
        terms["num_heads"], list(terms["window_size"]), list(terms["shift_size"]), terms["scale"],
        terms["mask_value"], terms["layout"], bool(terms["grid"]), precision,
    )  # fmt: skip


_CALLS: dict[str, Callable[..., Callable[[], object]]] = {
    "Attention": _attention, "PackedAttention": _packed, "WindowAttention": _window
}  # fmt: skip
