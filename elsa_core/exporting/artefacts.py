"""The files of a bundle that run: each format's artefact, and the operator libraries they call."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elsa_core import ops
from elsa_core.backends import compiler as compiling
from elsa_core.backends import native
from elsa_core.base import calls
from elsa_core.base.messages import first_line, quiet
from elsa_core.base.version import __version__
from elsa_core.errors import ElsaError, ExportError, UnavailableError
from elsa_core.exporting import gpu_library, ort_library
from elsa_core.exporting.export_target import ExportTarget, attempt
from elsa_core.exporting.manifest import FILES, PLATFORM
from elsa_core.exporting.onnx import export_onnx, quantise
from elsa_core.exporting.reference import flat, judge, make_reference
from elsa_core.exporting.replay import PROVIDER
from elsa_core.patching import patched_sites
from elsa_core.precision import dtype_name

_FACTS_NAME = "elsa.txt"  # in extra/ of model.ts, and in the metadata of model.aoti.pt2
# model.onnx comes after model.pt2, whose program it rewrites.
_ORDER = ("torchscript", "pt2", "aoti", "onnx", "onnx-int8")
TORCH_LIBRARY = "lib/libelsa_torch.so"
ONNX_LIBRARY = "lib/libelsa_onnxruntime.so"
# Less free space than this on the disk means that a failed write ran out of it.
_NO_ROOM = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Choices:
    """The arguments of `export` that shape the artefacts, checked; AOTI and INT8 are formats."""

    formats: tuple[str, ...]
    onnx_mode: str
    opset: int
    dynamic_size: bool
    batches: tuple[int, ...]
    labels: tuple[str, ...]
    gpu_archs: tuple[str, ...]
    nodes: bool  # whether model.onnx has elsa's nodes


def require_onnx(device: str) -> None:
    """Raise UnavailableError, before anything heavy is done, where a package is missing or, on a
    GPU, ONNX Runtime's provider."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # what is not run is not written
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"format onnx needs a package: {error}; pip install onnx onnxscript onnxruntime"
            f"{'-gpu' * (device == 'cuda')}, or name other --formats"
        ) from None
    if device == "cuda" and PROVIDER not in onnxruntime.get_available_providers():
        raise UnavailableError(
            f"format onnx on a GPU needs an ONNX Runtime with its {PROVIDER}: pip install "
            "onnxruntime-gpu in place of onnxruntime, or name other --formats"
        )


def write_artefacts(
    exported: ExportTarget, chosen: Choices, staging: Path, say: Say
) -> dict[str, tuple[str, ...]]:
    """Write each artefact; returns elsa's operators in its graph, torch's or ONNX's names. Raises
    ExportError where the model cannot be written so, or the file is not the model."""
    facts: dict[str, Any] = {}  # what a C++ program needs beside a model
    if exported.preprocess is not None:
        facts = {key: getattr(exported.preprocess, key) for key in ("input_size", "mean", "std")}
        facts["dtype"] = [dtype_name(exported.first[0].dtype)]
    # in words that `std::istream` reads
    text = "".join(f"{key} {' '.join(map(str, row))}\n" for key, row in facts.items())
    used: dict[str, tuple[str, ...]] = {}
    programs: dict[str, torch.export.ExportedProgram] = {}
    for name in sorted(chosen.formats, key=_ORDER.index):
        path = staging / FILES[name]
        say(f"exporting {path.name}")
        try:
            if name == "torchscript":
                used[name] = _write_torchscript(exported, path, text)
            elif name.startswith("onnx"):
                used[name] = _write_onnx(exported, chosen, path, programs.get("pt2"))
            else:
                used[name] = _write_program(exported, chosen, path, programs, text)
        except (ElsaError, OSError):
            raise
        except Exception as error:
            # PyTorch's writers report a full disk as a RuntimeError of their own words.
            if shutil.disk_usage(staging).free < _NO_ROOM:
                raise OSError(errno.ENOSPC, "No space left on device") from error
            why = first_line(error)
            if name == "aoti" and " " in tempfile.gettempdir():
                why += " (its commands do not quote the space in the temporary folder: set TMPDIR)"
            raise ExportError(f"{path.name} cannot be written: {why}") from error
    return {name: used[name] for name in chosen.formats}


