"""The plans of every operator, kept by layout, with one bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Final

MISSING: Final = object()


class PlanCache:
    """Plans by operator and layout.

    At most `most` plans are kept: a loop over lengths without end must not grow memory. Where the
    bound is reached, all of them go, since a plan is cheap to make again and its kernel stays
    compiled. Two threads that miss at once both plan; one of the two plans is kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._plans: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self.on_clear: list[Callable[[], None]] = []  # who keeps what was made of these plans

    def get(self, key: Hashable, plan: Callable[..., Any], *given: Any) -> Any:
        """The plan of `key`; where there is none yet, what `plan(*given)` returns is kept."""
        found = self._plans.get(key, MISSING)
        if found is not MISSING:
            return found
        made = plan(*given)
        with self._lock:
            if len(self._plans) >= self.most:
                self._plans = {}
            return self._plans.setdefault(key, made)

    def clear(self) -> None:
        """Forget every plan, for example after a tuning table changed."""
        with self._lock:
            self._plans = {}
        for forget in self.on_clear:
            forget()

    def __len__(self) -> int:
        return len(self._plans)


PLANS: Final = PlanCache(4096)
"""Every operator shares it; keys begin with the operator's name."""
