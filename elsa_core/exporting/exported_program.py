"""model.pt2: `torch.export`, and model.aoti.pt2: the same compiled ahead of time."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ExportError
from elsa_core.exporting import operators
from elsa_core.exporting.torchscript import FACTS_NAME
from elsa_core.exporting.tracing import attempt


def export_program(
    model: nn.Module, inputs: tuple[Tensor, ...], *, dynamic_size: bool = False, step: int = 1
) -> torch.export.ExportedProgram:
    """Export `model` with a dynamic batch, and a dynamic height and width where asked for.

    Args:
        model: patched, in eval mode.
        inputs: of one batch, two rows or more.
        dynamic_size: also let the height and width of images vary, in multiples of `step`.
        step: pixels that a side must be a multiple of.

    Raises:
        ExportError: the model cannot be exported so; names the module where it is known.
    """
    shapes = _dynamic(inputs, dynamic_size, step)
    what = "torch.export with a dynamic image size" if dynamic_size else "torch.export"

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)

    try:
        program = attempt(what, model, export)
    except ExportError as error:
        if dynamic_size and _takes_one_size(model):
            raise ExportError(
                "this model takes images of one size: build it with dynamic_img_size=True "
                "(--model-kwargs dynamic_img_size=True), then export it with a dynamic size"
            ) from error
        raise
    operators.check(operators.in_program(program), inputs[0].device.type)
    return program


def _takes_one_size(model: torch.nn.Module) -> bool:
    """Whether timm built a part of the model for one size, and could build it for any."""
    return any(getattr(part, "dynamic_img_size", None) is False for part in model.modules())


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write model.pt2.

    Raises:
        OSError: the file cannot be written.
    """
    with quiet():
        # Example inputs are a copy of data that the bundle holds anyway.
        program._example_inputs = None
        # Python writes the bytes: torch's own writer aborts the process where the disk is full.
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def compile_program(program: torch.export.ExportedProgram, path: Path, facts: str = "") -> None:
    """Compile with AOTInductor into one package; elsa's library is loaded beside it, not inside.

    facts: text kept in the package's metadata as `elsa.txt`, for programs that read no JSON.

    Raises:
        ExportError: no working compiler, or a model that Inductor cannot compile.
    """
    try:
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path),
                inductor_configs={"aot_inductor.metadata": {FACTS_NAME: facts}},
            )  # fmt: skip
    except OSError:
        raise
    except Exception as error:
        why = first_line(error)
        if " " in tempfile.gettempdir():
            why += " (its commands do not quote the space in the temporary folder: set TMPDIR)"
        raise ExportError(f"AOTInductor cannot compile this model: {why}") from error


def _dynamic(inputs: tuple[Tensor, ...], dynamic_size: bool, step: int) -> tuple[Any, ...]:
    batch = torch.export.Dim("batch", min=1)
    shapes: list[dict[int, Any]] = []
    for tensor in inputs:
        dims: dict[int, Any] = {0: batch}
        if dynamic_size and tensor.ndim == 4:
            for index, name in ((2, "rows"), (3, "columns")):
                side = torch.export.Dim(name, min=1)
                dims[index] = step * side if step > 1 else side
        shapes.append(dims)
    return tuple(shapes)
