"""Plans in a file, served by the CUDA library in a process without this package and Triton; run by
`test_cuda_library.py` over a stub driver.
"""

import ctypes
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cuda_calls import linear_inputs, started, window_inputs
from cuda_checks import lines
from torch import Tensor

from elsa_core import ops
from elsa_core.backends import compiler
from elsa_core.backends.cuda import library, plan, planfile
from elsa_core.backends.cuda.planfile import Recorded, joined, recorded, write
from elsa_core.backends.triton.pack.cases import Gpu
from elsa_core.backends.triton.shared.device import Described
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.dispatch import table
from elsa_core.errors import UnavailableError

SERVED = "it serves batches of 1 and 2"
# plans tensors on the CPU as they are planned without a GPU: by the H200's tiles, in plain Triton
PLAIN_H200 = Gpu(90, Described("NVIDIA H200", (8, 0), 132), 232448)
_LAUNCH = Launch.__call__
PROGRAM = """
import ctypes, sys
from pathlib import Path
import torch
sys.modules.update(dict.fromkeys(("elsa_core", "elsa_cli", "triton")))
_, built, stub, plans, model, *batches = sys.argv
torch.ops.load_library(built)
calls = ctypes.CDLL(built)
for name in ("elsa_cuda_open", "elsa_cuda_serve_file"):
    getattr(calls, name).restype = ctypes.c_char_p
assert calls.elsa_cuda_open(stub.encode()) is None
data = Path(plans).read_bytes()
error = calls.elsa_cuda_serve_file(data, ctypes.c_uint64(len(data)), b"CPU")
if error is not None:
    sys.exit(error.decode())
loaded = torch.jit.load(model)
for batch in map(int, batches):
    given = [torch.zeros(batch, 2, 50, 64, dtype=torch.float16) for _ in range(3)]
    for _ in range(2):
        try:
            out = loaded(*given)
        except RuntimeError as error:
            sys.exit([line for line in str(error).splitlines() if "elsa::" in line][-1])
        print(tuple(out.shape), out.dtype, [t.data_ptr() for t in (*given, out)])
"""


