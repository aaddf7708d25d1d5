"""Forms of linear layers that no table names yet, product by product.

    python -m elsa_core.bench.forms [FORM ...] --device cuda [--compile] -o forms.json

Each form of `elsa_core.routing.FORMS` but norm and padded (`elsa_core.bench.fusions` has them) runs
beside PyTorch and beside what serves today, with the weight's halves kept: median time under CUDA
graphs (eager calls on a CPU), error against float64 and its lean, which is the share of the result
that is missing (negative) or too much. One table a product on stdout, all figures as JSON with -o.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core import calls, reference, routing
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.files import write_json
from elsa_core.graphs import capture
from elsa_core.linear import served, served_gated
from elsa_core.measuring import environment, timing
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender
from elsa_core.operators import SPLIT_WEIGHT

Shape = tuple[int, int, int]
# Rows, channels, columns: of DINOv2 giant and EVA-02, of Swin-T at 896 px, of ViT-B.
SHAPES: dict[str, tuple[Shape, ...]] = {
    routing.GATED: ((1370, 1536, 4096), (2056, 768, 2048)),
    routing.CENTRED: (
        (50176, 96, 288), (12544, 192, 768), (3136, 1536, 384), (784, 768, 3072),
        (1576, 768, 2304),
    ),
    routing.ROUNDED: ((1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072)),
    routing.HALF: ((1576, 768, 3072), (1576, 3072, 768), (25088, 96, 384)),
}  # fmt: skip


class Way(NamedTuple):
    """One way to compute a product: a call, the form that it uses, what surrounds it."""

    name: str
    call: Callable[[], Tensor]
    form: str = ""
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Row:
    """One way of one product.

    Attributes:
        form, product, way: their names.
        milliseconds: median of a call. gain: PyTorch's time over it.
        error: relative L2 distance from float64. lean: the mean of the difference along the result,
            relative to it.
    """

    form: str
    product: str
    way: str
    milliseconds: float
    gain: float
    error: float
    lean: float


@contextmanager
def allowing_tf32() -> Iterator[None]:
    """PyTorch's float32 products may use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _operands(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, depth, columns = shape
    torch.manual_seed(0)
    x = torch.randn(rows, depth, device=device).to(dtype)
    w = (torch.randn(columns, depth, device=device) * depth**-0.5).to(dtype)
    return x, w, torch.randn(columns, device=device).to(dtype)


