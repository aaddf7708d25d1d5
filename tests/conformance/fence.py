"""What a GPU shows and Triton's interpreter hides: writes behind what a call allocates, which are
mostly nobody's, and what a masked load without `other` leaves where it reads nothing: zeros there,
anything on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import quick_interpreter  # noqa: F401

BYTE, WIDTH = 0xFF, 4096  # of every floating dtype a NaN
aten = torch.ops.aten
ALLOCATING = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip


class _Fence(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports the compiler, which takes two seconds

    def __init__(self) -> None:
        super().__init__()
        self.tails: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in ALLOCATING or out.numel() == 0:
            return out
        used = out.untyped_storage().nbytes()
        memory = torch.full((-(-used // 16) * 16 + WIDTH,), BYTE, dtype=torch.uint8)
        self.tails.append(memory[used:])
        return torch.empty(0, dtype=out.dtype).set_(
            memory.untyped_storage(), 0, out.shape, out.stride()
        )


@contextmanager
def fenced() -> Iterator[dict[str, bool]]:
    """`intact` afterwards: whether nothing was written behind the tensors that were allocated."""
    said = {"intact": False}
    fence = _Fence()
    with fence:
        yield said
    said["intact"] = all(bool((t == BYTE).all()) for t in fence.tails)


def _spoil_masked_loads() -> None:
    """Fill what a load reads nothing for with NaN, and integers with ones in every bit."""
    import numpy as np
    from triton.runtime import interpreter

    inner = interpreter.InterpreterBuilder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        if other is None and not mask.data.all():
            kind = pointers.get_element_ty()
            spoilt = np.full(pointers.data.shape, 0, interpreter._get_np_dtype(kind))
            spoilt.view(np.uint8).fill(0xFF)
            other = interpreter.TensorHandle(spoilt, kind)
        return inner(self, pointers, mask, other, *rest, **named)

    interpreter.InterpreterBuilder.create_masked_load = load


if os.environ.get("TRITON_INTERPRET") == "1":
    _spoil_masked_loads()
