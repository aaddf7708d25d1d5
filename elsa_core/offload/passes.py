"""Forward and backward of streamed attention: blocks of queries outside, of keys inside.

A block of queries meets the blocks of keys in their order, so that states and gradients of queries
are summed in one order: ELSA (arXiv 2604.23798), Eq. 4. What a block of keys adds to the gradients
needs nothing of other blocks, see `elsa_core.distributed.shards`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

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


class _Keys(NamedTuple):
    """A block of keys and values on the device with the rows' mask of its columns."""

    rows: Rows
    run: Run
    columns: slice


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Nq, Dv] and lse [B, Hq, Nq], where the query is. ArgumentError where an additive
    mask gives all keys of a row so large a number that lse holds nothing of their count."""
    batch, heads, length, _ = call.query.shape
    width = call.value.shape[3]
    with _on(call.device):
        pass_ = _Pass(call, backward=False)
        here = streaming.stays(call.query, call.device)
        out = lse = call.query.new_empty(0)
        if not here or len(pass_.query_bounds) != 1:
            shape = (batch, length, heads, width)
            out = call.query.new_zeros(shape).transpose(1, 2)
            wide = state_dtype(call.query.dtype)
            lse = call.query.new_full((batch, heads, length), -math.inf, dtype=wide)
        for bounds, (query,) in pass_.queries(call.query):
            total = None
            for block in pass_.keys(query, bounds):
                total = shards.state(block.rows, block.run, total)
            found = shards.finished(total, pass_.rows(query, bounds), width)
            found = found[0], found[1].to(state_dtype(query.dtype))
            _require_count(found[1], call.attn_mask)
            if here and len(pass_.query_bounds) == 1:
                return found
            rows = slice(*bounds)
            pass_.put((found[0], out[:, :, rows]), (found[1], lse[:, :, rows]))
        pass_.finish()
        return out, lse


def backward(call: Call, saved: Saved, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value, each where its operand is and of its dtype.

    saved: where the query is.
    """
    with _on(call.device):
        pass_ = _Pass(call, backward=True)
        whole = len(pass_.query_bounds) == 1
        alone = whole and not call.is_causal  # a block of keys is met once
        totals = [
            _empty(call.query, call.query.dtype, wanted.query),
            *(
                _empty(t, t.dtype if alone else state_dtype(t.dtype), needed).zero_()
                for t, needed in ((call.key, wanted.key), (call.value, wanted.value))
            ),
        ]
        given = [t for t in (saved.grad_out, saved.out, saved.lse, saved.grad_lse) if t is not None]
        for bounds, (rows_of, *parts) in pass_.queries(call.query, *given):
            query, of_rows = rows_of, Saved(*parts)
            large = loses_digits(of_rows.lse)
            if large:
                query, of_rows = query.double(), pass_.doubled(query, bounds, of_rows)
            own = Sums.zeros(pass_.rows(query, bounds), wanted)
            for block in pass_.keys(query, bounds):
                rows, run = block.rows, block.run
                if large:
                    rows, run = rows.doubled(), run.doubled()
                grads = shards.gradients(rows, run, of_rows, own, wanted)
                pairs = [
                    (grad.to(total.dtype), total[:, :, block.columns])
                    for grad, total, needed in zip(grads, totals[1:], wanted[1:3], strict=True)
                    if needed
                ]
                pass_.put(*pairs, add=not alone)
            if own.query is not None:
                pass_.put((own.query.to(call.query.dtype), totals[0][:, :, slice(*bounds)]))
        pass_.finish()
        return tuple(
            total.to(t.dtype) if needed else None
            for total, t, needed in zip(totals, call[:3], wanted[:3], strict=True)
        )


def _require_count(lse: Tensor, attn_mask: Tensor | None) -> None:
    """Refuse rows whose lse = m + ln S has lost ln S to rounding.

    A block's state is (lse, 1, out), and a gradient reads exp(score - lse): without ln S every
    block weighs the same, whatever its number of keys. Scores of that size without a mask have lost
    their own digits, so that only masked calls wait here for the device.
    """
    if attn_mask is None or not attn_mask.is_floating_point():
        return
    limit = _LOST / torch.finfo(lse.dtype).eps
    if bool(((lse.abs() > limit) & lse.isfinite()).any()):
        raise ArgumentError(
            f"attn_mask gives all keys of a row numbers beyond {limit:.0f}, in which streamed "
            "blocks lose their count of keys: hide rows with -inf or a bool mask"
        )


