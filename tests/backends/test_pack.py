"""Kernel packs in use: plans without a GPU, keys, and the first call of a launch."""

import inspect
import logging
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
from elsa_core.backends.triton.pack import cases, lookup, specialize, store
from elsa_core.backends.triton.pack.build import build
from elsa_core.backends.triton.pack.cases import Planner
from elsa_core.backends.triton.pack.specialize import Compiler
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
VERSION = triton.__version__
H200 = Described("NVIDIA H200", (9, 0), 132)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of one kernel for sm_90."""
    out = tmp_path_factory.mktemp("packs")
    build(90, out, jobs=1, only=ONLY)
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
            assert device.capability_of(meta) == gpu.facts.capability
            assert device.table_of(-1) == table
            assert device.device_table(-1)[1] == gpu.facts.multiprocessors
            assert device.overlaps(meta) is overlaps
            assert device.specializes(meta) is (arch == 90)
            assert backward_tiling.tiles_name(meta) == backward
            PLANS.get("inner", lambda: 1)
        assert len(PLANS) == 0
    assert device.capability_of(meta) is None
    assert device.device_table(-1) == before
    assert not device.overlaps(meta) and not device.specializes(meta)


def test_planners_decide_what_is_compiled() -> None:
    """The Gluon kernels on sm_90 alone; what a call takes is what its pack serves."""
    only = "attention/vit_*_patch16_224/*"
    plans = {arch: planned(arch, only) for arch in (80, 90)}
    names = {arch: {job.name for job in plan.jobs.values()} for arch, plan in plans.items()}
    assert "attention.one_launch:forward" in names[90]
    assert "attention.backward_kernels:gradients" in names[90]
    assert names[80] == {"attention.forward:forward", "attention.merge:merge_states",
                         "attention.split:split_ahead"}  # fmt: skip
    for plan in plans.values():
        asked = [key for keys in plan.calls.values() for key in keys]
        assert set(asked) == plan.jobs.keys() and len(asked) > len(plan.jobs)  # shapes share


def key(
    found: Launch | None = None, tensors: tuple[Any, ...] | None = None, arch: int = 90,
    **options: Any,
) -> str:  # fmt: skip
    first, given = recorded()
    found, tensors = found or first, given if tensors is None else tensors
    options = {**found.options, **options}
    return Compiler(arch).job(found.kernel, tensors, found.tail, options).key


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
        "kernel": key(Launch(merge_states, (1,), MERGE, found.options), tensors[:4]),
    }
    monkeypatch.setattr(triton, "__version__", "3.7.9")
    others["Triton"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(specialize, "sources_digest", lambda: "0" * 64)
    others["sources"] = key()
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


def test_kernels_are_written_in_nothing_but_the_digested_files() -> None:
    """What kernels reach beside Triton lies below `specialize.KERNELS`."""
    from triton.runtime.jit import JITCallable

    reached: set[Any] = set()
    waiting = [job.kernel for job in planned(90, "*/b1-fp*").jobs.values()]
    while waiting:
        function = waiting.pop()
        if function.fn not in reached and not function.__module__.startswith("triton."):
            reached.add(function.fn)
            assert function.__module__.startswith("elsa_core.backends.triton.")
            assert Path(function.fn.__code__.co_filename).is_relative_to(specialize.KERNELS)
            names = inspect.getclosurevars(function.fn)
            found = [*names.globals.values(), *names.nonlocals.values()]
            waiting += [value for value in found if isinstance(value, JITCallable)]
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
    assert gpu.loaded == [("decode", pack.cubin(entry), entry.metadata["shared"])]
    found(*tensors)
    addresses = [t.data_ptr() for t in tensors]
    values = [found.tail[p.name] for p in found.kernel.params[len(tensors) :]]
    for given in gpu.launched:
        assert given[:5] == (*found.grid, STREAM, FUNCTION)
        assert given[9:] == (*addresses, *values)
    assert (len(gpu.launched), lookup.COUNTS) == (2, {"hits": 1})
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


def misses(caplog: pytest.LogCaptureFixture, *words: str, of: Launch | None = None) -> None:
    """The launch goes to the JIT, which the fixture has fail, and `words` are in all that is
    said."""
    caplog.clear()
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        called(of or recorded()[0])
    assert lookup.COUNTS["hits"] == 0
    assert all(word in caplog.text for word in words) and len(caplog.messages) == bool(words)


def test_a_call_without_its_kernel_goes_to_the_jit(gpu: Driver, caplog) -> None:
    misses(caplog, of=changed(D=32))
    assert lookup.COUNTS == {"misses": 1}


def test_packs_that_are_not_used(gpu: Driver, monkeypatch, caplog) -> None:
    """Unless they are asked for; with another Triton, of other sources, beside settings."""
    with monkeypatch.context() as patch:
        for value in ("", "0"):
            patch.setenv(lookup.VARIABLE, value)
            misses(caplog)
    assert not lookup.COUNTS
    lookup.forget()
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "3.8.7")
        misses(caplog, "needs Triton", "this is 3.8.7")
    lookup.forget()
    with monkeypatch.context() as patch:
        patch.setattr(specialize, "sources_digest", lambda: "0" * 64)
        misses(caplog, "it is of another version of elsa")
    lookup.forget()
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    misses(caplog, "kernel packs are not used: PTXAS_OPTIONS is set")


def test_a_damaged_kernel_is_a_miss_in_one_line(gpu: Driver, packs: Path, tmp_path, monkeypatch,
                                                caplog) -> None:  # fmt: skip
    data = tmp_path / "sm_90" / store.NAME
    data.parent.mkdir()
    content = bytearray((packs / "sm_90" / store.NAME).read_bytes())
    content[-len(content) // 4] ^= 1
    data.write_bytes(content)
    monkeypatch.setenv(lookup.VARIABLE, str(tmp_path))
    misses(caplog, "is damaged")
    assert "\n" not in caplog.messages[0] and not gpu.loaded


@pytest.mark.parametrize("wrong", ["keyword", "no name"])
def test_metadata_of_no_kernel_is_a_miss(
    gpu: Driver, packs: Path, tmp_path, monkeypatch, caplog, wrong
) -> None:
    """The first call raised: names were checked to be proper, not to be a kernel's."""
    pack = store.read(packs / "sm_90")
    kernels = {}
    for key, entry in pack.entries.items():
        metadata = {**entry.metadata, "class": 1} if wrong == "keyword" else {}
        kernels[key] = metadata, pack.cubin(entry)
    header = {"arch": 90, "triton": pack.triton, "elsa": "0", "sources": pack.sources}
    store.write(tmp_path / "sm_90", header, kernels)
    monkeypatch.setenv(lookup.VARIABLE, str(tmp_path))
    misses(caplog, "is not used")
    assert not gpu.loaded


