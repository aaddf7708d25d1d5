"""The CUDA library over a stub driver, run by `test_cuda_library.py`.

Tensors lie on the CPU, whose addresses the stub takes for a device's. Triton's compiler makes the
kernels for sm_90; nothing is run, so results are memory that nobody wrote.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from cuda_checks import lines
from torch import Tensor
from triton_compile import compiled_as

from elsa_core import dispatch, ops
from elsa_core.backends import cuda
from elsa_core.backends.cuda import calls, library
from elsa_core.backends.cuda.plan import Kernel
from elsa_core.backends.support import Backend
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.dispatch import table

STREAM = 7000
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
         torch.int64: "i64", torch.uint8: "u8"}  # fmt: skip
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@dataclass
class Made:
    """A launch that Python made: what it was given."""

    launch: Launch
    pointers: tuple[Tensor, ...]


MADE: list[Made] = []


def compiled_for(launch: Launch, pointers: tuple[Tensor, ...], arch: int = 90) -> Any:
    """The kernel that Triton's JIT would compile for these tensors, of a GPU that is not here."""
    given = iter(pointers)

    def pointer(_: str) -> tuple[str, bool]:
        tensor = next(given)
        return TYPES[tensor.dtype], tensor.data_ptr() % 16 == 0

    made = compiled_as(launch, pointer, ("cuda", arch, 32))
    assert next(given, None) is None
    return made


def _launch(self: Launch, *pointers: Tensor) -> None:
    """In place of `Launch.__call__`: compiles, and runs nothing."""
    if self.compiled is None:
        self.compiled = compiled_for(self, pointers)
    MADE.append(Made(self, pointers))


def as_stub(kernel: Kernel, compiled: Any) -> Kernel:
    """The kernel with code that the stub driver reads: its name and the bytes of its parameters."""
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    sizes = [ctypes.sizeof(SCALARS[kind]) if kind in SCALARS else 8 for kind in kinds]
    text = ",".join(map(str, (*sizes, 8, 8)))  # two scratch buffers
    return replace(kernel, code=f"{kernel.symbol};{text}".encode() + b"\0")


def started(stub: str, overlap: bool = False) -> library.Library:
    """The library with the stub driver, serving all operators on the CPU."""
    from elsa_core.backends.cuda import plan

    plain = plan.kernel_of
    library.kernel_of = lambda compiled: as_stub(plain(compiled), compiled)
    Launch.__call__ = _launch
    if overlap:
        device.overlaps = lambda where: True
        device.specializes = lambda where: True
    loaded = library.load()
    loaded.open_driver(stub)
    for operator in table.BY_LIBRARY:
        calls.serve(loaded, operator, table.KERNELS_ON_CUDA[operator], "CPU")
    return loaded


def expected(made: Made, address: Callable[[Tensor], int]) -> Iterator[str]:
    """The arguments that Triton's launcher would pass, from the compiled kernel's signature."""
    pointers = iter(made.pointers)
    for name, kind in made.launch.compiled.src.signature.items():
        if kind.startswith("*"):
            yield address(next(pointers)).to_bytes(8, "little").hex()
        elif kind != "constexpr":
            yield bytes(SCALARS[kind](made.launch.tail[name])).hex()
    yield from ("00" * 8, "00" * 8)  # two scratch buffers, of which there are none


def check_launch(line: str, made: Made, address: Callable[[Tensor], int]) -> None:
    """One line of the stub's log against the launch that Python made."""
    facts = made.launch.compiled.metadata
    grid = " ".join(map(str, made.launch.grid))
    pdl = "6:010000000000000000000000" if facts.launch_pdl else ""
    head = f"launch {facts.name} {grid} {32 * facts.num_warps} 1 1 {facts.shared} {STREAM} [{pdl}]"
    assert line == " ".join([head, *expected(made, address)]), line


