"""The three ways in which shards meet: a ring, a gather, and an exchange of heads for tokens.

Each has a forward (out and lse of this rank's rows) and a backward. A sum has one order, whatever
arrives first: states in the order of the shards; gradients of a shard's keys from its own rank
downwards around the ring, or in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elsa_core import monoid
from elsa_core.backends.support import loses_digits
from elsa_core.distributed import groups, shards
from elsa_core.distributed.agreement import Agreement
from elsa_core.distributed.plan import Plan
from elsa_core.distributed.shards import Rows, Run, Saved, Sums, Wanted
from elsa_core.monoid import state_dtype
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
    plan: Plan

    def shapes(self, rank: int, wanted: Wanted | None = None) -> list[torch.Size]:
        """Of the keys and values of a rank's shard, or of those of their gradients that are
        wanted."""
        batch, heads, _, head_dim = self.key.shape
        tokens = self.agreed.keys[rank]
        parts = ((head_dim, not wanted or wanted.key),
                 (self.value.shape[3], not wanted or wanted.value))  # fmt: skip
        return [torch.Size((batch, heads, tokens, width)) for width, needed in parts if needed]

    def size(self, rank: int, wanted: Wanted | None = None) -> int:
        """How many numbers these are."""
        return sum(shape.numel() for shape in self.shapes(rank, wanted))


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, n, Dv] and lse [B, Hq, n], float64, of this rank's rows, and the tokens of all
    ranks, int64 [2, P]."""
    method, tokens = call.plan.method, torch.tensor([call.agreed.queries, call.agreed.keys])
    if method == "heads":
        rows, queries = call.rows, call.agreed.queries
        out, lse = attend(
            *_whole_heads(call), is_causal=rows.is_causal, scale=rows.scale, enable_gqa=True,
            precision=rows.precision, backend=rows.backend, return_lse=True,
        )  # fmt: skip
        out, lse = (_exchanged(call, t, queries, back=True) for t in (out, lse.unsqueeze(-1)))
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, lse.squeeze(-1).double(), tokens
    if method == "gather":
        total = shards.state(call.rows, _gathered(call))
    else:  # own and later shards come first, then the earlier ones: two folds, each in order
        late = early = None
        for rank, run in _ring(call):
            if rank >= call.group.rank():
                late = shards.state(call.rows, run, late)
            else:
                early = shards.state(call.rows, run, early)
        total = monoid.merge_(early, late) if early and late else early or late
    out, lse = shards.finished(total, call.rows, call.value.shape[3])
    return out, lse.double(), tokens


def backward(call: Call, saved: Saved, wanted: Wanted) -> Gradients:
    """The gradients of this rank's query, key, value and mask."""
    grad_out, saved = saved.grad_out, shards.narrowed(saved)
    if call.plan.method == "heads":
        return _heads_backward(call, saved, wanted)
    if call.plan.method == "gather":
        run, rows = _gathered(call), call.rows
        if loses_digits(saved.lse):
            run, rows = run.doubled(), rows.doubled()
            found = shards.finished(shards.state(rows, run), rows, call.value.shape[3])
            saved = Saved(grad_out.double(), *found)
        sums = Sums.zeros(rows, wanted)
        moved = state_dtype(call.key.dtype)  # other ranks need not have computed in float64
        of_key, of_value = shards.gradients(rows, run, saved, sums, wanted)
        own = _summed_at_home(call, of_key.to(moved), of_value.to(moved), wanted)
    else:
        group, doing = call.group, "asking whether scores are large"
        alone = group.size() == 1
        of_all = None if alone else lambda x: groups.all_gather(group, x.to(torch.uint8), doing)
        if loses_digits(saved.lse, of_all):
            call = call._replace(
                rows=call.rows.doubled(), key=call.key.double(), value=call.value.double()
            )
            saved = Saved(grad_out.double(), *forward(call)[:2])
        sums = Sums.zeros(call.rows, wanted)
        own = _ring_backward(call, saved, sums, wanted)
    shapes = call.shapes(call.group.rank(), wanted)
    given = iter([] if own is None else groups.unpacked(own, shapes))
    key, value = (next(given) if needed else None for needed in wanted[1:3])
    return sums.query, key, value, sums.attn_mask


def _ring(call: Call) -> Iterator[tuple[int, Run]]:
    """Every rank's shard in turn, this rank's first; the next one is under way meanwhile."""
    world, rank = call.group.size(), call.group.rank()
    message = torch.cat([call.key.reshape(-1), call.value.reshape(-1)])
    for step in range(world):
        here, following = (rank + step) % world, (rank + step + 1) % world
        more = step + 1 < world
        coming = message.new_empty(call.size(following) if more else 0)
        shard = groups.unpacked(message, call.shapes(here))
        start = sum(call.agreed.keys[:here])
        with groups.passing(call.group, message if more else None, coming):
            yield here, Run(start, start + call.agreed.keys[here], *shard)
        message = coming


