"""`python -m tests.fuzz.sizes --cases N [--seed S]`: sizes and attributes at the ends of 64 bits.

Operators of the CPU library, past the checks in Python, and nodes of the ONNX Runtime library are
called with small numbers and extreme ones. Each call gives a result or an error; a call that ends
the process or takes more than 20 seconds is a finding. The last line printed is the case.
"""

import argparse
import faulthandler
import math
import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import elsa_core  # noqa: F401  (defines the operators)
from elsa_core.backends import native

SECONDS = 20  # of a case
SMALL = (0, 1, 1, 2, 3, 8)
# products of some of these wrap around to small or negative numbers
EXTREME = (
    -(2**63), -1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 + 1, 2**48, 2**48 + 1, 2**61, 2**62,
    2**63 // 3 + 1, 2**64 // 3 + 1, 2**63 - 1,
)  # fmt: skip
QUICK, TOO_LARGE = 1 << 16, 1 << 48  # elements: between them a call is right, and slow
Case = tuple[str, tuple[Any, ...]]


class Draw:
    """Numbers of one case."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)

    def number(self, extreme: float = 0.3) -> int:
        return self.random.choice(EXTREME if self.random.random() < extreme else SMALL)

    def size(self) -> int:
        return max(0, self.number(0.2))

    def shape(self, rank: int) -> list[int]:
        return [self.size() for _ in range(rank)]

    def maybe(self, value: Any, chance: float = 0.5) -> Any:
        return value if self.random.random() < chance else None

    def like(self, shape: list[int]) -> list[int]:
        """The shape, or one that differs in one place."""
        shape = list(shape)
        if shape and self.random.random() < 0.2:
            shape[self.random.randrange(len(shape))] = self.size()
        return shape


def tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of any shape in the memory of a few elements."""
    dense = math.prod(shape) <= QUICK
    return torch.ones(shape, dtype=dtype) if dense else torch.ones(1, dtype=dtype).expand(*shape)


def is_slow(*sizes: int) -> bool:
    """Whether a loop over so many elements would be right, and long."""
    work = math.prod(size for size in sizes if size > 0)
    return QUICK < work <= TOO_LARGE * 2**14 and 0 not in sizes


def attention_case(draw: Draw) -> Case:
    b, h, n, m, d, e = (draw.size() for _ in range(6))
    if is_slow(b, h, n, max(m, 1), max(d, e)) or is_slow(b, h, m, max(d, e)):
        b = h = 1
        n, m, d, e = (min(x, 8) for x in (n, m, d, e))
    rank = 4 if draw.random.random() < 0.95 else draw.random.randrange(1, 4)
    shapes = [draw.like(s)[:rank] for s in ([b, h, n, d], [b, h, m, d], [b, h, m, e])]
    mask = draw.maybe([draw.random.choice((1, x)) for x in (b, h, n, m)], 0.3)
    return "attention", (*shapes, mask, draw.random.random() < 0.3)


def attention(
    q: list[int], k: list[int], v: list[int], mask: list[int] | None, causal: bool, which: int
) -> None:
    ops = torch.ops.elsa
    given = [tensor(s) for s in (q, k, v)]
    bias = None if mask is None else tensor(mask, torch.bool)
    terms = (*given, bias, causal, 1.0, "strict")
    out_shape = (*q[:-1], v[-1])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ops.attention(*terms),
        lambda: ops.attention_dropout(*terms, 0.5, torch.tensor([1, 2**62])),
        lambda: ops.sparse_attention(*terms, 0.0, 7),
        lambda: ops.entmax_attention(*given, bias, None, 1.5, causal, 1.0, "strict"),
        lambda: ops.attention_backward_native(
            tensor(out_shape), None, *given, bias, tensor(out_shape), tensor(q[:-1]), causal, 1.0,
            0.0, None, True, True, True, bool(which % 2),
        ),
    )  # fmt: skip
    calls[which % len(calls)]()


def varlen_case(draw: Draw) -> Case:
    t, h, d, s, e = (draw.size() for _ in range(5))
    if is_slow(t, h, max(d, e)) or is_slow(t, h, max(s, 1), max(d, 1)):
        t, h, d, e = (min(x, 3) for x in (t, h, d, e))
    starts = [[draw.random.choice((0, 1, t, draw.number())) for _ in range(3)] for _ in range(2)]
    shapes = [draw.like(x) for x in ([t, h, d], [t, h, d], [t, h, e])]
    return "varlen", (*shapes, *starts)


def varlen(
    q: list[int], k: list[int], v: list[int], starts: list[int], others: list[int], which: int
) -> None:
    given = [tensor(s) for s in (q, k, v)]
    bounds = (torch.tensor(starts), torch.tensor(others))
    torch.ops.elsa.varlen_attention(*given, *bounds, bool(which % 2), 1.0, "strict")


