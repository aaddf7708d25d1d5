"""Drivers and devices that are not the usual ones: too old, found elsewhere, a part of a GPU."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from processes import environment, python

pytest.importorskip("triton")

from elsa_core.backends import compiler
from elsa_core.backends.cuda import library
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.device import Described
from elsa_core.dispatch import measured

pytestmark = pytest.mark.compiler

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
SLICE = Described("NVIDIA H200 MIG 1g.18gb", (9, 0), 16)
WHOLE = Described("NVIDIA H200", (9, 0), 132)

OPENED = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
opened = ctypes.CDLL(sys.argv[1]).elsa_cuda_open
opened.restype = ctypes.c_char_p
for _ in range(2):
    error = opened(None)
    print("open" if error is None else error.decode())
with open("/proc/self/maps") as maps:
    print(*sorted({line.split(maxsplit=5)[5].strip() for line in maps if "libcuda.so.1" in line}))
"""


def driver(folder: Path, *without: str) -> Path:
    """A folder with a driver that runs nothing and lacks some functions."""
    folder.mkdir()
    source = (HERE / "cuda_stub.cpp").read_text()
    for name in without:
        assert f"STUB Result {name}(" in source
        source = source.replace(f"STUB Result {name}(", f"STUB Result old_{name}(")
    (folder / "stub.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{SOURCES}", str(folder / "stub.cpp")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def program(code: str, *folders: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Code in a process that looks for drivers in folders, the first one first."""
    places = os.pathsep.join(map(str, folders))
    env = environment(LD_LIBRARY_PATH=places, ELSA_NATIVE="0", **variables)
    return python("-c", code, compiler.build(library.recipe()), env=env)


@pytest.mark.parametrize("missing", ["cuLaunchKernelEx", "cuCtxPushCurrent_v2"])
def test_a_driver_that_is_too_old_is_one_line(missing: str, tmp_path: Path) -> None:
    """The function that it lacks and the version that has it; the same again when asked again."""
    done = program(OPENED, driver(tmp_path / "old", missing))
    said = f"the CUDA driver has no {missing}: it is older than CUDA 12"
    assert done.stdout.splitlines()[:2] == [said, said], done.stderr


TOO_OLD = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
import elsa_core
from elsa_core.backends import cuda
print(cuda.ready(), cuda.serves("attention"))
print(cuda.status().reason)
print(torch._C._dispatch_has_kernel_for_dispatch_key("elsa::attention", "CUDA"))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA")
def test_with_a_driver_that_is_too_old_triton_serves(tmp_path: Path) -> None:
    """No operator is the library's then, and `elsa doctor` has the reason."""
    old = driver(tmp_path / "old", "cuLaunchKernelEx")
    done = program(TOO_OLD, old, ELSA_CUDA_LIBRARY="")
    why = "the CUDA driver has no cuLaunchKernelEx: it is older than CUDA 12"
    assert done.stdout.splitlines() == ["False False", why, "False"], done.stderr
    line = f"elsa the CUDA library is off, Triton's launcher takes over: {why}"
    assert [each for each in done.stderr.splitlines() if "CUDA library" in each] == [line]


def test_a_forward_compatible_driver_is_found_first(tmp_path: Path) -> None:
    """The one of a `cuda-compat` package lies in a folder of LD_LIBRARY_PATH, ahead of the
    system's, which is too old."""
    newer, old = driver(tmp_path / "compat"), driver(tmp_path / "old", "cuLaunchKernelEx")
    done = program(OPENED, newer, old)
    assert done.stdout.splitlines() == ["open", "open", str(newer / "libcuda.so.1")], done.stderr


def test_a_part_of_a_gpu_has_its_table_and_its_own_size() -> None:
    with device.describing(SLICE):
        assert device.table_of(-1) == "h200"
        assert device.device_table(-1)[1] == 16
        assert device.specializes(torch.device("meta")) and device.overlaps(torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "held"),
    [("NVIDIA H200", True), ("NVIDIA H200 MIG 1g.18gb", False),
     ("NVIDIA H200 MIG 7g.141gb", False)],
)  # fmt: skip
def test_rows_of_a_whole_gpu_do_not_hold_for_a_part(
    name: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part has fewer multiprocessors and less bandwidth: nothing was measured on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = measured.rows("attention", "infer", torch.device("cuda", 0), torch.float16)
    assert bool(found) is held
