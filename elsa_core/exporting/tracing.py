"""model.ts by `torch.jit.trace`, model.pt2 by `torch.export`, model.aoti.pt2 by AOTInductor."""

from __future__ import annotations

import io
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from elsa_core import ops
from elsa_core.base.calls import plain_multihead
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ElsaError, ExportError

Result = TypeVar("Result")

FACTS_NAME = "elsa.txt"
_NODE = re.compile(r"\belsa::(\w+)")


def attempt(what: str, model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run `action`, which runs the model; a failure becomes an ExportError that names the module.

    Only after a failure does it run again, followed by hooks: patched blocks of windows leave their
    attention to the original forward where a hook waits for its call.
    """
    try:
        with quiet(), torch.no_grad(), plain_multihead():
            return action()
    except (ElsaError, MemoryError, OSError):
        raise
    except Exception as error:
        path, name = _where(model, action)
        where = f"module {path!r} ({name})" if path else f"the model ({name})"
        raise ExportError(f"{what} failed in {where}: {first_line(error)}") from error


def _where(model: nn.Module, action: Callable[[], object]) -> tuple[str, str]:
    """Path and class of the module in which `action` fails."""
    entered: list[tuple[str, str]] = []
    with ExitStack() as hooks, quiet(), torch.no_grad(), plain_multihead():
        for path, module in model.named_modules():
            label = (path, type(module).__name__)

            def enter(_module: nn.Module, _args: object, label: tuple[str, str] = label) -> None:
                entered.append(label)

            def leave(_module: nn.Module, _args: object, _output: object) -> None:
                if entered:
                    entered.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        try:
            action()
        except Exception:
            if entered:
                return entered[-1]
    return "", type(model).__name__


def export_torchscript(
    model: nn.Module, inputs: tuple[Tensor, ...], path: Path, *, facts: str = ""
) -> tuple[str, ...]:
    """Trace a model on two rows or more (one would be taken for a constant) and write it; returns
    the names of elsa's operators in the graph.

    The batch is dynamic as far as the model's own code takes it from its input's shape; the proof
    that it does is the verification at several batch sizes. `facts` are kept as `extra/elsa.txt`,
    for programs that read no JSON.
    """
    traced = attempt(
        "tracing to TorchScript",
        model,
        lambda: torch.jit.trace(model, inputs, strict=False, check_trace=False),
    )
    names = checked_operators(set(_NODE.findall(str(traced.inlined_graph))), inputs[0].device.type)
    # Python writes the bytes: torch's own writer aborts the process where the disk is full.
    with quiet(), path.open("wb") as file:
        torch.jit.save(traced, file, _extra_files={FACTS_NAME: facts})
    return names


def export_program(
    model: nn.Module, inputs: tuple[Tensor, ...], *, dynamic_size: bool = False, step: int = 1
) -> torch.export.ExportedProgram:
    """Export a model with a dynamic batch, and where asked for a dynamic height and width, in
    multiples of `step`; `inputs` have two rows or more."""
    batch, *sides = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    sizes = {axis: step * side if step > 1 else side for axis, side in enumerate(sides, 2)}
    shapes = tuple(
        {0: batch, **(sizes if dynamic_size and tensor.ndim == 4 else {})} for tensor in inputs
    )
    what = "torch.export with a dynamic image size" if dynamic_size else "torch.export"
    try:
        program = attempt(
            what,
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
    checked_operators(operators_of(program), inputs[0].device.type)
    return program


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write model.pt2."""
    with quiet():
        # Example inputs are a copy of data that the bundle holds anyway.
        program._example_inputs = None
        # Python writes the bytes: torch's own writer aborts the process where the disk is full.
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def compile_program(program: torch.export.ExportedProgram, path: Path, facts: str = "") -> None:
    """Compile with AOTInductor into one package; elsa's library is loaded beside it, not inside.
    `facts` are kept in its metadata as `elsa.txt`, for programs that read no JSON."""
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
    if sys.platform == "linux" and brings_cpp_library(path):
        raise ExportError(
            "the C++ compiler (CXX) links its standard library statically: beside torch's own a "
            "second one ends the process; set CXX to a compiler that links libstdc++.so"
        )


def brings_cpp_library(package: Path) -> bool:
    """Whether a library in a package does not name the C++ library that it needs."""
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                with archive.open(name) as file:
                    names = file.read(1 << 24)  # those of what it needs are at its beginning
                if b"libstdc++.so" not in names and b"libc++.so" not in names:
                    return True
    return False


def operators_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of elsa's operators in an exported program, subgraphs included, without the domain."""
    graphs = (getattr(module, "graph", None) for module in program.graph_module.modules())
    targets = (node.target for graph in graphs if graph is not None for node in graph.nodes)
    found = (each for each in targets if isinstance(each, torch._ops.OpOverload))
    return tuple(sorted({each._opname for each in found if each.namespace == "elsa"}))


def checked_operators(names: Iterable[str], device: str) -> tuple[str, ...]:
    """The names, sorted. Raises ExportError over dropout, an operator that only this package's
    Python code computes, and none at all."""
    found = tuple(sorted(names))
    if any(name.startswith("attention_dropout") for name in found):
        raise ExportError("the graph drops attention weights: a bundle is for inference")
    if eager := [name for name in found if name.endswith("_eager")]:
        from elsa_core.backends import native

        why = "a site was patched with backend 'eager', or its head_dim or dtype has no kernel"
        if device == "cpu" and not (answer := native.load()).ok:
            why = f"the native library is off ({answer.reason})"
        raise ExportError(f"the graph calls elsa::{eager[0]}, which no library holds: {why}")
    records = [ops.of(f"elsa::{name}") for name in found]
    if all(record is not None and record.kind == "linear" for record in records):  # no site
        raise ExportError("the graph calls none of elsa's operators: no patched site was reached")
    return found
