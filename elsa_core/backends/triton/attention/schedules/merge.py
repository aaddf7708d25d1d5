"""The launch that merges partial states, for the schedules that split keys."""

from __future__ import annotations

from typing import Any

from elsa_core.backends.triton.attention.schedules.record import Merge
from elsa_core.backends.triton.attention.tiling import Shape
from elsa_core.backends.triton.shared.launch import Launch


def plan_merge(shape: Shape, partitions: int, overlap: bool) -> Merge | None:
    """The merge of so many partitions; None for one. overlap: it may start during the fold."""
    if partitions == 1:
        return None
    from elsa_core.backends.triton.attention.merge import merge_states

    states = shape.batch * shape.heads * shape.queries
    wide = max(16, 1 << (shape.value_dim - 1).bit_length())
    deep = 1 << (partitions - 1).bit_length()
    # 4096 numbers a program, but a program a row while rows are few
    rows = 1 if states < 1024 else max(1, 4096 // (wide * deep))
    tail: dict[str, Any] = {
        "parts": partitions, "heads": shape.heads, "n_q": shape.queries, "states": states,
        "ROWS": rows, "PARTS": deep, "DV": shape.value_dim, "VP": wide, "OVERLAP": overlap,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": 4 if rows * deep >= 16 else 1}
    if overlap:
        options["launch_pdl"] = True
    launch = Launch(merge_states, (-(-states // rows),), tail, options)
    return Merge(launch, (partitions, states, shape.value_dim))
