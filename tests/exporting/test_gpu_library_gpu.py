"""A bundle of a CUDA model with its own library, exported and run on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import environment, python, without

from elsa_core.exporting import gpu_library

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]

EXPORTED = """
import sys
import timm, torch
import elsa_core as elsa
model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2, num_classes=10)
model = model.to("cuda", getattr(torch, sys.argv[2])).eval()
elsa.patch(model, scope="attention")
formats, aoti = ("torchscript", "pt2"), "aoti" in sys.argv
archs = [name for name in sys.argv[3:] if name != "aoti"]
bundle = elsa.export(model, sys.argv[1], formats=formats, gpu_archs=archs, aoti=aoti)
assert [each.status for each in bundle.artefacts] == ["ok"] * (2 + aoti), bundle.artefacts
print(bundle.manifest["artefacts_libraries"]["cuda"])
"""
RUN = """
sys.path.insert(0, sys.argv[1])
import hashlib
import numpy as np
import load
model = load.load(sys.argv[2])
images = np.random.default_rng(0).normal(size=(2, 3, 160, 160)).astype(np.float32)
logits = model(images)[0]
print(logits.shape, hashlib.sha256(logits.tobytes()).hexdigest())
try:
    model(np.zeros((5, 3, 160, 160), np.float32))
except RuntimeError as error:  # of a compiled package PyTorch itself says why on stderr
    print(*[line for line in str(error).splitlines() if "no kernel is here" in line][-1:])
"""


def exported(folder: Path, dtype: str, *archs: str, **variables: str) -> str:
    """What a process that exports a model says."""
    done = python("-c", EXPORTED, folder, dtype, *archs, timeout=600, env=environment(**variables))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ran(folder: Path, format: str) -> list[str]:
    """What a process without the package says of two images, and of five."""
    hidden = ("PYTHONPATH", "ELSA_CUDA_LIBRARY")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    # verify refuses a __pycache__
    done = python("-B", "-c", without("elsa_core", "timm") + RUN, folder, format, env=env)
    assert done.returncode == 0, done.stderr
    result, line = done.stdout.splitlines()
    said = [each for each in done.stderr.splitlines() if "no kernel is here" in each]
    return [result, line or said[0]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bundle_runs_on_a_gpu_without_the_package(tmp_path: Path, dtype: str) -> None:
    """`export` has verified it so at three batch sizes; another one is one line."""
    said = exported(tmp_path / "bundle", dtype, ELSA_CUDA_LIBRARY="1")
    assert said == str([gpu_library.LIBRARY, gpu_library.PLANS])
    for format in ("torchscript", "pt2"):
        result, line = ran(tmp_path / "bundle", format)
        assert result.startswith("(2, 10) ")
        assert "this bundle serves batches of 1, 2, 3 on sm_" in line


def test_the_first_export_for_another_gpu_with_empty_caches(tmp_path: Path) -> None:
    """The check's compiled path sets TRITON_PTXAS_PATH: the export ended there after a minute."""
    places = ("ELSA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    caches = {name: str(tmp_path / name) for name in places}
    other = next(
        arch for arch in ("sm_80", "sm_90")
        if arch != "sm_{}{}".format(*torch.cuda.get_device_capability())
    )  # fmt: skip
    said = exported(tmp_path / "bundle", "float32", other, **caches)
    assert said == str([gpu_library.LIBRARY, gpu_library.PLANS])


PLAIN = """
import sys
import torch
torch.zeros(1, device="cuda")
if sys.argv[1] == "make":
    with torch.no_grad():
        linear = torch.nn.Linear(8, 8, device="cuda")
        program = torch.export.export(linear, (torch.zeros(2, 8, device="cuda"),))
        torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
else:
    torch._inductor.aoti_load_package(sys.argv[2])
"""


@pytest.fixture(scope="module")
def compiled_ones_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whether AOTInductor's package of a plain layer, without elsa, can be loaded here."""
    path = str(tmp_path_factory.mktemp("plain") / "plain.pt2")
    for step in ("make", "load"):
        done = subprocess.run(
            [sys.executable, "-c", PLAIN, step, path], capture_output=True, check=False, timeout=300
        )
        if done.returncode:
            pytest.skip(f"to {step} a plain package of PyTorch's ends with {done.returncode} here")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_compiled_package_runs_on_a_gpu_without_the_package(
    compiled_ones_run: None, tmp_path: Path, dtype: str
) -> None:
    exported(tmp_path / "bundle", dtype, "aoti", ELSA_CUDA_LIBRARY="1")
    result, line = ran(tmp_path / "bundle", "aoti")
    assert result.startswith("(2, 10) ")
    assert "this bundle serves batches of 1, 2, 3 on sm_" in line


ELSEWHERE = """
import sys
from pathlib import Path
import torch
import elsa_core
from elsa_core.backends import cuda
from elsa_core.backends.cuda import library, planfile
from elsa_core.backends.triton.pack import cases
assert cuda.status().ok, cuda.status().reason
major, minor = torch.cuda.get_device_capability()
arch = 10 * major + minor
model = torch.jit.load(sys.argv[1] + "/model.ts", map_location="cuda")
x = torch.zeros(2, 3, 160, 160, device="cuda", dtype=getattr(torch, sys.argv[2]))
with torch.no_grad():
    found = planfile.joined([planfile.recorded(library.load(), lambda: model(x))])
name = torch.cuda.get_device_name()
gpu = next(each for each in cases.gpus(arch) if each.facts.name == name)
planned = planfile.planned(found, gpu, cuda.OFFERED)
facts = lambda each: sorted((k.symbol, k.threads, k.shared, k.code)
                            for k in each.kernels.values())
assert facts(planned) == facts(found)
Path(sys.argv[1], "lib/plans.elsa").write_bytes(planfile.write({arch: planned}, "batches of 2"))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bundle_of_two_architectures_runs_by_its_own(tmp_path: Path, dtype: str) -> None:
    """The other one is compiled, and not run; this GPU's kernels, planned and compiled as if it
    were not here, are those that were recorded, and compute the same bits."""
    from elsa_core.backends.triton.pack import cases
    from elsa_core.exporting.verify import verify

    own = "sm_{}{}".format(*torch.cuda.get_device_capability())
    other = "sm_80" if own != "sm_80" else "sm_90"
    bundle = tmp_path / "bundle"
    exported(bundle, dtype, other)  # without ELSA_CUDA_LIBRARY
    entry = json.loads((bundle / "manifest.json").read_text())["libraries"][gpu_library.PLANS]
    assert set(entry["gpu_archs"]) == {own, other} and entry["gpu_archs_verified"] == [own]
    readme = (bundle / "README.md").read_text()
    assert f"Compiled and not run: {other} (for " in readme
    result, line = ran(bundle, "torchscript")
    assert other in line and own in line
    assert verify(bundle).ok
    name = torch.cuda.get_device_name()
    if not any(gpu.facts.name == name for gpu in cases.gpus(int(own[3:]))):
        pytest.skip(f"{name} is not described")
    done = python("-c", ELSEWHERE, bundle, dtype, timeout=600)
    assert done.returncode == 0, done.stderr
    assert ran(bundle, "torchscript")[0] == result
