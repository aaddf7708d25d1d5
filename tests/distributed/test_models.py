"""Sharded ViTs on two and three ranks against one process, by the rule of `check`: whole models,
heads on features of an earlier forward, and hooks that come after `shard`."""

import copy
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import ModelError
from elsa_core.proof.compare import Comparison

from . import models
from .conftest import Results
from .ranks import SHORT


def assert_as_exact(found: dict[str, Tensor], name: str) -> None:
    plain = models.vit(name)
    exact = models.step(copy.deepcopy(plain).double(), name, torch.float64)
    one = models.step(plain, name)
    assert list(found) == list(one) == list(exact)
    for terms in (["output"], [key for key in exact if key != "output"]):
        comparison = Comparison(2.0)
        for term in terms:
            comparison.add(exact[term], one[term], found[term])
        assert comparison.reason() == "" and comparison.oracle.maximum > 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", models.VITS)
def test_as_exact_as_one_process(name: str, world: int, results: Results) -> None:
    parts = [results[world][rank]["models"][name] for rank in range(world)]
    for part in parts[1:]:
        assert all(torch.equal(part[term], first) for term, first in parts[0].items())
    assert_as_exact(parts[0], name)


def test_one_rank(results: Results) -> None:
    for rank in range(2):
        assert_as_exact(results[2][rank]["one rank"]["vit"], "registers")


def test_distributed_data_parallel(results: Results) -> None:
    for rank in range(2):
        assert_as_exact(results[2][rank]["ddp"], "registers")


def test_copies_and_unpatch(results: Results) -> None:
    assert all(results[2][rank]["undone"] for rank in range(2))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("size", "ArgumentError: images of 16 x 16 pixels: the model takes 20 x 16"),
        ("intermediates", "ModelError: forward_intermediates of a sharded model: "),
        ("dropout", "ModelError: blocks.1.attn.proj_drop drops in training"),
        ("patched since", "ModelError: blocks.0.attn was patched after the model was sharded"),
        ("sharded again", ""),
    ],
)
def test_what_a_sharded_model_refuses(name: str, line: str, results: Results) -> None:
    for rank in range(2):
        said = results[2][rank]["refused"][name]
        assert said.startswith(line) and bool(said) == bool(line) and "\n" not in said


LINES = {
    "batch": "the ranks make different calls: the shape of images is [1, 3, ",
    "size": "the ranks make different calls: the shape of images is [",
    "dtype": "the dtype is float32 on rank 0 and float64 on rank 1",
    "gradients": "whether gradients are wanted is False on rank 0 and True on rank 1",
    "wrong here": "pixels are not made of patches of 4 x 4",
    "causal": "is_causal is False on rank 0 and True on rank 1",
    "mask": "attn_mask is none on rank 0 and ['float32', 1, 1, 1, 13] on rank 1",
}


@pytest.mark.parametrize(
    "name", [name for name in LINES if name != "causal" or name in models.VITS]
)
def test_ranks_that_call_a_model_differently(name: str, results: Results) -> None:
    """All end with one line, at a later forward too, and the next one works."""
    for rank in range(2):
        found = results[2][rank]["models differ"]
        said = found[name]
        assert said.startswith("ArgumentError: ") and LINES[name] in said and "\n" not in said
        assert found["agreed"] == ""


def test_a_rank_that_stops_within_a_forward(results: Results) -> None:
    assert results[3][1]["faults"]["vit"][0] == "RuntimeError: this rank stops here"
    for rank in (0, 2):
        line, seconds = results[3][rank]["faults"]["vit"]
        assert line.startswith(f"UnavailableError: rank {rank} of 3 waited in vain while ")
        assert "\n" not in line and seconds < 3 * SHORT


def small(**options: Any) -> VisionTransformer:
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2,
                             num_classes=3, **options)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (torch.nn.Linear(2, 2), "Linear cannot be sharded: only timm's VisionTransformer is"),
        (
            SwinTransformer(img_size=32, embed_dim=8, depths=(1,), num_heads=(1,), window_size=4),
            "SwinTransformer cannot be sharded: only timm's VisionTransformer is",
        ),
        (
            small(block_fn=ParallelScalingBlock),
            "blocks.0 cannot be sharded: ParallelScalingBlock is not Block or ResPostBlock",
        ),
        (small(patch_drop_rate=0.5), "patch_drop cannot be sharded: ranks would drop different"),
        (
            small(norm_layer=torch.nn.BatchNorm1d),
            "blocks.0.norm1 cannot be sharded: its statistics are over all tokens",
        ),
    ],
)
def test_what_cannot_be_sharded(model: Any, line: str) -> None:
    with pytest.raises(ModelError, match=line):
        elsa.distributed.require_shardable(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", models.RIGHT)
def test_a_head_of_earlier_features(name: str, world: int, results: Results) -> None:
    """Means were divided by the number of tokens of the last forward."""
    for rank in range(world):
        assert results[world][rank]["heads"][name] < 1e-5


@pytest.mark.parametrize("name", models.REFUSED)
def test_a_head_that_must_know_the_lengths(name: str, results: Results) -> None:
    for rank in range(2):
        found = results[2][rank]["heads"]
        assert found[name].startswith("ArgumentError: features of ") and "\n" not in found[name]
        assert found[f"{name}, again"] == ""


@pytest.mark.parametrize("path", models.HOOKED)
def test_hooks_that_would_not_be_called(path: str, results: Results) -> None:
    """A hook on a module that a sharded forward does not call as a whole was left out silently."""
    line = f"{path} cannot be sharded: its hooks would not be called as in one process"
    for rank in range(2):
        assert results[2][rank]["later hooks"][path] == f"ModelError: {line}"
        assert results[2][rank]["later hooks"][""] == ""
    model = models.headed("")
    elsa.distributed.require_shardable(model)
    model.get_submodule(path).register_forward_pre_hook(lambda *given: None)
    with pytest.raises(ModelError, match=f"^{line}$"):
        elsa.distributed.require_shardable(model)
