"""Kernels of a call, compiled before it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from elsa_core.base.messages import Progress


def compile_kernels(call: Callable[[], Any], tell: Progress | None = None) -> int:
    """Compile the GPU kernels that `call` needs and no earlier call did, side by side.

    The call runs once on this thread, without gradients and without these kernels: its results are
    of no use, and it must change nothing that lasts.

    Returns:
        How many kernels were missing; 0 without a GPU.
    """
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return 0
    from elsa_core.backends.triton.shared import ahead

    with torch.no_grad():
        return ahead.compile_kernels(call, tell)