def compare(loaded: library.Library, call: Callable[..., Any], first: Any, second: Any) -> int:
    """Calls twice, with tensors of one layout in other memory: the second one's launches must be
    those of the first, with its own addresses. Returns their number."""
    MADE.clear()
    flat = lambda given: [t for t in given if isinstance(t, Tensor)]  # noqa: E731
    before = loaded.counts()[1]
    results = call(*first)
    results = results if isinstance(results, tuple) else (results,)
    made = list(MADE)
    lines()
    again = call(*second)
    again = again if isinstance(again, tuple) else (again,)
    assert len(MADE) == len(made), "the second call was planned in Python again"
    assert loaded.counts()[1] == before + 1
    for a, b in zip(results, again, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    known = {a.data_ptr(): b.data_ptr() for a, b in zip(flat(first), flat(second), strict=True)}
    known |= {a.data_ptr(): b.data_ptr() for a, b in zip(results, again, strict=True) if a.numel()}
    log = [line for line in lines() if line.startswith("launch")]
    assert len(log) == len(made), log
    workspace: dict[int, tuple[int, int]] = {}
    for line, each in zip(log, made, strict=True):
        words = iter(line.partition("] ")[2].split())
        kinds = [k for k in each.launch.compiled.src.signature.values() if k != "constexpr"]
        given = [word for word, kind in zip(words, kinds, strict=False) if kind.startswith("*")]
        for tensor, word in zip(each.pointers, given, strict=True):
            if tensor.data_ptr() in known:
                continue
            where = int.from_bytes(bytes.fromhex(word), "little")
            kept = workspace.setdefault(tensor.data_ptr(), (where, 0))
            assert kept[0] == where and where % 16 == 0
            size = max(kept[1], tensor.numel() * tensor.element_size())
            workspace[tensor.data_ptr()] = (where, size)
        check_launch(line, each, lambda t: known.get(t.data_ptr()) or workspace[t.data_ptr()][0])
    parts = sorted(workspace.values())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(parts)), parts
    return len(made)


def attention_inputs(
    shape: tuple[int, ...], keys: int | None = None, dtype: torch.dtype = torch.float32,
    mask: str = "", layout: str = "bhnd", **given: Any,
) -> list[Any]:  # fmt: skip
    b, h, n, d = shape
    h_kv = given.get("heads", h)

    def operand(heads: int, length: int) -> Tensor:
        if layout == "bnhd":
            return torch.empty((b, length, heads, d), dtype=dtype).transpose(1, 2)
        return torch.empty((b, heads, length, d), dtype=dtype)

    q, k, v = operand(h, n), operand(h_kv, keys or n), operand(h_kv, keys or n)
    bias = None
    if mask == "bool":
        bias = torch.ones((1, 1, n, keys or n), dtype=torch.bool)
    elif mask == "additive":
        bias = torch.zeros((b, 1, 1, keys or n), dtype=torch.float32)
    terms = (
        given.get("causal", False),
        given.get("scale", d**-0.5),
        given.get("precision", "strict"),
    )
    return [q, k, v, bias, *terms]


def attention(stub: str) -> None:
    """Every schedule of the forward without those of sm_90 alone."""
    loaded, call = started(stub), ops.ATTENTION.overload
    half, single = torch.float16, torch.float32
    for counts, given in (
        (1, {"shape": (2, 3, 77, 64), "dtype": half}),
        (1, {"shape": (1, 2, 50, 64), "dtype": half, "mask": "bool", "layout": "bnhd"}),
        (1, {"shape": (1, 2, 50, 64), "dtype": half, "mask": "additive", "scale": -0.5}),
        (1, {"shape": (1, 4, 33, 40), "dtype": half, "heads": 2, "causal": True}),
        (2, {"shape": (1, 2, 1, 64), "keys": 5000, "dtype": half}),
        (2, {"shape": (1, 3, 197, 64), "dtype": single}),
    ):
        inputs = attention_inputs(**given), attention_inputs(**given)
        assert compare(loaded, call, *inputs) == counts, given
    layouts, served = loaded.counts()
    assert (layouts, served) == (6, 6)


def hopper(stub: str) -> None:
    """The schedules of sm_90: one launch, keys split ahead with dependent launches."""
    loaded, call = started(stub, overlap=True), ops.ATTENTION.overload
    counts = [
        compare(loaded, call, attention_inputs(shape), attention_inputs(shape))
        for shape in ((1, 3, 50, 64), (1, 4, 1025, 64))
    ]
    assert counts[0] == 1 and counts[1] >= 3, counts


def window_inputs(dtype: torch.dtype, side: int = 14, window: int = 7, **given: Any) -> list[Any]:
    heads, dim = 3, 32
    tokens = window * window
    qkv = torch.empty((2, 1, side, side, 3 * heads * dim), dtype=dtype)
    bias = index = pad = logit = None
    if given.get("table"):
        bias = torch.empty(((2 * window - 1) ** 2, heads), dtype=dtype)
        index = torch.zeros((tokens, tokens), dtype=torch.int64)
    elif given.get("bias"):
        bias = torch.empty((heads, tokens, tokens), dtype=dtype)
    if given.get("pad"):
        pad = torch.empty(3 * heads * dim, dtype=given.get("pad_dtype", dtype))
    if given.get("logit"):
        logit = torch.empty(heads, dtype=torch.float32)
    shift = given.get("shift", 0)
    return [qkv, bias, index, pad, logit, heads, [1, window, window], [0, shift, shift],
            dim**-0.5, -100.0, "qkv", False, "strict"]  # fmt: skip


