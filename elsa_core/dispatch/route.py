"""How a call is served, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """How a call would be served, and why.

    Attributes:
        backend: one of `names()` but "auto".
        schedule: how keys and queries are cut, in words.
        precision: the precision asked for.
        arithmetic: what that precision means on this backend.
        reasons: one line for each backend that was asked first and could not serve the call, and
            for anything the caller should know (a measured table, a gradient path, dropout).
    """

    backend: str
    schedule: str
    precision: str
    arithmetic: str
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}
