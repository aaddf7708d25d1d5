"""A rank's queries against some of the keys: states forward, gradients backward.

A rank's rows [q0, q1) and a run of columns [k0, k1) of the whole score matrix meet in blocks that a
kernel takes: all of one, or a causal one whose diagonal starts in its corner.

Forward, a block's (out, lse) is the state (m, S, W) = (lse, 1, out), and states are merged in the
order of the columns: ELSA (arXiv 2604.23798), Eq. 4. Of float32 operands lse is float64: rounded
to float32 it would add 40% to the error of a million keys, and its rounding would show in weights.
In half precision it is not, and where an additive mask gives all keys of a row a large finite
number, ln S is lost, and every block weighs the same whatever its number of keys.

Backward, the weights of a block are P = exp(score - lse) with the lse of the whole row, and delta =
rowsum(grad_out * out) with the out of the whole row: what a block adds to the gradients needs
nothing of other blocks (FlashAttention, arXiv 2205.14135, Algorithm 4). But a backward may round
scores otherwise than the forward did, and where a rounding of them shows in exp, the weights of a
row do not sum to one. Such calls compute both in float64 (`doubled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core import dispatch, monoid
from elsa_core.distributed import groups
from elsa_core.monoid import State, state_dtype
from elsa_core.ops.attention.dense import attention as attend


class Run(NamedTuple):
    """Keys and values of columns [start, stop) of the whole sequence: [B, Hkv, n, D or Dv]."""

    start: int
    stop: int
    key: Tensor
    value: Tensor

    def doubled(self) -> Run:
        """In float64."""
        return self._replace(key=self.key.double(), value=self.value.double())


@dataclass(frozen=True)
class Rows:
    """A rank's side of a call."""

    query: Tensor  # [B, Hq, n, D] of rows [start, start + n) of the whole sequence
    attn_mask: Tensor | None  # [B or 1, Hq or 1, n or 1, all keys or 1]
    start: int
    is_causal: bool
    scale: float
    precision: str
    backend: str

    def doubled(self) -> Rows:
        """In float64, by plain PyTorch, which has it on every device."""
        mask = self.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.double()
        return replace(
            self, query=self.query.double(), attn_mask=mask, precision="strict",
            backend=dispatch.PLAIN,
        )  # fmt: skip


class _Block(NamedTuple):
    """Rows and columns (within the rank's rows and within a run), and whether it is causal."""

    rows: slice
    columns: slice
    is_causal: bool


def _blocks(start: int, stop: int, first: int, last: int, is_causal: bool) -> Iterator[_Block]:
    """The blocks of rows [start, stop) by columns [first, last) in which anything is seen."""
    if start >= stop or first >= last:
        return
    count = stop - start
    if not is_causal:
        yield _Block(slice(0, count), slice(0, last - first), False)
        return
    seen_by_all = min(last, start)
    if first < seen_by_all:
        yield _Block(slice(0, count), slice(0, seen_by_all - first), False)
    column = max(first, start)
    if column < min(stop, last):  # the diagonal starts in the corner
        yield _Block(slice(column - start, count), slice(column - first, last - first), True)


def _mask_of(rows: Rows, block: _Block, run: Run) -> Tensor | None:
    mask = rows.attn_mask
    if mask is None:
        return None
    if mask.shape[2] > 1:
        mask = mask[:, :, block.rows]
    columns = slice(run.start + block.columns.start, run.start + block.columns.stop)
    return mask[..., columns] if mask.shape[3] > 1 else mask


def state(rows: Rows, run: Run, total: State | None = None) -> State | None:
    """The state of a rank's rows over a run; None of no key at all.

    `total`: of the runs before, which is used up: states are merged in the order of the columns.
    """
    stop = rows.start + rows.query.shape[2]
    for block in _blocks(rows.start, stop, run.start, run.stop, rows.is_causal):
        query, key = rows.query[:, :, block.rows], run.key[:, :, block.columns]
        value, mask = run.value[:, :, block.columns], _mask_of(rows, block, run)
        merged = dispatch.state_run(query, value, mask, rows.precision, rows.backend)
        if merged is not None:
            out, lse = merged(query, key, value, mask, block.is_causal, rows.scale, rows.precision)
            lse = lse.double()  # of few keys it is float32
        else:
            out, lse = attend(
                query, key, value, mask, is_causal=block.is_causal, scale=rows.scale,
                enable_gqa=True, precision=rows.precision, backend=rows.backend, return_lse=True,
            )  # fmt: skip
        found = State(lse, (~lse.isneginf()).to(lse.dtype), out.to(state_dtype(out.dtype)))
        if total is None and block.rows.start == 0:
            total = found
            continue
        if total is None:  # no key yet, of any row
            shape, device = rows.query.shape[:3], found.m.device
            sums = State.identity(shape, 1, dtype=found.m.dtype, device=device)
            width, dtype = found.W.shape[3], found.W.dtype
            weighted = State.identity(shape, width, dtype=dtype, device=device)
            total = State(sums.m, sums.S, weighted.W)
        monoid.merge_(State(*(part[:, :, block.rows] for part in total)), found)
    return total


