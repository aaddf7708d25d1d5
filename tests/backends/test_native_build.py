"""Building, caching and loading the CPU library: every way it can go wrong is one clear line."""

import dataclasses
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from processes import at_once, environment, forked, python, stand_in

from elsa_core.backends import compiler, native
from elsa_core.errors import UnavailableError

pytestmark = pytest.mark.compiler

LOAD = """
import logging
logging.basicConfig(level="WARNING", format="%(message)s")
import torch, elsa_core as elsa
from elsa_core.backends import native
torch.manual_seed(0)
q = torch.randn(1, 2, 49, 16)
route = elsa.explain(q, q, q)
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(q.double(), q.double(), q.double())
error = lambda out: (out - exact).norm() / exact.norm()
ours, peer = error(elsa.attention(q, q, q)), error(sdpa(q, q, q))
assert ours <= 2 * peer + 2.4e-7, f"error {ours:.3g}, PyTorch's {peer:.3g}"  # two ulp
print(route.backend, native.isa() if route.backend == "native" else "|".join(route.reasons))
"""


def run(program: str = LOAD, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with these variables changed."""
    return python("-c", program, env=environment(**variables))


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


def digest_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


@pytest.fixture(scope="module")
def library() -> Path:
    return native.build()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler; the cache is empty."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "native").mkdir(parents=True)
    return tmp_path / "cache" / "native"


FAILS = (
    ({"CXX": "/bin/false"}, ["/bin/false", "failed"]),
    ({"CXX": "no-such-compiler"}, ["no-such-compiler", "does not exist"]),
    ({"CXX": 'g++ "'}, ["unset or correct CXX"]),
    ({"ELSA_CACHE_DIR": "file/cache"}, ["ELSA_CACHE_DIR"]),
    ({"ELSA_CPU_ISA": "avx9000"}, ["avx9000"]),
)


def test_what_fails_leaves_eager_and_one_line(library: Path, tmp_path: Path) -> None:
    """Where it is switched off, not even the line."""
    (tmp_path / "file").write_text("in the way")
    rows = [(LOAD, [], {"ELSA_NATIVE": "0"})]
    for given, _ in FAILS:
        cache = {"ELSA_CACHE_DIR": str(tmp_path / given.get("ELSA_CACHE_DIR", ""))}
        rows.append((LOAD, [], given if "ELSA_CPU_ISA" in given else given | cache))
    off, *answers = forked(tmp_path, *rows)
    assert off.stdout.strip() == "eager native: switched off by ELSA_NATIVE=0" and off.stderr == ""
    for done, (_, words) in zip(answers, FAILS, strict=True):
        line = one_line(done)
        assert all(word in line for word in words)
        assert done.stdout.startswith("eager native:")
    assert not list(tmp_path.rglob("*.so"))


def test_status_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    facts = native.status()
    assert facts["built"] is False
    assert facts["compiler"]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm of binutils is not installed")
def test_it_needs_no_python_and_no_cxx_symbol_of_torch(library: Path) -> None:
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert any("torch_parallel_for" in name for name in names)
    assert not [name for name in names if re.match(r"_?Py|_ZN2at|_ZN3c10|_ZN5torch", name)]


def test_it_serves_a_process_without_elsa(library: Path) -> None:
    program = f"""
import torch
torch.ops.load_library({str(library)!r})
torch.manual_seed(0)
q = torch.randn(2, 3, 50, 16)
out, lse = torch.ops.elsa.attention(q, q, q, None, False, 0.25, "strict")
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(q.double(), q.double(), q.double())
error = lambda out: (out - exact).norm() / exact.norm()
assert error(out) <= 2 * error(sdpa(q, q, q)) + 2.4e-7 and lse.shape == (2, 3, 50)
import sys
assert "elsa_core" not in sys.modules
import elsa_core as elsa  # afterwards the package joins in: the schema is defined already
assert torch.equal(elsa.attention(q, q, q), out)
print("served")
"""
    done = run(program)
    assert done.stdout.strip() == "served", done.stderr


def test_a_process_without_elsa_is_told_of_a_wrong_set(library: Path) -> None:
    """There nobody asks for the kernels' name first: the operator itself refuses."""
    program = f"""
import torch
torch.ops.load_library({str(library)!r})
q = torch.ones(1, 1, 2, 16)
torch.ops.elsa.attention(q, q, q, None, False, 0.25, "strict")
"""
    done = run(program, ELSA_CPU_ISA="avx9000")
    assert done.returncode == 1 and "ELSA_CPU_ISA=avx9000 is unknown" in done.stderr


def test_the_best_set_that_the_processor_has_is_chosen() -> None:
    """PyTorch asks the processor for itself."""
    names = {"AVX512": "avx512", "AVX2": "avx2"}
    program = LOAD + "print(torch.backends.cpu.get_cpu_capability())"
    done = run(program, ELSA_CPU_ISA="", ATEN_CPU_CAPABILITY="")
    ours, theirs = done.stdout.splitlines()
    if theirs not in names:
        pytest.skip(f"PyTorch says {theirs} of this processor")
    assert ours == f"native {names[theirs]}"


BITS = """
import hashlib, torch, elsa_core as elsa
torch.manual_seed(0)
x = torch.randn(1, 2, 60, 24, requires_grad=True)
image, ends = (lambda x: x.reshape(1, 6, 10, 48)), torch.tensor([0, 23, 60])
calls = {
    "attention": lambda x: elsa.attention(x, x, x, backend="native"),
    "entmax": lambda x: elsa.entmax_attention(x, x, x, backend="native"),
    "packed": lambda x: elsa.varlen_attention(*[x[0].mT.reshape(60, 2, 24)] * 3, ends,
                                              backend="native"),
    "windows": lambda x: elsa.window_attention(image(x), None, num_heads=2, window_size=(6, 5),
                                               backend="native"),
}
for name, call in calls.items():
    out = call(x)
    grad, = torch.autograd.grad(out.square().sum(), x)
    found = [t.detach().contiguous().numpy().tobytes() for t in (out, grad)]
    print(name, hashlib.sha256(b"".join(found)).hexdigest())
"""


def test_every_operator_runs_the_set_that_is_named(library: Path, tmp_path: Path) -> None:
    """Each set adds in an order of its own: the bits tell which one ran."""
    rows = [(BITS, [], {"ELSA_CPU_ISA": name.lower()}) for name in compiler.kernels()]
    done = forked(tmp_path, *rows)
    lines = [one.stdout.splitlines() for one in done if "lacks it" not in one.stderr]
    assert lines and all(len(operators) == 4 for operators in lines), done
    for operator in zip(*lines, strict=True):
        assert len(set(operator)) == len(lines), operator


def test_threads_load_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that asked at once defined operators twice, which switched the library off."""
    within, most = [], []

    def define() -> None:
        within.append(1)
        most.append(len(within))
        time.sleep(0.02)
        within.pop()

    def broken() -> Path:
        raise ValueError

    monkeypatch.setattr(native.native_backward, "define", define)
    monkeypatch.setattr(native, "build", broken)
    monkeypatch.delenv("ELSA_NATIVE", raising=False)
    at_once(lambda _: native.load.__wrapped__(), range(3))
    assert most == [1, 1, 1]


def test_a_version_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", stand_in(tmp_path, "exit 1", r"caf\351 1.0"))
    assert native.status()["compiler_version"] == "caf\ufffd 1.0"


def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / "native").mkdir(parents=True)
    monkeypatch.setenv("ELSA_CACHE_DIR", str(cache))
    native.status()  # the compiler's version is known from here on
    cache.chmod(0)
    root = os.geteuid() == 0
    if root:  # who may enter every folder
        os.seteuid(65534)
    try:
        status = native.status()
        with pytest.raises(UnavailableError, match="Permission denied; set ELSA_CACHE_DIR"):
            native.build()
    finally:
        if root:
            os.seteuid(0)
        cache.chmod(0o700)
    assert status["built"] is False
    assert str(cache) in status["reason"]
    assert "Permission denied" in status["reason"]


def test_the_key_holds_the_flags_of_cxx_and_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ("g++", "g++ -O0", "g++ -march=native -ffast-math")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    paths = set()
    for command in commands:
        monkeypatch.setenv("CXX", command)
        paths.add(compiler.library_path(native.recipe()))
    recipe = native.recipe()
    linked = dataclasses.replace(recipe, link_flags=(*recipe.link_flags, "-lm"))
    paths.add(compiler.library_path(linked))
    assert len(paths) == 4
    moved = dataclasses.replace(recipe, link_flags=("-L/elsewhere", *recipe.link_flags[1:]))
    assert compiler.library_path(moved) in paths


def test_a_damaged_library_that_cannot_be_built_again(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", stand_in(tmp_path, "echo no luck >&2; exit 1"))
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    path = compiler.library_path(native.recipe())
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(
        UnavailableError, match=r"is damaged.*no luck; then run `elsa build --force"
    ):
        native.build()


def test_a_library_that_does_not_load_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "not-one.so"
    file.write_text("no library")
    with pytest.raises(UnavailableError, match=r"(?s)not-one\.so.*`elsa build --force`"):
        native._opened(file)


def test_a_compiler_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", stand_in(tmp_path, "exit 0"))
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    with pytest.raises(UnavailableError, match="wrote no library"):
        native.build()


def test_it_is_on_the_disk_before_it_has_its_name(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", stand_in(tmp_path, f'cp "{library}" "$output"'))
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    synced = []
    flushed = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(
            (os.fstat(descriptor).st_ino, compiler.library_path(native.recipe()).exists())
        )
        flushed(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = native.build()
    assert synced == [(path.stat().st_ino, False), (digest_of(path).stat().st_ino, False)]


def test_without_a_compiler_the_newest_library_built_ahead_serves(
    library: Path, bare: Path
) -> None:
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler was found"):
        native.build()
    facts, made_by = library.stem.removeprefix("libelsa-").split("-")
    old, new = (bare / f"libelsa-{facts}-{name}.so" for name in (made_by, "0" * 8))
    for age, path in ((20, old), (10, new)):
        shutil.copyfile(library, path)
        shutil.copyfile(digest_of(library), digest_of(path))
        os.utime(path, (time.time() - age,) * 2)
    (bare / f"libelsa-{facts}-{'1' * 8}.so").write_bytes(b"")  # damaged: passed over
    shutil.copyfile(library, bare / f"libelsa-{facts}-{'3' * 8}.so")  # nobody says what it is
    shutil.copyfile(library, bare / f"libelsa-{'2' * 16}-{made_by}.so")  # of other facts
    assert native.build() == compiler.library_path(native.recipe()) == new
    assert native.status()["built"]
    assert run().stdout.startswith("native")
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler was found"):
        native.build(force=True)
