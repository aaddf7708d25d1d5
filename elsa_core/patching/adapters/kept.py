"""Biases that timm's attention gathers from a learned table and keeps in eval mode: LeViT,
EfficientFormer, EfficientViT (MSRA) and TinyViT.

What is kept there does not follow the weights. A module whose original method elsa calls (a keeper)
gets a dict in the place of its own that keeps nothing (`follow`): each read gathers anew, whichever
thread reads, and none can find it emptied by another. In settled calls (`direct.py`) and in CUDA
graphs one gather serves all keepers of the model (`Keepers`), of the weights as they are when the
call begins.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from elsa_core import calls

CACHE, TABLE, INDEX = "attention_bias_cache", "attention_biases", "attention_bias_idxs"
_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_TERMS = attrgetter("shape", "dtype", "device")
_VERSION = attrgetter("_version")
_MOST: Final = 1 << 22  # biases that one gather makes: they and their index stay for the whole call
_FEWEST: Final = 3  # keepers in a graph: one gather of all is two launches
_PLANS_AHEAD: Final = 4  # of one model, for as many dtypes and addresses
_ALIGNED: Final = 256  # biases; attention reads a mask that begins elsewhere by other kernels


_NONE: Final[dict[int, Tensor]] = {}


class _Current(threading.local):
    biases: dict[int, Tensor] = _NONE  # of the call that is under way, by the id of their table
    later: Callable[[], dict[int, Tensor]] | None = None  # gathers them at the first read


_CURRENT = _Current()


class Biases(dict[str, Tensor]):
    """A keeper's cache by device, which keeps nothing: gathered at each read. A copy is a dict."""

    __slots__ = ("keeper",)

    def __init__(self, keeper: nn.Module) -> None:
        super().__init__()
        self.keeper = weakref.ref(keeper)

    def __contains__(self, place: object) -> bool:
        return True

    def __getitem__(self, place: str) -> Tensor:
        keeper: Any = self.keeper()
        if not torch.is_grad_enabled():
            found = _found(keeper)
            return _gathered(keeper) if found is None else found
        biases: Tensor = keeper.attention_biases[:, keeper.attention_bias_idxs]
        return biases

    def __reduce__(self) -> Any:
        return dict, ()


def _gathered(keeper: Any) -> Tensor:
    """What the original would gather, by an operator that takes the host half the time."""
    index: Tensor = keeper.attention_bias_idxs
    biases: Tensor = keeper.attention_biases.index_select(1, index.view(-1))
    return biases.view(-1, *index.shape)


def follow(keeper: nn.Module) -> None:
    """Have a keeper's biases follow its weights."""
    space = keeper.__dict__
    own = space.get(CACHE)  # a copy of the module may share that of another
    if own is not None and (type(own) is not Biases or own.keeper() is not keeper):
        space[CACHE] = Biases(keeper)


def leave(model: nn.Module) -> None:
    """Give the keepers within a model a plain cache again."""
    for module in model.modules():
        if type(module.__dict__.get(CACHE)) is Biases:
            module.__dict__[CACHE] = {}


class Keepers:
    """The sites of a model that have keepers, each with its class, and all modules around these."""

    def __init__(self, model: nn.Module, sites: Iterable[Any]) -> None:
        known = set(sites)
        sites = tuple(m for m in model.modules() if m in known)  # in one order, as plans have them
        self.sites = tuple((weakref.ref(site), type(site)) for site in sites)
        keepers = {site.elsa_kept() for site in sites}
        within = (m for m in model.modules() if not keepers.isdisjoint(m.modules()))
        self.around = tuple(weakref.ref(m) for m in within if m not in keepers)

    def begin(self, captured: bool = False) -> Any:
        """Gather for one call of this thread; returns what `end` takes.

        captured: for a CUDA graph, by a plan that was made ahead of it, and at the first read:
        kernels of windows gather for themselves.
        """
        now = _CURRENT
        before = now.biases, now.later
        now.biases = _NONE if captured else self._gathered()
        now.later = functools.partial(self._gathered, True) if captured else None
        return before

    @staticmethod
    def end(before: Any) -> None:
        """The call is over."""
        _CURRENT.biases, _CURRENT.later = before

    def plan(self) -> None:
        """Plan the gather for CUDA graphs, which hold what was made before them."""
        keepers = self._followed()
        indexes = [keeper._buffers.get(INDEX) for keeper in keepers]
        plan = _plan_of([keeper._parameters.get(TABLE) for keeper in keepers], indexes)
        if plan is None:
            return
        ahead = _AHEAD.setdefault(indexes[0], [])
        if len(ahead) < _PLANS_AHEAD and all(plan.key != other.key for other in ahead):
            ahead.append(plan)

    def _followed(self) -> list[Any]:
        sites: list[Any] = [site for ref, cls in self.sites if type(site := ref()) is cls]
        keepers: list[Any] = [site.elsa_kept() for site in sites]
        for keeper in keepers:
            follow(keeper)
        return keepers

    def _gathered(self, captured: bool = False) -> dict[int, Tensor]:
        """All biases by the id of their table; none where each keeper gathers its own."""
        keepers = self._followed()
        around: list[Any] = [ref() for ref in self.around]
        if len(keepers) < len(self.sites) or None in around or torch.is_grad_enabled():
            return _NONE
        # a hook may write weights after the call has begun
        if keepers[0].training or _is_hooked([each.__dict__ for each in (*around, *keepers)]):
            return _NONE
        tables = [keeper._parameters.get(TABLE) for keeper in keepers]
        indexes = [keeper._buffers.get(INDEX) for keeper in keepers]
        plan = _plan_of(tables, indexes, captured)
        if plan is None:
            return _NONE
        flat = torch._C._nn.flatten_dense_tensors(tables).index_select(0, plan.rows)
        views = [flat.as_strided(*place) for place in plan.places]
        return dict(zip(map(id, tables), views, strict=True))


