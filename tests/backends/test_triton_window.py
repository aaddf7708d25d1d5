"""The window kernels without a GPU: interpreted against float64, planned, compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elsa_core.backends import eager_window
from elsa_core.backends.triton.attention.tiling import TABLES as SHIPPED
from elsa_core.backends.triton.shared.device import MODES
from elsa_core.backends.triton.window import backward, planner, tiling
from elsa_core.backends.triton.window.tiling import WindowShape
from elsa_core.backends.window_call import WindowCall

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from interpreted import Rows, rows_of
from sampling import some, thinned
from triton_compile import compile_launch
from window_interpreted import CASES

BEYOND = ("overflow", "overflow long", "cosine overflow")
BAND = {torch.float32: 2.5e-7, torch.float16: 5e-4}
TABLES = ["default", *sorted(p.stem for p in SHIPPED.glob("*.json"))]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """Every case of window_interpreted.py, in a process of its own."""
    with rows_of("window_interpreted.py") as rows:
        yield rows


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


@pytest.mark.parametrize("name", list(CASES))
def test_interpreted(interpreted, name):
    """By twice the error of the eager backend, which computes half precision in float32."""
    row, (_, dtype, precision, _) = interpreted[name], CASES[name]
    assert row["finite"] and row["dense"] and row["fence"]
    if name not in BEYOND:
        limit = 1e-3 if precision == "turbo" else 2 * row["peer"] + BAND[dtype]
        assert row["error"] <= limit


def test_cosine_of_huge_rows(interpreted):
    """Norms beyond float32: PyTorch's normalize gives zeros, the exact path does not."""
    row = interpreted["cosine overflow"]
    assert row["error"] < 3e-7 < row["peer"]


def test_what_a_split_does_not_hold_is_computed_exactly(interpreted):
    """A channel of the values 2**-24 below the tile's largest: beyond a pair of halves alone."""
    for name in CASES:
        if name.startswith("far values"):
            assert (interpreted[name]["exact_rows"] > 0) == (CASES[name][2] == "strict"), name
    assert interpreted["strict swin"]["exact_rows"] == interpreted["long"]["exact_rows"] == 0


def test_several_windows_a_program(interpreted):
    """A last group that is not full, and one window of a group that takes the exact path."""
    assert interpreted["grouped"] == {"name": "grouped", "equal": True, "finite": True}


def test_index_beyond_the_table(interpreted):
    row = interpreted["beyond the table"]
    assert row["rows"] == [row["windows"]] * 2


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


def test_windows_are_grouped_where_programs_abound():
    tile = tiling.WindowTile("half", 64, 64, 64, 64, 4, 3, windows=8, resident=3)
    assert tiling.windows_each(512, 3, 132, tile) == 4
    assert tiling.windows_each(128, 6, 132, tile) == 2
    assert tiling.windows_each(32, 12, 132, tile) == 1
    assert tiling.windows_each(1, 1, 132, tile) == 1
    assert tiling.windows_each(1 << 20, 3, 132, tile) == 8


def test_plan_does_not_depend_on_the_image():
    """Sizes are run-time arguments: images of one kind share every constant."""
    constants = []
    for side in (56, 63, 112):
        call = planner.plan_call(given(size=(8, 1, side, side)))
        names = [p.name for p in call.kernel.params if p.is_constexpr]
        constants.append({name: call.tail[name] for name in names})
    assert constants[0] == constants[1] == constants[2]


def test_plan_counts_windows():
    call = planner.plan_call(given(size=(2, 3, 15, 20), win=(2, 7, 7), shift=(1, 3, 3), pad=True))
    assert call.tail["windows"] == 2 * 2 * 3 * 3
    assert (call.tail["PADDED"], call.tail["VOLUME"], call.tail["SHIFTED"]) == (2, True, True)


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


COMPILED = [
    ("cuda", 80, (1, 7, 7)), ("cuda", 90, (1, 7, 7)), ("cuda", 120, (1, 12, 12)),
    ("hip", "gfx942", (1, 7, 7)),
]  # fmt: skip


@pytest.mark.parametrize(("target", "arch", "win"), some(COMPILED))
def test_compiles(target, arch, win):
    call = planner.plan_call(given(size=(8, 1, 60, 60), win=win, pad=True))
    code = compile_launch(call, torch.float16, target, arch).asm
    assert ("hsaco" if target == "hip" else "cubin") in code


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    thinned(
        [("cuda", 80), ("cuda", 90), ("hip", "gfx942")], [torch.float32, torch.bfloat16], one_in=3
    ),
)
def test_gather_compiles(gpu, dtype):
    target, arch = gpu
    table = torch.empty(169, 3, dtype=dtype, device="meta")
    index = torch.empty(49, 49, dtype=torch.int64, device="meta")
    code = compile_launch(planner.plan_gather(table, index), dtype, target, arch).asm
    assert ("hsaco" if target == "hip" else "cubin") in code


def test_strict_compiles_to_tensor_cores():
    call = planner.plan_call(given(dtype=torch.float32, cosine=True))
    assert "wgmma" in compile_launch(call, torch.float32, "cuda", 90).asm["ptx"]


def test_ieee_has_no_tensor_core_instruction():
    call = planner.plan_call(given(dtype=torch.float32, precision="ieee", win=(1, 4, 4)))
    ptx = compile_launch(call, torch.float32, "cuda", 90).asm["ptx"]
    assert "mma" not in ptx and "fma.rn.f32" in ptx
