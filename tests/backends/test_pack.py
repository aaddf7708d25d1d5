"""Kernel packs in use: plans without a GPU, keys, and the first call of a launch."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from elsa_core.backends.triton.attention import backward_tiling
from elsa_core.backends.triton.attention.decode import decode
from elsa_core.backends.triton.attention.merge import merge_states
from elsa_core.backends.triton.pack import cases, lookup, sources, specialize, store
from elsa_core.backends.triton.pack.build import build
from elsa_core.backends.triton.pack.plan import Planner
from elsa_core.backends.triton.shared import device, launch
from elsa_core.backends.triton.shared.device import Described
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

pytestmark = pytest.mark.skipif(
    device.INTERPRETED or not specialize.known(), reason="packs are made by Triton 3.6 to 3.9"
)
STREAM, FUNCTION = 77, 4711
# one kernel, 2 s to compile
ONLY = "attention/vit_base_patch16_siglip_224/12x1:196x64/b8-fp16"
H200 = Described("NVIDIA H200", (9, 0), 132)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of one kernel for each of three architectures."""
    out = tmp_path_factory.mktemp("packs")
    for arch in (80, 90, 120):
        build(arch, out, jobs=1, only=ONLY)
    return out


def planned(arch: int, only: str = ONLY) -> Any:
    return Planner(arch).add(cases.expanded(only))


def recorded(only: str = ONLY) -> tuple[Launch, tuple[Any, ...]]:
    """The first launch of a case, with its tensors."""
    seen: list[tuple[Launch, tuple[Any, ...]]] = []
    with device.describing(H200), launch.recording(lambda *found: seen.append(found)):
        next(cases.expanded(only)).launch()
    return seen[0]


def test_a_described_gpu_is_planned_for() -> None:
    meta, before = torch.device("meta"), device.device_table(-1)
    PLANS.get("kept", lambda: 1)
    expected = {
        80: ("a100", False, "default"), 90: ("h200", True, "h200"),
        120: ("rtx4090", True, "default"),
    }  # fmt: skip
    for arch, (table, overlaps, backward) in expected.items():
        gpu = cases.gpus(arch)[0]
        with device.describing(gpu.facts):
            assert len(PLANS) == 0
            assert device.described() == gpu.facts
            assert device.table_of(-1) == table
            assert device.device_table(-1)[1] == gpu.facts.multiprocessors
            assert device.overlaps(meta) is overlaps
            assert device.specializes(meta) is (arch == 90)
            assert backward_tiling.tiles_name(meta) == backward
            PLANS.get("inner", lambda: 1)
        assert len(PLANS) == 0
    assert device.described() is None
    assert device.device_table(-1) == before
    assert not device.overlaps(meta) and not device.specializes(meta)


def test_planners_decide_what_is_compiled() -> None:
    """The Gluon kernels on sm_90 alone; what a call takes is what its pack serves."""
    only = "attention/vit_*_patch16_224/*"
    plans = {arch: planned(arch, only) for arch in (80, 90)}
    names = {
        arch: {specialize.name_of(job.kernel) for job in plan.jobs.values()}
        for arch, plan in plans.items()
    }
    assert "attention.two_warpgroups:forward" in names[90]
    assert "attention.backward_kernels:gradients" in names[90]
    assert names[80] == {"attention.forward:forward", "attention.merge:merge_states",
                         "attention.split:split_ahead"}  # fmt: skip
    for plan in plans.values():
        assert plan.served(plan.jobs) == 1.0
        assert plan.served(list(plan.jobs)[1:]) < 1.0
        assert plan.launches > len(plan.jobs)  # shapes share kernels


def key(
    found: Launch | None = None, tensors: tuple[Any, ...] | None = None, arch: int = 90,
    source: str = "", **options: Any,
) -> str:  # fmt: skip
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    first, given = recorded()
    found, tensors = found or first, given if tensors is None else tensors
    backend = make_backend(GPUTarget("cuda", arch, 32))
    kernel = found.kernel
    special = specialize.specialize(
        kernel, tensors, found.tail, {**found.options, **options}, backend,
        specialize.binder_of(kernel, backend),
    )  # fmt: skip
    return specialize.key_of(kernel, special, source or sources.source_key(kernel), arch)


def changed(**tail: Any) -> Launch:
    found, _ = recorded()
    return Launch(found.kernel, found.grid, {**found.tail, **tail}, found.options)


