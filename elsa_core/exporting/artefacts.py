"""The files of a bundle that run: each format's artefact, and the operator libraries they call."""

from __future__ import annotations

import copy
import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elsa_core.backends import compiler as compiling
from elsa_core.backends import native
from elsa_core.base import calls
from elsa_core.base.version import __version__
from elsa_core.errors import ElsaError, ExportError, UnavailableError
from elsa_core.exporting import (
    exported_program,
    gpu_library,
    operators,
    ort_library,
    quantised,
    torchscript,
)
from elsa_core.exporting.export_target import ExportTarget
from elsa_core.exporting.onnx import export_onnx
from elsa_core.exporting.reference import BATCH_SIZES, flat, judge, make_reference
from elsa_core.exporting.verify import platform_tag
from elsa_core.patching import patched_sites
from elsa_core.precision import dtype_name

FILES = {
    "torchscript": "model.ts",
    "onnx": "model.onnx",
    "pt2": "model.pt2",
    "aoti": "model.aoti.pt2",
    "onnx-int8": "model.int8.onnx",
}
# model.onnx comes after model.pt2, whose program it rewrites.
_ORDER = ("torchscript", "pt2", "aoti", "onnx", "onnx-int8")
TORCH_LIBRARY = "lib/libelsa_torch.so"
ONNX_LIBRARY = "lib/libelsa_onnxruntime.so"
CUDA_PROVIDER = "CUDAExecutionProvider"
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
    batches: tuple[int, ...] = BATCH_SIZES
    labels: tuple[str, ...] = ()
    gpu_archs: tuple[str, ...] = ()

    @property
    def nodes(self) -> bool:
        """Whether model.onnx has elsa's nodes."""
        return "onnx" in self.formats and self.onnx_mode != "standard"


def write_artefacts(
    exported: ExportTarget, chosen: Choices, staging: Path, say: Say
) -> dict[str, tuple[str, ...]]:
    """Write each artefact; returns elsa's operators in its graph, torch's or ONNX's names.

    Raises:
        ExportError: the model cannot be written in this format, or the file is not the model.
        UnavailableError: a package or a compiler is missing.
        OSError: the file cannot be written.
    """
    used, writer = {}, _Writer(exported, chosen, staging)
    for name in sorted(chosen.formats, key=_ORDER.index):
        say(f"exporting {FILES[name]}")
        used[name] = _written(name, writer)
    return {name: used[name] for name in chosen.formats}


def require_onnx(device: str) -> None:
    """Before anything heavy is done: whether model.onnx can be written and run here.

    Raises:
        UnavailableError: a package or, on a GPU, ONNX Runtime's provider is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # what is not run is not written
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"format onnx needs a package: {error}; pip install onnx onnxscript onnxruntime"
            f"{'-gpu' * (device == 'cuda')}, or name other --formats"
        ) from None
    if device == "cuda" and CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise UnavailableError(
            f"format onnx on a GPU needs an ONNX Runtime with its {CUDA_PROVIDER}: pip install "
            "onnxruntime-gpu in place of onnxruntime, or name other --formats"
        )


def _written(name: str, writer: _Writer) -> tuple[str, ...]:
    try:
        return writer.write(name)
    except (ElsaError, OSError):
        raise
    except Exception as error:
        # PyTorch's writers report a full disk as a RuntimeError of their own words.
        if shutil.disk_usage(writer.staging).free < _NO_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device") from error
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"{FILES[name]} cannot be written: {line[:300]}") from error


@dataclass
class _Writer:
    """Writes the artefacts of one bundle. torch.export traces a model once for model.pt2 and
    model.onnx: `program` is the one that model.pt2 holds, of an open batch. A model that calls
    `elsa.linear` is traced for each of them."""

    exported: ExportTarget
    chosen: Choices
    staging: Path
    program: torch.export.ExportedProgram | None = None

    def write(self, name: str) -> tuple[str, ...]:
        exported, path = self.exported, self.staging / FILES[name]
        if name == "torchscript":
            return torchscript.export_torchscript(
                exported.model, exported.first, path, facts=_facts(exported)
            )
        if name == "onnx":
            return self._write_onnx(path)
        if name == "onnx-int8":
            quantised.quantise(self.staging / FILES["onnx"], path)
            return _elsa_nodes(path)
        dynamic_size = self.chosen.dynamic_size and name == "pt2"
        with calls.Products(kept=False) as products:
            program = exported_program.export_program(
                exported.model, exported.first, dynamic_size=dynamic_size, step=size_step(exported)
            )
        names = operators.in_program(program)
        if name == "aoti":
            exported_program.compile_program(program, path, _facts(exported))
            return names
        if dynamic_size:
            _prove_other_sizes(exported, program, self.chosen.batches)
        elif not products.asked:  # which model.onnx holds as nodes, and this program does not
            self.program = program
        exported_program.save_program(program, path)
        return names

    def _write_onnx(self, path: Path) -> tuple[str, ...]:
        mode, exported = self.chosen.onnx_mode, self.exported
        model, inputs = _on_cpu(exported)
        export_onnx(
            model,
            inputs,
            path,
            mode=mode,
            opset=self.chosen.opset,
            input_names=exported.input_names,
            output_names=exported.output_names,
            dynamic_batch=True,
            program=self.program if exported.device == "cpu" else None,
        )
        names = _elsa_nodes(path)
        if not names and mode != "standard":
            raise ExportError(
                "model.onnx calls none of elsa's operators: no patched site was reached"
            )
        return names


def _on_cpu(exported: ExportTarget) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model as the CPU's graph of it is traced: a copy, where it is on a GPU."""
    if exported.device == "cpu":
        return exported.model, exported.first
    model = copy.deepcopy(exported.model).cpu()
    for site in patched_sites(model).values():
        vars(site)["elsa_backend"] = "auto"  # one named may serve GPUs alone
    return model, tuple(tensor.cpu() for tensor in exported.first)


