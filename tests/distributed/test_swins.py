"""Sharded Swins on two and three ranks against one process, by the rule of `check`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.distributed.rows import cut_at_windows, cut_for_pairs, rows_of
from elsa_core.errors import ModelError
from elsa_core.patching.adapters import timm_sharded_swin
from elsa_core.proof.compare import Comparison
from elsa_core.reference import relative_l2

from . import swins
from .conftest import Results
from .ranks import SHORT

ON_A_GPU = pytest.mark.gpu


def assert_as_exact(found: dict[str, Tensor], name: str, device: str = "cpu") -> None:
    plain = swins.swin(name)
    exact = swins.step(copy.deepcopy(plain).double(), name, torch.float64)
    one = {path: t.cpu() for path, t in swins.step(plain.to(device), name).items()}
    names = {path for path in exact if path in found or "images" not in path}
    assert set(found) == names
    for outputs in (True, False):
        comparison = Comparison(2.0)
        for path in sorted(names):
            if path.startswith("output") == outputs:
                comparison.add(exact[path], one[path], found[path])
        assert comparison.reason() == ""
        assert comparison.oracle.maximum > 0


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in swins.OF.items() for name in names]
)
def test_as_exact_as_one_process(name: str, world: int, results: Results) -> None:
    parts = [results[world][rank]["swins"][name] for rank in range(world)]
    assert all(part["again"] for part in parts)
    for part in parts[1:]:
        for path, first in parts[0]["terms"].items():
            assert torch.equal(part["terms"][path], first), path
    assert_as_exact(parts[0]["terms"], name)


def test_one_rank(results: Results) -> None:
    for rank in range(2):
        assert_as_exact(results[2][rank]["one rank"]["swin"], "uneven")


def test_distributed_data_parallel(results: Results) -> None:
    for rank in range(2):
        assert_as_exact(results[2][rank]["swin by ddp"], "one row of windows")


def test_unpatch(results: Results) -> None:
    assert all(results[2][rank]["swin undone"] for rank in range(2))


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_holds_its_rows(world: int, results: Results) -> None:
    """The last stage has 3 x 2 tokens: one row of windows, which is the first rank's."""
    shapes = [results[world][rank]["rows"] for rank in range(world)]
    assert shapes == [[2, 3, 2, 64], *[[2, 0, 2, 64]] * (world - 1)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", swins.SENT)
def test_a_plan_says_what_is_sent(name: str, world: int, results: Results) -> None:
    found = [results[world][rank]["bytes"][name] for rank in range(world)]
    assert all(planned == sent for planned, sent in found)
    assert any(sent for _, sent in found)


@pytest.mark.parametrize("world", [2, 3])
def test_autocast(world: int, results: Results) -> None:
    """Ranks without rows send and receive what the others do; the error is that of rounding."""
    plain, images = swins.swin("one row of windows"), swins.batches("one row of windows")[0]
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(images.double())
        with torch.autocast("cpu", torch.bfloat16):
            one = plain(images)
    for rank in range(world):
        out = results[world][rank]["autocast"]
        assert out.dtype == one.dtype
        assert relative_l2(out, exact) <= 2 * relative_l2(one, exact) + 2**-8


LINES = {
    "batch": "the ranks make different calls: the shape of images is [1, 3, ",
    "size": "the ranks make different calls: the shape of images is [",
    "dtype": "the dtype is float32 on rank 0 and float64 on rank 1",
    "gradients": "whether gradients are wanted is False on rank 0 and True on rank 1",
    "wrong here": "pixels are not made of patches of 4 x 4",
}


@pytest.mark.parametrize("model", ["vit", "swin"])
@pytest.mark.parametrize("name", LINES)
def test_ranks_that_call_a_model_differently(model: str, name: str, results: Results) -> None:
    """All end with one line, at a later forward too, and the next one works."""
    for rank in range(2):
        found = results[2][rank]["models differ"]
        line = found[f"{model}: {name}"]
        assert line.startswith("ArgumentError: ") and LINES[name] in line and "\n" not in line
        assert found[f"{model}: agreed"] == ""


def test_a_rank_that_stops_within_a_forward(results: Results) -> None:
    assert results[3][1]["faults"]["swin"][0] == "RuntimeError: this rank stops here"
    for rank in (0, 2):
        line, seconds = results[3][rank]["faults"]["swin"]
        assert line.startswith(f"UnavailableError: rank {rank} of 3 waited in vain while ")
        assert "\n" not in line and seconds < 3 * SHORT


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("rows", "window", "shift"),
    [(56, 7, 3), (15, 7, 3), (5, 7, 3), (9, 4, 2), (1, 4, 2), (64, 8, 0), (293, 7, 3)],
)
def test_cuts(rows: int, window: int, shift: int, world: int) -> None:
    """Every row has one rank; windows are whole; rolled back, a rank's rows are its windows'."""
    cut = cut_at_windows(rows, window, shift, world)
    held = [rows_of(cut, rank) for rank in range(world)]
    assert sorted(row for part in held for row in part) == list(range(rows))
    rolled = []
    for rank, part in enumerate(held):
        back = shift % len(part) if part and rank == cut.last() else 0
        rolled += part[back:] + part[:back]
        assert len(part) % window == 0 or rank == cut.last()
    assert rolled == [(row + shift) % rows for row in range(rows)]
    assert len(held[cut.last()]) >= min(shift, rows)
    above = cut_for_pairs(cut._replace(shift=0), 2 * rows - 1)
    assert sum(above.lengths) == 2 * rows - 1
    assert all(n % 2 == 0 for n in above.lengths[: above.last()])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize(("version", "scope"), [(1, "model"), (1, "attention"), (2, "attention")])
