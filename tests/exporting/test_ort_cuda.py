"""The library for ONNX Runtime's CUDA provider without a GPU: over a driver that writes down its
calls, and a runtime that this package's tests play; and in a real CPU session."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_ort import OUT, STREAM
from layouts import layout
from onnx_files import one_node
from processes import environment, python
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core  # noqa: F401  (defines the operators)
from elsa_core.backends.cuda import planfile
from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer
from elsa_core.backends.cuda.plan import write as plan_bytes
from elsa_core.backends.cuda.record import DTYPES
from elsa_core.errors import ExportError, UnavailableError
from elsa_core.exporting import artefacts, gpu_library, ort_library
from elsa_core.exporting.bundle import Bundle
from elsa_core.exporting.description import readme
from elsa_core.exporting.templates import load as template
from elsa_core.loading.loader import Loaded

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

HERE = Path(__file__).parent
FLOAT, BOOL, HALF = 1, 9, 10
WORKSPACE = 100
# As long as the longest that an export writes.
SERVED = f"this bundle serves batches of {', '.join(map(str, range(1, 65)))} on " + ", ".join(
    f"sm_{arch}" for arch in range(70, 122)
)
HEADS: dict[str, Any] = {"is_causal": 0, "scale": 0.25}
PACKED: dict[str, Any] = {"num_heads": 3, "is_causal": 1, "scale": 0.3}
WINDOW: dict[str, Any] = {
    "num_heads": 2, "window_size": [1, 2, 3], "shift_size": [0, 1, 0], "scale": 0.5,
    "mask_value": -100.0, "layout": "head", "grid": 0,
}  # fmt: skip
IMAGE = ("batch", 1, 4, 6, 3 * 2 * 8)
# op_type, attributes, (type, sizes) of each input (None: left out), sizes of the output
NODES: dict[str, tuple[str, dict[str, Any], list[Any], tuple[int, ...]]] = {
    "heads": (
        "Attention", HEADS, [(FLOAT, ("batch", 3, n, d)) for n, d in ((5, 16), (7, 16), (7, 8))],
        (2, 3, 5, 8),
    ),
    "one head": ("Attention_2", HEADS, [(HALF, ("batch", 1, 5, 16))] * 3, (2, 1, 5, 16)),
    "one mask for all": (
        "Attention", HEADS, [(FLOAT, ("batch", 3, 5, 16))] * 3 + [(BOOL, (5, 5))], (2, 3, 5, 16),
    ),
    "a mask for each": (
        "Attention", HEADS, [(FLOAT, ("batch", 3, 5, 16))] * 3 + [(FLOAT, ("batch", 3, 1, 5))],
        (2, 3, 5, 16),
    ),
    "a mask of one element": (
        "Attention", HEADS, [(FLOAT, ("batch", 1, 1, 16))] * 3 + [(BOOL, (1,))], (2, 1, 1, 16),
    ),
    "packed": ("PackedAttention", PACKED, [(FLOAT, ("batch", 5, 144))], (2, 5, 48)),
    "packed, one head": (
        "PackedAttention_3", {**PACKED, "num_heads": 1}, [(HALF, ("batch", 5, 48))], (2, 5, 16),
    ),
    "packed, masked": (
        "PackedAttention", PACKED, [(FLOAT, ("batch", 5, 144)), (BOOL, ("batch", 1, 5, 5))],
        (2, 5, 48),
    ),
    "windows": (
        "WindowAttention", WINDOW,
        [(FLOAT, IMAGE), (FLOAT, (2, 6, 6)), (FLOAT, (48,)), (FLOAT, (2,))], (2, 1, 4, 6, 16),
    ),
    "windows alone": ("WindowAttention", WINDOW, [(HALF, IMAGE)], (2, 1, 4, 6, 16)),
}  # fmt: skip


def model(folder: Path, op_type: str, terms: dict[str, Any], inputs: list[Any]) -> Path:
    """A file of one node."""
    (folder / "model.onnx").write_bytes(one_node(op_type, inputs, **terms))
    return folder / "model.onnx"


def plans(calls: list[Any]) -> bytes:
    """A file of plans in which each call is one launch that is given every address."""
    layouts = []
    for call in calls:
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        outputs = tuple(Output(DTYPES[t.dtype], tuple(t.shape), tuple(t.stride())) for t in results)
        tensors = sum(str(a.type) in _TENSORS for a in call.func._schema.arguments)
        slots = tensors + len(outputs) + 1
        launch = Launch(7, (1, 1, 1), tuple(Pointer(slot) for slot in range(slots)))
        words = layout(*call.args)
        plan = plan_bytes(Plan(tensors, outputs, WORKSPACE, (launch,)))
        layouts.append((call.func._schema.name, words, plan))
    sizes = ",".join("8" * slots)
    kernel = Kernel("scale", f"scale;{sizes}\0".encode(), 128)
    found = gpu_library.without_precision(planfile.Recorded(tuple(layouts), {7: kernel}), "strict")
    return planfile.write({90: found}, SERVED)


_TENSORS = ("Tensor", "Optional[Tensor]")


@dataclasses.dataclass
class NodeBundle:
    """lib/ of a bundle whose model is one node."""

    folder: Path
    driver: str

    @property
    def library(self) -> Path:
        return self.folder / "lib" / "libelsa_onnxruntime.so"

    @property
    def plans(self) -> Path:
        return self.folder / gpu_library.PLANS

    def ask(
        self, *calls: Any, version: int = 18, device: int = 0, stream: int = STREAM,
        out: int = OUT, memory: bool = True, **variables: str,
    ) -> dict[str, Any]:  # fmt: skip
        """What the played runtime answers, see `fake_ort.main`."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        asked = {
            "path": str(self.library), "version": version, "device": device, "stream": stream,
            "out": out, "memory": memory, "calls": calls,
        }  # fmt: skip
        own = {"STUB_LOG": str(log), "LD_LIBRARY_PATH": self.driver}
        env = environment(**own | variables)
        done = python(HERE / "fake_ort.py", input=json.dumps(asked), env=env)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