def _gated(shape: Shape, device: torch.device) -> tuple[list[Way], Tensor]:
    rows, depth, columns = shape
    x, w, b = _operands((rows, depth, 2 * columns), device, torch.float32)
    halves, powers = SPLIT_WEIGHT.overload(w)
    parts = [t.chunk(2, d) for t, d in ((w, 0), (b, 0), (halves, 1), (powers, 0))]
    (w1, w2), (b1, b2), (h1, h2), (p1, p2) = parts

    def gate(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return functional.silu(first) * second

    def apart() -> Tensor:
        return gate(served(x, w, b, halves=halves, powers=powers))

    def together() -> Tensor:
        out = served_gated(x, (w1, b1), (w2, b2), "silu", halves=(h1, p1, h2, p2))
        return apart() if out is None else out

    exact = gate(functional.linear(x.double(), w.double(), b.double()))
    ways = [
        Way("PyTorch", lambda: gate(functional.linear(x, w, b))),
        Way("elsa", apart),
        Way("elsa, gated", together, routing.GATED),
    ]
    return ways, exact


def _centred(shape: Shape, device: torch.device) -> tuple[list[Way], Tensor]:
    x, w, b = _operands(shape, device, torch.float32)
    kept = SPLIT_WEIGHT.overload(w)

    def split() -> Tensor:  # also what `served` leaves to PyTorch
        out: Tensor = torch.ops.elsa.linear.default(x, w, b, "none", None, None, "strict", *kept)
        return out

    ways = [
        Way("PyTorch", lambda: functional.linear(x, w, b)),
        Way("elsa", split),
        Way("elsa, centred", split, routing.CENTRED),
    ]
    return ways, functional.linear(x.double(), w.double(), b.double())


def _rounded(shape: Shape, device: torch.device) -> tuple[list[Way], Tensor]:
    x, w, b = _operands(shape, device, torch.float32)
    kept = SPLIT_WEIGHT.overload(w)

    def turbo() -> Tensor:
        return served(x, w, b, precision="turbo", halves=kept[0], powers=kept[1])

    ways = [
        Way("PyTorch", lambda: functional.linear(x, w, b), context=allowing_tf32),
        Way("elsa", turbo),
        Way("elsa, rounded", turbo, routing.ROUNDED),
    ]
    return ways, functional.linear(x.double(), w.double(), b.double())


def _half(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Way], Tensor]:
    """GELU where the product widens, a residual with LayerScale where it narrows."""
    x, w, b = _operands(shape, device, dtype)
    wide = shape[2] > shape[1]
    residual = torch.randn(shape[0], shape[2], device=device).to(dtype)
    scale = torch.rand(shape[2], device=device).to(dtype)

    def plain(x: Tensor, w: Tensor, b: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
        y = functional.linear(x, w, b)
        return functional.gelu(y) if wide else residual + scale * y

    def fused() -> Tensor:
        terms = ("gelu", None, None) if wide else ("none", residual, scale)
        return served(x, w, b, *terms)

    given = (x, w, b, residual, scale)
    compiled = torch.compile(plain, dynamic=False)
    ways = [
        Way("PyTorch", lambda: plain(*given)),
        Way("torch.compile", lambda: compiled(*given)),
        Way("elsa, half", fused, routing.HALF),
    ]
    return ways, plain(*(t.double() for t in given))


def products(
    form: str, device: torch.device, shapes: tuple[Shape, ...], compiles: bool
) -> Iterator[tuple[str, list[Way], Tensor]]:
    """The name of each product of a form, its ways and its result in float64."""
    build = {routing.GATED: _gated, routing.CENTRED: _centred, routing.ROUNDED: _rounded}
    for shape in shapes:
        name = "x".join(map(str, shape))
        if form in build:
            yield name, *build[form](shape, device)
            continue
        for dtype in (torch.float16, torch.bfloat16):
            ways, exact = _half(shape, device, dtype)
            ways = [way for way in ways if compiles or way.name != "torch.compile"]
            yield f"{name} {str(dtype)[6:]}", ways, exact


def measure(
    form: str, device: torch.device, shapes: tuple[Shape, ...], *, rounds: int = 15,
    budget_seconds: float = 2.0, compiles: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Time every way of every product of a form.

    Args:
        shapes: rows, channels and columns of the products. rounds: samples of each way, fewer where
            a product would take longer than budget_seconds. compiles: whether `torch.compile` is
            timed too, in half precision.
    """
    for name, ways, exact in products(form, device, shapes, compiles):
        contenders = [Contender(w.name, _called(w, device), context=w.context) for w in ways]
        errors = {}
        with torch.inference_mode():
            for contender in contenders:
                errors[contender.name] = _errors(_output(contender, device), exact)
        if device.type == "cuda":
            samples, _ = timing.time_cuda(contenders, rounds=rounds, budget_seconds=budget_seconds)
        else:
            with torch.inference_mode():
                samples = timing.time_cpu(contenders, rounds=rounds, budget_seconds=budget_seconds)
        seconds = {key: percentile(taken, 0.5) for key, taken in samples.items()}
        for way in ways:
            gain = digits(seconds["PyTorch"] / seconds[way.name])
            took = digits(seconds[way.name] * 1e3)
            yield Row(form, name, way.name, took, gain, *errors[way.name])


def _called(way: Way, device: torch.device) -> Callable[[], Tensor]:
    def call() -> Tensor:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            calls.forget_kinds()  # the warm-up of a graph loads this way's kernels
        with routing.unmeasured(*([way.form] if way.form else [])):
            return way.call()

    return call


def _output(contender: Contender, device: torch.device) -> Tensor:
    """What a graph of the call computes; on a CPU the call itself."""
    found: list[Tensor] = []
    with contender.context():
        if device.type != "cuda":
            out = contender.call()
            assert isinstance(out, Tensor)
            return out
        replay = capture.captured(lambda: found.append(contender.call()))  # type: ignore[arg-type]
        replay()
        torch.cuda.synchronize()
    return found[-1].clone()


def _errors(out: Tensor, exact: Tensor) -> tuple[float, float]:
    lean = ((out.double() - exact) * exact).sum() / exact.square().sum()
    return reference.relative_l2(out, exact), lean.item()


def table(rows: list[Row]) -> str:
    """Rows as Markdown."""
    lines = [
        "| form | product | way | ms | gain | error | lean |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.form} | {r.product} | {r.way} | {r.milliseconds:.4g} | {r.gain:.2f} | {r.error:.1e} "
        f"| {r.lean:+.1e} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def _shape(text: str) -> Shape:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise ArgumentError(f"--shape {text!r} is no ROWSxCHANNELSxCOLUMNS")
    return sizes[0], sizes[1], sizes[2]


def main(arguments: list[str]) -> None:
    """Measure the forms named, or all of `SHAPES`.

    Raises:
        ArgumentError: the output exists, a form is unknown, or a shape is none.
        UnavailableError: there is no such device.
    """
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.forms")
    parser.add_argument("forms", nargs="*", metavar="FORM", help=", ".join(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--shape", metavar="ROWSxCHANNELSxCOLUMNS", help="instead of those built in"
    )
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=2.0, metavar="SECONDS", help="a product")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.exists():
        raise ArgumentError(f"{given.output} exists")
    unknown = [form for form in given.forms if form not in SHAPES]
    if unknown:
        raise ArgumentError(f"form {unknown[0]!r} is unknown: choose from {', '.join(SHAPES)}")
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("forms: torch sees no CUDA GPU")
    rows: list[Row] = []
    for form in given.forms or SHAPES:
        shapes = SHAPES[form] if given.shape is None else (_shape(given.shape),)
        sys.stderr.write(f"{form}\n")
        options = {"rounds": given.rounds, "budget_seconds": given.budget}
        found = list(measure(form, device, shapes, compiles=given.compile, **options))
        sys.stdout.write(table(found) + "\n")
        sys.stdout.flush()
        rows += found
    if given.output is not None:
        described = environment.describe(device)
        document = {"environment": described, "rows": [asdict(row) for row in rows]}
        write_json(given.output, json.loads(json.dumps(document)))


if __name__ == "__main__":
    main(sys.argv[1:])
