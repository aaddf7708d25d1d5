"""Calls of attention over ranks: whole operands by name, cut into the shards of each rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from drawn import Operands, operands, tokens_first
from torch import Tensor

Result = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """A call. queries, keys: each rank's tokens; factor: of the queries, or of those of one rank.

    mask: none, bool (whole rows hidden too), additive, hidden (-inf, whole rows too), row (one for
    all queries) or column (one value a query); mask_heads: of how many heads; expanded: made whole.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...] = ()
    batch: int = 2
    heads: int = 3
    kv_heads: int = 3
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    mask_heads: int = 1
    is_causal: bool = False
    scale: float | None = None
    factor: float = 1.0
    of_rank: int | None = None
    expanded: bool = False
    methods: tuple[str, ...] = ("ring", "gather")
    options: dict[str, Any] = field(default_factory=dict)

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.queries, self.keys or self.queries

    def whole(self) -> Operands:
        """The operands of all ranks."""
        rows, columns = (sum(n) for n in self.lengths())
        shape = {"row": (1, columns), "column": (rows, 1)}.get(self.mask, (rows, columns))
        large = slice(None) if self.of_rank is None else cut(self.queries, self.of_rank)
        of_mask = (self.batch, self.mask_heads, *shape)
        query, key, value, mask, grad = operands(self, rows, columns, of_mask, large)
        if self.expanded and mask is not None:
            mask = mask.expand(-1, -1, rows, columns).contiguous()
        return query, key, value, mask, grad

    def shard(self, rank: int) -> Operands:
        """A rank's part, as leaves with strides of their own."""
        query, key, value, mask, grad = self.whole()
        rows, columns = (cut(lengths, rank) for lengths in self.lengths())
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, rows]
        query, key, value = (
            tokens_first(t[:, :, part])
            for t, part in ((query, rows), (key, columns), (value, columns))
        )
        return query, key, value, mask, grad[:, :, rows]

    def arguments(self) -> dict[str, Any]:
        grouped = {"enable_gqa": True} if self.heads != self.kv_heads else {}
        return {"is_causal": self.is_causal, "scale": self.scale, **grouped, **self.options}


def cut(lengths: tuple[int, ...], rank: int) -> slice:
    start = sum(lengths[:rank])
    return slice(start, start + lengths[rank])


def differentiated(
    function: Callable[..., Any], given: Operands, dtype: torch.dtype, device: str = "cpu"
) -> Result:
    """A call's output and gradients, back on the CPU; of a whole call or of a rank's part."""
    *inputs, grad = (t if t is None or t.dtype == torch.bool else t.to(dtype) for t in given)
    leaves = [
        None if t is None else t.detach().to(device).requires_grad_(t.dtype != torch.bool)
        for t in inputs
    ]
    out = function(*leaves)
    out.backward(grad.to(device))
    grads = [None if t is None or t.grad is None else t.grad.cpu() for t in leaves]
    names = ("out", "query", "key", "value", "mask")
    return dict(zip(names, (out.detach().cpu(), *grads), strict=True))


ALL = ("ring", "gather", "heads", "auto")
TWO = {
    "plain": Case((17, 17), heads=4, kv_heads=4, methods=ALL),
    "uneven": Case((5, 26), heads=2, kv_heads=2, methods=ALL),
    "empty rank": Case((0, 13), heads=2, kv_heads=2, methods=ALL),
    "nobody": Case((0, 0), heads=2, kv_heads=2),
    "causal": Case((11, 20), heads=2, kv_heads=2, is_causal=True, methods=ALL),
    "causal cross": Case((9, 14), keys=(16, 3), is_causal=True),
    "grouped": Case((7, 12), heads=4, kv_heads=2, value_dim=5, methods=ALL),
    "bool": Case((7, 12), heads=2, kv_heads=2, mask="bool", mask_heads=2, methods=ALL),
    "additive": Case((7, 12), heads=2, kv_heads=2, mask="additive", methods=ALL),
    "hidden": Case((7, 12), mask="hidden", mask_heads=3),
    "row": Case((7, 12), heads=2, kv_heads=2, mask="row", methods=ALL),
    "column": Case((7, 12), mask="column"),
    "extreme": Case((33, 34), factor=60.0),
    # |lse| of some tens and hundreds: its rounding in float32 shows in the weights of a row
    "large": Case((64, 64), mask="bool", batch=1, head_dim=32, value_dim=32, factor=30.0),
    "larger": Case((64, 64), mask="bool", batch=1, head_dim=32, value_dim=32, factor=150.0),
    "large causal": Case((64, 64), batch=1, head_dim=32, value_dim=32, factor=60.0, is_causal=True),
    "large additive": Case(
        (64, 64), mask="additive", batch=1, head_dim=32, value_dim=32, factor=60.0
    ),
    "huge": Case((33, 34), factor=4000.0),
    "huge on one rank": Case((33, 34), factor=4000.0, of_rank=1, mask="additive"),
    "huge in halves": Case((33, 34), factor=4000.0, of_rank=0, dtype=torch.bfloat16),
    "zero scale": Case((5, 6), scale=0.0),
    "float64": Case((7, 12), dtype=torch.float64, mask="additive"),
    "float16": Case((19, 12), dtype=torch.float16),
    "bfloat16": Case((19, 12), dtype=torch.bfloat16, mask="bool"),
    "long": Case((700, 613), batch=1, heads=2, kv_heads=2, head_dim=16, value_dim=16, methods=ALL),
    "eager": Case((9, 8), options={"backend": "eager"}),
}
THREE = {
    "plain": Case((17, 17, 17), methods=("ring", "gather", "heads", "auto")),
    "uneven": Case((5, 0, 21), methods=("ring", "gather", "heads")),
    "causal": Case((11, 5, 20), is_causal=True, methods=("ring", "gather", "heads")),
    "causal cross": Case((0, 14, 9), keys=(8, 3, 12), is_causal=True, dtype=torch.float64),
    "grouped": Case((7, 12, 2), heads=6, kv_heads=3, value_dim=5, methods=("ring", "heads")),
    "hidden": Case((7, 12, 4), mask="hidden", methods=("ring", "gather", "heads")),
    "bool": Case((7, 1, 12), mask="bool", mask_heads=3, methods=("ring", "heads")),
    "extreme": Case((33, 34, 2), factor=60.0),
    "long": Case((350, 351, 612), batch=1, head_dim=16, value_dim=16),
}
CASES = {2: TWO, 3: THREE}
NAMES = [
    (world, name, method)
    for world, cases in CASES.items()
    for name, case in cases.items()
    for method in case.methods
]
