"""What a pending tensor stands for: scores of two operands with scales, biases and masks, their
softmax, and the call of `elsa_core.attention` that gives the softmax's product with values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.patching.recognition.axes import (
    BATCH,
    LEFT,
    RIGHT,
    Atom,
    Axes,
    Axis,
    Layout,
    broadcast,
    leaves,
    length,
    of_kind,
    run,
    steps_to,
)

# What a pending tensor holds; WEIGHTS follow a softmax, MAXIMUM and SUM are one of a row. USED
# weights were multiplied with values: what is made of them may never be looked at.
SCORES, MAXIMUM, POWERS, SUM, WEIGHTS = "scores", "maximum", "powers", "sum", "weights"
USED = "used"
# Filled in for a masked score: exp of it is 0 beside any score that a model computes.
LEAST_FILL = -1e4
_HIDES = -100.0  # such a score does so still, after factors


class Term(NamedTuple):
    """One step from the product to the scores: "mul", "div", "add", "sub", "fill" with a mask and a
    number, or "row": the same was added to all scores of a row, of which a number is known or 0."""

    kind: str
    value: Any
    layout: Layout
    fill: float = 0.0


class Scores(NamedTuple):
    """Scores or weights as they are now."""

    left: Tensor  # the factors
    right: Tensor
    layout: Layout  # their dimensions, and those of the scores
    product: torch.dtype  # that PyTorch multiplies in
    dtype: torch.dtype  # what PyTorch would hold the scores in
    terms: tuple[Term, ...] = ()  # what was done to the product, in order
    stage: str = SCORES  # to WEIGHTS
    key: str = ""  # RIGHT or LEFT: the operand whose tokens the softmax is over; "" before it
    place: Any = None  # where in the model the product was made, for an observer
    origin: Scores | None = None  # of a MAXIMUM or a SUM, the scores or powers that it is of

    def and_then(self, kind: str, value: Any, dtype: torch.dtype, fill: float = 0.0) -> Scores:
        return self._replace(terms=(*self.terms, Term(kind, value, self.layout, fill)), dtype=dtype)

    def sources(self) -> list[Tensor]:
        """Every tensor that the scores are made of."""
        found = [self.left, self.right]
        found += [term.value for term in self.terms if isinstance(term.value, Tensor)]
        return found

    def of(self, sources: Sequence[Tensor]) -> Scores:
        """The same of other tensors, in the order of `sources`."""
        left, right, *others = sources
        rest = iter(others)
        terms = tuple(
            t._replace(value=next(rest)) if isinstance(t.value, Tensor) else t for t in self.terms
        )
        return self._replace(left=left, right=right, terms=terms)


class RefusedError(Exception):
    """These scores, or this product, are none that `attention` computes."""


class _Plan:
    """How operands of certain layouts become those of `attention`, [batch atoms..., tokens,
    channels], and its result the product. Atoms of the batch form two dimensions, `groups`, of the
    lengths `sizes`: None where each holds one atom."""

    def __init__(self, layout: Layout, key: str, value: Sequence[int], labels: tuple[Any, ...]):
        query, keys = (layout.left, layout.right) if key == RIGHT else (layout.right, layout.left)
        self.queries = of_kind(query, LEFT if key == RIGHT else RIGHT)
        self.keys, self.batch = of_kind(keys, key), of_kind(layout.axes, BATCH)
        self.every = tuple((atom,) for atom in (*self.batch, *self.queries, *self.keys))
        of_value, self.free = _value_axes(layout, value, labels, self.keys)
        if max(layout.inner.size, self.free.size) > LARGEST_HEAD_DIM:
            raise RefusedError
        lead, inner = tuple((atom,) for atom in self.batch), (layout.inner,)
        axes = dict(zip(labels[0], layout.axes, strict=True))
        self.want = tuple(leaves(axes[n]) if n in axes else (self.free,) for n in labels[2])
        # with every atom that was cut since replaced by its parts
        now, keys_now = (tuple(leaves(axis) for axis in axes) for axes in (query, keys))
        self.of_query = steps_to(now, (*lead, self.queries, inner))
        self.of_key = steps_to(keys_now, (*lead, self.keys, inner))
        self.of_value = steps_to(of_value, (*lead, self.keys, (self.free,)))
        first = min(len(self.batch), max(len(self.batch) - 1, 1))
        self.groups = self.batch[:first], self.batch[first:]
        self.sizes = None if len(self.batch) == 2 else [length(group) for group in self.groups]
        self.of_out = steps_to((*self.groups, self.queries, (self.free,)), self.want)


def attended(
    scores: Scores,
    value: Tensor,
    labels: tuple[Any, ...],
    dtype: torch.dtype,
    attend: Callable[..., Any],
) -> Tensor:
    """The product of WEIGHTS with values, by one call of `attend`, in the place of `attention`.
    `labels` are of the dimensions of the weights, of the values and of the product."""
    layout, key = scores.layout, scores.key
    # atoms may have been cut since
    known = labels, key, value.shape, Atom.cuts
    plan: _Plan = layout.known(known, _Plan, layout, key, value.shape, labels)
    query, keys = (scores.left, scores.right) if key == RIGHT else (scores.right, scores.left)
    q, k, v = run(query, plan.of_query), run(keys, plan.of_key), run(value, plan.of_value)
    if q.dtype != scores.product or k.dtype != scores.product:
        q, k = q.to(scores.product), k.to(scores.product)
    if v.dtype != q.dtype:
        computed = torch.promote_types(q.dtype, v.dtype)
        q, k, v = q.to(computed), k.to(computed), v.to(computed)
    mask, scale = None, 1.0
    if scores.terms:
        q, k, mask, scale = _with_terms(scores.terms, q, k, plan)
    if plan.sizes is not None:
        q, k, v = (t.reshape(*plan.sizes, *t.shape[-2:]) for t in (q, k, v))
    if mask is not None:
        want, of_mask = (*plan.groups, plan.queries, plan.keys), ("mask", plan, mask.shape)
        mask = run(mask, layout.known(of_mask, broadcast, plan.every, mask.shape, want))
    out = run(attend(q, k, v, mask, scale=scale), plan.of_out)
    return out if out.dtype == dtype else out.to(dtype)


def _value_axes(
    layout: Layout, value: Sequence[int], labels: Sequence[Sequence[Any]], keys: Axis
) -> tuple[Axes, Atom]:
    of_weights, of_value, of_out = labels
    axes = {name: leaves(axis) for name, axis in zip(of_weights, layout.axes, strict=True)}
    contracted = [atom for name, axis in axes.items() if name not in of_out for atom in axis]
    if len(contracted) != len(keys) or set(contracted) != set(keys):
        raise RefusedError
    found: list[Axis] = []
    free: Atom | None = None
    for name, size in zip(of_value, value, strict=True):
        if name not in axes:
            if free is not None or name not in of_out:
                raise RefusedError
            free = Atom("value", size)
            found.append((free,))
        elif size == 1 and name in of_out:
            found.append(())
        elif size != length(axes[name]) or (
            name in of_out and any(atom.kind != BATCH for atom in axes[name])
        ):
            raise RefusedError
        else:
            found.append(axes[name])
    if free is None or any(name not in of_value for name in of_weights if name not in of_out):
        raise RefusedError
    return tuple(found), free


def _with_terms(  # noqa: PLR0912, PLR0915
    terms: Sequence[Term], q: Tensor, k: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Query and key with factors in them, what is added to the scores or hides them, with a
    dimension for each atom, and their scale."""
    scale = 1.0
    batch, queries, keys, every = plan.batch, plan.queries, plan.keys, plan.every
    ends = len(batch), len(batch) + len(queries)
    biases: list[Tensor] = []
    hidden: Tensor | None = None
    finite = shifted = False
    level, lowest = 0.0, float("-inf")  # a number that the scores were moved by; a fill above it
    for term in terms:
        given = term.value
        if term.kind == "row":
            # of the number 0 each row's own, which is not known; hidden scores were moved by it too
            shifted, level = True, level + (given or (math.nan if finite else 0.0))
            continue
        if term.kind in ("mul", "div") and not isinstance(given, Tensor):
            factor = given if term.kind == "mul" else 1 / given
            scale, level, lowest = scale * factor, level * factor, lowest * factor
            biases = [bias * factor for bias in biases]
            if factor <= 0 and hidden is not None:
                raise RefusedError
            continue
        shape = given.shape
        layout, known = term.layout, ("term", plan, shape)
        spread = run(given, layout.known(known, broadcast, layout.axes, shape, every))
        if term.kind == "fill":
            if hidden is not None and lowest != term.fill - level:  # not all weigh alike
                raise RefusedError
            lowest = term.fill - level
            finite = math.isfinite(lowest)
            hidden = spread if hidden is None else hidden | spread
        elif term.kind in ("add", "sub"):
            if finite:
                raise RefusedError
            biases.append(spread if term.kind == "add" else -spread)
        else:
            if hidden is not None:
                raise RefusedError
            factors = spread if term.kind == "mul" else spread.reciprocal()
            biases = [bias * factors for bias in biases]
            of_query = any(n != 1 for n in factors.shape[ends[0] : ends[1]])
            of_key = any(n != 1 for n in factors.shape[ends[1] :])
            if of_key and (of_query or shifted):
                raise RefusedError
            if of_key:
                k = k * _per_token(factors, batch, keys, range(*ends)).to(k.dtype)
            else:
                q = q * _per_token(factors, batch, queries, range(ends[1], len(every))).to(q.dtype)
    if not scale > 0 or lowest > _HIDES:
        raise RefusedError
    if finite and hidden is not None:
        # a row that is hidden whole weighs all keys alike: its queries become 0, it hides nothing
        every_key = hidden.all(dim=tuple(range(ends[1], len(every))), keepdim=True)
        q = q.masked_fill(_per_token(every_key, batch, queries, range(ends[1], len(every))), 0.0)
        biases = [bias.masked_fill(every_key, 0.0) for bias in biases]
        hidden = hidden & ~every_key
    if len(keys) > 1:
        q, k, biases, scale = _widened(q, k, biases, scale, plan)
    mask = sum(biases[1:], biases[0]) if biases else None
    if mask is None:
        return q, k, None if hidden is None else ~hidden, scale
    if mask.dtype not in (q.dtype, torch.float32):
        wide = torch.float64 in (mask.dtype, q.dtype)
        mask = mask.to(q.dtype if wide else torch.float32)
    return q, k, mask if hidden is None else mask.masked_fill(hidden, float("-inf")), scale