def window(stub: str) -> None:
    """Window attention: with a dense bias, a table that is gathered first, shift and padding."""
    loaded, call = started(stub), ops.WINDOW_ATTENTION.overload
    half, single = torch.float16, torch.float32
    for count, given in (
        (1, {"dtype": half, "bias": True, "shift": 3}),
        (2, {"dtype": half, "table": True}),
        (1, {"dtype": single, "side": 13, "pad": True, "logit": True}),
    ):
        inputs = window_inputs(**given), window_inputs(**given)
        assert compare(loaded, call, *inputs) == count, given
    # a pad that PyTorch converts first: every call is Python's
    inputs = window_inputs(half, side=13, pad=True, pad_dtype=single)
    before = loaded.counts()
    for _ in range(2):
        MADE.clear()
        assert call(*inputs).shape == (2, 1, 13, 13, 96) and len(MADE) == 1
    assert loaded.counts() == (before[0] + 1, before[1])


def linear_inputs(rows: int = 128, **given: Any) -> list[Any]:
    columns, depth = 96, 64
    return [
        torch.empty((2, rows // 2, depth)), torch.empty((columns, depth)), torch.empty(columns),
        given.get("activation", "none"),
        torch.empty((2, rows // 2, columns)) if given.get("residual") else None, None,
        given.get("precision", "strict"),
    ]  # fmt: skip


def linear(stub: str) -> None:
    """Linear layers: operands split in a launch ahead."""
    loaded, call = started(stub), ops.LINEAR.overload
    for given in ({}, {"activation": "gelu", "residual": True}):
        assert compare(loaded, call, linear_inputs(**given), linear_inputs(**given)) == 2, given
    # a plan is kept by layout alone: not beyond a change of backends
    cuda._SERVED.add("linear")
    call(*linear_inputs())
    assert loaded.counts()[0]
    dispatch.register(Backend("guest", "cpu", {}))
    assert not loaded.counts()[0]
    call(*linear_inputs())
    assert loaded.counts()[0]
    dispatch.unregister("guest")
    assert not loaded.counts()[0]
    x = linear_inputs(8)
    for tensor in x[:3]:
        tensor.normal_()
    before = loaded.counts()
    for _ in range(2):
        torch.testing.assert_close(call(*x), torch.nn.functional.linear(*x[:3]))
    assert loaded.counts() == (before[0] + 1, before[1])


def gradients(stub: str) -> None:
    """The backward operators: attention in half precision, windows with a dense bias, and linear
    layers, whose bias is summed beside them.
    """
    from elsa_core.backends.triton.attention.backward import attention_backward
    from elsa_core.backends.triton.linear import gate
    from elsa_core.backends.triton.window.backward import window_attention_backward

    loaded = started(stub)
    calls.serve(loaded, "attention_backward", attention_backward, "CPU")
    calls.serve(loaded, "window_attention_backward", window_attention_backward, "CPU")

    def inputs() -> list[Any]:
        q, k, v, mask, *terms = attention_inputs((1, 2, 50, 32), dtype=torch.float16)
        lse = torch.empty(1, 2, 50)
        out = torch.empty_like(q)
        rest = lse.clone(), q, k, v, mask, out, lse, *terms, [True, True, True, False]
        return [torch.empty_like(q), *rest]

    def window_terms() -> list[Any]:
        terms = window_inputs(torch.float16, bias=True)
        return [torch.empty(2, 1, 14, 14, 96, dtype=torch.float16), *terms,
                [True, True, False, False]]  # fmt: skip

    backward = torch.ops.elsa.attention_backward.default
    assert compare(loaded, backward, inputs(), inputs()) == 4
    backward = torch.ops.elsa.window_attention_backward.default
    assert compare(loaded, backward, window_terms(), window_terms()) == 2

    def linear_terms(*needs: bool, rows: int = 256) -> list[Any]:
        depth, columns = 256, 512
        return [torch.empty(2, rows // 2, columns), torch.empty(2, rows // 2, depth),
                torch.empty(columns, depth), "strict", [*needs, False]]  # fmt: skip

    gate._serves = lambda *given: True
    backward = torch.ops.elsa.linear_backward.default
    for needs, launches in (((True, True), 9), ((True, False), 4), ((False, True), 5)):
        found = compare(loaded, backward, linear_terms(*needs), linear_terms(*needs))
        assert found == launches, (needs, found)
    # a sum over many tokens is cut into parts, which the last launch joins
    found = compare(
        loaded, backward, linear_terms(False, True, rows=2048),
        linear_terms(False, True, rows=2048),
    )  # fmt: skip
    assert found == 6, found


CHECKS = (attention, hopper, window, linear, gradients)
