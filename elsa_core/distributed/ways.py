"""The three ways in which shards meet: a ring, a gather, and an exchange of heads for tokens.

Each has a forward (out and lse of this rank's rows) and a backward. A sum has one order, whatever
arrives first: states in the order of the shards; gradients of a shard's keys from its own rank
downwards around the ring, or in the order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elsa_core import monoid
from elsa_core.backends.support import loses_digits
from elsa_core.distributed import groups, shards
from elsa_core.distributed.agreement import Agreement
from elsa_core.distributed.shards import Rows, Run, Saved, Sums, Wanted
from elsa_core.monoid import State, state_dtype
from elsa_core.ops.attention.dense import attention as attend

# of query, key, value and mask, float32 or float64; None where not wanted
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Call(NamedTuple):
    """This rank's side of a call, its shard of keys and values, and who else takes part."""

    rows: Rows
    key: Tensor
    value: Tensor
    agreed: Agreement
    group: dist.ProcessGroup

    def doubled(self) -> Call:
        """In float64."""
        key, value = self.key.double(), self.value.double()
        return self._replace(rows=self.rows.doubled(), key=key, value=value)


def forward(call: Call, method: str) -> tuple[Tensor, Tensor]:
    """out [B, Hq, n, Dv] and lse [B, Hq, n] of this rank's rows."""
    if method == "heads":
        return _heads_forward(call)
    value_dim = call.value.shape[3]
    if method == "gather":
        run = _gathered(call)
        return shards.finished(shards.state(call.rows, [run]), call.rows, value_dim)
    before: list[State] = []
    after: list[State] = []
    for rank, run in _ring(call):
        found = shards.state(call.rows, [run])
        if found is None:
            continue
        # own and later shards come first, then the earlier ones: two folds, each in order
        states = after if rank >= call.group.rank() else before
        states[:] = [monoid.merge_(states[0], found) if states else found]
    folded = [*before, *after]
    total = monoid.merge_(*folded) if len(folded) == 2 else next(iter(folded), None)
    return shards.finished(total, call.rows, value_dim)


def backward(call: Call, method: str, saved: Saved, wanted: Wanted) -> Gradients:
    """The gradients of this rank's query, key, value and mask."""
    grad_out, saved = saved.grad_out, shards.narrowed(saved)
    if method == "heads":
        return _heads_backward(call, saved, wanted)
    if method == "gather":
        run, rows = _gathered(call), call.rows
        if loses_digits(saved.lse):
            run, rows = run.doubled(), rows.doubled()
            found = shards.finished(shards.state(rows, [run]), rows, call.value.shape[3])
            saved = Saved(grad_out.double(), *found)
        sums = Sums.zeros(rows, wanted)
        moved = state_dtype(call.key.dtype)  # other ranks need not have computed in float64
        of_key, of_value = shards.gradients(rows, run, saved, sums, wanted)
        own = _summed_at_home(call, of_key.to(moved), of_value.to(moved), wanted)
        return sums.query, *own, sums.attn_mask
    if loses_digits(saved.lse, lambda found: _of_all(call.group, found)):
        call = call.doubled()
        saved = Saved(grad_out.double(), *forward(call, "ring"))
    sums = Sums.zeros(call.rows, wanted)
    own = _ring_backward(call, saved, sums, wanted)
    return sums.query, *own, sums.attn_mask


def _of_all(group: dist.ProcessGroup, found: Tensor) -> Tensor:
    if group.size() == 1:
        return found
    with groups.watching(group, "asking whether scores are large"):
        return groups.all_gather(group, found.to(torch.uint8))


