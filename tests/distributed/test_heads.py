"""Heads of sharded models on features of an earlier forward, and hooks that come after `shard`."""

from __future__ import annotations

import pytest

import elsa_core as elsa
from elsa_core.errors import ModelError

from . import heads
from .conftest import Results


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", heads.RIGHT)
def test_a_head_of_earlier_features(name: str, world: int, results: Results) -> None:
    """Means were divided by the number of tokens of the last forward."""
    for rank in range(world):
        assert results[world][rank]["heads"][name] < 1e-5


@pytest.mark.parametrize("name", heads.REFUSED)
def test_a_head_that_must_know_the_lengths(name: str, results: Results) -> None:
    for rank in range(2):
        found = results[2][rank]["heads"]
        assert found[name].startswith("ArgumentError: features of ") and "\n" not in found[name]
        assert found[f"{name}, again"] == ""


@pytest.mark.parametrize("path", heads.HOOKED)
def test_hooks_that_would_not_be_called(path: str, results: Results) -> None:
    """A hook on a module that a sharded forward does not call as a whole was left out silently."""
    line = f"{path} cannot be sharded: its hooks would not be called as in one process"
    for rank in range(2):
        assert results[2][rank]["later hooks"][path] == f"ModelError: {line}"
        assert results[2][rank]["later hooks"][""] == ""
    model = heads.small("")
    elsa.distributed.require_shardable(model)
    model.get_submodule(path).register_forward_pre_hook(lambda *given: None)
    with pytest.raises(ModelError, match=f"^{line}$"):
        elsa.distributed.require_shardable(model)
