"""A few seconds of every generator, the same examples each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from elsa_core.exporting.manifest import parse_manifest
from elsa_core.exporting.verify import verify
from elsa_core.loading.plan import read_plan
from elsa_core.loading.weights import read_safetensors

from .engine import Target, answered, explore
from .hostile import GOOD, TARGETS, good_zip

SECONDS = 4.0
EXAMPLES = 250


@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore::RuntimeWarning")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_hostile_inputs(target: Target, tmp_path: Path) -> None:
    """A typed error of one line or the right answer; never a crash, a hang or a wrong success."""
    assert explore(target, tmp_path, seconds=SECONDS, examples=EXAMPLES) > 10


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
