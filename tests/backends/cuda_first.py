"""What the first planned calls of a process load, run by `test_cuda_library.py`."""

import sys

import torch
from cuda_calls import attention_inputs, started

from elsa_core import ops


def no_compiler(stub: str) -> None:
    """PyTorch's compiler takes a second to load, and longer where no bytecode is kept."""
    loaded = started(stub)
    for dtype in (torch.float32, torch.float16):
        ops.ATTENTION.overload(*attention_inputs(shape=(1, 3, 197, 64), dtype=dtype))
    assert loaded.counts()[0] == 2, "the calls were not planned"
    found = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
    assert not found, found


CHECKS = (no_compiler,)
