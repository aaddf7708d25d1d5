"""A call's kernels compiled side by side, before the call that would compile them in turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.pack import lookup
from elsa_core.backends.triton.shared.device import INTERPRETED
from elsa_core.backends.triton.shared.launch import Launch, recording
from elsa_core.base.messages import Progress

_ONE_AT_A_TIME = threading.Lock()  # the recorder is the process's
_ALIGNMENT = 16  # of an address, which Triton compiles for


def compile_kernels(call: Callable[[], Any], tell: Progress | None = None) -> int:
    """Compile what `call` would launch and no earlier call did; returns how many kernels.

    The call runs without its first launches, on this thread: what it computes is of no use, and it
    must change nothing that lasts. Kernels that are here already run on what the others did not
    write: none reads an index of another's in inference. What the call raises, the one that follows
    raises again.
    """
    if INTERPRETED or torch.version.hip:
        return 0
    needed: dict[Any, tuple[Launch, tuple[Tensor, ...]]] = {}
    thread = threading.get_ident()

    def note(launch: Launch, pointers: tuple[Tensor, ...]) -> bool:
        if threading.get_ident() != thread:
            return False
        constants = [launch.tail[p.name] for p in launch.kernel.params if p.is_constexpr]
        operands = [(p.dtype, p.data_ptr() % _ALIGNMENT) for p in pointers]
        given = repr((constants, operands, launch.options))
        needed.setdefault((launch.kernel, given), (launch, pointers))
        return True

    with _ONE_AT_A_TIME, recording(note):
        try:
            call()
        except Exception:
            return 0

    def compiled(launch: Launch, pointers: tuple[Tensor, ...]) -> None:
        with torch.cuda.device(pointers[0].device):
            if (
                not lookup.wanted()
                or lookup.find(launch.kernel, pointers, launch.tail, launch.options) is None
            ):
                launch.kernel.warmup(*pointers, grid=launch.grid, **launch.tail, **launch.options)

    with ThreadPoolExecutor(min(len(needed), os.cpu_count() or 1) or 1) as pool:
        waiting = [pool.submit(compiled, *each) for each in needed.values()]
        for done, _ in enumerate(as_completed(waiting)):  # an error is the call's to raise
            if tell is not None:
                tell("compiling kernels", done + 1, len(needed))
    return len(needed)
