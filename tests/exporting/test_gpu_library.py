"""A bundle of a CUDA model with its own library: loaded here, run where there is a GPU."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import layout
from processes import environment, python, without

from elsa_core.backends import compiler
from elsa_core.backends.cuda import library, planfile
from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer
from elsa_core.backends.cuda.plan import write as plan_bytes
from elsa_core.backends.triton.pack import build
from elsa_core.errors import ArgumentError, ExportError, UnavailableError
from elsa_core.exporting import gpu_library
from elsa_core.exporting.description import _limits
from elsa_core.exporting.templates import load as template

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
import json
from pathlib import Path
import torch
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
    return python(
        "-c", without("elsa_core") + LOADED, folder, env=environment(**variables), cwd=folder
    )


def test_operators_come_from_the_bundles_library(folder: Path, driver: str) -> None:
    """They are there, and once."""
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    schema = str(torch.ops.elsa.attention.default._schema)
    assert done.stdout.splitlines() == ["True", schema], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a CUDA driver is meant")
def test_without_a_driver_there_is_one_line(folder: Path) -> None:
    done = loaded(folder)
    assert done.returncode == 1 and "no CUDA driver" in done.stderr.splitlines()[-1]


def attends(batch: int, dtype: torch.dtype = torch.float32) -> tuple[str, list[Any]]:
    q = torch.empty(batch, 65, 2, 64, dtype=dtype, device="meta").transpose(1, 2)
    return "elsa::attention", [q, q, q, None, False, 0.125, "strict"]


def product(dtype: torch.dtype) -> tuple[str, list[Any]]:
    x, weight = (torch.empty(n, 64, dtype=dtype, device="meta") for n in (4096, 96))
    return "elsa::linear", [x, weight, None, "none", None, None, "strict"]


def calls(*given: tuple[str, list[Any]]) -> planfile.Recorded:
    """What a GPU would have recorded."""
    found = {(name, layout(*arguments)): arguments for name, arguments in given}
    return planfile.Recorded(tuple((*key, b"") for key in found), {}, found)


def silent(line: str) -> None: ...


def test_plans_for_other_architectures(folder: Path, driver: str) -> None:
    """Compiled without such a GPU: one file, which the library of a GPU of sm_90 takes."""
    said: list[str] = []
    found = calls(attends(1), attends(2))
    made = {arch: gpu_library.planned(found, arch, said.append) for arch in (80, 90, 120)}
    assert [name for _, name in made.values()] == [
        "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA GeForce RTX 5090",
    ]  # fmt: skip
    for arch in (80, 120):
        assert any(line.startswith(f"compiling for sm_{arch} (kernel 1 of ") for line in said)
    content = planfile.write({arch: plans for arch, (plans, _) in made.items()}, "these alone")
    assert content.count(b"\x7fELF") >= len(said) and b"these alone" in content
    (folder / gpu_library.PLANS).write_bytes(content)
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    assert done.stdout.startswith("True\n"), done.stderr
    facts = {
        "gpu_archs": ["sm_80", "sm_90", "sm_120"], "gpu_archs_verified": ["sm_90"],
        "gpus": {"sm_90": "a GPU", "sm_80": "NVIDIA A100", "sm_120": "x"},
    }  # fmt: skip
    whole = FACTS["libraries"][gpu_library.LIBRARY] | facts
    text = _limits({**FACTS, "libraries": {gpu_library.LIBRARY: whole}})
    assert "GPU: sm_80, sm_90, sm_120 alone, at batches" in text
    assert "written: sm_90 (a GPU).\nCompiled and not run: sm_80 (for NVIDIA A100" in text


def test_nodes_are_found_without_a_precision() -> None:
    """Each call once as PyTorch makes it and once as a node of model.onnx does, by one plan."""
    found, _ = gpu_library.planned(calls(attends(1)), 90, silent)
    content = planfile.write({90: gpu_library.without_precision(found, "strict")}, "")
    words = layout(*attends(1)[1])
    assert content.count(b"elsa::attention") == content.count(words[:-16]) == 2
    assert content.count(words) == 1


def test_an_architecture_without_kernels_is_one_line() -> None:
    """Products in half precision are PyTorch's there."""
    line = "a call of elsa::linear on sm_80 is not by kernels of this package alone: PyTorch serves"
    with pytest.raises(ExportError, match="; leave sm_80 out of gpu_archs") as raised:
        gpu_library.planned(calls(product(torch.float16)), 80, silent)
    assert line in str(raised.value)
    assert gpu_library.planned(calls(product(torch.float32)), 80, silent)[0].layouts


def test_what_no_plans_can_be_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes in (False, True):
        assert not gpu_library.check((), "cpu", nodes=nodes)
    gpu_library.check((), "cuda", formats=("pt2",))
    with pytest.raises(ArgumentError, match="gpu_archs: 'sm_75'; choose among sm_80, sm_86"):
        gpu_library.check(("sm_80", "sm_75"), "cuda")
    with pytest.raises(ArgumentError, match="the model is on the CPU: export it with --device"):
        gpu_library.check(("sm_80",), "cpu")
    with pytest.raises(ArgumentError, match="name pt2 among the formats"):
        gpu_library.check((), "cuda", formats=("aoti",))
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="gpu_archs needs the CUDA library: "):
            gpu_library.check(("sm_80",), "cuda")
        with pytest.raises(UnavailableError, match="onnx on a GPU needs the CUDA library: "):
            gpu_library.check((), "cuda", nodes=True)
        with pytest.raises(ArgumentError, match="aoti on a GPU needs model"):
            gpu_library.check((), "cuda", formats=("pt2", "aoti"))
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    with pytest.raises(UnavailableError, match="TRITON_F32_DEFAULT changes what Triton compiles"):
        build.require_compiler()


def test_a_gpu_that_a_bundle_has_no_kernels_for(folder: Path, driver: str) -> None:
    """One line as it is loaded, and where it is verified."""
    plans = planfile.write({80: calls(), 120: calls()}, "it serves nothing")
    (folder / gpu_library.PLANS).write_bytes(plans)
    done = loaded(folder, LD_LIBRARY_PATH=driver)
    line = "the kernels are for sm_80, sm_120, and the GPU here is sm_90, sm_91: export the bundle"
    assert done.returncode == 1 and line in done.stderr.splitlines()[-1], done.stderr
    for archs, said in (
        (["sm_80", "sm_120"], "its kernels are for sm_80, sm_120, and the GPU here is sm_90"),
        (["sm_90"], ""), ("hostile", ""), (None, ""),
    ):  # fmt: skip
        content = {"libraries": {gpu_library.PLANS: {"gpu_archs": archs}}}
        assert gpu_library.missing(content, "sm_90") == said
    assert gpu_library.missing({"libraries": 3}, "sm_90") == ""