def finished(total: State | None, rows: Rows, value_dim: int) -> tuple[Tensor, Tensor]:
    """out [B, Hq, n, Dv] in the query's dtype, memory [B, n, Hq, Dv], and lse [B, Hq, n] in that of
    the state's maxima.
    """
    query = rows.query
    if total is None:
        total = State.identity(query.shape[:3], value_dim, dtype=query.dtype, device=query.device)
    out, lse = monoid.finalize_(total)
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse.contiguous()


class Wanted(NamedTuple):
    """Which gradients a call wants; equal on all ranks."""

    query: bool
    key: bool
    value: bool
    attn_mask: bool


@dataclass
class Sums:
    """A rank's gradients of its own rows, float32 or float64, summed run after run.

    Attributes:
        query: [B, Hq, n, D]. attn_mask: of the mask's shape. None where not wanted.
    """

    query: Tensor | None
    attn_mask: Tensor | None

    @classmethod
    def zeros(cls, rows: Rows, wanted: Wanted) -> Sums:
        """Nothing summed yet."""
        wide = state_dtype(rows.query.dtype)
        return cls(
            torch.zeros_like(rows.query, dtype=wide) if wanted.query else None,
            torch.zeros_like(rows.attn_mask, dtype=wide, memory_format=torch.contiguous_format)
            if wanted.attn_mask and rows.attn_mask is not None
            else None,
        )


class Saved(NamedTuple):
    """What the gradients read of a rank's rows.

    grad_out and out [B, Hq, n, Dv], lse [B, Hq, n]: of the whole rows; lse in the state's dtype
    (`narrowed`). grad_lse [B, Hq, n], or None where nothing depends on lse.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None


def narrowed(saved: Saved) -> Saved:
    """With lse in the dtype that the kernels read, from float64, and no digit lost.

    A kernel takes P' = exp(score - lse') with the rounded lse', and P' = c P with
    c = exp(lse - lse') in each row. All gradients are linear in P grad_out, delta included: of
    grad_out / c and P' they are those of grad_out and P.
    """
    lse = saved.lse.to(state_dtype(saved.out.dtype))
    if saved.out.dtype != torch.float32:  # half precision rounds far more, float64 nothing
        return saved._replace(lse=lse)
    # scores of which a rounding is 60 have no digits left
    lost = (saved.lse - lse).nan_to_num_(0.0).clamp_(-60.0, 60.0)
    factor = torch.exp(-lost).to(torch.float32).unsqueeze(-1)
    return saved._replace(grad_out=saved.grad_out * factor, lse=lse)


def gradients(
    rows: Rows, run: Run, saved: Saved, sums: Sums, wanted: Wanted, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add a run's share to `sums`; give the gradients of its keys and values.

    memory: takes them, flat, one behind the other; of the dtype of `sums`.

    Returns:
        [B, Hkv, n, D] and [B, Hkv, n, Dv] of this rank's rows alone, float32 or float64; [0] where
        not wanted.
    """
    shapes = [t.shape if needed else torch.Size([0])
              for t, needed in ((run.key, wanted.key), (run.value, wanted.value))]  # fmt: skip
    if memory is None:
        count = sum(shape.numel() for shape in shapes)
        memory = run.key.new_empty(count, dtype=state_dtype(rows.query.dtype))
    of_key, of_value = groups.unpacked(memory, shapes)
    stop = rows.start + rows.query.shape[2]
    blocks = list(_blocks(rows.start, stop, run.start, run.stop, rows.is_causal))
    once = [block.columns for block in blocks] == [slice(0, run.stop - run.start)]
    if not once:
        memory.zero_()
    for block in blocks:
        grad_out, out, lse = (t[:, :, block.rows] for t in saved[:3])
        if saved.grad_lse is not None:
            grad_lse = saved.grad_lse[:, :, block.rows]
        else:
            grad_lse = lse.new_zeros(0) if lse.is_cuda else torch.zeros_like(lse)
        grads = dispatch.shard_backward(
            grad_out, grad_lse, rows.query[:, :, block.rows], run.key[:, :, block.columns],
            run.value[:, :, block.columns], _mask_of(rows, block, run), out, lse, block.is_causal,
            rows.scale, rows.precision, list(wanted),
        )  # fmt: skip
        if sums.query is not None:
            sums.query[:, :, block.rows] += grads[0]
        for total, grad, needed in zip((of_key, of_value), grads[1:3], wanted[1:3], strict=True):
            if needed and once:
                total.copy_(grad)
            elif needed:
                total[:, :, block.columns] += grad
        if sums.attn_mask is not None:
            part = _mask_of(replace(rows, attn_mask=sums.attn_mask), block, run)
            assert part is not None
            part += grads[3]
    return of_key, of_value
