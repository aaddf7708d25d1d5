"""Plans in a file, served by the CUDA library in a process without this package and Triton; run by
`test_cuda_library.py` over a stub driver.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from cuda_calls import linear_inputs, started
from cuda_checks import lines, main
from torch import Tensor

from elsa_core import operators
from elsa_core.backends import compiler
from elsa_core.backends.cuda import library
from elsa_core.backends.cuda.planfile import Recorded, recorded, write
from elsa_core.errors import UnavailableError

SERVED = "it serves batches of 1 and 2"
PROGRAM = """
import ctypes, sys
from pathlib import Path
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("elsa_core", "elsa_cli", "triton"):
            raise ModuleNotFoundError(name + " is blocked")
import torch
sys.meta_path.insert(0, Block())
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
assert not {"elsa_core", "triton"} & sys.modules.keys()
"""


class Attends(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.elsa.attention(q, k, v, None, False, 0.125, "strict")[0]


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


def saved(folder: Path) -> None:
    traced = torch.jit.trace(Attends(), attends(2), check_trace=False)
    torch.jit.save(traced, folder / "model.ts")


def travels(stub: str) -> None:
    """A recorded call makes the same launches in a process that has only torch and the library."""
    loaded = started(stub)
    found = noted(loaded)
    assert found.operators == ("attention",)
    assert len(found.layouts) == 2  # the second call of a layout is no further one
    lines()
    Attends()(*attends(2))
    (expected,) = (line for line in lines() if line.startswith("launch"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plans").write_bytes(write([found, found], 90, SERVED))
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


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def refuses(stub: str) -> None:
    """Another GPU, a changed file, a file cut short, a call for Python."""
    loaded = started(stub)
    found = noted(loaded)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved(folder)
        (folder / "plans").write_bytes(write([found], 80, SERVED))
        done = fresh(stub, folder, 2)
    assert "the kernels are for sm_80, and this GPU is sm_90" in done.stderr, done.stderr
    good = write([found], 90, SERVED)
    assert good[-32:] == hashlib.sha256(good[:-32]).digest()
    older = good[:8] + struct.pack("<I", 1) + good[12:-32]
    step = max(1, len(good) // 50)
    changes = [(flipped(good, at), "its SHA-256 is another: it was changed")
               for at in (*range(12, len(good), step), len(good) - 1)]  # fmt: skip
    for bytes_of, why in (
        *changes, (good[:-9], "it was changed"),
        (older + bytes(8), "it is of version 1, and this library reads version 2: export the"),
        (good[:7], "end too soon"), (b"\0" * 64, "begin otherwise"), (b"", "end too soon"),
    ):  # fmt: skip
        try:
            loaded.serve_file(bytes_of, "CPU")
        except UnavailableError as error:
            assert str(error).startswith("no plan file: ") and why in str(error), error
            assert "\n" not in str(error)
        else:
            raise AssertionError("a file that is none was served")
    rows = linear_inputs(8)  # few rows are PyTorch's product
    for tensor in rows[:3]:
        tensor.normal_()
    try:
        recorded(loaded, lambda: operators.LINEAR.overload(*rows))
    except UnavailableError as error:
        assert "a call of elsa::linear" in str(error)
    else:
        raise AssertionError("a call for Python was recorded")


if __name__ == "__main__":
    main(travels, refuses)
