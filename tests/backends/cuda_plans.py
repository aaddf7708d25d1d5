"""The CUDA library over a stub driver, with kernels that no compiler made; run by
`test_cuda_library.py`.
"""

import ctypes
import logging
import os
import random
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from cuda_checks import LOG, lines
from torch import Tensor

from elsa_core import ops
from elsa_core.backends import cuda
from elsa_core.backends.cuda import calls, library, planfile, record
from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer, Zero, write
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.errors import ArgumentError, UnavailableError

CODE = b"scale;8,8,4,8,8\0"


def compiled(**facts: Any) -> Any:
    """What Triton's compiler returns, of a kernel scale(X, Out, n, BLOCK)."""
    metadata = SimpleNamespace(
        **{"name": "scale", "num_warps": 4, "num_ctas": 1, "shared": 0, **facts}
    )
    signature = {"X": "*fp32", "Out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return SimpleNamespace(
        metadata=metadata, hash=repr(sorted(facts.items())), asm={"cubin": CODE},
        src=SimpleNamespace(signature=signature),
    )  # fmt: skip


@dataclass
class Launched:
    """A launch as `record` hears of it."""

    compiled: Any = field(default_factory=compiled)
    values: tuple[Any, ...] = (7, 64)
    grid: tuple[int, int, int] = (3, 2, 1)
    is_hooked: bool = False

    def hooked(self) -> bool:
        return self.is_hooked


