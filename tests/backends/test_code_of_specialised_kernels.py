"""The warp-specialised kernel of sm_90, compiled without a GPU: what the assembler made of it."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from triton_compile import compile_launch

from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.attention.schedules import Call
from elsa_core.backends.triton.shared import device

# three products each for Q K^T and P V, 64 / 16 instructions a product
PRODUCTS = 24


@pytest.fixture(autouse=True)
def overlapped_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "overlaps", lambda device: True)


def planned(
    shape: tuple[int, int, int, int], block_m: int = 128, stages: int = 2, registers: int = 0,
    causal: bool = False, parts: int = 1, scale: float = 0.1,
) -> Call:  # fmt: skip
    _, _, n, d = shape
    q = torch.empty(shape, device="meta")
    tile = tiling.Tile(
        "split", d, None, None, block_m, 64, 4, stages, True, 256, registers, True, True
    )
    chunk = -(-n // 64 // parts) * 64
    plan = tiling.Plan(tile, -(-n // chunk), chunk)
    return planner.plan_call(q, q, q, None, causal, scale, "strict", tiles=plan)


def loops_of(compiled: Any, tmp_path: Path) -> list[list[str]]:
    """The instructions of the loops that multiply, from the assembler's own listing."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton comes without nvdisasm")
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    text = subprocess.run(
        [str(tool), "-c", str(binary)], capture_output=True, text=True, check=True
    ).stdout
    labels, code = {}, []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    loops = [
        code[labels[jump[1]] : i + 1]
        for i, line in enumerate(code)
        if (jump := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels.get(jump[1], i) < i
    ]
    # jumps back also end the waits, which the assembler puts behind everything
    return [loop for loop in loops if sum("HGMMA" in line for line in loop) == PRODUCTS]


known = pytest.mark.skipif(not device.gluon_known(), reason="a Triton whose Gluon is not known")


@known
@pytest.mark.parametrize(("block_m", "registers"), [(64, 128), (128, 0)])
def test_products_are_in_flight_during_the_softmax(
    block_m: int, registers: int, tmp_path: Path
) -> None:
    call = planned((1, 8, 1024, 64), block_m, registers=registers)
    loops = loops_of(compile_launch(call.fold, torch.float32, "cuda", 90), tmp_path)
    assert len(loops) == block_m // 64
    for loop in loops:
        marks = [i for i, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
        assert sum("HGMMA" in line for line in loop[: marks[0]]) == PRODUCTS
        assert len(marks) == 2  # for the scores, then for the weighted values
        assert sum("MUFU.EX2" in line for line in loop[marks[0] : marks[1]]) >= 32
        assert not any(re.match(r"(STL|LDL)", line) for line in loop)


@known
@pytest.mark.parametrize(
    ("dim", "more"),
    [(64, {"scale": -0.3}), (100, {"parts": 3}), (128, {"causal": True})], ids=str,
)  # fmt: skip
def test_every_form_compiles(dim: int, more: dict[str, Any]) -> None:
    """Of split keys with an lse in float64, as states that are merged have it."""
    call = planned((1, 2, 300, dim), **more)
    assert call.schedule.name == "hopper"
    for name in ("fold", "fma_fallback", *(["merge"] if call.states else [])):
        lse = "fp64" if call.states else ""
        compiled = compile_launch(call.launches[name], torch.float32, "cuda", 90, lse=lse)
        assert compiled.asm["cubin"]


def test_an_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    known = [f"{a}.{b}.1" for (a, b) in device.GLUON]
    for version, expected in [*((v, True) for v in known), ("3.5.0", False), ("4.0.0", False)]:
        monkeypatch.setattr(triton, "__version__", version)
        assert device.gluon_known() is expected