class Shifted:
    """A tensor that begins 4 bytes behind a multiple of 16."""

    dtype = torch.float16

    def data_ptr(self) -> int:
        return 4


def test_every_part_of_a_kernel_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tensors = recorded()
    first = key()
    others = {
        "a constant": key(changed(BN=2 * found.tail["BN"])),
        "its type": key(changed(PARTIAL=int(found.tail["PARTIAL"]))),
        "dtypes": key(tensors=tuple(torch.empty(4, device="meta") for _ in tensors)),
        "alignment": key(tensors=(Shifted(), *tensors[1:])),
        "warps": key(num_warps=2 * found.options["num_warps"]),
        "stages": key(num_stages=7),
        "registers": key(maxnreg=64),
        "overlap": key(launch_pdl=True),
        "fusion": key(enable_fp_fusion=False),
        "architecture": key(arch=80),
        "source": key(source="0" * 64),
        "kernel": key(Launch(merge_states, (1,), MERGE, found.options), tensors[:4]),
    }
    monkeypatch.setattr(triton, "__version__", "3.7.9")
    others["Triton"] = key()
    assert first not in others.values() and len(set(others.values())) == len(others)


MERGE = {"parts": 2, "heads": 1, "n_q": 1, "states": 4, "ROWS": 1, "PARTS": 2, "DV": 64, "VP": 64,
         "OVERLAP": False}  # fmt: skip


def test_lengths_and_strides_are_not_in_a_key() -> None:
    found, tensors = recorded()
    more = {name: found.tail[name] + 1 for name in ("n_k", "heads", "q_b", "scale", "chunk")}
    assert key(changed(**more)) == key()
    longer = tuple(torch.empty((9, *t.shape), dtype=t.dtype, device="meta") for t in tensors)
    assert key(tensors=longer) == key()


@pytest.mark.parametrize(
    "name", ["TRITON_PTXAS_PATH", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "MLIR_ENABLE_DUMP",
             "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_F32_DEFAULT", "TRITON_DISABLE_LINE_INFO"],
)  # fmt: skip
def test_settings_of_the_compiler_turn_packs_away(name: str) -> None:
    assert specialize.departs({name: "1"}) == name
    assert specialize.departs({"TRITON_CACHE_DIR": "/x", "TRITON_DEFAULT_FP_FUSION": "1"}) == ""


def test_knobs_of_the_compiler_turn_packs_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    assert specialize.departs({}) == ""
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", print, raising=False)
    assert "add_stages_inspection_hook" in specialize.departs({})


def test_sources_are_in_a_digest_of_their_own(tmp_path: Path, monkeypatch) -> None:
    """Kept in the cache, by the sizes and times of the files."""
    folder, found = tmp_path / "kernels", []
    (folder / "shared").mkdir(parents=True)
    monkeypatch.setattr(sources, "KERNELS", folder)
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    read = sources.sources_digest.__wrapped__
    names = [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2"), ("shared/b.py", "x = 2")]
    for name, text in names:
        (folder / name).write_text(text)
        found.append(read())
    assert len(set(found)) == len(names)
    kept = tmp_path / "cache" / "packs" / "sources.json"
    facts = json.loads(kept.read_text())
    assert facts["digest"] == found[-1]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda _: pytest.fail("read"))
        assert read() == found[-1]
    for damaged in ("", "[]", "{", json.dumps({"files": facts["files"]}), json.dumps({"a": 1})):
        kept.write_text(damaged)
        assert read() == found[-1] and json.loads(kept.read_text()) == facts
    before = os.umask(0o002)  # of systems on which each user has a group
    try:
        kept.unlink()
        assert read() == found[-1] and not kept.stat().st_mode & 0o022
    finally:
        os.umask(before)
    changed = folder / "shared" / "b.py"
    facts_of = changed.stat()
    changed.write_text("x = 3")
    os.utime(changed, ns=(facts_of.st_atime_ns, facts_of.st_mtime_ns))  # as some copies do
    assert read() not in found
    changed.write_text("x = 2")
    assert read() == found[-1]
    facts = json.loads(kept.read_text())
    kept.chmod(0o666)  # anybody may have written it
    kept.write_text(json.dumps(facts | {"digest": "another"}))
    assert read() == found[-1]