def _empty(operand: Tensor, dtype: torch.dtype, needed: bool) -> Tensor:
    """Memory for a gradient; none where it is not wanted."""
    return operand.new_empty(operand.shape if needed else 0, dtype=dtype)


class _Pass:
    """The streams and blocks of one forward or backward."""

    def __init__(self, call: Call, *, backward: bool) -> None:
        self.call = call
        timeline = streaming.begin(call.device)
        self._queries = streaming.Loader(call.device, timeline, folds=False)
        self._keys = streaming.Loader(call.device, timeline)
        self._writer = streaming.Writer(call.device, timeline)
        rows, self._block = sizes(call, backward=backward)
        self.query_bounds = _bounds(call.query.shape[2], rows)

    def queries(self, *tensors: Tensor) -> Iterator[tuple[tuple[int, int], tuple[Tensor, ...]]]:
        """Blocks of queries and of what belongs to them, along dim 2, with their rows."""
        blocks = self._queries.blocks(tensors, [2] * len(tensors), self.query_bounds)
        return zip(self.query_bounds, blocks, strict=True)

    def keys(self, query: Tensor, bounds: tuple[int, int]) -> Iterator[_Keys]:
        """The blocks of keys that a block of queries sees, in their order."""
        call, rows = self.call, self.rows(query, bounds)
        seen = call.key.shape[2]
        if call.is_causal:
            seen = min(seen, bounds[1])
        tensors, dims, mask = [call.key, call.value], [2, 2], self._mask(bounds)
        if mask is not None and mask.shape[3] > 1:
            tensors, dims = [*tensors, mask], [2, 2, 3]
        columns = _bounds(seen, self._block)
        for (start, stop), parts in zip(
            columns, self._keys.blocks(tensors, dims, columns), strict=True
        ):
            own = parts[2] if len(parts) == 3 else mask
            # a mask of the block's columns alone; without one, rows and columns have their places
            place = (start, stop) if own is None else (0, stop - start)
            run = Run(*place, parts[0], parts[1])
            yield _Keys(replace(rows, attn_mask=own), run, slice(start, stop))

    def rows(self, query: Tensor, bounds: tuple[int, int]) -> Rows:
        """A block of queries as the rows that start at its first."""
        call = self.call
        return Rows(
            query, None, bounds[0], call.is_causal, call.scale, call.precision, call.backend
        )

    def doubled(self, query: Tensor, bounds: tuple[int, int], saved: Saved) -> Saved:
        """What the gradients of a block of queries read, in float64: their keys come once more."""
        total = None
        for block in self.keys(query, bounds):
            total = shards.state(block.rows.doubled(), block.run.doubled(), total)
        rows = self.rows(query, bounds).doubled()
        found = shards.finished(total, rows, self.call.value.shape[3])
        return saved._replace(grad_out=saved.grad_out.double(), out=found[0], lse=found[1])

    def put(self, *pairs: tuple[Tensor, Tensor], add: bool = False) -> None:
        """Put results where they belong: in place on the device, by the writer on the host."""
        moved = []
        for found, target in pairs:
            if streaming.stays(target, self.call.device):
                target.copy_(target + found if add else found)
            else:
                moved.append((found, target))
        if moved:
            self._writer.write(moved, add=add)

    def finish(self) -> None:
        """Wait for what is still on its way to the host."""
        self._writer.finish()

    def _mask(self, bounds: tuple[int, int]) -> Tensor | None:
        """The mask of a block of queries; on the device where it has no columns to be cut into."""
        mask = self.call.attn_mask
        if mask is None:
            return None
        if mask.shape[2] > 1:
            mask = mask[:, :, slice(*bounds)]
        return mask if mask.shape[3] > 1 else mask.to(self.call.device)


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
    here = streaming.stays(call.query, call.device)
    rows, block = length, _CPU_BLOCK
    if call.device.type == "cuda":
        row = batch * heads * (2 * head_dim * size + 3 * width * wide)
        row += batch * heads * (2 * head_dim + 2 * width) * wide * backward
        key = batch * kv_heads * (head_dim + width) * size
        free = int(_SHARE * _free(call.device))
        if not here:
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


def _free(device: torch.device) -> int:
    """Bytes that this process may still take of the device, its own pool included."""
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    # torch 2.10 may lack it: then there is no limit to know of
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    return int(min(free + held, share(device) * total) - used)


def _bounds(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
