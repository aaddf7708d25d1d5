"""The window gradient kernels without a GPU: interpreted against float64, planned, compiled."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import triton_compile
from interpreted import Rows, rows_of
from sampling import some
from window_backward_interpreted import CASES, F16, GROUPED

from elsa_core.backends.support import Request
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.window import backward, tiling
from elsa_core.backends.triton.window.backward_plan import Wants, plan_call, tile_plan
from elsa_core.backends.triton.window.tiling import WindowShape
from elsa_core.backends.window_call import WindowCall

FLOATS = ("Partial", "DBias", "DLogit", "Dense")
KINDS = {"Flags": "i32", **dict.fromkeys(FLOATS, "fp32")}
ALL = Wants(True, True, True, True)


NAMES = some(CASES)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of window_backward_interpreted.py, in a process of its own."""
    with rows_of("window_backward_interpreted.py", *NAMES, *GROUPED) as rows:
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(interpreted, name):
    """Within twice the error of autograd on a model's own operations; twice the same bits."""
    row, (_, dtype, precision, options) = interpreted[name], CASES[name]
    assert row["finite"] and row["dense"] and row["same"] and row["errors"] and row["fence"]
    band = 1e-3 if precision == "turbo" else 3e-4 if dtype == F16 else 2.5e-7
    for term, error in row["errors"].items():
        # autograd makes NaN of a row that sees no key
        peer = 0.0 if options.get("dead") else row["peer"][term]
        assert error <= 2 * peer + band, (term, error, peer)


@pytest.mark.parametrize("name", list(GROUPED))
def test_sums_do_not_depend_on_the_programs(interpreted, name):
    """Rows of dqkv have the same bits, sums differ by their rounding."""
    row = interpreted[name]
    assert row["equal"] and row["sums"] < 2e-7


def given(dtype=torch.float16, precision="strict", *, cosine=False, pad=False, win=7, side=56):
    """Arguments without data: 32 images, 3 heads of 32 channels."""
    tokens, heads, dim = win * win, 3, 32
    q = torch.empty(32, 1, side, side, 3 * heads * dim, dtype=dtype, device="meta")
    return WindowCall(
        q, torch.empty(heads, tokens, tokens, dtype=dtype, device="meta"), None,
        torch.empty(3 * heads * dim, dtype=dtype, device="meta") if pad else None,
        torch.empty(heads, device="meta") if cosine else None, heads, (1, win, win),
        (0, win // 2, win // 2), dim**-0.5, -100.0, "qkv", False, precision,
    )  # fmt: skip


def compiled(monkeypatch, launch, dtype, arch):
    monkeypatch.setattr(triton_compile, "POINTERS", {**triton_compile.POINTERS, **KINDS})
    return triton_compile.compile_launch(launch, dtype, "cuda", arch).asm


def planned(dtype, precision="strict", **terms):
    own = given(dtype, precision, **terms)
    tokens = own.bias.shape[1]
    table = torch.empty(169, 3, device="meta"), torch.empty((tokens,) * 2, device="meta").long()
    return plan_call(own, ALL, table)


def launches(call):
    return [launch for launch, _ in call.steps]


@pytest.mark.parametrize(
    ("dtype", "arch"),
    some([(torch.float16, 80), (torch.bfloat16, 90), (torch.float32, 90), (torch.float16, 120)]),
)
def test_compiles_without_atomics(monkeypatch, dtype, arch):
    call = planned(dtype, cosine=dtype == torch.bfloat16, pad=True, side=60)
    found = launches(call)
    assert len(found) == (4 if dtype == torch.float32 else 3)
    for launch in found:
        asm = compiled(monkeypatch, launch, dtype, arch)
        assert "cubin" in asm
        assert not re.search(r"(?<![\w.])(atom|red)\.", asm["ptx"])


# bytes of shared memory that a program may use
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}


def test_products_are_what_the_precision_says(monkeypatch):
    strict = planned(torch.float32)
    ptx = compiled(monkeypatch, launches(strict)[0], torch.float32, 90)["ptx"]
    assert "wgmma" in ptx and "f32.f16.f16" in ptx
    ieee = planned(torch.float32, "ieee")
    assert len(ieee.steps) == len(strict.steps) - 1
    ptx = compiled(monkeypatch, launches(ieee)[0], torch.float32, 90)["ptx"]
    assert "mma" not in ptx and "fma.rn.f32" in ptx


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_every_call(name):
    table = tiling.load_table(name)
    for mode in device.MODES:
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
        own = given(torch.float16, cosine=True, side=84)
        own = own._replace(qkv=own.qkv[:batch])
        call = plan_call(own, ALL._replace(pad=False), None)
        plan = tile_plan(own)
        size, _ = call.workspace["partial"]
        assert size <= plan.tile.resident * 132 * (64 * 64 + 1)
        assert all(n == 1 for name, (n, _) in call.workspace.items() if name.endswith("flags"))


def test_who_is_served(monkeypatch):
    def asked(**changes):
        kind = Request("cuda", torch.float32, 32, 32, "strict", "window_attention")
        return backward.support(kind._replace(**changes))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "64" in asked(head_dim=80).reason and not asked(dtype=torch.float64).ok
    monkeypatch.setattr(backward, "measured_tokens", lambda index: 0)
    assert "not measured" in asked().reason
    monkeypatch.setattr(backward, "measured_tokens", lambda index: 64)
    assert asked(tokens=64).ok and not asked(tokens=65).ok
    assert tiling.load_table("h200").gradients == 64
    assert tiling.load_table("default").gradients == 0


def test_what_is_not_served_is_left_to_others():
    q = torch.zeros(1, 1, 16, 16, 3 * 80)
    found = backward.window_attention_backward(
        q[..., :80], q, None, None, None, None, 1, (1, 4, 4), (0, 0, 0), 1.0, -math.inf, "qkv",
        False, "strict", (True, False, False, False),
    )  # fmt: skip
    assert found is None


def test_empty_image():
    q, bias = torch.zeros(0, 1, 7, 7, 96), torch.zeros(1, 49, 49)
    found = backward.window_attention_backward(
        q[..., :32], q, bias, None, None, None, 1, (1, 7, 7), (0, 0, 0), 1.0, -100.0, "qkv", False,
        "strict", (True, True, False, False),
    )  # fmt: skip
    assert found is not None
    assert found[0].shape == q.shape and not found[1].any() and found[1].shape == bias.shape
