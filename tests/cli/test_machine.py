"""doctor and build: what the machine has, and what happens when it lacks something."""

import json
import os
import time
from pathlib import Path

import pytest
from processes import environment, python, signalled, stand_in, started

from elsa_cli import probes
from elsa_cli.values import BACKENDS
from elsa_core.backends import native

from .conftest import TINY, Elsa

GROUPS = [
    "system", "packages", "gpu", "native library", "kernel packs", "backends", "caches",
    "variables", "config",
]  # fmt: skip


def test_doctor(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = elsa("doctor")
    assert answer.code == 0
    for word in ("python", "torch", "compiler", "native", "triton", "eager", "hugging face"):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    (help_text,) = (elsa("patch", "--help").out,)
    for name, about in BACKENDS.items():
        assert f"{name}: {about}" in " ".join(help_text.split())
        assert about[:20] in answer.out or name == "auto"


def test_doctor_json(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_IMG_SIZE", "64")
    found = elsa("doctor", "--json").document()["results"]["probes"]
    assert list(dict.fromkeys(probe["group"] for probe in found)) == GROUPS
    assert {probe["name"]: probe["value"] for probe in found}["ELSA_IMG_SIZE"] == "64"
    # Whatever is off says why.
    assert all(probe["reason"] for probe in found if probe["ok"] is False)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CXX", 'g++ "', "correct or unset CXX='g++ \"'"),
        ("CXX", "g++ \\", r"correct or unset CXX='g++ \\'"),
        ("ELSA_CACHE_DIR", "~nosuchuser/x", "ELSA_CACHE_DIR='~nosuchuser/x' names a home"),
        ("ELSA_CACHE_DIR", "/tmp/" + "x" * 300, "too long; set ELSA_CACHE_DIR"),
    ],
)
def test_doctor_names_what_keeps_the_native_library_off(
    variable: str, value: str, words: str, elsa: Elsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    native.load.cache_clear()
    answer = elsa("doctor", "--quiet")
    native.load.cache_clear()
    assert answer.code == 0 and answer.out.startswith("Ready: sdpa, eager only. ")
    assert words in answer.out
    elsa("build").fails(3, variable)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{name}} is broken here")
sys.meta_path.insert(0, Block())
sys.argv = ["elsa", *{arguments!r}]
from elsa_cli.main import main
main()
"""


@pytest.mark.parametrize("names", [["torch"], ["timm", "open_clip", "triton", "torchvision"]])
def test_doctor_without_packages(names: list[str]) -> None:
    done = python("-c", BLOCK.format(names=names, arguments=["doctor", "--json"]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]["probes"]
    reasons = {probe["name"]: probe["reason"] for probe in found if probe["group"] == "packages"}
    distributions = {name: dist for dist, name, _ in probes.PACKAGES}
    assert all("is broken here" in reasons[distributions[name]] for name in names)


def test_doctor_says_why_torch_failed_at_first(tmp_path: Path) -> None:
    """torch is imported once a process: a second attempt says that, and not what was wrong."""
    (tmp_path / "torch.py").write_text(
        "import sys\nfirst = not hasattr(sys, 'again')\nsys.again = True\n"
        "raise ImportError('is broken here' if first else 'once per process')\n"
    )
    places = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = python("-m", "elsa_cli", "doctor", "--json", env=environment(PYTHONPATH=places))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]["probes"]
    (torch,) = (probe for probe in found if probe["name"] == "torch")
    assert "is broken here" in torch["reason"]


def test_a_missing_torch_is_one_line() -> None:
    done = python("-c", BLOCK.format(names=["torch"], arguments=["inspect", "vit"]))
    assert (done.returncode, done.stdout) == (3, "") and len(done.stderr.splitlines()) == 1
    assert "torch is broken here" in done.stderr


def test_sizes_for_people() -> None:
    assert [probes.human(n) for n in (0, 999, 1000, 987_654, 5e12)] == [
        "0 B", "999 B", "1.0 kB", "987.7 kB", "5.0 TB",
    ]  # fmt: skip


@pytest.mark.gpu
def test_build_of_a_machine_with_a_gpu(elsa: Elsa) -> None:
    """The CUDA library is built too: a first call on the GPU would take those seconds."""
    assert elsa("build").out.splitlines()[-1].startswith("CUDA library: ")
    assert elsa("build", "--json").document()["results"]["cuda_library"]["serves"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built() -> Path:
    """A library of the right kind, wherever this machine keeps it."""
    return native.build()


@pytest.mark.compiler
def test_build_twice_at_once(built: Path, cache: Path) -> None:
    """One process compiles, the other waits and takes its library."""
    here = Path.cwd()
    slow = stand_in(
        here,
        f"""echo "${{output##*/}}" >> '{here}/units'
while [ ! -e '{here}/go' ]; do sleep 0.05; done
cp '{built}' "$output\"""",
    )
    env = environment(CXX=slow, CUDA_VISIBLE_DEVICES="")
    first = started("-m", "elsa_cli", "build", "--json", env=env)
    while not Path("units").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    second = started("-m", "elsa_cli", "build", "--json", env=env)
    assert second.stderr is not None
    assert "waiting for another process that builds" in second.stderr.readline()
    Path("go").touch()
    answers = [child.communicate(timeout=300) for child in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], answers
    results = [json.loads(out)["results"] for out, _ in answers]
    assert results[0]["path"] == results[1]["path"]
    assert all(result["loads"] for result in results)
    assert [result["compiled"] for result in results] == [True, False]
    units = Path("units").read_text().split()
    assert len(units) == len(set(units)) > 0
    left = [path for path in (cache / "native").iterdir() if path.suffix != ".lock"]
    path = Path(results[0]["path"])
    assert sorted(left) == [path, path.with_name(f"{path.name}.sha256")]


def test_a_compiler_that_fails(elsa: Elsa, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", stand_in(Path.cwd(), "echo 'x.cpp:1: error: no luck' >&2; exit 1"))
    elsa("build").fails(3, "compiler", "no luck")
    assert not list(cache.rglob("*.so")) and not list(cache.rglob(".build-*"))


def test_patch_goes_on_without_a_compiler(
    process: Elsa, elsa: Elsa, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eager backend takes over and says so; asked for by name, native is an error."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    small = (*TINY, "--model-kwargs", "depth=2")
    answer = process("patch", *small, "-v")
    answer.shows("eager kernels")
    warnings = [line for line in answer.err.splitlines() if "no-such-compiler" in line]
    assert len(warnings) == 1
    native.load.cache_clear()
    answer = elsa("patch", *small, "--backend", "native", "-q")
    native.load.cache_clear()
    answer.fails(3, "no-such-compiler")


def test_ctrl_c_while_compiling(cache: Path) -> None:
    slow = stand_in(Path.cwd(), "touch started; sleep 60")
    child = started("-m", "elsa_cli", "build", env=environment(CXX=slow))
    ended = signalled(child, Path("started").exists)
    assert ended == (130, "", "interrupted; nothing was written\n")
    assert not list(cache.rglob("*.so")) and not list(cache.rglob(".build-*"))
