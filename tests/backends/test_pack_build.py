"""`elsa build --cuda`: code as Triton's JIT compiles it, the same bytes each time."""

import dataclasses
import json
import shlex
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import environment, python, signalled, started

pytest.importorskip("triton")

import triton

from elsa_core.backends.triton.pack import build as building
from elsa_core.backends.triton.pack import cases, lookup, specialize, store
from elsa_core.backends.triton.pack.build import build
from elsa_core.backends.triton.pack.cases import Planner
from elsa_core.backends.triton.shared import device
from elsa_core.errors import UnavailableError

pytestmark = pytest.mark.skipif(
    device.INTERPRETED or not specialize.known(), reason="packs are made by Triton 3.6 to 3.9"
)
ROOT = Path(__file__).parents[2]
# two kernels, 2 s each to compile
ONLY = "attention/vit_base_patch16_siglip_224/12x1:196x64/b8-??16"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two kernels for sm_80."""
    out = tmp_path_factory.mktemp("packs")
    built = build(80, out, jobs=2, only=ONLY)
    assert (built.kernels, built.reused, built.calls, built.served) == (2, 0, 2, 1.0)
    assert not built.left_out
    return out


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ELSA_PACK", raising=False)


def elsa(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return python("-m", "elsa_cli", *arguments, env=environment(**extra))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_build_gives_the_same_bytes(packs: Path, tmp_path: Path, monkeypatch) -> None:
    """In another process, from another folder, by another number of processes, and where
    torch.compile has named a ptxas before."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    answer = elsa("build", "--cuda", "--arch", "sm_80", "--jobs", 1, "--only", ONLY, "-o", "again",
                  "--json")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    (pack,) = json.loads(answer.stdout)["results"]["packs"]
    assert (pack["arch"], pack["kernels"], pack["reused"]) == (80, 2, 0)
    assert content(tmp_path / "again" / "sm_80") == content(packs / "sm_80")


def test_what_is_unchanged_is_not_compiled_again(packs: Path) -> None:
    before = content(packs / "sm_80")
    assert build(80, packs, only=ONLY).reused == 2
    assert content(packs / "sm_80") == before
    built = build(80, packs, only=ONLY.replace("??16", "fp16"))
    assert (built.kernels, built.reused) == (1, 1)
    assert build(80, packs, jobs=1, only=ONLY).reused == 1
    assert content(packs / "sm_80") == before


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The sections of machine code and of constants of an ELF file, by name.

    Those of kernel properties (.nv.info) hold numbers of symbols, which debug sections shift.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = rows[names][4]
    found = {}
    for name, _, _, _, offset, length in rows:
        title = cubin[start + name : cubin.index(b"\0", start + name)].decode()
        if title.startswith((".text", ".nv.constant", ".nv.global")):
            found[title] = cubin[offset : offset + length]
    return found


def test_code_is_what_the_jit_compiles(packs: Path) -> None:
    """Compiled here as the JIT does: the machine code and all that a launch needs are the same, and
    the CUDA library takes both alike.

    Packs left lines of sources out from the start, and kernels came out with other registers.
    """
    from elsa_core.backends.cuda.plan import kernel_of

    pack = store.read(packs / "sm_80")
    jobs = Planner(80).add(cases.expanded(ONLY)).jobs
    for key, entry in pack.entries.items():
        ours, theirs = lookup.compiled(jobs[key], pack), jobs[key].compile()
        first, second = code_of(pack.cubin(entry)), code_of(theirs.asm["cubin"])
        assert any(name.startswith(".text") for name in first) and first == second
        for name, value in theirs.metadata._asdict().items():
            # Triton's cache keeps the paths of the environment that compiled first
            if name not in ("hash", "triton_version", "extern_libs"):
                assert getattr(ours.metadata, name) in (value, _plain(value)), name
        assert ours.packed_metadata == theirs.packed_metadata
        first, second = kernel_of(ours), kernel_of(theirs)
        assert dataclasses.replace(first, code=b"") == dataclasses.replace(second, code=b"")