Make = Callable[..., NodeBundle]


@pytest.fixture
def make(tmp_path: Path, driver: str, gpu_onnx_library: Path) -> Make:
    def made(name: str = "packed") -> NodeBundle:
        op_type, terms, inputs, _ = NODES[name]
        path = model(tmp_path, op_type, terms, inputs)
        bundle = NodeBundle(tmp_path, driver)
        bundle.plans.parent.mkdir()
        calls = gpu_library.of_nodes(path, 2, "strict", torch.device("meta"))
        bundle.plans.write_bytes(plans(list(calls)))
        shutil.copyfile(gpu_onnx_library, bundle.library)
        return bundle

    return made


def call(name: str, rows: int = 2) -> list[Any]:
    """A call of a node, with the addresses 0x10000, 0x20000, ..."""
    op_type, terms, inputs, _ = NODES[name]
    given = [
        None if each is None else [
            each[0], [rows if n == "batch" else n for n in each[1]], (i + 1) << 16,
        ]
        for i, each in enumerate(inputs)
    ]  # fmt: skip
    return [op_type, given, terms]


def launches(answer: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """The stream and the addresses of each launch."""
    found = []
    for line in answer["log"]:
        if line.startswith("launch scale 1 1 1 128 1 1 0 "):
            stream, _, *pointers = line.split()[9:]
            addresses = [int.from_bytes(bytes.fromhex(p), "little") for p in pointers]
            found.append((int(stream), addresses))
    return found


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_launched_on_the_sessions_stream(name: str, make: Make) -> None:
    """Twice: its module is loaded once. Inputs, result and scratch are the runtime's memory; lse
    and workspace are parts of one block, which goes back to the provider's allocator."""
    op_type, _, inputs, sizes = NODES[name]
    answer = make(name).ask(call(name), call(name))
    assert answer["answers"] == [{"sizes": list(sizes), "error": ""}] * 2
    assert sum(line.startswith("load scale") for line in answer["log"]) == 1
    for number, (stream, pointers) in enumerate(launches(answer)):
        block = answer["scratch"][number][0]
        first = 0x10000
        if "Packed" in op_type:
            width = inputs[0][1][2] // 3 * (2 if inputs[0][0] == HALF else 4)
            given = [first, first + width, first + 2 * width, 0x20000 if inputs[1:] else 0]
        elif "Window" in op_type:
            rest = [(i + 2) << 16 if inputs[1:] else 0 for i in range(3)]
            given = [first, rest[0], 0, *rest[1:]]
        else:
            given = [first, 0x20000, 0x30000, 0x40000 if inputs[3:] else 0]
        parts = [block] if "Window" in op_type else [block, block + 512]
        assert (stream, pointers) == (STREAM, [*given, OUT, *parts])
    assert len(launches(answer)) == 2
    needed = WORKSPACE + (0 if "Window" in op_type else 512)
    assert [size >= needed for _, size in answer["scratch"]] == [True] * 2
    assert answer["freed"] == [at for at, _ in answer["scratch"]] and answer["alive"] == 0


@dataclasses.dataclass
class Fault:
    """A call that must end as one error, with nothing launched."""

    said: str
    rows: int = 2
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)
    how: dict[str, Any] = dataclasses.field(default_factory=dict)


