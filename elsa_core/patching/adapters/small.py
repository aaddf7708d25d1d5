"""What runs in the place of a patched module's method in calls that wait for the host.

That is the original method. An adapter may have another one that computes the same and takes the
host less: `elsa_small_NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elsa_core.patching.adapters.kept import follow


def small_method(cls: Any, name: str) -> Callable[..., Any]:
    """That method of a patched class."""
    method: Callable[..., Any] | None = getattr(cls, f"elsa_small_{name}", None)
    return getattr(cls.elsa_base, name) if method is None else method


def own_method(site: Any, name: str) -> Callable[..., Any]:
    """That method of a site; what it keeps of the weights follows them from here on."""
    if hasattr(type(site), "elsa_kept"):
        follow(site.elsa_kept())
    return small_method(type(site), name)
