"""Tiles of Triton's kernels serve every call and fit their GPU; plans follow layouts alone, hold no
tensor, and say why they refuse."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton_compile import planned_call

from elsa_core import dispatch
from elsa_core.backends import eager_window, triton
from elsa_core.backends.support import Request
from elsa_core.backends.triton.attention import (
    backward,
    backward_tiling,
    entmax,
    planner,
    schedules,
    sparse,
)
from elsa_core.backends.triton.attention import tiling as attention
from elsa_core.backends.triton.linear import launches
from elsa_core.backends.triton.linear import planner as linear
from elsa_core.backends.triton.linear.product import product
from elsa_core.backends.triton.pack import cases
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.device import MODES, describing
from elsa_core.backends.triton.shared.launch import recording
from elsa_core.backends.triton.shared.plans import PlanCache
from elsa_core.backends.triton.window import backward as window_backward
from elsa_core.backends.triton.window import planner as window_planner
from elsa_core.backends.triton.window import tiling as window_tiling
from elsa_core.backends.triton.window.tiling import WindowShape
from elsa_core.backends.window_call import WindowCall
from elsa_core.profiling.bench.linear import SHAPES

TABLES = sorted(path.stem for path in attention.TABLES.glob("*.json"))


def request(**changes):
    given = {
        "device_type": "cuda", "dtype": torch.float32, "head_dim": 64, "value_dim": 64,
        "precision": "strict",
    }  # fmt: skip
    return Request(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"device_type": "cpu"}, "GPU"), ({"head_dim": 512}, "512"), ({"value_dim": 257}, "257"),
     ({"dtype": torch.float64}, "float64")],
)  # fmt: skip
def test_unsupported_says_why(changes, word):
    answer = triton.support(request(**changes))
    assert not answer.ok and word in answer.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu_says_so():
    answer = triton.support(request())
    assert not answer.ok and "GPU" in answer.reason


@pytest.mark.parametrize("name", TABLES)
def test_tables_serve_attention(name):
    table = attention.load_table(name)
    assert table.measured == (name == "h200")
    for mode in device.MODES:
        for dim in (16, 64, 72, 80, 96, 128, 160, 256):
            for queries, keys in ((2, 5), (197, 197), (4097, 4097), (7, 1 << 20)):
                for workspace in (True, False) if mode in ("half", "split") else (True,):
                    shape = attention.Shape(1, 4, 4, queries, keys, dim, dim)
                    plan = attention.plan(
                        shape, mode, table, workspace=workspace, multiprocessors=100
                    )
                    assert plan.chunk % plan.tile.block_n == 0
                    assert (plan.partitions - 1) * plan.chunk < keys <= plan.partitions * plan.chunk
                    assert workspace or (plan.partitions == 1 and not plan.tile.ahead)


@pytest.mark.parametrize("name", TABLES)
def test_tiles_of_attention_fit_shared_memory(name):
    """Operand tiles as the kernels keep them; what the compiler adds is small."""
    table = attention.load_table(name)
    for tile in table.tiles:
        if tile.mode == "exact":
            continue
        pairs = 2 if tile.mode == "split" else 1
        keys = tile.stages * tile.block_n * 2 * tile.dim * 2 * pairs
        if not tile.ahead and tile.mode != "half":
            keys = tile.block_n * 2 * tile.dim * 2 * pairs
        queries = tile.block_m * tile.dim * 2 * pairs
        assert keys + queries <= table.shared_memory, tile


@pytest.mark.parametrize(
    ("name", "capability", "table"),
    [("NVIDIA H200", (9, 0), "h200"), ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
     ("NVIDIA L4", (8, 9), "l4"), ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
     ("NVIDIA B200", (10, 0), "h200"), ("NVIDIA GeForce RTX 5090", (12, 0), "rtx4090"),
     ("NVIDIA GeForce RTX 3090", (8, 6), "rtx4090")],
)  # fmt: skip
def test_table_of_a_gpu(name, capability, table):
    assert attention.table_name(name, capability) == table


WINDOW_TABLES = ["default", *TABLES]


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
    out = window_planner.window_attention(*unmasked)
    torch.testing.assert_close(out, expected.roll((5, 3), (2, 3)))
    assert torch.equal(window_planner.window_attention(*call), eager_window.attention(*call))
    needs = (True, False, True, False)
    assert window_backward.window_attention_backward(torch.ones_like(out), *call, needs) is None


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


@pytest.mark.parametrize("name", WINDOW_TABLES)
def test_tables_serve_windows(name):
    table = window_tiling.load_table(name)
    assert not table.measured or name == "h200"
    for mode in MODES:
        for dim in (1, 16, 24, 32, 64, 80, 128, 256):
            for tokens in (1, 4, 16, 49, 64, 65, 144, 256, 392, 576, 4096):
                for windows, heads in ((1, 1), (512, 3), (100_000, 4)):
                    shape = WindowShape(windows, heads, tokens, dim)
                    plan = window_tiling.plan(shape, mode, table, 132)
                    assert plan.padded_dim >= dim
                    if plan.whole:
                        assert plan.block_m == plan.block_n >= tokens
                        assert plan.programs == -(-windows // plan.count) * heads
                        assert plan.count <= window_tiling.MOST_WINDOWS
                    else:
                        assert plan.count == 1
                        assert plan.programs == windows * heads * -(-tokens // plan.block_m)
                    assert plan.whole is False or mode != "exact"


@pytest.mark.parametrize(("name", "room"), [("h200", 232448), ("default", 65536)])
def test_tiles_of_windows_fit_shared_memory(name, room):
    """Operand tiles as the kernels keep them; 64 KiB is what the smallest GPU served has."""
    table = window_tiling.load_table(name)
    for mode, size in (("half", 2), ("split", 4), ("single", 4), ("exact", 4)):
        for dim in (32, 64, 128, 256):
            for tokens in (49, 64, 144, 576):
                plan = window_tiling.plan(WindowShape(512, 3, tokens, dim), mode, table, 132)
                row = plan.padded_dim * size
                need = 3 * plan.block_m * row * (plan.tile.stages if plan.count > 1 else 1)
                if not plan.whole:
                    need = (plan.block_m + 2 * plan.block_n * plan.tile.stages) * row
                assert need < room, plan


def test_large_images_have_wide_offsets():
    assert not window_planner.plan_call(given(size=(64, 1, 1024, 1024))).tail["WIDE"]
    assert window_planner.plan_call(given(size=(1, 1, 4096, 4096))).tail["WIDE"]


def test_empty_image():
    for shape in ((0, 1, 7, 7, 96), (2, 1, 0, 7, 96)):
        q = torch.empty(shape)
        out = window_planner.window_attention(
            q, None, None, None, None, 1, (1, 7, 7), (0, 0, 0), 1.0, -100.0, "qkv", False, "strict"
        )
        assert out.shape == (*shape[:-1], 32)


ALL = window_backward.Wants(True, True, True, True)


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_gradients_of_windows(name):
    table = window_tiling.load_table(name)
    for mode in MODES:
        for dim in (1, 16, 24, 32, 64):
            for tokens in (1, 4, 16, 49, 64):
                for windows, heads in ((1, 1), (2048, 3), (100_000, 4), (5, 1000)):
                    shape = WindowShape(windows, heads, tokens, dim)
                    plan = window_tiling.plan_backward(shape, mode, table, 132)
                    assert plan.padded_dim >= dim and plan.block >= tokens
                    assert (plan.groups - 1) * plan.count < windows <= plan.groups * plan.count
                    assert (plan.exact is None) is (mode in ("half", "exact"))


def test_workspace_does_not_grow_with_the_images():
    """Sums of the programs that run at once."""
    for batch in (2, 32):
        own = given((32, 1, 84, 84), cosine=True)
        own = own._replace(qkv=own.qkv[:batch])
        call = window_backward.plan_call(own, ALL._replace(pad=False), None)
        plan = window_tiling.plan_backward(*window_planner.tile_terms(own))
        size, _ = call.workspace["partial"]
        assert size <= plan.tile.resident * 132 * (64 * 64 + 1)
        assert all(n == 1 for name, (n, _) in call.workspace.items() if name.endswith("flags"))


def test_gradients_of_an_empty_image():
    q, bias = torch.zeros(0, 1, 7, 7, 96), torch.zeros(1, 49, 49)
    found = window_backward.window_attention_backward(
        q[..., :32], q, bias, None, None, None, 1, (1, 7, 7), (0, 0, 0), 1.0, -100.0, "qkv", False,
        "strict", (True, True, False, False),
    )  # fmt: skip
    assert found is not None
    assert found[0].shape == q.shape and not found[1].any() and found[1].shape == bias.shape


def meta(rows, depth, columns, dtype=torch.float32):
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    w = torch.empty(columns, depth, dtype=dtype, device="meta")
    return x, w


def products(call):
    """The products that a call on tensors without memory launches."""
    found = []
    with recording(lambda launch, _: found.append(launch)):
        call()
    return [launch for launch in found if launch.kernel is product]


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
TILES = {name: getattr(launches, name) for name in ("LARGE", "NARROW", "WIDE", "SHALLOW", "SMALL")}


@pytest.mark.parametrize("wide", ["columns", "depth"])
def test_gradients_of_more_columns_than_a_grid_takes_are_pytorchs(wide):
    """The launch failed: blocks of turned columns lie along the grid's second axis."""
    for blocks, served in (((1 << 16) - 1, True), (1 << 16, False)):
        columns, depth = (64 * blocks, 64) if wide == "columns" else (64, 64 * blocks)
        x, w = meta(64, depth, columns)
        grad = torch.empty(64, columns, device="meta")
        assert (linear._plan_backward(grad, x, w, (True, True, False)) is not None) == served


