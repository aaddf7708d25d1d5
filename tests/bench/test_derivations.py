"""The cost of derived tensors: what is measured, and that nothing else is."""

from __future__ import annotations

import pytest

from elsa_core.bench import derivations
from elsa_core.errors import ModelError
from elsa_core.patching.adapters.derived import DERIVED


def test_shares_of_the_sites() -> None:
    before = len(DERIVED)
    found = derivations.shares("levit_128s", rounds=2)
    assert found.sites == 11 and found.milliseconds > 0
    assert 0 < found.compared < found.derived  # the difference is twentyfold
    assert len(DERIVED) == before
    assert str(found).split()[:3] == ["levit_128s", "11", "sites"]


def test_a_model_that_derives_nothing() -> None:
    with pytest.raises(ModelError, match="no site of test_vit derives"):
        derivations.shares("test_vit", rounds=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_model"], "error: "),
        (["test_vit"], "error: no site of test_vit derives"),
        (["--threads", "0"], "--threads must be at least 1, not 0"),
        (["--batch", "-1"], "--batch must be at least 1, not -1"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of these was a traceback."""
    with pytest.raises(SystemExit) as ended:
        derivations.main([*arguments])
    said = capsys.readouterr().err or str(ended.value.code)
    assert words in said.splitlines()[-1] and ended.value.code != 0