def _per_token(factors: Tensor, batch: Axis, tokens: Axis, others: range) -> Tensor:
    """[*batch, tokens, 1] of factors with a dimension for each atom, of length 1 for the others."""
    if len(others):
        factors = factors.flatten(others.start, others.stop - 1)
        factors = factors.squeeze(others.start)
    lead, each = tuple((atom,) for atom in batch), tuple((atom,) for atom in tokens)
    return run(factors, broadcast((*lead, *each), factors.shape, (*lead, tokens, ())))


def _widened(
    q: Tensor, k: Tensor, biases: list[Tensor], scale: float, plan: _Plan
) -> tuple[Tensor, Tensor, list[Tensor], float]:
    """Biases that depend on a part of the key's position alone (decomposed relative positions) as
    more channels: queries [q * scale, bias], keys [k, one-hot position]. As a mask their sum would
    be as large as the scores."""
    batch, queries, keys = plan.batch, plan.queries, plan.keys
    first = len(batch) + len(queries)
    found: dict[int, Tensor] = {}
    rest = []
    for bias in biases:
        parts = [i for i, size in enumerate(bias.shape[first:]) if size != 1]
        if len(parts) == 1:
            found[parts[0]] = found[parts[0]] + bias if parts[0] in found else bias
        else:
            rest.append(bias)
    more = sum(keys[i].size for i in found)
    if not found or q.shape[-1] + more > LARGEST_HEAD_DIM:
        return q, k, biases, scale
    lead = tuple((atom,) for atom in batch)
    wide, places = [q * scale], [k]
    for i, bias in found.items():
        atoms = (*batch, *queries, keys[i])
        bias = bias.squeeze(tuple(first + j for j in range(len(keys)) if j != i))  # noqa: PLW2901
        have = tuple((a,) if n != 1 else () for a, n in zip(atoms, bias.shape, strict=True))
        wide.append(run(bias, steps_to(have, (*lead, queries, (keys[i],)))).to(q.dtype))
        one_hot = Atom(RIGHT, keys[i].size)
        eye = torch.eye(keys[i].size, dtype=k.dtype, device=k.device)
        place = run(eye, steps_to(((keys[i],), (one_hot,)), (keys, (one_hot,))))
        places.append(place.expand(*k.shape[:-1], -1))
    return torch.cat(wide, -1), torch.cat(places, -1), rest, 1.0