@pytest.mark.parametrize("gpu", [gpu for arch in SHARED for gpu in cases.gpus(arch)], ids=str)
def test_products_fit(gpu):
    """Those of `elsa bench linear --tune`, and their gradients' products."""
    found = []
    with describing(gpu.facts):
        limits = launches.gpu_of(torch.device("meta"))
        assert limits.shared_memory == gpu.shared_memory == SHARED[gpu.arch] << 10
        for rows, depth, columns in SHAPES:
            x, w = meta(rows, depth, columns)
            grad = torch.empty(rows, columns, device="meta")
            found += products(lambda g=(x, w, None): linear.linear(*g))
            found += products(lambda g=(grad, x, w, (True,) * 3): linear.backward(*g))
    assert len(found) > 2 * len(SHAPES)
    for multiply in found:
        tail, options = multiply.tail, multiply.options
        tile = launches.Tile(
            tail["BM"], tail["BN"], tail["BK"], options["num_warps"], tail["STAGES"]
        )  # fmt: skip
        assert tile in (*TILES.values(), launches.MEDIUM)
        # only these read the tile that is multiplied from shared memory
        held = tile.stages if 90 <= gpu.arch < 120 else tile.stages - 1
        assert held * (tile.rows + tile.columns) * tile.depth * 4 <= gpu.shared_memory