FAULTS = {
    "another batch": Fault(
        "elsa::PackedAttention of [3, 3, 5, 16], [3, 3, 5, 16], [3, 3, 5, 16] on sm_90: "
        "elsa::attention: no kernel is here", rows=3,
    ),
    "what is served": Fault(SERVED, rows=3),
    "another scale": Fault("no kernel is here", terms={"scale": 0.5}),
    "not causal": Fault("no kernel is here", terms={"is_causal": 0}),
    "other heads": Fault("no kernel is here", terms={"num_heads": 6}),
    "another GPU": Fault(  # the stub's device 1
        "the kernels are for sm_90, and the GPU here is sm_91", how={"device": 1}
    ),
    "no stream": Fault(
        "elsa::PackedAttention: the session has no CUDA stream", how={"stream": 0}
    ),
    # a caller binds a result wherever it likes; kernels store 16 bytes at once
    "a result that is not aligned": Fault(
        "elsa::PackedAttention: the address of the result is no multiple of 16",
        how={"out": OUT + 4},
    ),
    "no memory": Fault(
        "elsa::PackedAttention: no memory for 1024 bytes of scratch", how={"memory": False}
    ),
    "no launch": Fault("out of memory", how={"STUB_FAIL": "cuLaunchKernelEx"}),
    "no module": Fault("out of memory", how={"STUB_FAIL": "cuModuleLoadData"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_served_is_one_error(name: str, make: Make) -> None:
    fault = FAULTS[name]
    op_type, given, terms = call("packed", fault.rows)
    answer = make().ask([op_type, given, {**terms, **fault.terms}], **fault.how)
    error = answer["answers"][0]["error"]
    assert fault.said in error and "\n" not in error
    assert name == "no launch" or not launches(answer)
    held = answer["scratch"] if fault.how.get("memory", True) else []
    assert answer["freed"] == [at for at, _ in held] and answer["alive"] == 0


def test_changed_plans_are_refused_when_a_kernel_is_made(make: Make) -> None:
    made = make()
    content = bytearray(made.plans.read_bytes())
    content[40] ^= 1
    made.plans.write_bytes(content)
    answer = made.ask(call("packed"))
    assert answer["answers"][0]["error"].endswith("its CRC-32 is another: it was changed")
    assert not answer["log"]


def test_where_the_operators_are_registered(make: Make) -> None:
    """For the CUDA provider: where there are plans, and the runtime orders memory by streams."""
    made = make()
    answer = made.ask()
    assert answer["cuda"] == answer["cpu"] and len(answer["cpu"]) == 12
    assert made.ask(version=17)["cuda"] == []
    made.plans.unlink()
    assert made.ask()["cuda"] == []


GROUPED = ("Attention", HEADS, [(FLOAT, (2, 6, 5, 16)), *[(FLOAT, (2, 3, 5, 16))] * 2])
PER_IMAGE = ("Attention", HEADS, [(FLOAT, (2, 3, 5, 16))] * 3 + [(BOOL, (2, 1, 5, 5))])


@pytest.mark.parametrize("node", [GROUPED, PER_IMAGE], ids=["grouped heads", "a mask per image"])
def test_nodes_without_kernels_are_refused(node: Any, make: Make, tmp_path: Path) -> None:
    """By the export, and by the library."""
    op_type, terms, inputs = node
    path = model(tmp_path, op_type, terms, inputs)
    with pytest.raises(ExportError, match="leave onnx out"):
        list(gpu_library.of_nodes(path, 2, "strict", torch.device("cpu")))
    given = [[kind, sizes, (i + 1) << 16] for i, (kind, sizes) in enumerate(inputs)]
    answer = make().ask([op_type, given, terms])
    assert "on a GPU there must be as many key heads" in answer["answers"][0]["error"]
    assert not launches(answer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a CUDA driver is meant")
def test_without_a_driver_a_cpu_session_runs(make: Make) -> None:
    """The same bits as by the library for CPUs; the operators of CUDA say what is missing."""
    made = make()
    answer = made.ask(call("packed"), LD_LIBRARY_PATH="")
    assert "no CUDA driver" in answer["answers"][0]["error"]
    qkv = np.random.default_rng(0).standard_normal((2, 5, 144), np.float32)
    outputs = []
    for library in (made.library, ort_library.build()):
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        path = str(made.folder / "model.onnx")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"input_0": qkv})[0])
    assert np.isfinite(outputs[0]).all() and np.array_equal(*outputs)


class Calls(TorchDispatchMode):
    """The layouts of the calls of `elsa::attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[bytes] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.elsa.attention.default:
            self.layouts.append(layout(*args[:5], float(np.float32(args[5])), *args[6:]))
        return func(*args, **(kwargs or {}))


def test_a_models_nodes_make_the_models_calls(bundle: Bundle, vit: Loaded) -> None:
    """Of the same layouts, so that the kernels of one are those of the other."""
    path = bundle.path / "model.onnx"
    nodes = list(gpu_library.of_nodes(path, 2, "strict", torch.device("meta")))
    with torch.no_grad(), Calls() as calls:
        vit.model(*vit.example_inputs(2))
    assert len(nodes) == 2 and [layout(*each.args) for each in nodes] == calls.layouts


@pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="the provider is here"
)
def test_without_the_provider_nothing_is_exported_and_loading_says_so(bundle: Bundle) -> None:
    """What is not run is not written, and no CPU serves in the provider's place."""
    artefacts.require_onnx("cpu")
    with pytest.raises(UnavailableError, match="its CUDAExecutionProvider: pip install"):
        artefacts.require_onnx("cuda")
    with pytest.raises(ImportError, match="no CUDAExecutionProvider: pip install onnxruntime-gpu"):
        template.load("onnx", bundle.path, device="cuda")
    images = np.zeros((1, 3, 64, 64), np.float32)
    assert template.load("onnx", bundle.path, device="cpu")(images)[0].shape[0] == 1


def test_the_readme_of_a_bundle_with_plans(bundle: Bundle) -> None:
    """It gave C++ a library alone, which serves nothing, and batches of any size."""
    lib = {"cuda": [gpu_library.LIBRARY, gpu_library.PLANS], "torch": [],
           "onnxruntime": ["lib/libelsa_onnxruntime.so"]}  # fmt: skip
    kernels = {"isa": [], "platform": "here", "gpu_archs": ["sm_90"], "gpus": {"sm_90": "a GPU"},
               "gpu_archs_verified": ["sm_90"]}  # fmt: skip
    text = readme(bundle.manifest | {
        "model": bundle.manifest["model"] | {"device": "cuda"}, "artefacts_libraries": lib,
        "libraries": {gpu_library.LIBRARY: kernels},
    })  # fmt: skip
    assert f'dlopen("{gpu_library.LIBRARY}"' in text and "elsa_cuda_serve_file(bytes" in text
    assert "lib/ serve batches of 1, 2, 3 alone" in text and "may have any size" not in text
    assert "onnxruntime-gpu>=" in text and "load.py --device cpu" in text
    plain = readme(bundle.manifest)
    assert "may have any size" in plain and "elsa_cuda_serve_file" not in plain
