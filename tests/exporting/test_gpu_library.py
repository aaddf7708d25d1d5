"""A bundle of a CUDA model with its own library: loaded here, run where there is a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import layout

from elsa_core.backends import compiler, cuda
from elsa_core.backends.cuda import library, planfile
from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer
from elsa_core.backends.cuda.plan import write as plan_bytes
from elsa_core.errors import ArgumentError, ExportError, UnavailableError
from elsa_core.exporting import gpu_library
from elsa_core.exporting.readme import _limits
from elsa_core.exporting.templates import load as template
from elsa_core.exporting.verify import _made_for_elsewhere

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "backends" / "cuda_stub.cpp"
FACTS: dict[str, Any] = {
    "model": {"device": "cuda"},
    "operators": {"elsa::attention": {}},
    "artefacts_libraries": {"torch": [], "cuda": [gpu_library.LIBRARY, gpu_library.PLANS]},
    "libraries": {
        gpu_library.LIBRARY: {
            "isa": [], "platform": "here", "gpu_archs": ["sm_90"], "gpu_archs_verified": ["sm_90"],
            "gpus": {"sm_90": "NVIDIA H200"},
        },
    },
    "reference": {"batch_sizes": [1, 2, 3]},
}  # fmt: skip
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
    found = planfile.Recorded((("elsa::attention", b"\1" * 16, plan_bytes(plan)),), {7: kernel})
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
    assert "Verified where this bundle was written: sm_90 (NVIDIA H200).\n" in text
    assert "not run" not in text


def test_the_readme_says_how_onnx_runtime_finds_the_kernels() -> None:
    libraries = {**FACTS["artefacts_libraries"], "onnxruntime": ["lib/libelsa_onnxruntime.so"]}
    text = _limits({**FACTS, "artefacts_libraries": libraries})
    assert "finds them in lib/plans.elsa, beside lib/libelsa_onnxruntime.so.\n" in text
    alone = {"artefacts_libraries": {}, "artefacts": {"onnx": {}}, "libraries": {}}
    assert "GPU: any that ONNX Runtime's CUDA provider" in _limits({**FACTS, **alone})


def test_it_is_off_unless_asked_for() -> None:
    assert not gpu_library.is_asked_for("cpu", nodes=True)
    if os.environ.get("ELSA_CUDA_LIBRARY") != "1":
        assert not gpu_library.is_asked_for("cuda")


def attends(batch: int, dtype: torch.dtype = torch.float32) -> tuple[str, bytes, bytes]:
    q = torch.empty(batch, 65, 2, 64, dtype=dtype, device="meta").transpose(1, 2)
    return "elsa::attention", layout(q, q, q, None, False, 0.125, "strict"), b""


def product(dtype: torch.dtype) -> tuple[str, bytes, bytes]:
    x, weight = (torch.empty(n, 64, dtype=dtype, device="meta") for n in (4096, 96))
    rest = (None, "none", None, None, "strict", None, None)
    return "elsa::linear", layout(x, weight, *rest), b""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU of sm_90 that records whatever is under "calls"."""
    from elsa_core.backends.cuda import other_gpus
    from elsa_core.backends.triton.pack import cases

    given: dict[str, Any] = {"calls": (attends(1), attends(2))}

    def recorded(loaded: Any, call: Any) -> planfile.Recorded:
        found = planfile.Recorded(given["calls"], {})
        return other_gpus.planned(found, cases.gpus(90)[0], cuda.offered())

    monkeypatch.setattr(planfile, "recorded", recorded)
    monkeypatch.setattr(gpu_library, "_loaded", lambda *_: len)
    for name, value in (
        ("device", lambda _: nullcontext()), ("is_available", lambda: True),
        ("get_device_capability", lambda *_: (9, 0)), ("get_device_name", lambda *_: "a GPU"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return given


def write(folder: Path, *archs: str) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    inputs = (torch.zeros(2, 3),)
    entry = gpu_library.write(
        [("pt2", folder / "model.pt2")], inputs, (1, 2), folder, archs, said.append
    )
    return entry, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is faked")
def test_plans_for_other_architectures(folder: Path, driver: str, on_a_gpu: dict[str, Any]) -> None:
    """Compiled without such a GPU: one file, which the library of a GPU of sm_90 takes."""
    entry, said = write(folder, "sm_120", "sm_80", "sm_90")
    assert entry == {
        "gpu_archs": ["sm_80", "sm_90", "sm_120"], "gpu_archs_verified": ["sm_90"],
        "gpus": {"sm_90": "a GPU", "sm_80": "NVIDIA A100-SXM4-80GB",
                 "sm_120": "NVIDIA GeForce RTX 5090"},
    }  # fmt: skip
    assert said[0].startswith("compiling for sm_120 (kernel 1 of ")
    assert any(line.startswith("compiling for sm_80 (kernel 1 of ") for line in said)
    content = (folder / gpu_library.PLANS).read_bytes()
    assert content.count(b"\x7fELF") > len(said)  # those of sm_90 too
    assert b"this bundle serves batches of 1, 2 on sm_80, sm_90, sm_120" in content
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    assert done.stdout.startswith("True\n"), done.stderr
    facts = {**FACTS, "libraries": {gpu_library.LIBRARY: {"isa": [], "platform": "x", **entry}}}
    text = _limits(facts)
    assert "GPU: sm_80, sm_90, sm_120 alone, at batches" in text
    assert "written: sm_90 (a GPU).\nCompiled and not run: sm_80 (for NVIDIA A100" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is faked")
def test_nodes_are_found_without_a_precision(folder: Path, on_a_gpu: dict[str, Any]) -> None:
    """Each call once as PyTorch makes it and once as a node of model.onnx does, by one plan."""
    inputs = (torch.zeros(2, 3),)
    for format, times in (("pt2", 1), ("onnx", 2)):
        files = [(format, folder / "model")]
        gpu_library.write(files, inputs, (1,), folder, precision="strict")
        content = (folder / gpu_library.PLANS).read_bytes()
        assert content.count(b"elsa::attention") == 2 * times
        for _, words, _ in on_a_gpu["calls"]:
            assert content.count(words[:-16]) == times and content.count(words) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is faked")
def test_an_architecture_without_kernels_is_one_line(
    tmp_path: Path, on_a_gpu: dict[str, Any]
) -> None:
    """Products in half precision are PyTorch's there; nothing is written."""
    (tmp_path / "lib").mkdir()
    on_a_gpu["calls"] = (attends(1, torch.float16), product(torch.float16))
    line = (
        "a call of elsa::linear on sm_80 is not by kernels of this package alone: PyTorch serves it"
    )
    with pytest.raises(ExportError, match=line) as raised:
        write(tmp_path, "sm_80")
    assert str(raised.value).endswith("; leave sm_80 out of gpu_archs")
    assert not any((tmp_path / "lib").iterdir())
    on_a_gpu["calls"] = (product(torch.float32),)
    entry, _ = write(tmp_path, "sm_80")
    assert entry["gpu_archs"] == ["sm_80", "sm_90"]


def test_what_no_plans_can_be_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_library.check((), "cpu")
    with pytest.raises(ArgumentError, match="gpu_archs: 'sm_75'; choose among sm_80, sm_86"):
        gpu_library.check(("sm_80", "sm_75"), "cuda")
    with pytest.raises(ArgumentError, match="the model is on the CPU: export it with --device"):
        gpu_library.check(("sm_80",), "cpu")
    monkeypatch.setattr(cuda, "status", lambda: SimpleNamespace(ok=False, reason="off: why"))
    with pytest.raises(UnavailableError, match="gpu_archs needs the CUDA library: off: why"):
        gpu_library.check(("sm_80",), "cuda")
    assert not gpu_library.is_asked_for("cuda", ("sm_80",))
    with pytest.raises(UnavailableError, match="onnx on a GPU needs the CUDA library: off: why;"):
        gpu_library.check((), "cuda", nodes=True)
    gpu_library.check((), "cpu", nodes=True)
    monkeypatch.setattr(cuda, "status", lambda: SimpleNamespace(ok=True, reason=""))
    assert gpu_library.is_asked_for("cuda", ("sm_80",))
    assert gpu_library.is_asked_for("cuda", nodes=True)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    with pytest.raises(UnavailableError, match="TRITON_F32_DEFAULT changes what Triton compiles"):
        gpu_library.check(("sm_80",), "cuda")


def test_a_gpu_that_a_bundle_has_no_kernels_for(
    folder: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line as it is loaded, and where it is verified."""
    found = planfile.Recorded((), {})
    plans = planfile.write({80: found, 120: found}, "it serves nothing")
    (folder / gpu_library.PLANS).write_bytes(plans)
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    line = "the kernels are for sm_80, sm_120, and the GPU here is sm_90, sm_91: export the bundle"
    assert done.returncode == 1 and line in done.stderr.splitlines()[-1], done.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for archs, said in (
        (["sm_80", "sm_120"], "its kernels are for sm_80, sm_120, and the GPU here is sm_90"),
        (["sm_90"], ""), ("hostile", ""), (None, ""),
    ):  # fmt: skip
        content = {"libraries": {gpu_library.PLANS: {"gpu_archs": archs}}}
        assert _made_for_elsewhere(SimpleNamespace(content=content), "pt2", "cuda") == said
    assert _made_for_elsewhere(SimpleNamespace(content={"libraries": 3}), "pt2", "cuda") == ""


def test_a_compiled_package_on_a_gpu_needs_the_library_and_pt2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_library, "is_asked_for", lambda *given: False)
    with pytest.raises(ArgumentError, match="aoti on a GPU needs model"):
        gpu_library.check((), "cuda", formats=("pt2", "aoti"))
    gpu_library.check((), "cpu", formats=("aoti",))
    gpu_library.check((), "cuda", formats=("pt2",))
    monkeypatch.setattr(gpu_library, "is_asked_for", lambda *given: True)
    gpu_library.check((), "cuda", formats=("pt2", "aoti"))
    with pytest.raises(ArgumentError, match="name pt2 among the formats"):
        gpu_library.check((), "cuda", formats=("aoti",))