NEEDS = (True, True, True, True)


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_gradients_of_attention(name):
    modes = [*backward.MODES]
    for mode in modes:
        for side in ("key", "query", *(["mask", "normalise"] if mode != "split" else [])):
            for dim in (16, 32, 64, 128, 256):
                for keys in (5, 197, 100000):
                    tile = backward_tiling.tile_for(name, mode, side, dim, keys)
                    assert 128 % tile.block_m == 0 and 128 % tile.block_n == 0
    assert backward_tiling.load_table(name).measured == (name == "h200")
    with pytest.raises(LookupError, match="512"):
        backward_tiling.tile_for(name, "half", "key", 512, 5)


def test_workspace_is_linear_in_the_rows():
    """Terms of rows, factors and halves: no product of lengths."""
    sizes = []
    for n in (1280, 2560):
        q = torch.empty((1, 2, n, 64), device="meta")
        lse = torch.empty((1, 2, n), device="meta")
        operands = dict.fromkeys(("q", "k", "v", "g", "o", "dq", "dk", "dv"), q)
        options = backward.Options(False, 0.125, "split", NEEDS, False, "h200")
        call = backward.plan_call({**operands, "l": lse}, None, options)
        sizes.append((call.rows, call.guards, sum(call.halves)))
    assert [b / a for a, b in zip(*sizes, strict=True)] == [2.0] * 3