def test_a_source_is_known_by_all_that_it_reaches(monkeypatch) -> None:
    """A changed helper, a changed constant; and whatever was hashed before, by Triton too."""
    from elsa_core.backends.triton.shared import helpers

    def fresh() -> str:
        sources._KNOWN.clear()
        return sources.source_key(decode)

    first = fresh()
    merge_states.cache_key  # noqa: B018
    decode.cache_key  # noqa: B018
    assert fresh() == first
    for helper in (helpers.times_power, helpers.power):  # of decode, and of that one
        monkeypatch.setattr(helper, "_src", helper.src + "\n    # another\n")
        assert fresh() != first
        monkeypatch.undo()
    monkeypatch.setitem(decode.fn.__globals__, "LN2", triton.language.constexpr(2.0))
    assert fresh() != first
    monkeypatch.undo()
    assert fresh() == first
    monkeypatch.setitem(decode.fn.__globals__, "LN2", object())
    with pytest.raises(ValueError, match="decode reads LN2, which has no digest"):
        fresh()


def test_kernels_are_written_in_nothing_but_the_digested_files() -> None:
    """What kernels reach beside Triton lies below `sources.KERNELS`."""
    reached: set[str] = set()
    waiting = [job.kernel for job in planned(90, "*/b1-fp*").jobs.values()]
    while waiting:
        function = waiting.pop()
        if f"{function.__module__}:{function.__qualname__}" not in reached:
            reached.add(f"{function.__module__}:{function.__qualname__}")
            assert function.__module__.startswith("elsa_core.backends.triton.")
            assert Path(function.fn.__code__.co_filename).is_relative_to(sources.KERNELS)
            found = [value for _, value in sources._read(function)]
            waiting += [value for value in found if sources._is_function(value)]
    assert len(reached) > 50