def _packed(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _count(call: Call, rank: int) -> int:
    """Numbers of the keys and values of a rank's shard."""
    batch, heads, _, head_dim = call.key.shape
    return int(batch * heads * call.agreed.keys[rank] * (head_dim + call.value.shape[3]))


def _run(call: Call, rank: int, packed: Tensor) -> Run:
    batch, heads, _, head_dim = call.key.shape
    shape = (batch, heads, call.agreed.keys[rank])
    count = math.prod(shape) * head_dim
    key, value = packed[:count].view(*shape, head_dim), packed[count:]
    return Run(*call.agreed.columns(rank), key, value.view(*shape, call.value.shape[3]))


def _ring(call: Call) -> Iterator[tuple[int, Run]]:
    """Every rank's shard in turn, this rank's first; the next one is under way meanwhile."""
    world, rank = call.group.size(), call.group.rank()
    packed = _packed(call.key, call.value)
    for step in range(world):
        here, following = (rank + step) % world, (rank + step + 1) % world
        works: list[dist.Work] = []
        coming = packed
        if step + 1 < world:
            coming = packed.new_empty(_count(call, following))
            works = groups.pass_on(call.group, packed, coming)
        yield here, _run(call, here, packed)
        groups.finish(call.group, works)
        packed = coming


def _ring_backward(
    call: Call, saved: Saved, sums: Sums, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a shard follow it around the ring, one step later, and end at home."""
    needed = wanted.key or wanted.value
    sent: Tensor | None = None
    for _, run in _ring(call):
        works: list[dist.Work] = []
        come: Tensor | None = None
        if needed and sent is not None:
            come = sent.new_empty(_gradient_size(run, wanted))
            works = groups.pass_on(call.group, sent, come)
        dtype = state_dtype(run.key.dtype)
        found = run.key.new_empty(_gradient_size(run, wanted), dtype=dtype)
        shards.gradients(call.rows, run, saved, sums, wanted, found)
        groups.finish(call.group, works)
        sent = found if come is None else come.add_(found)
    if not needed or sent is None:
        return None, None
    if call.group.size() > 1:
        home = sent.new_empty(_gradient_size(Run(0, 0, call.key, call.value), wanted))
        groups.finish(call.group, groups.pass_on(call.group, sent, home))
        sent = home
    return _unpacked(call, sent, wanted)


def _gradient_size(run: Run, wanted: Wanted) -> int:
    return run.key.numel() * wanted.key + run.value.numel() * wanted.value


def _unpacked(call: Call, packed: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of this rank's keys and values out of one message."""
    count = call.key.numel() if wanted.key else 0
    return (
        packed[:count].view(call.key.shape) if wanted.key else None,
        packed[count:].view(call.value.shape) if wanted.value else None,
    )


def _gathered(call: Call) -> Run:
    """The keys and values of all ranks as one run."""
    total = sum(call.agreed.keys)
    if call.group.size() == 1:
        return Run(0, total, call.key, call.value)
    packed = _packed(call.key, call.value)
    sizes = [_count(call, rank) for rank in range(call.group.size())]
    message = packed.new_zeros(max(sizes))
    message[: packed.numel()] = packed
    with groups.watching(call.group, "gathering keys and values"):
        rows = groups.all_gather(call.group, message)
    runs = [_run(call, rank, rows[rank, :size]) for rank, size in enumerate(sizes)]
    return Run(0, total, torch.cat([r.key for r in runs], 2), torch.cat([r.value for r in runs], 2))


def _summed_at_home(
    call: Call, of_key: Tensor, of_value: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Send each shard's gradients to its rank, which adds them in the order of the ranks."""
    if not (wanted.key or wanted.value):
        return None, None
    chosen = [g for g, needed in ((of_key, wanted.key), (of_value, wanted.value)) if needed]
    columns = [slice(*call.agreed.columns(rank)) for rank in range(call.group.size())]
    parts = [_packed(*(g[:, :, place] for g in chosen)) for place in columns]
    size = _gradient_size(Run(0, 0, call.key, call.value), wanted)
    if call.group.size() > 1:
        with groups.watching(call.group, "returning gradients of keys and values"):
            parts = groups.exchange(call.group, parts, [(size,)] * call.group.size())
    return _unpacked(call, sum(parts[1:], parts[0]), wanted)


def _to_heads(call: Call, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[B, H, own tokens, D] -> [B, H / P, all tokens, D]."""
    batch, _, _, width = tensor.shape
    parts = list(tensor.chunk(call.group.size(), 1))
    shapes = [(batch, parts[0].shape[1], n, width) for n in lengths]
    with groups.watching(call.group, "exchanging tokens for heads"):
        return torch.cat(groups.exchange(call.group, parts, shapes), 2)


def _to_tokens(call: Call, tensor: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """The way back: [B, H / P, all tokens, D] -> [B, H / P, own tokens, D] of each rank."""
    batch, heads, _, width = tensor.shape
    shape = (batch, heads, lengths[call.group.rank()], width)
    parts = list(tensor.split(list(lengths), 2))
    with groups.watching(call.group, "exchanging heads for tokens"):
        return groups.exchange(call.group, parts, [shape] * call.group.size())


def _whole_heads(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask of this rank's heads over the whole sequence."""
    rows, agreed = call.rows, call.agreed
    mask = rows.attn_mask
    if mask is not None:
        # whole: what a rank receives must not depend on which dims another one leaves out
        batch, heads, tokens = rows.query.shape[:3]
        mask = mask.expand(batch, heads, tokens, sum(agreed.keys))
        moved = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        mask = _to_heads(call, moved, agreed.queries).to(mask.dtype)
    return (
        _to_heads(call, rows.query, agreed.queries),
        _to_heads(call, call.key, agreed.keys),
        _to_heads(call, call.value, agreed.keys),
        mask,
    )


def _heads_forward(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.rows
    query, key, value, mask = _whole_heads(call)
    out, lse = attend(
        query, key, value, mask, is_causal=rows.is_causal, scale=rows.scale, enable_gqa=True,
        precision=rows.precision, backend=rows.backend, return_lse=True,
    )  # fmt: skip
    queries = call.agreed.queries
    out = torch.cat(_to_tokens(call, out, queries), 1)
    lse = torch.cat(_to_tokens(call, lse.unsqueeze(-1), queries), 1).squeeze(-1)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _heads_backward(call: Call, saved: Saved, wanted: Wanted) -> Gradients:
    rows, agreed = call.rows, call.agreed
    query, key, value, mask = _whole_heads(call)
    grad_out, out = (_to_heads(call, t, agreed.queries) for t in (saved.grad_out, saved.out))
    lse = _to_heads(call, saved.lse.unsqueeze(-1), agreed.queries).squeeze(-1)
    grads = torch.ops.elsa.attention_backward(
        grad_out, lse.new_zeros(0) if lse.is_cuda else torch.zeros_like(lse), query, key, value,
        mask, out, lse, rows.is_causal, rows.scale, rows.precision, list(wanted),
    )  # fmt: skip
    lengths = (agreed.queries, agreed.keys, agreed.keys)
    found = [
        torch.cat(_to_tokens(call, grad, of), 1) if needed else None
        for grad, of, needed in zip(grads[:3], lengths, wanted[:3], strict=True)
    ]
    of_mask = None
    if wanted.attn_mask and rows.attn_mask is not None:
        wide = torch.cat(_to_tokens(call, grads[3], agreed.queries), 1)
        of_mask = wide.to(state_dtype(wide.dtype)).sum_to_size(rows.attn_mask.shape)
    return found[0], found[1], found[2], of_mask