def test_float32_on_an_amd_gpu_is_refused_but_for_ieee(monkeypatch):
    """Triton has no products of three TF32 ones there, and `auto` asks `support` alone."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "AMD" in entmax.support(request).reason
    assert "AMD" in entmax.support(request._replace(precision="lean")).reason
    assert entmax.support(request._replace(precision="ieee")).ok
    assert entmax.support(request._replace(dtype=torch.float16)).ok


def test_support_of_entmax_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "256" in entmax.support(request._replace(head_dim=256)).reason
    assert "lean" not in entmax.support(request._replace(precision="lean")).reason
    assert "turbo" in entmax.support(request._replace(precision="turbo")).reason


def test_auto_does_not_choose_it_and_support_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "sparse_attention")
    name, reasons = dispatch.select(request)
    assert name == "eager" and "triton" in dispatch.names("sparse_attention")
    assert any(reason.startswith("triton: ") and "measured" in reason for reason in reasons)
    assert "256" in sparse.support(request._replace(head_dim=256)).reason
    assert "turbo" in sparse.support(request._replace(precision="turbo")).reason
    assert sparse.support(request).ok
    kind = ("attention_dropout", "cuda", torch.float16, 64, 64, "strict")
    assert dispatch.choose(*kind, mode="train", gradient=("query",)) == "sdpa"


def test_gradients_are_chosen_by_the_gpu_of_the_call(monkeypatch):
    """An H200, which is the current one, beside an L4."""
    known = {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA L4", (8, 9))}

    def capability(device):
        return known[torch.device(device).index or 0][1]

    def properties(index):
        name, (major, minor) = known[index]
        return SimpleNamespace(name=name, major=major, minor=minor)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device.capability_at.cache_clear()
    for support, operator in (
        (backward_tiling.support, "attention"), (window_backward.support, "window_attention"),
    ):  # fmt: skip
        request = Request("cuda", torch.float32, 32, 32, "strict", operator, tokens=49)
        found = [support(request._replace(ordinal=ordinal)).ok for ordinal in (-1, 0, 1)]
        assert found == [True, True, False]
    device.capability_at.cache_clear()


def test_a_plan_holds_no_tensor():
    """Plans outlive calls: what they referred to would never be freed."""
    q = torch.empty(1, 2, 0, 8)
    watched = weakref.ref(q)
    call = planner.plan_call(q, q, q, None, False, 1.0, "strict")
    del q
    gc.collect()
    assert watched() is None and call.schedule is schedules.EMPTY


def test_the_bound_holds_for_all_operators_together():
    cache = PlanCache(4)
    for i in range(50):
        for operator in ("attention", "window", "linear"):
            assert cache.get((operator, i), lambda *given: given, operator, i) == (operator, i)
            assert len(cache) <= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim"), [(20, 16), (60, 32), (92, 32), (63, 33), (100, 16)])
def test_unaligned_rows_of_half_precision_fill_128_bytes(dtype, dim, value_dim):
    """Shorter tiles that the loop writes to shared memory were seen miscompiled (Triton 3.6,
    sm_90): head dimension 60 with values of 32 gave wrong results without a word."""

    def constants(dim, value_dim):
        q, v = (torch.empty(1, 2, 96, d, dtype=dtype, device="meta") for d in (dim, value_dim))
        call = planner.plan_call(q, q, v, None, False, 1.0, "strict", specialized=False)
        return call.launches["fold"].tail

    known = constants(dim, value_dim)
    assert (known["UNIT"], known["D1"], known["V1"]) == (1, 0, 0)
    assert known["D0"] >= max(64, dim) and known["V0"] >= max(64, value_dim)
    assert constants(32, 16)["V0"] == 16  # aligned rows are copied ahead of the loop


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float16])
def test_masks_in_half_precision_have_all_registers(kind):
    """The tables' limits were measured without them: within those they spilled 1 KB a thread."""
    q = torch.empty(1, 8, 196, 32, dtype=torch.float16, device="meta")
    mask = None if kind is None else torch.empty(1, 8, 196, 196, dtype=kind, device="meta")
    call = planner.plan_call(q, q, q, mask, False, 0.125, "strict", specialized=False)
    assert call.fold.options.get("maxnreg") == (96 if kind is None else None)


LENGTHS = {
    "attention": (lambda n: planned_call((1, 8, n, 64), torch.float16, "strict").fold,
                  (900, 941, 1500)),
    "window_attention": (lambda n: window_planner.plan_call(given(size=(8, 1, n, n))),
                         (56, 63, 112)),
    "linear": (lambda n: products(lambda: linear.linear(*meta(n, 768, 2304), None))[0],
               (1576, 1577, 3152)),
}  # fmt: skip


@pytest.mark.parametrize("operator", LENGTHS)
def test_no_length_is_compiled_in(operator):
    """Lengths and sizes are run-time arguments: those of one table row share every constant."""
    linear.PLANS.clear()
    launch, lengths = LENGTHS[operator]
    constants = []
    for call in map(launch, lengths):
        names = [p.name for p in call.kernel.params if p.is_constexpr]
        constants.append({name: call.tail[name] for name in names} | call.options)
    assert constants[0] == constants[1] == constants[2]
