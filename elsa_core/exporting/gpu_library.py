"""What a bundle of a CUDA model needs to run without this package and Triton: lib/libelsa_cuda.so
and the plans and kernels of the artefacts' own calls.

Not chosen by default until it was measured on a GPU: it is written where the CUDA library serves
the exporting process (ELSA_CUDA_LIBRARY=1). The plans are of this kind of GPU and of the batch
sizes that the export verifies (`--batches`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core.backends import compiler, cuda
from elsa_core.errors import ExportError, UnavailableError

LIBRARY: Final = "lib/libelsa_cuda.so"
PLANS: Final = "lib/plans.elsa"


def is_asked_for(device: str) -> bool:
    """Whether an export of a model on this kind of device holds the GPU library."""
    return device == "cuda" and cuda.is_asked_for() and cuda.status().ok


def write(
    artefacts: Sequence[tuple[str, Path]],
    inputs: tuple[Tensor, ...],
    batches: Sequence[int],
    staging: Path,
) -> str:
    """Run the artefacts on the GPU at each batch size and write the library and their plans.

    Args:
        artefacts: (format, file), of "torchscript" and "pt2".
        inputs: of the model, max(batches) rows or more.
        batches: the sizes that the bundle serves.
        staging: the bundle's directory, with lib/ in it.

    Returns:
        The kind of GPU that it runs on, "sm_90".

    Raises:
        ExportError: a call of the model is not by kernels of this package alone.
        UnavailableError: the library cannot be built.
    """
    from elsa_core.backends.cuda import library, planfile

    device = inputs[0].device
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    loaded, parts = library.load(), []
    for format, path in artefacts:
        model = _loaded(format, path, device)
        for rows in batches:
            try:
                with torch.cuda.device(device), torch.no_grad():
                    call = partial(model, *(tensor[:rows] for tensor in inputs))
                    parts.append(planfile.recorded(loaded, call))
            except UnavailableError as error:
                raise ExportError(
                    f"{path.name} cannot run by the CUDA library alone: {error}; patch it with "
                    "scope='attention', or unset ELSA_CUDA_LIBRARY"
                ) from error
    sizes = ", ".join(map(str, batches))
    served = f"this bundle serves batches of {sizes} on sm_{arch}"
    (staging / PLANS).write_bytes(planfile.write(parts, arch, served))
    shutil.copyfile(compiler.build(library.recipe()), staging / LIBRARY)
    return f"sm_{arch}"


def _loaded(format: str, path: Path, device: torch.device) -> Callable[..., Any]:
    if format == "torchscript":
        module: Callable[..., Any] = torch.jit.load(str(path), map_location=device)
        return module
    program: Callable[..., Any] = torch.export.load(str(path)).module()
    return program
