"""model.ts: TorchScript by tracing, with elsa's operator as a node that the library serves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from elsa_core.base.messages import quiet
from elsa_core.exporting import operators
from elsa_core.exporting.tracing import attempt

DEPRECATION = (
    "TorchScript is deprecated in PyTorch and kept for programs that already load it; "
    "model.pt2 is the format to build on"
)


FACTS_NAME = "elsa.txt"


def export_torchscript(
    model: nn.Module, inputs: tuple[Tensor, ...], path: Path, *, facts: str = ""
) -> tuple[str, ...]:
    """Trace `model` on `inputs` and write it.

    The batch is dynamic as far as the model's own code takes it from its input's shape; the proof
    that it does is the verification at several batch sizes.

    Args:
        model: patched, in eval mode.
        inputs: two rows or more: a batch of one would be taken for a constant by some models.
        path: the file to write.
        facts: text kept inside the file as `extra/elsa.txt`, for programs that read no JSON.

    Returns:
        The names of elsa's operators in the graph.

    Raises:
        ExportError: the model cannot be traced, or its graph holds no operator of the library.
        OSError: the file cannot be written.
    """

    def trace() -> torch.jit.ScriptModule:
        traced: torch.jit.ScriptModule = torch.jit.trace(
            model, inputs, strict=False, check_trace=False
        )
        return traced

    traced = attempt("tracing to TorchScript", model, trace)
    names = operators.check(operators.in_text(str(traced.inlined_graph)), inputs[0].device.type)
    # Python writes the bytes: torch's own writer aborts the process where the disk is full.
    with quiet(), path.open("wb") as file:
        torch.jit.save(traced, file, _extra_files={FACTS_NAME: facts})
    return names