def keepers_of(model: nn.Module) -> Keepers | None:
    """All keepers of a model, where a CUDA graph of it is to gather them at once."""
    sites = [m for m in model.modules() if hasattr(type(m), "elsa_kept")]
    return Keepers(model, sites) if len(sites) >= _FEWEST else None


def current(keeper: Any) -> Tensor | None:
    """What was gathered of a keeper for the call that is under way; None for nothing."""
    if calls.traced() or torch.is_grad_enabled():
        return None
    return _found(keeper)


def _found(keeper: Any) -> Tensor | None:
    now = _CURRENT
    if now.later is not None:
        gather, now.later = now.later, None
        now.biases = gather()
    return now.biases.get(id(keeper._parameters.get(TABLE)))


def _is_hooked(spaces: list[dict[str, Any]]) -> bool:
    if any(chain.from_iterable(map(_HOOKS, spaces))):
        return True
    replaced = any(map(dict.__contains__, spaces, repeat("forward")))
    return replaced or torch.nn.modules.module._has_any_global_hook()


class _Plan(NamedTuple):
    """How the biases of several tables are gathered at once.

    Attributes:
        key: what it was made for. others: the indexes but the first, whose ids are in it.
        rows: indexes into the tables one after another. places: size, strides and offset of each
            result.
    """

    key: Any
    others: list[Tensor]
    rows: Tensor
    places: list[Any]


# By the first index, so that a plan ends with it: with the model, or where that is moved.
_PLANS: Any = WeakTensorKeyDictionary()
# Those that CUDA graphs may read, so that none is replaced by another.
_AHEAD: Any = WeakTensorKeyDictionary()


def _plan_of(tables: list[Any], indexes: list[Any], captured: bool = False) -> _Plan | None:
    """None where the tables cannot be gathered at once; in a graph, where no plan was made."""
    # no subclass, which may know nothing of this; None where a name is gone
    if set(map(type, tables)) != {nn.Parameter} or set(map(type, indexes)) != {Tensor}:
        return None
    if any(map(Tensor.is_inference, indexes)):  # which have no version
        return None
    key = (
        tuple(map(id, indexes)), tuple(map(_VERSION, indexes)),
        tuple(map(Tensor.data_ptr, indexes)), tuple(map(_TERMS, tables)),
    )  # fmt: skip
    if captured:
        return next((p for p in _AHEAD.get(indexes[0], ()) if p.key == key), None)
    plan: _Plan | None = _PLANS.get(indexes[0])
    if plan is None or plan.key != key:
        places = {(t.dtype, t.device) for t in tables}
        same = len(places) == 1 and {i.device for i in indexes} == {tables[0].device}
        count = sum(t.shape[0] * i.numel() for t, i in zip(tables, indexes, strict=True))
        if not same or count > _MOST:
            return None
        plan = _PLANS[indexes[0]] = _planned(key, tables, indexes)
    return plan


def _planned(key: Any, tables: list[Tensor], indexes: list[Tensor]) -> _Plan:
    parts, places, first, start = [], [], 0, 0
    for table, index in zip(tables, indexes, strict=True):
        heads, offsets = table.shape
        rows = torch.arange(heads, device=index.device).view(-1, 1) * offsets
        part = (rows + index.view(1, -1) + first).flatten()
        more = -part.numel() % _ALIGNED
        parts += [part, part.new_zeros(more)]
        strides = (index.numel(), index.shape[1], 1)
        places.append(((heads, *index.shape), strides, start))
        first, start = first + table.numel(), start + part.numel() + more
    return _Plan(key, indexes[1:], torch.cat(parts).int(), places)
