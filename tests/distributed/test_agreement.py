"""Ranks that make different calls, hang or have ended: one line on every rank, and no hang."""

import pytest

from elsa_core.errors import ArgumentError, UnavailableError

from .conftest import Results
from .ranks import SHORT

LINES = {
    "types": "rank 1: key must be a torch.Tensor, not list",
    "query": "rank 1: query must be a torch.Tensor, not list",
    "kind of lengths": "rank 1: lengths must be whole numbers, not (4, 4.0)",
    "scale": "rank 1: could not convert string to float: 'a'",
    "dtype": "the dtype is float32 on rank 0 and float64 on rank 1",
    "head_dim": "head_dim is 8 on rank 0 and 9 on rank 1",
    "mask": "attn_mask is float32 on rank 0 and bool on rank 1",
    "no mask": "attn_mask is none on rank 0 and float32 on rank 1",
    "method": "method is gather on rank 0 and ring on rank 1",
    "causal": "is_causal is False on rank 0 and True on rank 1",
    "gradients": "gradients is  on rank 0 and query on rank 1",
    "version": "the version of elsa is ",
    "wrong here": "rank 1: value has 4 tokens, key 3: they must be equal",
    "method name": "rank 1: method='star' is unknown: choose one of auto, ring, gather, heads",
    "mask of own keys": "rank 1: attn_mask of shape [1, 1, 4, 4] does not broadcast to "
    "[1, 2, 4, 8]",
    "heads": "method='heads' needs numbers of heads that 2 ranks divide, not 1 and 1",
    "other lengths": "lengths is (4, 4) on rank 0 and (4, 5) on rank 1",
    "lengths": "lengths=(4, 5), but the shards of query have (4, 4) tokens",
}


@pytest.mark.parametrize("name", LINES)
def test_every_rank_says_the_same(name: str, results: Results) -> None:
    one, two = (results[2][rank]["agreement"][name] for rank in range(2))
    assert one == two
    assert one.startswith("ArgumentError: ") and LINES[name] in one and "\n" not in one


def test_calls_go_on_afterwards(results: Results) -> None:
    """Masks of other dims are no disagreement; lengths are compared once."""
    for found in results[2]:
        assert found["agreement"]["agreed"] == found["agreement"]["mask of other dims"] == ""
        assert found["again"] == {"messages": 3, "equal": True}


@pytest.mark.parametrize("name", ["hangs", "ended"])
def test_a_rank_that_is_lost(name: str, results: Results) -> None:
    """The others end with one line: after the timeout, or at once where the rank has ended."""
    for rank in (0, 2):
        line, seconds = results[3][rank]["faults"][name]
        assert line.startswith(f"UnavailableError: rank {rank} of 3 waited in vain while ")
        assert "a rank has ended or hangs" in line and "\n" not in line
        assert seconds < (SHORT if name == "ended" else 3 * SHORT)


@pytest.mark.parametrize(
    ("method", "world", "rank", "dies"),
    [("heads", 2, 0, 1), ("ring", 3, 0, 1), ("ring", 3, 2, 1), ("gather", 3, 0, 2)],
)
def test_a_rank_that_ends_in_its_backward(
    results: Results, method: str, world: int, rank: int, dies: int
) -> None:
    found = [results[world][each]["faults"][f"backward by {method}"] for each in (rank, dies)]
    assert found[1][0] == "RuntimeError: this rank stops here"
    line, seconds = found[0]
    assert line.startswith("UnavailableError: rank ") and "waited in vain while " in line
    assert "a rank has ended or hangs" in line and "\n" not in line
    assert seconds < 3 * SHORT


def test_no_process_group() -> None:
    import torch

    import elsa_core as elsa

    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnavailableError, match="start the program with torchrun"):
        elsa.distributed.attention(x, x, x)


def test_plans(results: Results) -> None:
    """The ranks choose alike, by size."""
    one, two = (results[2][rank]["plans"] for rank in range(2))
    for name in ("short", "long", "heads"):
        assert one[name]["method"] == two[name]["method"]
        assert one[name]["queries"] == two[name]["queries"]
    assert one["short"]["method"] == "gather" and one["long"]["method"] == "ring"
    assert one["short"]["queries"] == (8, 9)
    assert "heads" not in one["long"]["seconds"] and "heads" in one["heads"]["seconds"]
    # keys and values of a shard, float32, go to the one other rank
    assert one["long"]["bytes_sent"] == 20000 * 3 * 2 * 64 * 4
    assert one["mesh of two dimensions"].startswith(ArgumentError.__name__)
