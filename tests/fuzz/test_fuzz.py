"""Six seconds of generated inputs for each of a third of the readers, the same ones each time."""

import time
from pathlib import Path

import pytest
from hypothesis.strategies import integers
from sampling import some

from elsa_core.exporting.manifest import parse_manifest
from elsa_core.exporting.verify import verify
from elsa_core.loading.plan import read_plan
from elsa_core.loading.weights import read_safetensors

from .engine import EXAMPLES_A_ROUND, Target, answered, explore
from .hostile import GOOD, TARGETS, good_zip

SECONDS = 6.0  # for each


@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore::RuntimeWarning")
@pytest.mark.parametrize("target", some(TARGETS, one_in=3), ids=lambda each: each.name)
def test_hostile_inputs(target: Target, tmp_path: Path) -> None:
    """A typed error of one line or the right answer; never a crash, a hang or a wrong success."""
    assert explore(target, tmp_path, seconds=SECONDS) > 10


def test_inputs_do_not_run_out_before_the_time(tmp_path: Path) -> None:
    """More rounds follow; each draws other inputs, and the same ones after the same seed."""
    seen: list[list[int]] = []

    def note(value: int, _: Path) -> None:
        seen[-1].append(value)

    target = Target("numbers", integers(0, 2**30), note)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        seen.append([])
        (tmp_path / folder).mkdir()
        start = time.monotonic()
        # a round takes half a second, and more on a busy machine
        for seconds in (0.7, 3.0, 20.0):
            seen[-1].clear()
            count = explore(target, tmp_path / folder, seconds=seconds, seed=seed)
            if count > EXAMPLES_A_ROUND:
                break
        assert time.monotonic() - start > 0.7 and count == len(seen[-1]) > EXAMPLES_A_ROUND
    length = min(map(len, seen))
    assert seen[0][:length] == seen[1][:length] != seen[2][:length]


def test_what_is_good_is_read(tmp_path: Path) -> None:
    """The changes begin from inputs that are read: refusing everything would be no answer."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(GOOD["safetensors"])
    assert len(read_safetensors(path).tensors) == 3
    (tmp_path / "plan.json").write_bytes(GOOD["plan"])
    assert read_plan(tmp_path / "plan.json").sites
    assert parse_manifest(GOOD["manifest"], "m").files
    assert verify(good_zip(tmp_path), run=False).ok


def test_an_error_that_is_not_typed_is_a_finding() -> None:
    def fail() -> None:
        raise RecursionError

    with pytest.raises(RecursionError):
        answered(fail)