def _elsa_nodes(path: Path) -> tuple[str, ...]:
    """Elsa's operators in an ONNX graph."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return tuple(sorted({node.op_type for node in graph.node if node.domain == "elsa"}))


def _prove_other_sizes(
    exported: ExportTarget, program: torch.export.ExportedProgram, batches: tuple[int, ...]
) -> None:
    """The program reproduces the model at other images too, by the same criterion."""
    module = program.module()
    rows, channels, height, width = exported.inputs[0].shape
    for sides in _other_sizes(height, width, size_step(exported)):
        shape = (rows, channels, *sides)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(shape, generator=generator).to(exported.inputs[0])
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


def _other_sizes(height: int, width: int, step: int) -> list[tuple[int, int]]:
    """A larger image, whose sides differ, and a smaller one where that is no single patch."""
    sizes = [(height + step, width + 2 * step)]
    if width >= 3 * step:
        sizes.append((height, width - step))
    return sizes


def size_step(exported: ExportTarget) -> int:
    """Pixels that a side of the image must be a multiple of, 1 where it is not known.

    timm says by how much each stage of a model shrinks the image; the last one says it for all.
    """
    stages = getattr(exported.model, "feature_info", None)
    if isinstance(stages, list) and stages and isinstance(stages[-1], dict):
        shrunk = stages[-1].get("reduction")
        if isinstance(shrunk, int) and shrunk > 0:
            return shrunk
    return 1


def _facts(exported: ExportTarget) -> str:
    """What a C++ program needs beside a model, in words that `std::istream` reads."""
    given = exported.preprocess
    if given is None:
        return ""
    rows = {
        "input_size": given.input_size, "mean": given.mean, "std": given.std,
        "dtype": [dtype_name(exported.first[0].dtype)],
    }  # fmt: skip
    return "\n".join(f"{name} {' '.join(map(str, row))}" for name, row in rows.items()) + "\n"


def write_libraries(
    exported: ExportTarget, chosen: Choices, staging: Path, say: Say
) -> dict[str, dict[str, Any]]:
    """Copy the operator libraries that the artefacts need into lib/."""
    found: dict[str, dict[str, Any]] = {}
    place = {
        "platform": platform_tag(),
        "isa": [name.lower() for name in compiling.kernels()],
        "gpu_archs": [],
        "elsa_version": __version__,
    }
    (staging / "lib").mkdir()
    on_gpu = exported.device == "cuda"
    formats = [name for name in chosen.formats if name != "onnx" or chosen.nodes]
    asked_for = gpu_library.is_asked_for(exported.device, chosen.gpu_archs, chosen.nodes)
    if formats and asked_for:
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
