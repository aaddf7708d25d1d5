"""float64 through the casts that a model's own forward makes.

A float64 copy of a model whose forward says `q.bfloat16()` or `x.float()` would compute the rest in
that dtype, and be no more exact than what it judges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WIDER = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_Result = TypeVar("_Result")


def exactly(run: Callable[[], _Result], model: nn.Module) -> _Result:
    """What `run` returns, with every value that is float64 kept so.

    A cast to a dtype coarser than the weights of `model` rounds the values as it does there: they
    are the operands of what follows. Any other cast changes nothing. Where the code does not run
    so, its casts are made as they are.
    """
    used = [p.dtype for p in model.parameters() if p.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in used), default=torch.finfo(torch.float32).eps)
    try:
        with _Float64(eps):
            return run()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return run()


class _Float64(TorchDispatchMode):
    """Gives float64 where a dtype is asked for that is narrower than a float64 operand's.

    `eps`: of the model's dtype; casts to a coarser one round.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("dtype")
        wider = _WIDER.get(asked)
        leaves = pytree.tree_leaves(args) if wider is not None else ()
        if not any(isinstance(each, Tensor) and each.dtype == wider for each in leaves):
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "dtype": wider})
        if func is torch.ops.aten._to_copy.default and torch.finfo(asked).eps > self.eps:
            return result.to(asked).to(wider)
        return result
