"""What the tests of the benchmarks share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elsa_core import dispatch
from elsa_core.backends.support import Backend, Implementation, Support
from elsa_core.measuring import busy

Offered = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def offered() -> Offered:
    """A backend "toy" of another package, whose `run` serves calls on a CPU first."""

    @contextmanager
    def registered(
        run: Callable[..., Any], operator: str = "attention", **parts: Any
    ) -> Iterator[None]:
        made = Implementation(lambda _: Support(True), run, lambda *_: "", lambda _: "", **parts)
        dispatch.register(Backend("toy", "cpu", {operator: made}), ahead_of="native")
        try:
            yield
        finally:
            dispatch.unregister("toy")

    return registered


@pytest.fixture
def free_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder on a machine where nothing else runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")
