"""Windows of every size have a tile that fits, and plans that follow layouts alone."""

from __future__ import annotations

import pytest
import torch

from elsa_core.backends import eager_window
from elsa_core.backends.triton.attention.tiling import TABLES as SHIPPED
from elsa_core.backends.triton.shared.device import MODES
from elsa_core.backends.triton.window import backward, planner, tiling
from elsa_core.backends.triton.window.backward import Wants, plan_call
from elsa_core.backends.triton.window.tiling import WindowShape
from elsa_core.backends.window_call import WindowCall

pytest.importorskip("triton")

TABLES = ["default", *sorted(p.stem for p in SHIPPED.glob("*.json"))]


def test_an_axis_rolled_by_more_than_its_size_is_left_to_plain_pytorch() -> None:
    """The kernels take a size off a coordinate once: they would read beyond the image."""
    call = WindowCall(
        torch.randn(2, 1, 2, 5, 48), None, None, torch.randn(48), None, 1, (1, 7, 4), (0, 5, 3),
        0.25, -100.0, "qkv", False,
    )  # fmt: skip
    rolled = call.qkv.roll((-5, -3), (2, 3))
    expected = eager_window.attention(*call._replace(qkv=rolled, shift_size=(0, 0, 0)))
    # a mask of zeros: where regions lie does not matter
    unmasked = call._replace(mask_value=0.0)
    out = planner.window_attention(*unmasked)
    torch.testing.assert_close(out, expected.roll((5, 3), (2, 3)))
    assert torch.equal(planner.window_attention(*call), eager_window.attention(*call))
    needs = (True, False, True, False)
    assert backward.window_attention_backward(torch.ones_like(out), *call, needs) is None


def given(
    size=(8, 1, 56, 56), heads=3, dim=32, win=(1, 7, 7), shift=(0, 3, 3), dtype=torch.float16,
    precision="strict", cosine=False, pad=False,
) -> WindowCall:  # fmt: skip
    """Arguments without data."""
    tokens = win[0] * win[1] * win[2]
    q = torch.empty(*size, 3 * heads * dim, dtype=dtype, device="meta")
    return WindowCall(
        q, torch.empty(heads, tokens, tokens, dtype=dtype, device="meta"), None,
        torch.empty(3 * heads * dim, dtype=dtype, device="meta") if pad else None,
        torch.empty(heads, device="meta") if cosine else None,
        heads, win, shift, dim**-0.5, -100.0, "qkv", False, precision,
    )  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_serve_every_call(name):
    table = tiling.load_table(name)
    assert not table.measured or name == "h200"
    for mode in MODES:
        for dim in (1, 16, 24, 32, 64, 80, 128, 256):
            for tokens in (1, 4, 16, 49, 64, 65, 144, 256, 392, 576, 4096):
                for windows, heads in ((1, 1), (512, 3), (100_000, 4)):
                    shape = WindowShape(windows, heads, tokens, dim)
                    plan = tiling.plan(shape, mode, table, 132)
                    assert plan.padded_dim >= dim
                    if plan.whole:
                        assert plan.block_m == plan.block_n >= tokens
                        assert plan.programs == -(-windows // plan.count) * heads
                        assert plan.count <= tiling.MOST_WINDOWS
                    else:
                        assert plan.count == 1
                        assert plan.programs == windows * heads * -(-tokens // plan.block_m)
                    assert plan.whole is False or mode != "exact"


@pytest.mark.parametrize(("name", "room"), [("h200", 232448), ("default", 65536)])
def test_tiles_fit_shared_memory(name, room):
    """Operand tiles as the kernels keep them; 64 KiB is what the smallest GPU served has."""
    table = tiling.load_table(name)
    for mode, size in (("half", 2), ("split", 4), ("single", 4), ("exact", 4)):
        for dim in (32, 64, 128, 256):
            for tokens in (49, 64, 144, 576):
                plan = tiling.plan(WindowShape(512, 3, tokens, dim), mode, table, 132)
                row = plan.padded_dim * size
                need = 3 * plan.block_m * row * (plan.tile.stages if plan.count > 1 else 1)
                if not plan.whole:
                    need = (plan.block_m + 2 * plan.block_n * plan.tile.stages) * row
                assert need < room, plan


def test_plan_does_not_depend_on_the_image():
    """Sizes are run-time arguments: images of one kind share every constant."""
    constants = []
    for side in (56, 63, 112):
        call = planner.plan_call(given(size=(8, 1, side, side)))
        names = [p.name for p in call.kernel.params if p.is_constexpr]
        constants.append({name: call.tail[name] for name in names})
    assert constants[0] == constants[1] == constants[2]


def test_large_images_have_wide_offsets():
    assert not planner.plan_call(given(size=(64, 1, 1024, 1024))).tail["WIDE"]
    assert planner.plan_call(given(size=(1, 1, 4096, 4096))).tail["WIDE"]


def test_empty_image():
    for shape in ((0, 1, 7, 7, 96), (2, 1, 0, 7, 96)):
        q = torch.empty(shape)
        out = planner.window_attention(
            q, None, None, None, None, 1, (1, 7, 7), (0, 0, 0), 1.0, -100.0, "qkv", False, "strict"
        )
        assert out.shape == (*shape[:-1], 32)


ALL = Wants(True, True, True, True)


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_every_gradient(name):
    table = tiling.load_table(name)
    for mode in MODES:
        for dim in (1, 16, 24, 32, 64):
            for tokens in (1, 4, 16, 49, 64):
                for windows, heads in ((1, 1), (2048, 3), (100_000, 4), (5, 1000)):
                    shape = WindowShape(windows, heads, tokens, dim)
                    plan = tiling.plan_backward(shape, mode, table, 132)
                    assert plan.padded_dim >= dim and plan.block >= tokens
                    assert (plan.groups - 1) * plan.count < windows <= plan.groups * plan.count
                    assert (plan.exact is None) is (mode in ("half", "exact"))


def test_workspace_does_not_grow_with_the_images():
    """Sums of the programs that run at once."""
    for batch in (2, 32):
        own = given((32, 1, 84, 84), cosine=True)
        own = own._replace(qkv=own.qkv[:batch])
        call = plan_call(own, ALL._replace(pad=False), None)
        plan = tiling.plan_backward(*planner.tile_terms(own))
        size, _ = call.workspace["partial"]
        assert size <= plan.tile.resident * 132 * (64 * 64 + 1)
        assert all(n == 1 for name, (n, _) in call.workspace.items() if name.endswith("flags"))


def test_gradients_of_an_empty_image():
    q, bias = torch.zeros(0, 1, 7, 7, 96), torch.zeros(1, 49, 49)
    found = backward.window_attention_backward(
        q[..., :32], q, bias, None, None, None, 1, (1, 7, 7), (0, 0, 0), 1.0, -100.0, "qkv", False,
        "strict", (True, True, False, False),
    )  # fmt: skip
    assert found is not None
    assert found[0].shape == q.shape and not found[1].any() and found[1].shape == bias.shape