def window_case(draw: Draw) -> Case:
    odd = draw.random.choice(("heads", "window", "shift", "shape", "all"))  # the rest is right

    def number(name: str, *right: int) -> int:
        return draw.number(0.7) if odd in (name, "all") else draw.random.choice(right)

    shape = [max(0, number("shape", 1, 2, 5)) for _ in range(4)]
    heads, width = number("heads", 1, 2), draw.random.choice((1, 2, 3))
    channels = 3 * heads * width if 0 < heads < 9 else draw.random.choice((6, 12, 24))
    window = [number("window", 1, 2, 3) for _ in range(3)]
    shift = [number("shift", 0, max(0, window[i] - 1)) for i in range(3)]
    if is_slow(*(max(1, abs(w)) for w in window for _ in range(2)), max(1, heads)):
        window = [min(max(w, -1), 3) for w in window]
    if is_slow(*shape, max(1, channels)):
        shape = [min(x, 3) for x in shape]
    tokens = math.prod(window)
    bias = draw.maybe([abs(heads), abs(tokens), abs(tokens)], 0.3)
    return "window", ([*shape, channels], bias, heads, window, shift, draw.random.random() < 0.2)


def window(
    shape: list[int], bias: list[int] | None, heads: int, size: list[int], shift: list[int],
    grid: bool, which: int,
) -> None:  # fmt: skip
    ops, image = torch.ops.elsa, tensor(shape)
    given = None if bias is None else tensor(bias)
    terms = (image, given, None, None, None, heads, size, shift, 1.0, -100.0, "qkv", grid)
    if which % 2:
        slope = tensor([*shape[:4], shape[4] // 3])
        ops.window_attention_backward_native(slope, *terms, True, True, True, True)
    else:
        ops.window_attention(*terms, "strict")


def node_case(draw: Draw) -> Case:
    """A node of the ONNX Runtime library, whose inputs fit in memory."""
    kind = draw.random.choice(("WindowAttention", "PackedAttention", "Attention"))
    if kind == "WindowAttention":
        window = [draw.number(0.5) for _ in range(3)]
        if is_slow(*(max(1, abs(w)) for w in window for _ in range(2))):
            window = [min(max(w, -1), 3) for w in window]
        attributes: dict[str, Any] = {
            "num_heads": draw.number(0.5), "window_size": window,
            "shift_size": [draw.random.choice((0, draw.number())) for _ in range(3)],
            "grid": draw.number(), "layout": draw.random.choice(("qkv", "head", "x" * 99)),
        }  # fmt: skip
        shapes = [[*(draw.random.choice(SMALL) for _ in range(4)), draw.random.choice((0, 6, 12))]]
    elif kind == "PackedAttention":
        attributes = {"num_heads": draw.number(0.5), "is_causal": draw.number()}
        shapes = [[*(draw.random.choice(SMALL) for _ in range(2)), draw.random.choice((0, 6, 12))]]
    else:
        attributes = {"is_causal": draw.number()}
        shapes = [draw.like([draw.random.choice((*SMALL, 2**40)) for _ in range(4)])] * 3
        shapes = [s if 0 in s else [min(x, 8) for x in s] for s in shapes]
    return "node", (kind, shapes, attributes)


class Nodes:
    """Nodes of the ONNX Runtime library, one session each."""

    def __init__(self) -> None:
        import onnx
        import onnxruntime
        from onnx import helper

        from elsa_core.exporting import ort_library

        self.onnx, self.helper, self.runtime = onnx, helper, onnxruntime
        self.library = str(ort_library.build())

    def run(self, kind: str, shapes: list[list[int]], attributes: dict[str, Any], _: int) -> None:
        import numpy as np

        helper, number = self.helper, self.onnx.TensorProto.FLOAT
        names = [f"x{i}" for i in range(len(shapes))]
        node = helper.make_node(kind, names, ["out"], domain="elsa", **attributes)
        values = [helper.make_tensor_value_info(name, number, None) for name in (*names, "out")]
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("elsa", 1)]
        made = helper.make_model(
            helper.make_graph([node], "one", values[:-1], values[-1:]), opset_imports=opsets,
            ir_version=8,
        )  # fmt: skip
        options = self.runtime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.register_custom_ops_library(self.library)
        session = self.runtime.InferenceSession(
            made.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        feed = {name: np.ones(s, np.float32) for name, s in zip(names, shapes, strict=True)}
        session.run(None, feed)


CASES = (attention_case, attention_case, varlen_case, window_case, window_case, node_case)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 0 where each gave a result or an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sizes", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-onnx", action="store_true", help="the operators alone")
    given = parser.parse_args(arguments)
    faulthandler.enable()
    torch.set_num_threads(1)
    if not native.load().ok:
        print(native.load().reason)
        return 2
    run: dict[str, Callable[..., None]] = {"attention": attention, "varlen": varlen}
    run["window"] = window
    cases = CASES[:-1] if given.no_onnx else CASES
    if not given.no_onnx:
        run["node"] = Nodes().run
    results = 0
    for i in range(given.cases):
        draw = Draw(f"{given.seed}.{i}")
        name, terms = cases[i % len(cases)](draw)
        which = draw.random.randrange(10)
        print(i, name, which, terms, flush=True)
        signal.alarm(SECONDS)
        try:
            run[name](*terms, which)
            results += 1
        except SystemError:
            raise
        except Exception as error:  # an answer
            print(" ", str(error).partition("\n")[0][:200])
        signal.alarm(0)
    print(f"{given.cases} cases, {results} results, 0 findings")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