class Kernels:
    """What computes `elsa::attention` in Python here; counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.launch = Launched()
        self.extra: Callable[[Tensor], Any] = lambda q: None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any) -> Any:
        self.count += 1
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        states = q.new_empty((5, 3))
        self.extra(q)
        record.heard(self.launch, (k, states))
        record.heard(self.launch, (states[1:], out))
        record.heard(self.launch, (v, lse))
        return out, lse


CALL = ops.ATTENTION.overload
KERNELS = Kernels()


def started(stub: str) -> library.Library:
    loaded = library.load()
    loaded.open_driver(stub)
    calls.serve(loaded, "attention", KERNELS, "CPU")
    return loaded


def operands(*shape: int, count: int = 3, **facts: Any) -> list[Tensor]:
    return [torch.empty(shape or (1, 2, 4, 8), **facts) for _ in range(count)]


def attend(*tensors: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    terms = given.get("causal", False), given.get("scale", 1.0), given.get("precision", "strict")
    result: tuple[Tensor, Tensor] = CALL(q, k, v, given.get("mask"), *terms)
    return result


def addresses(line: str) -> list[int]:
    words = line.partition("] ")[2].split()
    return [int.from_bytes(bytes.fromhex(word), "little") for word in words]


def failure(work: Callable[[], Any], kind: type[BaseException] = UnavailableError) -> str:
    """The one line of the error that `work` must raise."""
    try:
        work()
    except kind as error:
        text = str(error)
        assert text and "\n" not in text, text
        return text
    raise AssertionError("nothing was raised")


def serves(stub: str) -> None:
    """Arguments, workspace, the same tensor as two arguments, and memory set to zero."""
    loaded = started(stub)
    x = operands(count=1)[0]
    attend(x, x, x)
    loads = [line for line in lines() if line not in ("push 1", "pop")]
    assert loads == ["load scale;8,8,4,8,8"] and KERNELS.count == 1
    q, k, v = operands()
    out, lse = attend(q, k, v)
    assert KERNELS.count == 1 and loaded.counts() == (1, 1)
    log = lines()
    assert log[0] == "push 1" and log[-1] == "pop"
    first, second, third = map(addresses, log[1:-1])
    assert log[1].startswith("launch scale 3 2 1 128 1 1 0 7000 []")
    assert first == [k.data_ptr(), first[1], 7, 0, 0]
    assert second == [first[1] + 12, out.data_ptr(), 7, 0, 0]
    assert third == [v.data_ptr(), lse.data_ptr(), 7, 0, 0]
    KERNELS.launch = Launched(
        compiled(launch_pdl=True, launch_cooperative_grid=True, num_ctas=2, shared=100_000)
    )
    KERNELS.extra = lambda q: [q.new_zeros((2, 3)), torch.zeros_like(q).zero_()]
    attend(q, k, v, scale=2.0)
    assert "attribute 8 100000" in lines()
    attend(q, k, v, scale=2.0)
    log = lines()
    assert [line.split()[2:] for line in log if line.startswith("memset")] == [
        ["24", "7000"], ["256", "7000"], ["256", "7000"],
    ]  # fmt: skip
    attributes = "[6:010000000000000000000000 2:010000000000000000000000 "
    attributes += "4:020000000100000001000000 5:010000000000000000000000]"
    assert f"launch scale 6 2 1 128 1 1 100000 7000 {attributes}" in log[4], log


def keys(stub: str) -> None:
    """Whatever a plan may depend on tells layouts apart, and what it does not tells none."""
    loaded = started(stub)
    storage = torch.empty(4096)

    def at(offset: int, *strides: int) -> Tensor:
        return torch.as_strided(storage, (1, 2, 4, 8), strides or (64, 32, 8, 1), offset)

    q, k, v = at(0), at(64), at(128)
    mask = torch.ones((1, 1, 4, 4), dtype=torch.bool)
    different: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, v), {}),
        ((at(1), k, v), {}),
        ((q, at(65), v), {}),
        ((q, k, at(130)), {}),
        ((at(0, 64, 8, 16, 1), k, v), {}),
        ((q, at(64, 64, 8, 16, 1), v), {}),
        (tuple(operands(2, 1, 4, 8)), {}),
        (tuple(operands(1, 2, 8, 4)), {}),
        (tuple(operands(dtype=torch.float16)), {}),
        ((q, k, v), {"mask": mask}),
        ((q, k, v), {"mask": mask.float()}),
        ((q, k, v), {"mask": mask[:, :, :1]}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"scale": 2.0}),
        ((q, k, v), {"scale": -1.0}),
        ((q, k, v), {"precision": "turbo"}),
        ((q, k, v), {"precision": "strict and a longer name"}),
        ((q, k, v), {"precision": ""}),
    ]  # fmt: skip
    for number, (tensors, given) in enumerate(different, 1):
        for _ in range(2):
            attend(*tensors, **given)
        assert (KERNELS.count, loaded.counts()) == (number, (number, number)), (number, given)
    attend(at(4), at(128), at(256))  # other addresses, aligned alike
    attend(k, k, k, mask=mask.clone())
    assert KERNELS.count == len(different)
    other = compiled(shared=16)
    assert loaded.number(other) == loaded.number(other) and loaded.kernels[1].shared == 16
    PLANS.clear()
    assert loaded.counts()[0] == 0
    attend(q, k, v)
    assert KERNELS.count == len(different) + 1


def bounded(stub: str) -> None:
    """A loop over layouts without end does not grow memory."""
    loaded = started(stub)
    tensors, most = operands(1, 1, 1, 1), 0
    for number in range(4200):
        attend(*tensors, scale=float(number))
        most = max(most, loaded.counts()[0])
    assert most == 4096 and loaded.counts() == (4200 - 4096, 0) and KERNELS.count == 4200
    attend(*tensors, scale=4199.0)
    assert KERNELS.count == 4200


def threads(stub: str) -> None:
    """Eight threads at once, over layouts that each meets first."""
    loaded = started(stub)
    del os.environ[LOG]  # too many lines
    wrong: list[Any] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(200):
            heads = order.randrange(1, 9)
            out, lse = attend(*operands(1, heads, 4, 8))
            if out.shape != (1, heads, 4, 8) or lse.shape != (1, heads, 4):
                wrong.append((out.shape, lse.shape))
            if heads == 8:
                loaded.clear()

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong and sum((KERNELS.count, loaded.counts()[1])) == 1600
    assert loaded.counts()[1] > 100


def contexts(stub: str) -> None:
    """The primary context of the tensors' device is made current, and taken back."""
    loaded = started(stub)
    current = ctypes.CDLL(stub).stub_set_context
    tensors = operands()
    attend(*tensors)
    lines()
    current(1)  # the device's own
    attend(*tensors)
    assert not [line for line in lines() if line in ("push 1", "pop")]
    current(2)  # another device's
    attend(*tensors)
    assert [line for line in lines() if not line.startswith("launch")] == ["push 1", "pop"]
    current(1001)  # another one of the same device, with kernels of its own
    before = loaded.counts()[1]
    attend(*tensors)
    assert KERNELS.count == 2 and loaded.counts()[1] == before
    assert not [line for line in lines() if line.startswith("launch")]


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        logging.getLogger("elsa").setLevel(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("elsa").addHandler(self)

    def emit(self, entry: logging.LogRecord) -> None:
        self.lines.append(entry.getMessage())


def failures(stub: str) -> None:
    """Whatever the driver refuses is one line; while a plan is made, Python goes on."""
    loaded, heard, tensors = started(stub), Warnings(), operands()
    for number, name in enumerate(("cuModuleLoadData", "cuModuleGetFunction")):
        os.environ["STUB_FAIL"] = name
        attend(*tensors, scale=float(number))
        assert len(heard.lines) == number + 1, heard.lines
        expected = f"{name} of scale failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
        assert heard.lines[-1].endswith(expected) and "\n" not in heard.lines[-1]
        attend(*tensors, scale=float(number))
        assert KERNELS.count == 2 * number + 2 and loaded.counts()[1] == 0
    assert len(heard.lines) == 2
    assert "unload" in lines()
    del os.environ["STUB_FAIL"]
    attend(*tensors, scale=5.0)
    for name in ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent"):
        os.environ["STUB_FAIL"] = name
        text = failure(lambda: attend(*tensors, scale=5.0), RuntimeError)
        assert name in text and "CUDA_ERROR_OUT_OF_MEMORY (out of memory)" in text, text
    del os.environ["STUB_FAIL"]
    attend(*tensors, scale=5.0)
    assert loaded.counts()[1] == 1


def python(stub: str) -> None:
    """What stays in Python: errors of its own, hooks, graphs, PyTorch's operations."""
    loaded, tensors = started(stub), operands()

    def refuse(q: Tensor) -> None:
        raise ArgumentError("query is a stone")

    KERNELS.extra = refuse
    assert "query is a stone" in failure(lambda: attend(*tensors), RuntimeError)
    cuda._SERVED.add("attention")
    call = cuda.direct(CALL, KERNELS)
    direct = lambda: call(*tensors, None, False, 1.0, "strict")  # noqa: E731
    assert failure(direct, ArgumentError) == "query is a stone"

    def interrupt(q: Tensor) -> None:  # once: what is computed again would not meet it
        KERNELS.extra = refuse
        raise KeyboardInterrupt("enough")

    KERNELS.extra = interrupt
    failure(direct, KeyboardInterrupt)
    KERNELS.extra = interrupt
    assert "the call was interrupted" in failure(lambda: attend(*tensors), RuntimeError)
    assert loaded.counts() == (0, 0)
    KERNELS.extra, KERNELS.launch.is_hooked = (lambda q: None), True
    attend(*tensors)
    KERNELS.launch.is_hooked = False
    real = torch.cuda.is_available, torch.cuda.is_current_stream_capturing
    torch.cuda.is_available = torch.cuda.is_current_stream_capturing = lambda: True
    attend(*tensors)
    assert loaded.counts() == (0, 0)
    torch.cuda.is_available, torch.cuda.is_current_stream_capturing = real
    left: tuple[Callable[[Tensor], Any], ...] = (
        lambda q: q.add(1), lambda q: q.clone(), lambda q: q.new_zeros(4).add_(1),
        lambda q: record.heard(KERNELS.launch, (constant, q)),
        lambda q: record.heard(Launched(None), (q, q)),
        lambda q: record.heard(Launched(compiled(global_scratch_size=4)), (q, q)),
        lambda q: record.heard(Launched(values=(7,)), (q, q)),
        lambda q: record.heard(Launched(values=(1 << 40, 64)), (q, q)),
        lambda q: record.heard(Launched(values=(7.5, 64)), (q, q)),
        lambda q: record.heard(Launched(grid=(1 << 32, 1, 1)), (q, q)),
        lambda q: record.heard(KERNELS.launch, (q.as_strided((4,), (1,), 0), q)),  # ahead of q
    )  # fmt: skip
    constant = torch.empty(4)
    tensors[0] = torch.empty(16 + tensors[0].numel())[16:].view(tensors[0].shape)
    for number, extra in enumerate(left):
        KERNELS.extra, before = extra, KERNELS.count
        attend(*tensors, scale=float(number))
        attend(*tensors, scale=float(number))
        assert KERNELS.count == before + 2, number
    assert loaded.counts() == (len(left), 0)
    KERNELS.extra = left[-2]
    once = lambda: planfile.recorded(loaded, lambda: attend(*tensors))  # noqa: E731
    assert failure(once, UnavailableError).startswith("a call of elsa::attention is not by")


def driverless(stub: str) -> None:
    """Without a driver every call is Python's, and one line says why."""
    loaded, heard = library.load(), Warnings()
    calls.serve(loaded, "attention", KERNELS, "CPU")
    assert "no CUDA driver: " in failure(lambda: loaded.open_driver("/no/libcuda.so"))
    os.environ["STUB_FAIL"] = "cuInit"
    assert "does not start: out of memory" in failure(lambda: loaded.open_driver(stub))
    for _ in range(3):
        attend(*operands())
    assert KERNELS.count == 3 and loaded.counts()[1] == 0
    assert len(heard.lines) == 1 and "does not start" in heard.lines[0], heard.lines


def plan() -> Plan:
    outputs = (Output(6, (1, 2, 4, 8), (64, 32, 8, 1)), Output(5, (3,), (1,)))
    launch = Launch(0, (3, 2, 1), (Pointer(0), Pointer(2, 4), b"\1\0\0\0", Pointer(4, 512), b"\2"))
    return Plan(2, outputs, 1024, (launch, Zero(Pointer(3), 6), Zero(Pointer(4, 512), 512)))


def launched(stub: str) -> None:
    """A launch alone, without the dispatcher and Triton, on the current stream."""
    loaded, x = started(stub), torch.empty(3, 5)
    given = loaded, compiled(), (3, 2, 1), (7, 64), (x, x[1:])
    lines()
    assert calls._launched(*given)
    (line,) = (line for line in lines() if line.startswith("launch"))
    assert line.startswith("launch scale 3 2 1 128 1 1 0 7000 "), line
    assert addresses(line) == [x.data_ptr(), x[1:].data_ptr(), 7, 0, 0], line
    assert calls._launched(loaded, compiled(), (3, 0, 1), (7, 64), (x, x)), "nothing to do"
    assert not calls._launched(loaded, compiled(), (3, 2, 1), (7.5, 64), (x, x))
    assert not calls._launched(loaded, compiled(global_scratch_size=4), *given[2:])
    for wrong in (plan(), Plan(2, (), 64, ()), Plan(3, (), 0, ())):
        said = failure(lambda: loaded.launch(write(wrong), [4096, 8192], 0))  # noqa: B023
        assert "takes other tensors" in said or "kernel" in said, said
    os.environ["STUB_FAIL"] = "cuLaunchKernelEx"
    assert not calls._launched(*given)
    assert sum(line.startswith("launch") for line in lines()) == 1


def hostile(stub: str) -> None:
    """Bytes that are no plan are refused: none crashes, whatever they are."""
    loaded = library.load()
    loaded.open_driver(stub)
    loaded.add(Kernel("scale", CODE, 128))
    good, bytes_of = plan(), write(plan())
    loaded.check(bytes_of, 0)
    output, (launch, *_) = good.outputs[0], good.steps
    assert isinstance(launch, Launch)
    step = lambda *steps: replace(good, steps=steps)  # noqa: E731
    argued = lambda *arguments: step(replace(launch, arguments=arguments))  # noqa: E731
    out = lambda sizes, strides: replace(good, outputs=(Output(6, sizes, strides),))  # noqa: E731
    for bad, why in (
        (replace(good, inputs=33), "too many inputs"),
        (replace(good, outputs=(output,) * 17), "too many outputs"),
        (replace(good, outputs=(replace(output, dtype=9),)), "unknown dtype"),
        (replace(good, outputs=(replace(output, dtype=-1),)), "unknown dtype"),
        (out((1,) * 17, (1,) * 17), "too many dimensions"),
        (out((-1,), (1,)), "negative size or stride"),
        (out((2,), (-1,)), "negative size or stride"),
        (out((1 << 62, 4), (1, 1)), "too large"),
        (out((1 << 40, 1 << 40), (1 << 40, 1)), "too large"),
        (out((3,), (1 << 62,)), "too large"),
        (out((1 << 45,), (1,)), "too large"),
        (replace(good, workspace=1 << 50), "workspace is too large"),
        (step(*[launch] * 65), "too many steps"),
        (step(replace(launch, grid=(0, 1, 1))), "grid is empty"),
        (step(replace(launch, grid=(1, 65536, 1))), "grid is too large"),
        (step(replace(launch, kernel=1)), "kernel 1, which was not added"),
        (argued(*[b"\0"] * 257), "too many arguments"),
        (argued(b"\0" * 3), "size is unknown"),
        (argued(Pointer(5)), "unknown slot"),
        (argued(Pointer(2, 257)), "leaves its memory"),
        (argued(Pointer(4, 1025)), "leaves its memory"),
        (argued(Pointer(0, 1 << 50)), "leaves its memory"),
        (step(Zero(Pointer(0), 4)), "an input is to be zeroed"),
        (step(Zero(Pointer(3), 7)), "leaves its memory"),
        (step(Zero(Pointer(4, 1), 1024)), "leaves its memory"),
        (step(Zero(Pointer(4), 0)), "nothing is to be zeroed"),
    ):  # fmt: skip
        text = failure(lambda given=bad: loaded.check(write(given), 0))  # type: ignore[misc]
        assert why in text, (why, text)
    assert "begin otherwise" in failure(lambda: loaded.check(b"\0" * 64, 0))
    other = struct.pack("<2I", 0x4E4C5045, 2) + bytes_of[8:]
    assert "another version" in failure(lambda: loaded.check(other, 0))
    assert "follow its end" in failure(lambda: loaded.check(bytes_of + b"\0", 0))
    for length in range(len(bytes_of)):
        assert "end too soon" in failure(lambda n=length: loaded.check(bytes_of[:n], 0))  # type: ignore[misc]
    order, refused = random.Random(0), 0
    for _ in range(6000):
        given = bytearray(bytes_of)
        for _ in range(order.randrange(1, 4)):
            given[order.randrange(len(given))] = order.choice(
                (0, 1, 127, 255, order.randrange(256))
            )
        try:
            loaded.check(bytes(given), 0)
        except UnavailableError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 2000


CHECKS = (serves, keys, bounded, threads, contexts, failures, python, driverless, launched, hostile)
