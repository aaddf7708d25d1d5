"""Forward and backward of streamed attention: blocks of queries outside, of keys inside.

A block of queries meets the blocks of keys in their order, so that states and gradients of queries
are summed in one order: ELSA (arXiv 2604.23798), Eq. 4. What a block of keys adds to the gradients
needs nothing of other blocks, see `elsa_core.distributed.shards`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import loses_digits
from elsa_core.distributed import shards
from elsa_core.distributed.shards import Rows, Run, Saved, Sums, Wanted
from elsa_core.errors import ArgumentError
from elsa_core.monoid import state_dtype
from elsa_core.offload import streaming

# Orders of magnitude of current hardware, which only size the blocks: bytes a second from host to
# device and within the device, and the least seconds of a block's launches.
_COPY, _MEMORY, _LEAST = 25e9, 2e12, 1e-4
_ALIGNED, _SMALLEST = 128, 4096  # keys
_CPU_BLOCK = 65536
_SHARE = 0.8  # of the free memory that a call may take
_LOST = 2**-4  # the spacing of lse from which ln S counts as lost
_STAGED = 1 << 28  # bytes of a block that the host moves into pinned memory


class Call(NamedTuple):
    """A streamed call: operands in the operator's layout, on the host or on `device`.

    query [B, Hq, Nq, D]; key, value [B, Hkv, Nk, D or Dv]; attn_mask with dims full or 1, or None.
    block, query_block: tokens of a block; 0 where the memory of the device decides.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    precision: str
    backend: str
    device: torch.device
    block: int
    query_block: int


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Nq, Dv] and lse [B, Hq, Nq], where the query is. ArgumentError where an additive
    mask gives all keys of a row so large a number that lse holds nothing of their count."""
    batch, heads, length, _ = call.query.shape
    width, wide = call.value.shape[3], state_dtype(call.query.dtype)
    # A block's state is (lse, 1, out), and a gradient reads exp(score - lse): where lse = m + ln S
    # has lost ln S to rounding, every block weighs the same, whatever its number of keys. Scores of
    # that size without a mask have lost their own digits, so that masked calls alone wait here.
    masked = call.attn_mask is not None and call.attn_mask.is_floating_point()
    limit = _LOST / torch.finfo(wide).eps
    with torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext():
        pass_ = _Pass(call, backward=False)
        at_once = call.query.device == call.device and len(pass_.query_bounds) == 1
        out = lse = call.query.new_empty(0)
        if not at_once:
            out = call.query.new_zeros((batch, length, heads, width)).transpose(1, 2)
            lse = call.query.new_full((batch, heads, length), -math.inf, dtype=wide)
        for rows, own, _ in pass_.queries(call.query):
            total = None
            for seen, run, _ in pass_.keys(rows):
                total = shards.state(seen, run, total)
            found, of_rows = shards.finished(total, rows, width)
            of_rows = of_rows.to(wide)
            if masked and bool(((of_rows.abs() > limit) & of_rows.isfinite()).any()):
                raise ArgumentError(
                    f"attn_mask gives all keys of a row numbers beyond {limit:.0f}, in which "
                    "streamed blocks lose their count of keys: hide rows with -inf or a bool mask"
                )
            if at_once:
                return found, of_rows
            pass_.put((found, out[:, :, own]), (of_rows, lse[:, :, own]))
        pass_.writer.finish()
        return out, lse


def backward(call: Call, saved: Saved, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value, each where its operand is and of its dtype, and None
    for the mask's.

    saved: where the query is.
    """
    with torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext():
        pass_ = _Pass(call, backward=True)
        # a block of keys is met once
        alone = len(pass_.query_bounds) == 1 and not call.is_causal
        totals = [
            t.new_zeros(
                t.shape if needed else 0,
                dtype=t.dtype if alone or t is call.query else state_dtype(t.dtype),
            )
            for t, needed in zip(call[:3], wanted[:3], strict=True)
        ]
        given = [t for t in (saved.grad_out, saved.out, saved.lse, saved.grad_lse) if t is not None]
        for rows, own, parts in pass_.queries(call.query, *given):
            of_rows, double = Saved(*parts), loses_digits(parts[2])
            if double:  # what the gradients read, in float64: the keys come once more
                total, rows = None, rows.doubled()  # noqa: PLW2901
                for seen, run, _ in pass_.keys(rows):
                    total = shards.state(seen.doubled(), run.doubled(), total)
                out, lse = shards.finished(total, rows, call.value.shape[3])
                of_rows = of_rows._replace(grad_out=of_rows.grad_out.double(), out=out, lse=lse)
            sums = Sums.zeros(rows, wanted)
            for seen, run, columns in pass_.keys(rows):
                if double:  # here, where the block before is not held any more
                    seen, run = seen.doubled(), run.doubled()  # noqa: PLW2901
                grads = shards.gradients(seen, run, of_rows, sums, wanted)
                pairs = [
                    (grad.to(total.dtype), total[:, :, columns])
                    for grad, total, needed in zip(grads, totals[1:], wanted[1:3], strict=True)
                    if needed
                ]
                pass_.put(*pairs, add=not alone)
            if sums.query is not None:
                pass_.put((sums.query.to(call.query.dtype), totals[0][:, :, own]))
        pass_.writer.finish()
        found = (
            total.to(t.dtype) if needed else None
            for total, t, needed in zip(totals, call[:3], wanted[:3], strict=True)
        )
        return *found, None


