"""How a target is explored: examples of its strategy until they, or the time, are used up."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis.strategies import SearchStrategy

from elsa_cli.errors import LONGEST_LINE, describe
from elsa_core.errors import ElsaError

# A hang: the slowest good example takes a fraction of a second.
LONGEST_EXAMPLE_SECONDS = 30
EXAMPLES_A_ROUND = 250
Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """Something that reads.

    Attributes:
        name: what is read.
        strategy: the inputs, good ones among them.
        check: called with an input and an empty folder; fails on a wrong answer.
    """

    name: str
    strategy: SearchStrategy[Any]
    check: Callable[[Any, Path], None]


def answered(call: Callable[[], Result]) -> Result | None:
    """What `call` returns, or None where it refuses in a typed error of one line.

    Whatever else it raises is a defect.
    """
    try:
        return call()
    except (ElsaError, click.UsageError) as error:
        code, line = describe(error)
        assert code in {1, 2, 3, 4, 5}, error
        assert line and line.isprintable() and len(line) < LONGEST_LINE, line
        return None


def explore(target: Target, folder: Path, *, seconds: float, seed: int = 0) -> int:
    """Check a target on generated inputs until the time is over; returns how many.

    Args:
        target: what to check.
        folder: an empty one for each example is made below.
        seconds: no example begins later; the first one, which imports, does not count.
        seed: of the generator: the same examples, as many as the time allows.

    Raises:
        AssertionError: and whatever else an example raised, shrunk to the smallest that does.
    """
    end = float("inf")
    count = 0
    failed = False

    def one(value: Any) -> None:
        nonlocal count, end, failed
        # While a failure is shrunk the time does not count: it would seem to come and go.
        if time.monotonic() > end and not failed:
            return
        count += 1
        # a second exploration of the same folder, or a replayed example, makes others beside these
        place = Path(tempfile.mkdtemp(prefix=f"{target.name.replace(' ', '-')}-", dir=folder))
        start = time.monotonic()
        try:
            target.check(value, place)
            assert time.monotonic() - start < LONGEST_EXAMPLE_SECONDS, "a hang"
        except BaseException:
            failed = True
            raise
        if count == 1:
            end = time.monotonic() + seconds

    bounds = settings(
        max_examples=EXAMPLES_A_ROUND, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    rounds = 0
    while time.monotonic() < end:
        # hypothesis has no limit of time; once it is over, the rest of a round is drawn in vain.
        hypothesis.seed(f"{seed}.{rounds}")(bounds(hypothesis.given(target.strategy)(one)))()
        rounds += 1
    return count