class Attends(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.elsa.attention(q, k, v, None, False, 0.125, "strict")[0]


class Calls(torch.nn.Module):
    """Beside attention, calls with lists, flags and terms that are absent."""

    def forward(self, *given: Tensor) -> Any:
        window = ops.WINDOW_ATTENTION.overload(*window_inputs(torch.float16, table=True, shift=3))
        linear = ops.LINEAR.overload(*linear_inputs(activation="gelu", residual=True))
        return Attends()(*given) + 0.0 * (window.sum() + linear.sum())


def attends(batch: int) -> list[Tensor]:
    return [torch.zeros(batch, 2, 50, 64, dtype=torch.float16) for _ in range(3)]


def fresh(stub: str, folder: Path, *batches: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(compiler.build(library.recipe())), stub]
    files = [str(folder / "plans"), str(folder / "model.ts"), *map(str, batches)]
    return subprocess.run(
        [*command, *files], capture_output=True, text=True, check=False, cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip


def noted(loaded: library.Library) -> Recorded:
    def run() -> None:
        for batch in (1, 2, 2):
            Attends()(*attends(batch))

    return recorded(loaded, run)


def saved(folder: Path, model: torch.nn.Module | None = None) -> None:
    traced = torch.jit.trace(model or Attends(), attends(2), check_trace=False)
    torch.jit.save(traced, folder / "model.ts")


def travels(stub: str) -> None:
    """A recorded call makes the same launches in a process that has only torch and the library."""
    loaded = started(stub)
    found = noted(loaded)
    assert {name for name, *_ in found.layouts} == {"elsa::attention"}
    assert len(found.layouts) == 2  # the second call of a layout is no further one
    others = {
        number: replace(kernel, symbol="of_sm_80") for number, kernel in found.kernels.items()
    }
    foreign = replace(found, kernels=others)
    lines()
    Attends()(*attends(2))
    (expected,) = (line for line in lines() if line.startswith("launch"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plans").write_bytes(write({80: foreign, 90: joined([found, found])}, SERVED))
        saved(folder)
        lines()
        done = fresh(stub, folder, 2, 1, 3)
    log = lines()
    launches = [line for line in log if line.startswith("launch")]
    assert len(launches) == 4, done.stderr
    loads = [line for line in log if line.startswith("load ")]
    assert len(loads) == len(found.kernels), (loads, found.kernels.keys())
    said = done.stdout.splitlines()
    assert [line.partition(" [")[0] for line in said] == [
        *["(2, 2, 50, 64) torch.float16"] * 2, *["(1, 2, 50, 64) torch.float16"] * 2
    ]  # fmt: skip
    assert launches[0].partition("] ")[0] == expected.partition("] ")[0]
    theirs, ours = (
        [int.from_bytes(bytes.fromhex(word), "little") for word in line.partition("] ")[2].split()]
        for line in (launches[0], expected)
    )
    pointers = list(map(int, said[0].partition("[")[2].rstrip("]").split(", ")))
    assert set(pointers) <= set(theirs)
    numbers = [(a, b) for a, b in zip(ours, theirs, strict=True) if a < 1 << 32]
    assert len(numbers) >= 5 and all(a == b for a, b in numbers)  # what is no address is as it was
    assert len(ours) - len(numbers) >= 5  # three operands, two results
    line = "elsa::attention: no kernel is here for tensors of these sizes: " + SERVED
    assert done.returncode == 1 and done.stderr.strip().endswith(line), done.stderr


def every_argument_travels(stub: str) -> None:
    """The words of a layout that Python writes are those that the library reads calls as."""
    found = recorded(started(stub), lambda: Calls()(*attends(2)))
    assert len(found.layouts) == 3
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "plans").write_bytes(write({90: found}, SERVED))
        saved(Path(name), Calls())
        done = fresh(stub, Path(name), 2)
    assert done.returncode == 0, done.stderr


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def refuses(stub: str) -> None:
    """Another GPU, a changed file, a file cut short, a call for Python."""
    loaded = started(stub)
    found = noted(loaded)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved(folder)
        (folder / "plans").write_bytes(write({80: found, 120: found}, SERVED))
        done = fresh(stub, folder, 2)
    line = "the kernels are for sm_80, sm_120, and the GPU here is sm_90, sm_91: export the bundle "
    assert done.stderr == line + "for that (--gpu-archs)\n", done.stderr
    good = write({90: found}, SERVED)
    assert good[-4:] == struct.pack("<I", zlib.crc32(good[:-4]))
    older = good[:8] + struct.pack("<I", 1) + good[12:-4]
    step = max(1, len(good) // 50)
    changes = [(flipped(good, at), "its CRC-32 is another: it was changed")
               for at in (*range(12, len(good), step), len(good) - 1)]  # fmt: skip
    for bytes_of, why in (
        *changes, (good[:-9], "it was changed"),
        (older + bytes(8), "it is of version 1, and this library reads version 4: export"),
        (good[:7], "end too soon"), (b"\0" * 64, "begin otherwise"), (b"", "end too soon"),
        (write({}, SERVED), "it is of no architecture"),
        (write(dict.fromkeys(range(100, 165), Recorded((), {})), SERVED), "number is too large"),
    ):  # fmt: skip
        try:
            loaded._ask("elsa_cuda_serve_file", bytes_of, ctypes.c_uint64(len(bytes_of)), b"CPU")
        except UnavailableError as error:
            assert str(error).startswith("no plan file: ") and why in str(error), error
            assert "\n" not in str(error)
        else:
            raise AssertionError("a file that is none was served")
    rows = linear_inputs(8)  # few rows are PyTorch's product
    for tensor in rows[:3]:
        tensor.normal_()
    try:
        recorded(loaded, lambda: ops.LINEAR.overload(*rows))
    except UnavailableError as error:
        assert "a call of elsa::linear" in str(error)
    else:
        raise AssertionError("a call for Python was recorded")


def planned_elsewhere(stub: str) -> None:
    """Calls of recorded layouts are made again from the layouts alone: the same plans come out."""
    loaded = started(stub)
    written: dict[bytes, plan.Plan] = {}
    plain = plan.write

    def kept(each: plan.Plan) -> bytes:
        return [written.setdefault(data := plain(each), each), data][1]

    plan.write = kept

    def run() -> None:
        Attends()(*attends(2))
        q, k, v = (torch.zeros(1, 3, 197, 64) for _ in range(3))
        mask = torch.zeros(4 * 197 + 1)[1:].view(1, 1, 4, 197)[:, :, :1]  # unaligned, broadcast
        ops.ATTENTION.overload(q, k, v, mask, False, -0.5, "strict")
        ops.WINDOW_ATTENTION.overload(*window_inputs(torch.float16, table=True, shift=3))
        ops.WINDOW_ATTENTION.overload(*window_inputs(torch.float32, side=13, pad=True, logit=True))
        ops.LINEAR.overload(*linear_inputs(activation="gelu", residual=True))

    found = joined([recorded(loaded, run)])
    assert len(found.layouts) == 5
    Launch.__call__ = _LAUNCH
    told: list[tuple[int, int]] = []
    kernels = table.KERNELS_ON_CUDA
    again = planfile.planned(found, PLAIN_H200, kernels, lambda *given: told.append(given))
    total = len(again.kernels)
    assert told == [(done, total) for done in range(total + 1)]
    for ours, theirs in zip(again.layouts, found.layouts, strict=True):
        assert ours[:2] == theirs[:2]
        loaded.check(ours[2], -1)
        assert launched(written[ours[2]], again.kernels) == launched(
            written[theirs[2]], found.kernels
        )
    lost = "a call of elsa::attention on sm_90 is not by kernels of this package alone: "
    too_small = replace(PLAIN_H200, shared_memory=1000)
    for gpu, given, said in (
        (too_small, kernels, r"^kernel \w+ for sm_90 takes \d+ bytes of shared memory, NVIDIA"),
        (PLAIN_H200, {**kernels, "attention": lambda q, *_: (q * 2, q)}, f"^{lost}aten.mul"),
        (PLAIN_H200, {**kernels, "attention": lambda *_: 1 / 0},
         lost + r"PyTorch serves it \(division by zero\)$"),
    ):  # fmt: skip
        try:
            planfile.planned(found, gpu, given)
        except UnavailableError as error:
            assert re.search(said, str(error)) and "\n" not in str(error), error
        else:
            raise AssertionError("it was planned")


def launched(each: plan.Plan, kernels: dict[int, plan.Kernel]) -> list[Any]:
    """A plan with the kernels in the place of their numbers, whose code the stub's is not."""
    kernels = {number: replace(kernel, code=b"") for number, kernel in kernels.items()}
    steps = [(kernels[s.kernel], s) if isinstance(s, plan.Launch) else (s, s) for s in each.steps]
    unnumbered = [replace(s, kernel=0) if isinstance(s, plan.Launch) else s for _, s in steps]
    return [[kernel for kernel, _ in steps], replace(each, steps=tuple(unnumbered))]


CHECKS = (travels, every_argument_travels, refuses, planned_elsewhere)
