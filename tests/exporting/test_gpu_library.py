"""A bundle of a CUDA model with its own library: loaded here, run where there is a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elsa_core.backends import compiler
from elsa_core.backends.cuda import library, planfile
from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer, write
from elsa_core.exporting import gpu_library
from elsa_core.exporting.readme import _limits
from elsa_core.exporting.templates import load as template

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "backends" / "cuda_stub.cpp"
FACTS: dict[str, Any] = {
    "model": {"device": "cuda"},
    "operators": {"elsa::attention": {}},
    "artefacts_libraries": {"torch": [], "cuda": [gpu_library.LIBRARY, gpu_library.PLANS]},
    "libraries": {gpu_library.LIBRARY: {"isa": [], "platform": "here", "gpu_archs": ["sm_90"]}},
    "reference": {"batch_sizes": [1, 2, 3]},
}
LOADED = """
import json, sys
from pathlib import Path
import torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "elsa_core":
            raise ModuleNotFoundError(name + " is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import load
facts = json.loads(Path(sys.argv[1], "manifest.json").read_text())
for _ in range(2):
    try:
        load.load_operators(facts)
    except ImportError as error:
        sys.exit(str(error))
print(torch._C._dispatch_has_kernel_for_dispatch_key("elsa::attention", "CUDA"))
print(torch.ops.elsa.attention.default._schema)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle's lib/ with one plan, and its load.py."""
    outputs = (Output(6, (1, 2, 4, 8), (64, 32, 8, 1)), Output(6, (1, 2, 4), (8, 4, 1)))
    plan = Plan(4, outputs, 0, (Launch(7, (1, 1, 1), (Pointer(0), Pointer(4))),))
    kernel = Kernel("scale", b"scale;8,8\0", 128)
    found = planfile.Recorded((("elsa::attention", b"\1" * 16, write(plan)),), {7: kernel})
    (tmp_path / "lib").mkdir()
    (tmp_path / gpu_library.PLANS).write_bytes(planfile.write({90: found}, "it serves nothing"))
    shutil.copyfile(compiler.build(library.recipe()), tmp_path / gpu_library.LIBRARY)
    shutil.copyfile(Path(template.__file__), tmp_path / "load.py")
    (tmp_path / "manifest.json").write_text(json.dumps(FACTS))
    return tmp_path


def loaded(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOADED, str(folder)], capture_output=True, text=True, check=False,
        env={**os.environ, **variables}, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """A folder with a CUDA driver that runs nothing."""
    folder = tmp_path / "driver"
    folder.mkdir()
    command = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{ROOT / 'csrc' / 'cuda'}", str(STUB)]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return str(folder)


def test_operators_come_from_the_bundles_library(folder: Path, driver: str) -> None:
    """They are there, and once."""
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    schema = str(torch.ops.elsa.attention.default._schema)
    assert done.stdout.splitlines() == ["True", schema], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a CUDA driver is meant")
def test_without_a_driver_there_is_one_line(folder: Path) -> None:
    done = loaded(folder)
    assert done.returncode == 1 and "no CUDA driver" in done.stderr.splitlines()[-1]


def test_a_changed_plan_is_refused(folder: Path, driver: str) -> None:
    content = bytearray((folder / gpu_library.PLANS).read_bytes())
    content[40] ^= 1
    (folder / gpu_library.PLANS).write_bytes(content)
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("its SHA-256 is another: it was changed")


def test_the_readme_says_where_it_runs() -> None:
    text = _limits(FACTS)
    assert "GPU: sm_90 alone, at batches of 1, 2, 3" in text


def test_it_is_off_unless_asked_for() -> None:
    assert not gpu_library.is_asked_for("cpu")
    if os.environ.get("ELSA_CUDA_LIBRARY") != "1":
        assert not gpu_library.is_asked_for("cuda")


EXPORTED = """
import sys
import timm, torch
import elsa_core as elsa
model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2, num_classes=10)
model = model.to("cuda", getattr(torch, sys.argv[2])).eval()
elsa.patch(model, scope="attention")
formats = ("torchscript", "pt2")
bundle = elsa.export(model, sys.argv[1], formats=formats)
assert [each.status for each in bundle.artefacts] == ["ok", "ok"], bundle.artefacts
print(bundle.manifest["artefacts_libraries"]["cuda"])
"""
RUN = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("elsa_core", "timm"):
            raise ModuleNotFoundError(name + " is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import numpy as np
import load
model = load.load(sys.argv[2])
print(model(np.zeros((2, 3, 160, 160), np.float32))[0].shape)
try:
    model(np.zeros((5, 3, 160, 160), np.float32))
except RuntimeError as error:
    print([line for line in str(error).splitlines() if "no kernel is here" in line][-1])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bundle_runs_on_a_gpu_without_the_package(tmp_path: Path, dtype: str) -> None:
    """`export` has verified it so at three batch sizes; another one is one line."""
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "ELSA_CUDA_LIBRARY": "1", "PYTHONPATH": places}
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED, str(tmp_path / "bundle"), dtype],
        capture_output=True, text=True, check=False, env=environment, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == str([gpu_library.LIBRARY, gpu_library.PLANS]), done.stderr
    environment.pop("PYTHONPATH")
    environment.pop("ELSA_CUDA_LIBRARY")
    for format in ("torchscript", "pt2"):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / "bundle"), format],
            capture_output=True, text=True, check=False, env=environment, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shape, line = done.stdout.splitlines()
        assert shape == "(2, 10)"
        assert "this bundle serves batches of 1, 2, 3 on sm_" in line
