"""What tells modules of one class apart whose calls take other kernels."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final

from torch import nn

from elsa_core import calls

_PLAIN: Final = (bool, int, str, tuple)
_MOST: Final = 4096
_MAKES: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
_NUMBERS: dict[Any, int] = {}
_NEXT = itertools.count()


def make_of(site: nn.Module) -> int:
    """A number that patched modules share where these are equal, of them and of all within them:
    classes, shapes of weights, whole numbers and names, their scope among them. Kept until
    something is patched or a switch is turned.
    """
    known = _MAKES.get(site)
    if known is not None and known[0] == calls.forgotten():
        return known[1]
    made: list[Any] = []
    for module in site.modules():
        plain = (f"{name}={value}" for name, value in vars(module).items() if type(value) in _PLAIN)
        shapes = ((n, t if t is None else t.shape) for n, t in module._parameters.items())
        made.append((type(module), *sorted(plain), *shapes))
    if len(_NUMBERS) >= _MOST:
        _NUMBERS.clear()
    number = _NUMBERS.setdefault(tuple(made), next(_NEXT))
    _MAKES[site] = calls.forgotten(), number
    return number