@pytest.mark.parametrize(("rows", "world"), [(28, 3), (31, 2), (29, 4)])
def test_blocks_of_rows(rows: int, world: int, version: int, scope: str, device: str) -> None:
    """A shifted block called with each rank's rows gives what it gives of the image, or better."""
    torch.manual_seed(0)
    cls = SwinTransformerV2Block if version == 2 else SwinTransformerBlock
    terms = {"num_heads": 2, "window_size": 7, "shift_size": 3, "dynamic_mask": True}
    plain: Any = cls(64, input_resolution=(rows, 18), **terms).eval().to(device)
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            if "logit_scale" not in path:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    block = copy.deepcopy(plain)
    elsa.patch(block, scope=scope)
    image = torch.randn(2, rows, 18, 64, device=device)
    weight = torch.randn_like(image)
    cut = cut_at_windows(rows, 7, 3, world)

    def whole(module: Any, x: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    def in_parts(module: Any, x: Tensor) -> Tensor:
        held = [rows_of(cut, rank) for rank in range(world)]
        parts = [
            timm_sharded_swin._called(module, x[:, own], rank == cut.last())
            for rank, own in enumerate(held)
        ]
        order = torch.tensor([row for own in held for row in own]).argsort()
        return torch.cat(parts, 1)[:, order.to(device)]

    found = [
        differentiated(call, module, x, weight)
        for call, module, x in (
            (whole, copy.deepcopy(plain).double(), image.double()),
            (whole, plain, image),
            (in_parts, block, image),
        )
    ]
    for terms_of in (slice(0, 1), slice(1, None)):
        comparison = Comparison(2.0)
        for exact, one, part in zip(*(each[terms_of] for each in found), strict=True):
            comparison.add(exact, one, part)
        assert comparison.reason() == ""


def differentiated(call: Any, module: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of image and parameters."""
    leaf = x.clone().requires_grad_()
    out = call(module, leaf)
    (out * weight.to(out.dtype)).sum().backward()
    grads = [leaf.grad, *(p.grad for p in module.parameters())]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def small(**options: Any) -> nn.Module:
    terms = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1), **options}
    return SwinTransformer(patch_size=4, window_size=4, num_classes=3, **terms)


def with_a_hook(path: str) -> nn.Module:
    model = small()
    model.get_submodule(path).register_forward_hook(lambda *given: None)
    return model


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (
            partial(SwinTransformerV2Cr, img_size=32, embed_dim=8, depths=(1,), num_heads=(1,)),
            "SwinTransformerV2Cr cannot be sharded: only timm's VisionTransformer, Swin",
        ),
        (partial(small, global_pool="catavgmax"), "head cannot be sharded: it pools by catavgmax"),
        *(
            (partial(with_a_hook, path), f"{path} cannot be sharded: its hooks would not be called")
            for path in ("patch_embed", "layers", "layers.1", "layers.1.blocks")
        ),
    ],
)
def test_what_cannot_be_sharded(build: Any, line: str) -> None:
    with pytest.raises(ModelError, match=line):
        elsa.distributed.require_shardable(build())