def _write_torchscript(exported: ExportTarget, path: Path, facts: str) -> tuple[str, ...]:
    """The batch is dynamic as far as the model's own code takes it from its input's shape; proof is
    the verification at several batch sizes."""
    model, inputs = exported.model, exported.first
    traced = attempt(
        "tracing to TorchScript",
        model,
        lambda: torch.jit.trace(model, inputs, strict=False, check_trace=False),
    )
    names = checked_operators(traced, exported.device)
    # Python writes the bytes: torch's own writer aborts the process where the disk is full.
    with quiet(), path.open("wb") as file:
        torch.jit.save(traced, file, _extra_files={_FACTS_NAME: facts})
    return names


def _write_program(
    exported: ExportTarget, chosen: Choices, path: Path,
    programs: dict[str, torch.export.ExportedProgram], facts: str,
) -> tuple[str, ...]:  # fmt: skip
    """model.pt2 or model.aoti.pt2. The first is kept in `programs` for model.onnx, unless the model
    calls `elsa.linear`, which model.onnx holds as nodes and this program does not."""
    compiled = path.name == FILES["aoti"]
    model, inputs, step = exported.model, exported.first, size_step(exported)
    dynamic_size = chosen.dynamic_size and not compiled
    batch, *sides = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    sizes = {axis: step * side if step > 1 else side for axis, side in enumerate(sides, 2)}
    shapes = tuple({0: batch, **(sizes if dynamic_size and t.ndim == 4 else {})} for t in inputs)
    try:
        with calls.products(kept=False) as products:
            program = attempt(
                "torch.export" + " with a dynamic image size" * dynamic_size,
                model,
                lambda: torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False),
            )
    except ExportError as error:
        # timm built a part of it for one size, and could build it for any
        parts = (getattr(part, "dynamic_img_size", None) for part in model.modules())
        if dynamic_size and any(each is False for each in parts):
            raise ExportError(
                "this model takes images of one size: build it with dynamic_img_size=True "
                "(--model-kwargs dynamic_img_size=True), then export it with a dynamic size"
            ) from error
        raise
    names = checked_operators(program, exported.device)
    if compiled:  # elsa's library is loaded beside it, not inside
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path),
                inductor_configs={"aot_inductor.metadata": {_FACTS_NAME: facts}},
            )  # fmt: skip
        if sys.platform == "linux" and brings_cpp_library(path):
            raise ExportError(
                "the C++ compiler (CXX) links its standard library statically: beside torch's own "
                "a second one ends the process; set CXX to a compiler that links libstdc++.so"
            )
        return names
    if dynamic_size:
        _prove_other_sizes(exported, program, chosen.batches)
    elif not products.asked:
        programs["pt2"] = program
    program._example_inputs = None  # a copy of data that the bundle holds anyway
    # Python writes the bytes: torch's own writer aborts the process where the disk is full.
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())
    return names


def brings_cpp_library(package: Path) -> bool:
    """Whether a library in a package does not name the C++ library that it needs."""
    with zipfile.ZipFile(package) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        # names of what they need are at their beginning
        heads = (archive.open(name).read(1 << 24) for name in libraries)
        return any(b"libstdc++.so" not in head and b"libc++.so" not in head for head in heads)


def _write_onnx(
    exported: ExportTarget, chosen: Choices, path: Path,
    program: torch.export.ExportedProgram | None,
) -> tuple[str, ...]:  # fmt: skip
    """model.onnx or, from it, model.int8.onnx."""
    import onnx

    if path.name != FILES["onnx"]:
        quantise(path.with_name(FILES["onnx"]), path)
    else:
        model, inputs = exported.model, exported.first
        if exported.device != "cpu":  # the CPU's graph is traced
            program, inputs = None, tuple(tensor.cpu() for tensor in inputs)
            model = copy.deepcopy(model).cpu()
            for site in patched_sites(model).values():
                vars(site)["elsa_backend"] = "auto"  # one named may serve GPUs alone
        export_onnx(
            model, inputs, path, mode=chosen.onnx_mode, opset=chosen.opset, program=program,
            input_names=exported.input_names, output_names=exported.output_names,
        )  # fmt: skip
    graph = onnx.load(str(path), load_external_data=False).graph
    names = tuple(sorted({node.op_type for node in graph.node if node.domain == "elsa"}))
    if not names and chosen.nodes and path.name == FILES["onnx"]:
        raise ExportError("model.onnx calls none of elsa's operators: no patched site was reached")
    return names


