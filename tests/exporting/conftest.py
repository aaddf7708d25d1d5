"""One bundle for all tests of the package: a small ViT in every format."""

import dataclasses
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from torch._inductor import config

from elsa_core.backends import native
from elsa_core.errors import ExportError
from elsa_core.exporting import ort_library
from elsa_core.exporting.bundle import Bundle, export
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.patching.rewrite import patch
from elsa_core.proof import CheckReport, check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def vit() -> Loaded:
    """A patched ViT of two small blocks at 64 pixels."""
    loaded = load_model("test_vit", image_size=64, seed=4, model_kwargs={"depth": 2})
    patch(loaded.model)
    return loaded


@pytest.fixture(scope="package")
def bundle(
    vit: Loaded,
    report: CheckReport,
    once: Callable[[str, Callable[[Path], None]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    """The ViT in all formats that need no second compiler run; a copy of each process."""

    def make(folder: Path) -> None:
        made = export(vit.model, folder / "vit", loaded=vit, check=report)
        (folder / "bundle").write_bytes(pickle.dumps(made))

    folder = once("bundle", make)
    made: Bundle = pickle.loads((folder / "bundle").read_bytes())
    copy = shutil.copytree(folder / "vit", tmp_path_factory.mktemp("bundle") / "vit")
    return dataclasses.replace(made, path=Path(copy))


@pytest.fixture(scope="package")
def report(vit: Loaded) -> CheckReport:
    """That the patched ViT agrees, so that an export need not look."""
    return check(vit.model, vit.example_inputs(1), stress=False)


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    """A bundle that the test may change."""
    return Path(shutil.copytree(bundle.path, tmp_path / "vit"))


@pytest.fixture(scope="package")
def one_block() -> Loaded:
    """A patched ViT of one small block at 64 pixels."""
    loaded = load_model("test_vit", image_size=64, model_kwargs={"depth": 1})
    patch(loaded.model)
    return loaded


@pytest.fixture(scope="package")
def compiled(
    one_block: Loaded,
    once: Callable[[str, Callable[[Path], None]], Path],
    inductor_place: Callable[[], AbstractContextManager[None]],
) -> Path:
    """Its bundle with model.aoti.pt2 alone."""

    def make(folder: Path) -> None:
        report = check(one_block.model, one_block.example_inputs(1), stress=False)
        with config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # half of the time
            before = config.get_config_copy()
            try:
                export(one_block.model, folder / "out", formats=("pt2",), aoti=True,
                       loaded=one_block, check=report)  # fmt: skip
            except ExportError as error:
                if "links its standard library statically" in str(error):
                    pytest.skip(str(error))
                raise
            assert config.get_config_copy() == before

    with inductor_place():
        return once("compiled", make) / "out"


@pytest.fixture(scope="package")
def library() -> str:
    """The library for ONNX Runtime."""
    return str(ort_library.build())


@pytest.fixture(scope="package")
def driver(once: Callable[[str, Callable[[Path], None]], Path]) -> str:
    """A folder with a CUDA driver that runs nothing."""
    stub = ROOT / "tests" / "backends" / "cuda_stub.cpp"
    command = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{ROOT / 'csrc' / 'cuda'}", str(stub)]

    def make(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)

    return str(once("stub driver", make))


@pytest.fixture(scope="package")
def gpu_onnx_library(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The library for ONNX Runtime of a bundle for GPUs, with the CPU kernels of one set."""

    def make(folder: Path) -> None:
        words = [sys.executable, "-IS", str(ROOT / "tests" / "one_set.py")]
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("CXX", shlex.join([*words, native.isa() if native.load().ok else ""]))
            shutil.copyfile(ort_library.build(on_gpu=True), folder / "library.so")

    return once("gpu onnx library", make) / "library.so"
