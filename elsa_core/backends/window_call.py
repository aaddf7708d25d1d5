"""The arguments of `elsa::window_attention`, listed once for its schema and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

from torch import Tensor


class WindowCall(NamedTuple):
    """One call, in the order of the operator's schema. The terms are as in `ops.window.api`."""

    qkv: Tensor  # [B, D, H, W, 3 * C]
    bias: Tensor | None  # [heads, T, T], or with `bias_index` a table [L, heads]
    bias_index: Tensor | None  # int64 [T, T]
    pad_qkv: Tensor | None  # [3 * C]
    logit_scale: Tensor | None  # [heads]
    num_heads: int
    window_size: Sequence[int]  # three entries
    shift_size: Sequence[int]  # three entries
    scale: float
    mask_value: float
    layout: str
    grid: bool
    precision: str = "strict"

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be wanted of, in the order of `needs`."""
        return self.qkv, self.bias, self.pad_qkv, self.logit_scale


_KINDS = (
    (Tensor, "Tensor"), (Tensor | None, "Tensor?"), (Sequence[int], "int[]"), (int, "int"),
    (float, "float"), (str, "str"), (bool, "bool"),
)  # fmt: skip

# As `torch.library.define` takes them.
SCHEMA = ", ".join(
    f"{next(word for kind, word in _KINDS if kind == hint)} {name}"
    for name, hint in get_type_hints(WindowCall).items()
)
