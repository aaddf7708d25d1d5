"""The original methods of a model's sites, put on the modules themselves for the time of one call;
of a site whose adapter has a method for small calls that method (`small.py`).

In a call of which every site keeps its original (`model.py`), each site would still be asked
whether it is called within that, which takes the host longer than a small layer. The modules that
were asked in one such call get their original methods as attributes of their own in the next, where
PyTorch finds them in the place of those of the class, without a question. A thread that runs the
model meanwhile finds them too and computes the same by the originals.

Left as they are, and asked: a module that the user gave a method of its own, whose class is no
longer the one that it was patched with, that was patched with names or sparsity, answers by a
property of its own or takes the host less than its original (`elsa_stays`), or whose functions are
called in a row (`flat.py`). A copy or a save that begins within the call finds none of the methods
(`withdraw`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

from torch import nn

from elsa_core.patching.adapters.host import is_unasked, told, with_settled
from elsa_core.patching.adapters.kept import Keepers
from elsa_core.patching.adapters.small import place_of, small_method

# How a module is trained, saved and moved is the same for both.
_OTHERS: Final = frozenset({"_apply", "_load_from_state_dict", "train"})
Space = dict[str, Any]  # what a module holds: its __dict__


class _Packing:
    """Calls of all threads whose sites get what no original forward can read; see `packing`.

    Attributes:
        lock: held while original methods are put on modules, and while one is counted.
        calls: how many are under way.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0


_PACKING = _Packing()


@contextmanager
def packing(model: nn.Module) -> Iterator[None]:
    """Calls of a patched model whose sites may get packed tokens, which no original forward reads.

    Until it ends no thread puts an original method on a module: ask within it whether one is there.
    The model around hears that this one did not keep its original, whatever the layers within say:
    another batch of the same shape may have more padding, or less.
    """
    told(model, False)
    with _PACKING.lock:
        _PACKING.calls += 1
    try:
        yield
    finally:
        with _PACKING.lock:
            _PACKING.calls -= 1


@dataclass(frozen=True, eq=False)
class Direct:
    """Modules of one model that need not be asked; calls the model with their original methods.

    Attributes:
        sites: for each class the name of a method that is replaced, where the other one is found
            (`small.place_of`), and its modules.
        keepers: those of them that keep something of their weights; None for none.
        whole: whether no module of the model need be asked.
        settled: the ids of those that run elsa's operators in such calls, see `host.is_settled`.
    """

    sites: tuple[tuple[Any, str, tuple[Any, str], tuple[weakref.ref[Any], ...]], ...]
    keepers: Keepers | None = None
    whole: bool = True
    settled: frozenset[int] = frozenset()

    def __call__(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """method(...), within which the modules have their original methods."""
        put: list[tuple[Space, str, MethodType]] = []
        before = None if self.keepers is None else self.keepers.begin()
        try:
            with _PACKING.lock:
                if not _PACKING.calls:  # while one is under way, sites ask
                    self._put(put)
            return with_settled(self.settled, method, *given, **named)
        finally:
            for space, name, own in put:
                if space.get(name) is own:
                    space.pop(name, None)
            if before is not None:
                Keepers.end(before)

    def _put(self, put: list[tuple[Space, str, MethodType]]) -> None:
        # No function is called for each module that Python would have to enter: a small layer
        # takes the host no longer than ten of these lines.
        for cls, name, place, refs in self.sites:
            method = getattr(*place)
            for ref in refs:
                site: Any = ref()
                if type(site) is not cls:  # gone, or another one since
                    continue
                space = site.__dict__
                # as `is_unasked`: the names may have been given since
                if (
                    space.get("elsa_precision") == "strict"
                    and space.get("elsa_backend") == "auto"
                    and "elsa_sparsity" not in space
                    and name not in space
                ):
                    space[name] = own = MethodType(method, site)
                    put.append((space, name, own))


def direct(
    model: nn.Module, kept: set[Any], rows: Iterable[Any], others: set[Any], whole: bool = True
) -> Direct:
    """Of the modules within `model` that kept their originals, those that need not be asked: none
    that ran as functions in a row, and none within one that runs in a way of its own.

    Args:
        model: the model. kept: those modules. rows: those that ran in a row.
        others: those that did not keep their originals, in one of their calls at least.
        whole: whether all kept them.
    """
    within = set(model.modules()) - {model}
    settled = frozenset(id(site) for site in others - kept if is_unasked(site.__dict__))
    kept = kept - others
    own = [*rows, *(m for m in model.modules() if hasattr(type(m), "elsa_stays"))]
    if not whole:  # one that goes on asking reads what is within it, and hands terms to that
        own += [m for m in within if hasattr(type(m), "elsa_base") and m not in kept]
    for module in own:  # a module with a method of its own is no row's
        within.difference_update(module.modules())
    known: dict[tuple[Any, str], list[weakref.ref[Any]]] = {}
    keepers = []
    for site in kept:
        cls: Any = type(site)
        if site not in within or not is_unasked(site.__dict__):
            continue
        for name in replaced(cls):
            known.setdefault((cls, name), []).append(weakref.ref(site))
        if replaced(cls) and hasattr(cls, "elsa_kept"):
            keepers.append(site)
    sites = ((cls, name, place_of(cls, name), tuple(refs)) for (cls, name), refs in known.items())
    return Direct(tuple(sites), Keepers(model, keepers) if keepers else None, whole, settled)


def withdraw(model: nn.Module) -> None:
    """Take the methods from all modules of a model: of a call that is under way, which goes on
    asking, or of a copy that another thread made meanwhile.
    """
    for module in model.modules():
        cls: Any = type(module)
        for name in replaced(cls):
            own = module.__dict__.get(name)
            if isinstance(own, MethodType) and own.__func__ is small_method(cls, name):
                module.__dict__.pop(name, None)


def replaced(cls: Any) -> tuple[str, ...]:
    """The methods of the class that it stands for that an adapter replaces; none where they cannot
    stand for its own.
    """
    # a class derived since may have methods of its own
    if "elsa_base" not in cls.__dict__ or hasattr(cls, "elsa_stays"):
        return ()
    own = cls.__mro__[: cls.__mro__.index(cls.elsa_base)]
    answers = {name for c in own for name, value in vars(c).items() if isinstance(value, property)}
    # The original, called by a thread that is not within such a call, would meet another answer;
    # of this one both are right.
    if answers - {"fused_attn"}:
        return ()
    names = {name for c in own for name, value in vars(c).items() if callable(value)} - _OTHERS
    return tuple(n for n in sorted(names) if not n.startswith("__") and hasattr(cls.elsa_base, n))
