"""Triton's kernels compile for GPUs that are not here, fit their shared memory, add no floats by
atomics, and multiply as their precision says."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton_compile import compile_launch, planned_call

from elsa_core.backends.triton.attention import backward, entmax, sparse, varlen
from elsa_core.backends.triton.linear import gated, launches
from elsa_core.backends.triton.shared.device import Described, describing
from elsa_core.backends.triton.shared.launch import recording
from elsa_core.backends.triton.window import planner as windows
from elsa_core.backends.triton.window.backward import Wants
from elsa_core.backends.triton.window.backward import plan_call as plan_window_gradients
from elsa_core.backends.window_call import WindowCall

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Bytes of shared memory that a program may have; on AMD's GPUs the compiler decides.
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
KINDS = {
    "Lse": "fp32", "GradLse": "fp32", "Rows": "fp32", "Guards": "i32", "Factors": "fp32",
    "Halves": "fp16", "Alpha": "fp32", "Tiles": "u8", "Lists": "i32",
    "Delta": "fp32", "DAlpha": "fp32", "Norms": "fp32", "Flags": "i32", "Partial": "fp32",
    "DBias": "fp32", "DLogit": "fp32", "Dense": "fp32", "Counts": "i64",
}  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(dtype: torch.dtype, precision: str = "strict", **more: Any) -> list[Any]:
    return list(planned_call((1, 4, 300, 64), dtype, precision, **more).launches.values())


def gradients(
    dtype: torch.dtype, precision: str = "strict", tiles: str = "h200", masked: bool = False,
    causal: bool = False,
) -> list[Any]:  # fmt: skip
    """Of 4 heads, 300 queries and 333 keys."""
    q, k, lse = meta(1, 4, 300, 64, dtype=dtype), meta(1, 4, 333, 64, dtype=dtype), meta(1, 4, 300)
    mask = meta(1, 4, 300, 333, dtype=dtype) if masked else None
    mode = "half" if dtype != F32 else backward.PRECISIONS[precision]
    needs = (True, True, True, masked)
    options = backward.Options(causal, 0.125, mode, needs, mode == "half", tiles)
    operands = {"q": q, "k": k, "v": k, "g": q, "o": q, "l": lse, "dq": q, "dk": k, "dv": k}
    call = backward.plan_call(operands, mask, options)
    return [x for x in (call.prepare, *call.sides, call.fallback, call.mask) if x is not None]


def alpha_entmax(dtype: torch.dtype, packed: bool = False) -> list[Any]:
    """Forward, and gradients with alpha of heads, of the widest heads."""
    dim = entmax.LARGEST_WIDE if dtype == F32 else entmax.LARGEST_HALF
    q, k = meta(1, 4, 300, dim, dtype=dtype), meta(1, 4, 333, dim, dtype=dtype)
    forward = {"q": q, "k": k, "v": k, "o": q}
    trained = forward | {"g": q, "dq": q, "dk": k, "dv": k}
    heads, found = meta(5 if packed else 1, 4, 1, 1), []
    for operands, alpha, needs in (
        (forward, None, ()), (trained, heads, (True, True, True, False, True)),
    ):  # fmt: skip
        number = 1.5 if alpha is None else 0.0
        packing = entmax.Packing(5, 100, 120) if packed else None
        options = entmax.Options(number, packed, dim**-0.5, "strict", needs, packing)
        found += entmax.plan_call(operands, None, alpha, options).values()
    return found


def window(
    dtype: torch.dtype, precision: str = "strict", win: int = 7, cosine: bool = False
) -> WindowCall:
    tokens, heads, dim = win * win, 3, 32
    return WindowCall(
        meta(32, 1, 60, 60, 3 * heads * dim, dtype=dtype), meta(heads, tokens, tokens, dtype=dtype),
        None, meta(3 * heads * dim, dtype=dtype), meta(heads) if cosine else None, heads,
        (1, win, win), (0, win // 2, win // 2), dim**-0.5, -100.0, "qkv", False, precision,
    )  # fmt: skip


def window_gradients(dtype: torch.dtype, **more: Any) -> list[Any]:
    own = window(dtype, **more)
    table = meta(169, 3), meta(49, 49).long()
    return [launch for launch, _ in plan_window_gradients(own, Wants(True, True, True, True),
                                                           table).steps]  # fmt: skip


def product(arch: int, name: str, epilogue: tuple[Any, ...]) -> list[Any]:
    gpu = launches.Gpu(132, SHARED[arch], divmod(arch, 10))
    tile = launches.fitting(getattr(launches, name), gpu)
    shape, steps = launches.Shape(1576, 768, 768), (768, 1)
    return [launches.product_launch(shape, steps, steps, tile, epilogue=epilogue)]


def launched(call: Callable[[], Any]) -> list[Any]:
    """What a call on tensors without memory launches."""
    found: list[Any] = []
    with recording(lambda launch, _: found.append(launch)):
        call()
    return found


def splits() -> list[Any]:
    turned = launched(lambda: launches.split_turned(1577, 768, 768)(meta(1577, 768)))
    return [launches.split_launch((1576, 768, 768), 768, 768), *turned]


def gated_unit(arch: int) -> list[Any]:
    x, w, bias = meta(1370, 1536), meta(360, 1536), meta(360)
    with describing(Described("a GPU", divmod(arch, 10), 132)):
        return launched(lambda: gated.gated_linear(x, w, bias, w, bias))[-1:]


def packed(dtype: torch.dtype, dim: int, precision: str = "strict", causal: bool = False) -> Any:
    q, starts = meta(4096, 4, dim, dtype=dtype), torch.empty(9, dtype=torch.int32, device="meta")
    return [varlen.plan(q, q, q, starts, causal, dim**-0.5, precision)]


def tiles_left_out(dtype: torch.dtype) -> list[Any]:
    dim = sparse.LARGEST_WIDE if dtype == F32 else sparse.LARGEST_HALF
    q, k = meta(1, 4, 300, dim, dtype=dtype), meta(1, 4, 333, dim, dtype=dtype)
    return [sparse.plan_call(q, k, k, None, sparse.Options(True, 0.1, "strict", -20.0, 7))]


# what, for which GPU, in which dtype; "hip" for AMD's
ROWS: list[tuple[str, Callable[[], list[Any]], int | str, torch.dtype]] = [
    ("attention", lambda: attention(F32), 90, F32),
    ("attention", lambda: attention(BF16), 80, BF16),
    ("attention", lambda: attention(F16), "gfx942", F16),
    ("one query", lambda: attention(F32, keys=5000), 90, F32),
    ("gradients", lambda: gradients(F32, masked=True, causal=True), 90, F32),
    ("gradients", lambda: gradients(BF16, tiles="default"), 120, BF16),
    ("gradients", lambda: gradients(F16, tiles="default"), 80, F16),
    ("packed", lambda: packed(F32, 80), 80, F32),
    ("entmax", lambda: alpha_entmax(F16), 80, F16),
    ("packed entmax", lambda: alpha_entmax(BF16, packed=True), 90, BF16),
    ("sparsity", lambda: tiles_left_out(F16), 120, F16),
    ("windows", lambda: [windows.plan_call(window(F16))], 80, F16),
    ("windows", lambda: [windows.plan_call(window(BF16, win=12))], "gfx942", BF16),
    ("windows", lambda: [windows.plan_gather(meta(169, 3), meta(49, 49).long())], 120, F32),
    ("window gradients", lambda: window_gradients(F32), 90, F32),
    ("window gradients", lambda: window_gradients(BF16, cosine=True), 120, BF16),
    ("linear", lambda: product(90, "LARGE", (True, "gelu", True, True)), 90, F32),
    ("splits of linear", splits, 80, F32),
]


def compiled(launch: Any, arch: int | str, dtype: torch.dtype) -> Any:
    kinds, names = dict(KINDS), launch.kernel.arg_names
    dense = launch.kernel.fn.__module__.endswith("attention.backward_kernels")
    if dense and "DQ" in names and launch.tail["MODE"] == backward.MODES["split"]:
        kinds |= dict.fromkeys(("DQ", "DK", "DV_", "Mask"), "fp32")
        dtype = F16  # of the operands; the gradients are float32
    if launch.kernel.__name__ == "sum_of_sequences":
        kinds |= {"X": "fp32", "Out": "fp32", "Starts": "i32"}
    return compile_launch(launch, dtype, "cuda" if isinstance(arch, int) else "hip", arch,
                          kinds=kinds)  # fmt: skip


@pytest.mark.parametrize(
    ("what", "plan", "arch", "dtype"), ROWS,
    ids=[f"{what}, {str(dtype)[6:]}, {arch}" for what, _, arch, dtype in ROWS],
)  # fmt: skip
def test_every_kernel(
    what: str, plan: Callable[[], list[Any]], arch: int | str, dtype: torch.dtype
) -> None:
    found = plan()
    assert found
    for launch in found:
        made = compiled(launch, arch, dtype)
        if isinstance(arch, str):
            assert "hsaco" in made.asm
            continue
        assert "cubin" in made.asm and made.metadata.shared <= SHARED[arch]
        atomics = re.findall(r"(?<![\w.])(?:atom|red)\.[\w.]+", made.asm["ptx"])
        assert all(re.search(r"\.[usb]64$", each) for each in atomics), "floats in no fixed order"


PRODUCTS = {
    "strict": ("wgmma", lambda: attention(F32)[-1], F32),
    "strict gradients": ("wgmma", lambda: gradients(F32)[1], F32),
    "entmax": ("tf32", lambda: alpha_entmax(F32)[0], F32),
    "ieee": ("", lambda: attention(F32, "ieee")[0], F32),
    "ieee windows": ("", lambda: windows.plan_call(window(F32, "ieee", 4)), F32),
    "ieee packed": ("", lambda: packed(F32, 64, "ieee")[0], F32),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_what_the_precision_says(name: str) -> None:
    """On sm_90; `ieee` is float32 multiply-add alone."""
    instruction, plan, dtype = PRODUCTS[name]
    ptx = compiled(plan(), 90, dtype).asm["ptx"]
    if instruction:
        assert instruction in ptx
    else:
        assert "mma" not in ptx and "fma.rn.f32" in ptx


def test_threads_of_window_gradients_spill_next_to_nothing() -> None:
    from triton import knobs

    for launch in window_gradients(F16)[:1]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled(launch, 90, F16).asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert max(int(size) for size in re.findall(r"STACK:(\d+)", text)) <= 64


def test_the_value_product_of_sparsity_is_behind_a_branch() -> None:
    """Where nothing is left out the kernel has no such branch."""
    branches = []
    q, k = meta(1, 4, 300, 64, dtype=F16), meta(1, 4, 333, 64, dtype=F16)
    mask = torch.empty((1, 1, 300, 333), dtype=torch.bool, device="meta")
    for threshold in (-20.0, -torch.inf):
        options = sparse.Options(False, 0.125, "strict", threshold, 0)
        made = compiled(sparse.plan_call(q, k, k, mask, options), 90, F16)
        branches.append(made.asm["ttgir"].count("scf.if"))
    assert branches[0] > branches[1]


def test_rows_of_linear_are_read_and_written_16_bytes_at_a_time() -> None:
    assert "ld.global.v4" in compiled(splits()[0], 90, F32).asm["ptx"]
    text = compiled(gated_unit(90)[0], 90, F32).asm["ptx"]
    assert "cp.async.cg.shared.global" in text and "cp.async.ca" not in text