def _plain(value: Any) -> Any:
    """A value of the options before it went through JSON."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def test_no_path_of_this_machine_is_in_a_pack(packs: Path) -> None:
    for name, data in content(packs / "sm_80").items():
        assert str(ROOT).encode() not in data and b"elsa_core/" not in data, name


def test_every_default_case_is_planned_for_every_architecture() -> None:
    """None is refused by its planner, and each architecture has kernels of both operators."""
    for arch in cases.ARCHITECTURES:
        plan = Planner(arch).add(cases.expanded("*/b8-fp32"))
        names = {job.name.split(".")[0] for job in plan.jobs.values()}
        assert names >= {"attention", "window"}
        assert ("linear" in names) is (arch == 90)


def test_the_case_list_is_of_calls_that_exist_once() -> None:
    names = [case.name for case in cases.expanded(batches=(1,))]
    rows = json.loads(cases.CASES.read_text())["cases"]
    assert len(names) == 2 * len(cases.DTYPES) * len(rows) and len(rows) > 100


def test_a_compiler_set_up_otherwise_builds_nothing(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    with pytest.raises(UnavailableError, match="TRITON_F32_DEFAULT changes what Triton compiles"):
        build(80, Path("out"), only=ONLY)
    monkeypatch.undo()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with pytest.raises(UnavailableError, match=r"Triton 3\.6 to 3\.9, this is 3\.10\.0"):
        build(80, Path("out"), only=ONLY)


def test_a_kernel_that_no_gpu_can_hold_is_left_out() -> None:
    said = "takes 200000 bytes of shared memory, sm_80 has 166912"
    assert building._too_large(80, 200000) == said and building._too_large(90, 200000) == ""


def test_a_compiling_process_that_dies_is_one_line(monkeypatch) -> None:
    run = building.running

    def broken(command: list[str], **options: Any) -> Iterator[Any]:
        script = "import sys; sys.exit('no luck')"
        return run([sys.executable, "-c", script], **options)

    monkeypatch.setattr(building, "running", broken)
    with pytest.raises(UnavailableError, match="a compiling process ended: no luck"):
        build(80, Path("out"), jobs=1, only=ONLY)
    assert not list(Path("out").iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--cuda", "--arch", "sm_75", "-o", "out"), 2, "sm_75 is unknown: choose of sm_80"),
        (("--cuda", "--arch", "ninety"), 2, "'ninety' is no architecture"),
        (("--cuda", "--force"), 2, "--force is for the native library"),
        (("--arch", "sm_90"), 2, "--arch needs --cuda"),
        (("--only", "x"), 2, "--only needs --cuda"),
        (("--cuda", "--arch", "80", "--only", "nothing", "-o", "out"), 2,
         "no case that matches 'nothing'"),
        (("--cuda", "--arch", "sm_80", "-o", "file/packs"), 3, "cannot be written to file/packs"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, code, words, elsa) -> None:
    Path("file").write_text("")
    answer = elsa("build", *arguments)
    answer.fails(code, words)
    assert not answer.out and not Path("out").exists()


@pytest.mark.skipif(device.triton_version() < (3, 6), reason="packs need it")
def test_without_a_gpu_the_architecture_must_be_named(elsa) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    elsa("build", "--cuda").fails(2, "name those to compile for, --arch sm_90")


def test_the_command_and_doctor_say_what_is_there(packs: Path, elsa, monkeypatch) -> None:
    out = elsa("build", "--cuda", "--arch", "80", "--only", ONLY, "-o", packs).shows()
    first, second, third = out.splitlines()
    assert first == str(packs / "sm_80")
    assert second.startswith("2 kernels (0 compiled) · ") and second.endswith("100% of 2 calls")
    assert third == f"Next: ELSA_PACK={shlex.quote(str(packs))} elsa doctor"
    monkeypatch.setenv("ELSA_PACK", str(packs))
    probes = elsa("doctor", "--json").document()["results"]["probes"]
    (pack,) = [probe for probe in probes if probe["group"] == "kernel packs"]
    assert (pack["name"], pack["ok"], pack["reason"]) == ("sm_80", True, "")
    assert "(2 kernels, " in pack["value"] and triton.__version__ in pack["value"]
    monkeypatch.delenv("ELSA_PACK")
    elsa("doctor", "--json").shows("none here: `elsa build --cuda` compiles them")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The pack that was there stays, no process goes on, no folder is left."""
    words = "build --cuda --arch sm_90 -o packs --jobs 2 --only window_attention/swin_tiny*"

    def compiles() -> bool:
        begun = list(tmp_path.glob("packs/.elsa-pack-*/stderr"))
        return bool(begun) and time.time() > begun[0].stat().st_mtime + 1

    code, out, err = signalled(started("-m", "elsa_cli", *words.split()), compiles)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; nothing was written"
    assert not list((tmp_path / "packs").iterdir())
