"""Padding is left out on a real GPU: the same outputs, sooner where half of a batch is padding."""

import copy
from typing import Any

import pytest
import torch
from judging import cast
from test_host_time_gpu import _times
from test_padding_time import naflexvit, siglip2
from torch import Tensor
from torch.utils._pytree import tree_map_only

import elsa_core as elsa
from elsa_core.patching.adapters import padding

pytestmark = pytest.mark.gpu


def on_gpu(make: Any, dtype: torch.dtype) -> tuple[Any, Any, tuple[Any, ...]]:
    """The model, a patched copy and its arguments."""
    torch.manual_seed(0)
    model, given = make()
    model = model.eval().cuda().to(dtype)

    patched = copy.deepcopy(model)
    elsa.patch(patched, scope="attention")
    return model, patched, tree_map_only(Tensor, Tensor.cuda, cast(given, dtype))


def tensor(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [naflexvit, siglip2])
@torch.no_grad()
def test_the_same_outputs(
    make: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, packed: list[Any]
) -> None:
    monkeypatch.setattr("elsa_core.dispatch.measured.eager_least", lambda *of: 0)
    model, patched, given = on_gpu(make, dtype)
    exact = tensor(copy.deepcopy(model).double()(*cast(given, torch.float64)))
    peer, found = tensor(model(*given)).double(), tensor(patched(*given)).double()
    assert len(packed) == (2 if make is naflexvit else 4)  # its blocks
    own = (peer - exact).norm() / exact.norm()
    assert (found - exact).norm() / exact.norm() <= 2 * own + 1e-7
    assert torch.equal(found, tensor(patched(*given)).double())


def test_nothing_waits_while_a_graph_is_recorded() -> None:
    """Nor where the host takes longer than the device anyway, or no kernel takes packed tokens."""
    _, patched, _ = on_gpu(naflexvit, torch.float32)
    blocks, tokens = patched.blocks, torch.zeros(16, 576, 384, device="cuda")

    def packs(x: Tensor) -> bool:
        return padding.may_pack(x, blocks, "attn", type(blocks[0].attn))

    assert packs(tokens) and not packs(tokens[:1, :64])
    assert not packs(tokens.double())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        recorded = packs(tokens)
        tokens.add_(1)
    assert not recorded


@torch.no_grad()
def test_half_padding_pays() -> None:
    """1.5 times the original's speed in a model whose time is the GPU's."""
    import timm

    side, images = 24, 16
    sizes = torch.tensor([[24, 24], [12, 24], [12, 12], [12, 12]]).repeat(images // 4, 1)
    place = torch.arange(side * side)
    given = {
        "patches": torch.randn(images, side * side, 768).cuda(),
        "patch_coord": torch.stack((place // side, place % side), -1).repeat(images, 1, 1).cuda(),
        "patch_valid": (place < sizes.prod(1)[:, None]).cuda(),
    }
    model = timm.create_model("naflexvit_base_patch16_gap").eval().cuda()
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    own, found = _times((model, patched), given)
    ratio = own / found
    print(f"half padding: {ratio:.2f}")
    assert ratio >= 1.5