def test_a_driver_that_refuses_is_a_miss(gpu: Driver, caplog) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    gpu.utils.load_binary = refuse
    misses(caplog, "image is invalid")


def test_what_doctor_and_explain_say(packs: Path, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(lookup.VARIABLE, raising=False)
    assert lookup.summary(90) == ""
    own = tmp_path / "cache" / "packs"
    own.mkdir(parents=True)
    (own / "sm_90").symlink_to(packs / "sm_90")
    (own / "sm_80").symlink_to(packs / "sm_90")
    foreign, found = lookup.shipped()
    assert (foreign.arch, foreign.kernels, foreign.reason) == (80, 1, "it is for sm_90")
    assert (found.arch, found.kernels, found.reason) == (90, 1, "")
    said = f"kernel pack sm_90 (1 kernels, Triton {triton.__version__})"
    assert lookup.summary(90) == said and lookup.summary(89) == ""
    assert lookup.summary(80).endswith("is not used: it is for sm_90")
    assert [pack.arch for pack in lookup.packs_for(90)] == [90] and not lookup.packs_for(89)
    with caplog.at_level(logging.WARNING, "elsa"):
        assert not lookup.packs_for(80) and "it is for sm_90" in caplog.text
    monkeypatch.setenv(lookup.VARIABLE, "0")
    assert lookup.summary(90) == f"{said} is not used: ELSA_PACK is 0"
    monkeypatch.setenv(lookup.VARIABLE, "1")
    assert lookup.summary(90) == said
    assert lookup.summary(89) == "no kernel pack is here: Triton compiles"
    monkeypatch.setattr(triton, "__version__", "3.8.7")
    assert "this is 3.8.7" in lookup.summary(90)