def _ring_backward(call: Call, saved: Saved, sums: Sums, wanted: Wanted) -> Tensor | None:
    """The gradients of a shard follow it around the ring, one step later, and end at home."""
    sent: Tensor | None = None
    for rank, run in _ring(call):
        come = None if sent is None else sent.new_empty(call.size(rank, wanted))
        found = run.key.new_empty(call.size(rank, wanted), dtype=state_dtype(run.key.dtype))
        with groups.passing(call.group, sent, come):
            shards.gradients(call.rows, run, saved, sums, wanted, found)
        if wanted.key or wanted.value:
            sent = found if come is None else come.add_(found)
    if sent is None or call.group.size() == 1:
        return sent
    home = sent.new_empty(call.size(call.group.rank(), wanted))
    with groups.passing(call.group, sent, home):  # which waits
        return home


def _gathered(call: Call) -> Run:
    total, key, value = sum(call.agreed.keys), call.key, call.value
    if call.group.size() > 1:
        ranks = range(call.group.size())
        sizes = [call.size(rank) for rank in ranks]
        message = torch.cat([key.reshape(-1), value.reshape(-1)])
        messages = groups.gather(call.group, message, sizes, "gathering keys and values")
        shards_of = (groups.unpacked(messages[rank], call.shapes(rank)) for rank in ranks)
        key, value = (torch.cat(parts, 2) for parts in zip(*shards_of, strict=True))
    return Run(0, total, key, value)


def _summed_at_home(call: Call, of_key: Tensor, of_value: Tensor, wanted: Wanted) -> Tensor | None:
    """Send each shard's gradients to its rank, which adds them in the order of the ranks."""
    chosen = [g for g, needed in ((of_key, wanted.key), (of_value, wanted.value)) if needed]
    if not chosen:
        return None
    world = call.group.size()
    of_ranks = zip(*(g.split(list(call.agreed.keys), 2) for g in chosen), strict=True)
    parts = [torch.cat([g.reshape(-1) for g in each]) for each in of_ranks]
    if world > 1:
        shapes = [(call.size(call.group.rank(), wanted),)] * world
        doing = "returning gradients of keys and values"
        parts = groups.exchange(call.group, parts, shapes, doing)
    return sum(parts[1:], parts[0])


def _exchanged(
    call: Call, tensor: Tensor, lengths: tuple[int, ...], *, back: bool = False
) -> Tensor:
    """[B, H, own tokens, D] -> [B, H / P, all tokens, D], or the way back."""
    batch, heads, _, width = tensor.shape
    world = call.group.size()
    if back:
        parts, dim, doing = tensor.split(list(lengths), 2), 1, "exchanging heads for tokens"
        shapes = [(batch, heads, lengths[call.group.rank()], width)] * world
    else:
        parts, dim, doing = tensor.chunk(world, 1), 2, "exchanging tokens for heads"
        shapes = [(batch, heads // world, n, width) for n in lengths]
    return torch.cat(groups.exchange(call.group, parts, shapes, doing), dim)


def _whole_heads(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask of this rank's heads over the whole sequence."""
    rows, agreed = call.rows, call.agreed
    mask = rows.attn_mask
    if mask is not None:
        # whole: what a rank receives must not depend on which dims another one leaves out
        mask = mask.expand(*rows.query.shape[:3], sum(agreed.keys))
        moved = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        mask = _exchanged(call, moved, agreed.queries).to(mask.dtype)
    query = _exchanged(call, rows.query, agreed.queries)
    key, value = (_exchanged(call, t, agreed.keys) for t in (call.key, call.value))
    return query, key, value, mask


def _heads_backward(call: Call, saved: Saved, wanted: Wanted) -> Gradients:
    rows, agreed = call.rows, call.agreed
    query, key, value, mask = _whole_heads(call)
    grad_out, out = (_exchanged(call, t, agreed.queries) for t in (saved.grad_out, saved.out))
    lse = _exchanged(call, saved.lse.unsqueeze(-1), agreed.queries).squeeze(-1)
    grads = torch.ops.elsa.attention_backward(
        grad_out, lse.new_zeros(0) if lse.is_cuda else torch.zeros_like(lse), query, key, value,
        mask, out, lse, rows.is_causal, rows.scale, rows.precision, list(wanted),
    )  # fmt: skip
    lengths = (agreed.queries, agreed.keys, agreed.keys, agreed.queries)
    of_query, of_key, of_value, of_mask = (
        _exchanged(call, grad, of, back=True) if needed else None
        for grad, of, needed in zip(grads, lengths, wanted, strict=True)
    )
    if of_mask is not None and rows.attn_mask is not None:
        of_mask = of_mask.to(state_dtype(of_mask.dtype)).sum_to_size(rows.attn_mask.shape)
    return of_query, of_key, of_value, of_mask
