"""The portable kernel's source compiled for the CPU with `portable_shim.h`, and run there."""

import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from elsa_core.backends import compiler
from elsa_core.backends.portable import attention as portable
from elsa_core.backends.portable.tiling import Instance

HERE = Path(__file__).parent
# How a GPU copies to shared memory; see portable_shim.h.
PLAIN, AT_START, AT_WAIT = range(3)
_FOLDER = tempfile.TemporaryDirectory(prefix="elsa-portable-")


@functools.cache
def library(instance: Instance, copies: int) -> ctypes.CDLL:
    source = compiler.source_directory() / "cuda" / "portable" / "attention.cu"
    path = Path(_FOLDER.name) / f"{abs(hash((instance, copies)))}.so"
    macros = [f"-D{name}={number}" for name, number in instance.macros.items()]
    subprocess.run(
        [*compiler.compiler(), "-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fPIC",
         "-shared", "-w", "-x", "c++", str(HERE / "portable_shim.h"), "-o", str(path), *macros,
         f'-DSHIM_SOURCE="{source}"', f"-DSHIM_COPIES={copies}"],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(path))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    limit: int,
    copies: int = AT_WAIT,
    backwards: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the kernel on a device of so much shared memory; what it does not write is NaN."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, scale, out, lse = portable.ready(query, value, scale)
    out.fill_(math.nan)
    lse.fill_(math.nan)
    found = portable.instance_of(query, key, value, mask, causal, limit=limit)
    arguments = portable.arguments_of(query, key, value, mask, scale, out, lse)
    library(found, copies).run_grid(
        ctypes.byref(arguments), portable.blocks_of(found, arguments), ctypes.c_bool(backwards)
    )
    return out, lse


def kernels() -> dict[str, Callable[..., Any]]:
    """As the operator's kernel, on a GPU of sm_90."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
        precision: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return attention(query, key, value, mask, causal, scale, limit=232448)

    return {"attention_portable": kernel}