class _Pass:
    def __init__(self, call: Call, *, backward: bool) -> None:
        self.call = call
        timeline = streaming.Timeline(call.device.type == "cuda")
        streaming.LAST[:] = [timeline]
        self._queries = streaming.Loader(call.device, timeline, folds=False)
        self._keys = streaming.Loader(call.device, timeline)
        self.writer = streaming.Writer(call.device, timeline)
        rows, self._block = sizes(call, backward=backward)
        length = call.query.shape[2]
        self.query_bounds = [(at, min(at + rows, length)) for at in range(0, length, rows)]

    def queries(self, *tensors: Tensor) -> Iterator[tuple[Rows, slice, list[Tensor]]]:
        """Blocks of queries, the first tensor, as rows without a mask, their place, and what else
        belongs to them, along dim 2."""
        call = self.call
        blocks = self._queries.blocks(tensors, [2] * len(tensors), self.query_bounds)
        for (start, stop), (query, *parts) in zip(self.query_bounds, blocks, strict=True):
            rows = Rows(
                query, None, start, call.is_causal, call.scale, call.precision, call.backend
            )
            yield rows, slice(start, stop), parts

    def keys(self, rows: Rows) -> Iterator[tuple[Rows, Run, slice]]:
        """The blocks of keys and values that a block of queries sees, in their order: the rows with
        the mask of the block's columns, the block, and the columns."""
        call, mask, end = self.call, self.call.attn_mask, rows.start + rows.query.shape[2]
        seen = min(call.key.shape[2], end) if call.is_causal else call.key.shape[2]
        tensors, dims = [call.key, call.value], [2, 2]
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, rows.start : end]
        if mask is not None and mask.shape[3] > 1:
            tensors, dims = [*tensors, mask], [2, 2, 3]
        elif mask is not None:
            mask = mask.to(call.device)
        columns = [(at, min(at + self._block, seen)) for at in range(0, seen, self._block)]
        blocks = self._keys.blocks(tensors, dims, columns)
        for (start, stop), (key, value, *own) in zip(columns, blocks, strict=True):
            part = own[0] if own else mask
            # a mask of the block's columns alone; without one, rows and columns have their places
            place = (start, stop) if part is None else (0, stop - start)
            yield replace(rows, attn_mask=part), Run(*place, key, value), slice(start, stop)

    def put(self, *pairs: tuple[Tensor, Tensor], add: bool = False) -> None:
        """Put results where they belong: in place on the device, by the writer on the host."""
        moved = []
        for found, target in pairs:
            if target.device == self.call.device:
                target.copy_(target + found if add else found)
            else:
                moved.append((found, target))
        if moved:
            self.writer.write(moved, add=add)


def sizes(call: Call, *, backward: bool) -> tuple[int, int]:
    """Tokens of a block of queries and of a block of keys.

    All queries are one block where they are on the device. Else, and for the keys, as many as the
    free memory takes: half of it for queries and their states, half for keys, two buffers and what
    kernels derive from them. Fewer keys where they are not pinned (256 MiB) and where the copy of
    the first block, which nothing hides, would take longer than the merges that smaller blocks add:
    n = sqrt(Nk m / c), m the seconds of a merge and c those of the copy of a key.
    """
    batch, heads, length, head_dim = call.query.shape
    kv_heads, keys, width = call.key.shape[1], call.key.shape[2], call.value.shape[3]
    size, wide = call.query.element_size(), state_dtype(call.query.dtype).itemsize
    rows, block = length, _CPU_BLOCK
    if call.device.type == "cuda":
        row = batch * heads * (2 * head_dim * size + 3 * width * wide)
        row += batch * heads * (2 * head_dim + 2 * width) * wide * backward
        key = batch * kv_heads * (head_dim + width) * size
        free, total = torch.cuda.mem_get_info(call.device)
        free += torch.cuda.memory_reserved(call.device)
        # torch 2.10 may lack it: then there is no limit to know of
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
        used = torch.cuda.memory_allocated(call.device)
        free = int(_SHARE * (min(free, share(call.device) * total) - used))
        if call.query.device != call.device:
            rows = max(_SMALLEST, free // 2 // max(1, row))
        rows = max(1, min(call.query_block or rows, length))
        left = max(free // 2, free - rows * row) // 2
        if call.attn_mask is not None and call.attn_mask.shape[3] > 1:
            first, second, third = call.attn_mask.shape[:3]
            key += first * second * min(third, rows) * call.attn_mask.element_size()
        most = left // max(1, 4 * key + backward * 4 * key * wide // size)
        if not (call.key.is_pinned() and call.value.is_pinned()):
            most = min(most, _STAGED // max(1, key))
        merge = max(_LEAST, 7 * batch * heads * rows * width * wide / _MEMORY)
        block = max(_SMALLEST, min(most, round(math.sqrt(keys * merge * _COPY / max(1, key)))))
    rows = max(1, min(call.query_block or rows, length))
    if call.block:
        return rows, call.block
    count = max(1, math.ceil(keys / block))
    return rows, math.ceil(max(1, keys) / count / _ALIGNED) * _ALIGNED
