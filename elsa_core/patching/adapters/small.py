"""What runs in the place of a patched module's method in calls that wait for the host.

That is the original method. An adapter may have another one that computes the same and takes the
host less: `elsa_small_NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elsa_core.patching.adapters.kept import follow


def place_of(cls: Any, name: str) -> tuple[Any, str]:
    """Where that method of a patched class is found: a class, and the method's name there."""
    own = f"elsa_small_{name}"
    return (cls, own) if hasattr(cls, own) else (cls.elsa_base, name)


def small_method(cls: Any, name: str) -> Callable[..., Any]:
    """That method of a patched class."""
    method: Callable[..., Any] = getattr(*place_of(cls, name))
    return method


def own_method(site: Any, name: str) -> Callable[..., Any]:
    """That method of a site; what it keeps of the weights follows them from here on."""
    if hasattr(type(site), "elsa_kept"):
        follow(site.elsa_kept())
    return small_method(type(site), name)