class Driver:
    """A GPU's driver as Triton asks it: what is loaded and launched is kept."""

    def __init__(self, arch: int):
        self.arch = arch
        self.loaded: list[tuple[str, bytes, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            load_binary=self.load, get_device_properties=lambda _: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
        )  # fmt: skip

    def load(self, name: str, code: bytes, shared: int, _: int) -> tuple[int, ...]:
        self.loaded.append((name, code, shared))
        return 1, FUNCTION, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *given: self.launched.append(given)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return STREAM


@pytest.fixture
def gpu(packs: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with an H200 whose packs are asked for, and whose compiler fails the test."""
    from triton.compiler import compiler
    from triton.runtime import driver

    active = Driver(90)
    monkeypatch.setattr(type(driver), "active", active, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton.compiler, "compile", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setenv(lookup.VARIABLE, str(packs))
    monkeypatch.setenv("ELSA_CACHE_DIR", str(packs.parent / "nothing"))
    compiler.max_shared_mem.cache_clear()
    for kernel in (decode, merge_states):
        kernel.device_caches.clear()
    lookup.forget()
    lookup.COUNTS.clear()
    lookup._warn.cache_clear()
    yield active
    for loaded in lookup._FOUND.values():
        loaded.module = None  # no driver unloads it
    for kernel in (decode, merge_states):
        kernel.device_caches.clear()
    lookup.forget()
    compiler.max_shared_mem.cache_clear()


def called(found: Launch) -> tuple[torch.Tensor, ...]:
    _, shapes = recorded()
    tensors = tuple(torch.zeros(16, dtype=t.dtype) for t in shapes)
    found(*tensors)
    return tensors


def test_a_first_call_takes_its_kernel_from_a_pack(gpu: Driver, packs: Path) -> None:
    found, _ = recorded()
    tensors = called(found)
    pack = store.read(packs / "sm_90")
    (entry,) = pack.entries.values()
    assert gpu.loaded == [("decode", pack.cubin(entry.kernel), entry.kernel.shared)]
    found(*tensors)
    addresses = [t.data_ptr() for t in tensors]
    values = [found.tail[p.name] for p in found.kernel.params[len(tensors) :]]
    for given in gpu.launched:
        assert given[:5] == (*found.grid, STREAM, FUNCTION)
        assert given[9:] == (*addresses, *values)
    assert (len(gpu.launched), lookup.COUNTS) == (2, {"hits": 1})
    assert found.loaded
    other, _ = recorded()
    called(other)
    assert len(gpu.loaded) == 1  # one for all launches


def test_threads_load_a_kernel_once(gpu: Driver, monkeypatch) -> None:
    """And a load that fails is tried again by the next call."""
    monkeypatch.setattr(launch, "_FIRST", [lambda *given: True])
    found, _ = recorded()
    tensors, load = called(found), gpu.utils.load_binary
    began, go = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        began.set()
        assert go.wait(10)
        return load(*given)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    gpu.utils.load_binary = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        found(*tensors)
    gpu.utils.load_binary = slow
    threads = [threading.Thread(target=found, args=tensors) for _ in range(2)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join()
    found(*tensors)
    assert len(gpu.loaded) == 1
    assert [given[4] for given in gpu.launched] == [FUNCTION] * 3


def misses(found: Launch) -> None:
    """The launch goes to the JIT, which the fixture has fail."""
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        called(found)
    assert lookup.COUNTS["hits"] == 0


def test_a_call_without_its_kernel_goes_to_the_jit(gpu: Driver) -> None:
    misses(changed(D=32))
    assert lookup.COUNTS == {"misses": 1}


def test_packs_are_not_used_unless_asked_for(gpu: Driver, monkeypatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(lookup.VARIABLE, value)
        misses(recorded()[0])
    assert not lookup.COUNTS


def test_another_triton_is_a_miss(gpu: Driver, monkeypatch, caplog) -> None:
    monkeypatch.setattr(triton, "__version__", "3.8.7")
    with caplog.at_level(logging.WARNING, "elsa"):
        misses(recorded()[0])
    assert "needs Triton" in caplog.text and "this is 3.8.7" in caplog.text


def test_settings_are_a_miss(gpu: Driver, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    with caplog.at_level(logging.WARNING, "elsa"):
        misses(recorded()[0])
    assert caplog.messages == ["kernel packs are not used: PTXAS_OPTIONS is set"]


def test_a_damaged_kernel_is_a_miss_in_one_line(gpu: Driver, packs: Path, tmp_path, monkeypatch,
                                                caplog) -> None:  # fmt: skip
    place = tmp_path / "sm_90"
    place.mkdir()
    for path in (packs / "sm_90").iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    (data,) = place.glob("cubins-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    monkeypatch.setenv(lookup.VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, "elsa"):
        misses(recorded()[0])
    (line,) = caplog.messages
    assert "is damaged" in line and "\n" not in line and not gpu.loaded


def test_a_driver_that_refuses_is_a_miss(gpu: Driver, caplog) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    gpu.utils.load_binary = refuse
    with caplog.at_level(logging.WARNING, "elsa"):
        misses(recorded()[0])
    assert "image is invalid" in caplog.text


def test_a_pack_of_another_architecture_under_the_name(gpu: Driver, packs: Path, tmp_path,
                                                       monkeypatch, caplog) -> None:  # fmt: skip
    (tmp_path / "sm_90").mkdir()
    for path in (packs / "sm_80").iterdir():
        (tmp_path / "sm_90" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(lookup.VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, "elsa"):
        misses(recorded()[0])
    assert "it is for sm_80" in caplog.text


def test_what_doctor_and_explain_say(packs: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(lookup.VARIABLE, raising=False)
    assert lookup.summary(90) == ""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packs").symlink_to(packs)
    found = list(lookup.shipped())
    assert [(pack.arch, pack.kernels, pack.reason) for pack in found] == [
        (120, 1, ""), (80, 1, ""), (90, 1, "")
    ]  # fmt: skip
    said = f"kernel pack sm_90 (1 kernels, Triton {triton.__version__})"
    older = said.replace("sm_90", "sm_80")
    ptx = f"{older}, as PTX that the driver compiles for sm_89"
    assert lookup.summary(90) == said
    assert lookup.summary(89) == f"{ptx}, is not used: ELSA_PACK=1 asks for it"
    assert [pack.arch for pack in lookup.packs_for(90)] == [90] and not lookup.packs_for(89)
    monkeypatch.setenv(lookup.VARIABLE, "0")
    assert lookup.summary(90) == f"{said} is not used: ELSA_PACK is 0"
    monkeypatch.setenv(lookup.VARIABLE, "1")
    assert lookup.summary(90) == said
    assert lookup.summary(89) == f"{older}, as PTX that the driver compiles for sm_89"
    assert lookup.summary(75) == "no kernel pack is here: Triton compiles"
    monkeypatch.setattr(triton, "__version__", "3.8.7")
    assert "this is 3.8.7" in lookup.summary(90)