def _prove_other_sizes(
    exported: ExportTarget, program: torch.export.ExportedProgram, batches: tuple[int, ...]
) -> None:
    """The program reproduces the model by the same criterion at a larger image, whose sides differ,
    and at a smaller one where that is no single patch."""
    module, step = program.module(), size_step(exported)
    rows, channels, height, width = exported.inputs[0].shape
    sizes = [(height + step, width + 2 * step), (height, width - step)]
    for sides in sizes if width >= 3 * step else sizes[:1]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((rows, channels, *sides), generator=generator).to(exported.inputs[0])
        reference = make_reference(exported.model, (images,), batches)
        with torch.no_grad():
            outputs = {
                size: [t.cpu().double().numpy() for t in flat(module(images[:size]))]
                for size in reference.norms
            }
        bad = next((each for each in judge(reference, outputs) if each.reason), None)
        if bad is not None:
            where = f"{sides[0]} x {sides[1]}"
            raise ExportError(f"model.pt2 does not reproduce the model at {where}: {bad.reason}")


def size_step(exported: ExportTarget) -> int:
    """Pixels that a side of the image must be a multiple of, 1 where it is not known.

    timm says by how much each stage of a model shrinks the image; the last one says it for all.
    """
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        shrunk: Any = exported.model
        shrunk = shrunk.feature_info[-1]["reduction"]
        if isinstance(shrunk, int) and shrunk > 0:
            return shrunk
    return 1


def write_libraries(
    exported: ExportTarget, chosen: Choices, staging: Path, say: Say, *, plans: bool
) -> dict[str, dict[str, Any]]:
    """Copy the operator libraries that the artefacts need into lib/; `plans`: with the GPU's."""
    found: dict[str, dict[str, Any]] = {}
    place = {
        "platform": PLATFORM,
        "isa": [name.lower() for name in compiling.kernels()],
        "gpu_archs": [],
        "elsa_version": __version__,
    }
    (staging / "lib").mkdir()
    on_gpu = exported.device == "cuda"
    formats = [name for name in chosen.formats if name != "onnx" or chosen.nodes]
    if formats and plans:
        say("recording the plans of the GPU's calls")
        # model.aoti.pt2 is model.pt2 compiled, and has its calls
        files = [(name, staging / FILES[name]) for name in formats if name != "aoti"]
        kernels = gpu_library.write(
            files, exported.inputs, chosen.batches, staging, chosen.gpu_archs, say,
            exported.plan.precision,
        )  # fmt: skip
        entry = {"runtime": "cuda", "minimum": "2.10", **place, **kernels}
        found |= {gpu_library.LIBRARY: entry, gpu_library.PLANS: entry}
    elif set(chosen.formats) - {"onnx", "onnx-int8"}:
        say("building the operator library")
        shutil.copyfile(native.build(), staging / TORCH_LIBRARY)
        found[TORCH_LIBRARY] = {"runtime": "torch", "minimum": "2.10", **place}
    if chosen.nodes:
        say("building the ONNX Runtime library")
        shutil.copyfile(ort_library.build(on_gpu=on_gpu), staging / ONNX_LIBRARY)
        oldest = ort_library.OLDEST_ON_GPU if on_gpu else ort_library.OLDEST_RUNTIME
        found[ONNX_LIBRARY] = {"runtime": "onnxruntime", "minimum": oldest, **place}
    if not found:
        (staging / "lib").rmdir()
    return found


def checked_operators(traced: Any, device: str) -> tuple[str, ...]:
    """Names of elsa's operators in a traced module or exported program, without the domain. Raises
    ExportError over dropout, an operator that only this package's Python code computes, and none
    at all."""
    if isinstance(traced, torch.export.ExportedProgram):  # with its subgraphs
        graphs = (getattr(module, "graph", None) for module in traced.graph_module.modules())
        targets = [node.target for graph in graphs if graph is not None for node in graph.nodes]
        called = (each for each in targets if isinstance(each, torch._ops.OpOverload))
        names = {each._opname for each in called if each.namespace == "elsa"}
    else:
        names = set(re.findall(r"\belsa::(\w+)", str(traced.inlined_graph)))
    found = tuple(sorted(names))
    if any(name.startswith("attention_dropout") for name in found):
        raise ExportError("the graph drops attention weights: a bundle is for inference")
    if eager := [name for name in found if name.endswith("_eager")]:
        why = "a site was patched with backend 'eager', or its head_dim or dtype has no kernel"
        if device == "cpu" and not (answer := native.load()).ok:
            why = f"the native library is off ({answer.reason})"
        raise ExportError(f"the graph calls elsa::{eager[0]}, which no library holds: {why}")
    records = [ops.BY_SCHEMA.get(f"elsa::{name}") for name in found]
    if all(record is not None and record.kind == "linear" for record in records):  # no site
        raise ExportError("the graph calls none of elsa's operators: no patched site was reached")
    return found
