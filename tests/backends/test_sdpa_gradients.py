"""Gradients by PyTorch's kernels: what they are given on a GPU, looked at without one."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core.backends import sdpa

KERNEL = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


class Biases(TorchDispatchMode):
    """Notes the strides of the biases that the kernel is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is KERNEL:
            self.strides.append(args[4].stride())
        return func(*args, **(kwargs or {}))


BIASES = {
    "rows": lambda n, **of: torch.empty(1, 4, n, n, **of),
    "heads side by side": lambda n, **of: torch.empty(1, n, n, 4, **of).permute(0, 3, 1, 2),
    "columns": lambda n, **of: torch.empty(1, 4, n, n, **of).transpose(2, 3),
    "one row": lambda n, **of: torch.empty(2, 1, 1, n, **of),
}


@pytest.mark.parametrize("keys", [48, 49, 197])
@pytest.mark.parametrize("layout", BIASES)
def test_rows_of_a_bias_are_dense_and_aligned(keys: int, layout: str) -> None:
    """A table read by an index and permuted to [1, H, N, N] has its heads side by side: padding
    kept them so, and the kernel takes dense rows alone."""
    with FakeTensorMode():
        q = torch.empty(2, 4, keys, 32, dtype=torch.float16, device="cuda")
        lse = torch.empty(2, 4, keys, device="cuda")
        bias = BIASES[layout](keys, dtype=q.dtype, device="cuda")
        needs = (True, True, True, False)
        with Biases() as seen:
            sdpa.backward(q, lse[:0], q, q, q, bias, q, lse, False, 0.1, "strict", needs)
    (strides,) = seen.strides
    assert strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1])
