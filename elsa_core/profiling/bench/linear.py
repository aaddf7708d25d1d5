"""`elsa bench linear`: float32 linear layers, product by product, beside PyTorch's own.

Of elsa, `elsa` is the call as anyone makes it, `elsa-frozen` reads halves of the weight that were
kept, and `kernels` is there where `auto` leaves a product to PyTorch: elsa's own launches all the
same. `tf32` is a peer of another accuracy, which nothing is judged against. Errors are those of the
very outputs that were timed.

With `--tune` the kernels are measured on the user's GPU; the user's table then says from how many
multiply-adds on they serve: so many that every measured product of that size gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core import dispatch, reference
from elsa_core.base.files import write_text
from elsa_core.base.messages import first_line, milliseconds
from elsa_core.measuring import environment, timing
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.intervals import digits, percentile, ratio
from elsa_core.measuring.timing import Contender
from elsa_core.ops import SPLIT_WEIGHT
from elsa_core.ops.linear.api import linear
from elsa_core.profiling.bench.runner import Document, Runner, require_gpu
from elsa_core.profiling.runs.runs import Progress

PEER, TF32 = "pytorch", "tf32"
OWN, FROZEN, KERNELS = "elsa", "elsa-frozen", "kernels"
_ROUNDING: Final = 2.0**-24
Way = tuple[Callable[[], Tensor], Callable[[], AbstractContextManager[object]]]


@dataclass(frozen=True)
class ProductCase(Plain):
    """One product [rows, channels] x [columns, channels]^T + bias, of `table`."""

    table: str
    rows: int
    channels: int
    columns: int
    quick: bool = False
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        """Unique in the tables: `products/1576x768x2304`."""
        return f"{self.table}/{self.rows}x{self.channels}x{self.columns}"

    def to_dict(self) -> Document:
        """Plain data for JSON."""
        return {"name": self.name, **super().to_dict()}


# Rows, channels, columns: of ViT-B, and of Swin-T's first stages for one image, eight, and 896 px.
_PRODUCTS: Final = ((1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072))
_STAGES: Final = {96: (3136, 25088, 50176), 192: (784, 6272, 12544)}
_MADE: Final = {
    "products": tuple(ProductCase("products", *each, quick=each[0] < 32800) for each in _PRODUCTS),
    "swin": tuple(
        ProductCase("swin", rows, *sizes)
        for width, counts in _STAGES.items()
        for rows in counts
        for sizes in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    ),
}
TABLES: Final = {"cpu": _MADE, "cuda": _MADE}


class _Kept:
    """A call whose last output stays: of a CUDA graph the memory that its replays write to."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        self.output = torch.empty(0)

    def __call__(self) -> Tensor:
        self.output = self._call()
        return self.output


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether PyTorch's float32 products may use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _operands(case: Any, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias, drawn on the host."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.rows, case.channels, generator=generator)
    weight = torch.randn(case.columns, case.channels, generator=generator) * case.channels**-0.5
    bias = torch.randn(case.columns, generator=generator)
    return x.to(device), weight.to(device), bias.to(device)


def measure(
    case: ProductCase, device: torch.device, settings: Document, tell: Progress
) -> Document:
    """One product as plain data: `errors` are (elsa's, PyTorch's)."""
    tell("timing", 0, 0)
    x, weight, bias = _operands(case, device, settings["seed"])
    ways, left_out = _ways(x, weight, bias, settings["backend"])
    kept = {name: _Kept(call) for name, (call, _) in ways.items()}
    contenders = [Contender(name, kept[name], context=way[1]) for name, way in ways.items()]
    samples, notes = timing.time_all(
        contenders, device, settings["rounds"], settings["budget_seconds"]
    )
    exact = functional.linear(x.double(), weight.double(), bias.double())
    runs: dict[str, Document] = {}
    for name, taken in samples.items():
        own = name not in (PEER, TF32)
        middle = [percentile(each, 0.5) for each in (samples[PEER], taken)]
        gain = ratio(samples[PEER], taken, settings["seed"], (middle[0], middle[1])).to_dict()
        runs[name] = {
            "contender": name,
            "precision": "strict" if own else None,
            "exact": name != TF32,
            "seconds": digits(middle[1]),
            "seconds_p10": digits(percentile(taken, 0.1)),
            "seconds_p90": digits(percentile(taken, 0.9)),
            "samples": [digits(each) for each in taken[:100]],
            "error": reference.relative_l2(kept[name].output, exact),
            "ratio_to_best": gain if own else None,
        }
    auto = [runs[name] for name in (OWN, FROZEN) if name in runs]
    best = min(auto, key=lambda each: float(each["seconds"]))
    allowed = 2 * runs[PEER]["error"] + _ROUNDING
    return {
        "case": case.to_dict(),
        "measurements": list(runs.values()),
        "best_peer": PEER,
        "best_own": best["contender"],
        "gain": best["ratio_to_best"],
        "errors": [best["error"], runs[PEER]["error"]],
        "wrong": [n for n, r in runs.items() if r["precision"] and not r["error"] <= allowed],
        "left_out": left_out,
        "warnings": [f"{case.name}: {name}: {note}" for name, note in notes.items()],
    }


def _ways(
    x: Tensor, weight: Tensor, bias: Tensor, backend: str
) -> tuple[dict[str, Way], dict[str, str]]:
    """The calls and their contexts by name, and why others take no part."""
    found: dict[str, Way] = {
        PEER: (lambda: functional.linear(x, weight, bias), nullcontext),
        OWN: (lambda: linear(x, weight, bias, backend=backend), nullcontext),
    }
    if not x.is_cuda:
        return found, dict.fromkeys((TF32, FROZEN), "a GPU's")
    found[TF32] = (lambda: functional.linear(x, weight, bias), lambda: _tf32(True))
    halves = SPLIT_WEIGHT.overload(weight)
    operator, terms = torch.ops.elsa.linear.default, ("none", None, None, "strict")
    found[FROZEN] = (
        lambda: operator(x, weight, bias, *terms, *halves),
        nullcontext,
    )
    if dispatch.product_by_pytorch(x, weight) is not None:
        found[KERNELS] = (lambda: operator(x, weight, bias, *terms), nullcontext)
    return found, {}


RUNNER: Final = Runner("bench linear", TABLES, measure, "swin")


def table_of(cases: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: times and errors of every way, gains over PyTorch's float32."""
    names = list(dict.fromkeys(m["contender"] for case in cases for m in case["measurements"]))
    own = [name for name in names if name not in (PEER, TF32)]
    told = {TF32: "tf32 (inexact)"}
    columns = ["product", *(f">{told.get(name, name)}, ms" for name in names)]
    columns += [*(f">gain, {name}" for name in own), f">error {' / '.join(names)}"]
    rows = []
    for case in cases:
        found = {each["contender"]: each for each in case["measurements"]}
        row = [case["case"]["name"]]
        row += [milliseconds(found[n]["seconds"]) if n in found else "-" for n in names]
        for name in own:
            gain = found[name]["ratio_to_best"]["value"] if name in found else None
            row.append("-" if gain is None else "wrong" if name in case["wrong"] else f"{gain:.2f}")
        errors = (f"{found[n]['error']:.1e}" if n in found else "-" for n in names)
        rows.append([*row, " / ".join(errors)])
    return columns, rows


def summary(document: Document) -> str:
    """Where it was measured, and which products are slower than PyTorch's."""
    cases = document["results"]["cases"]
    done = [case for case in cases if case["gain"] is not None]
    slower = [
        f"{case['case']['name']} ({each['contender']} {each['ratio_to_best']['value']:.2f})"
        for case in done
        for each in case["measurements"]
        if each["contender"] in (OWN, FROZEN) and each["ratio_to_best"]["verdict"] == "slower"
    ]
    text = f"Measured on {environment.label(document['environment'])}. Slower than PyTorch's "
    text += f"float32 in {len(slower)} of {len(done)} products"
    text += f": {', '.join(slower)}." if slower else "."
    failed = [case for case in cases if case["gain"] is None]
    named = ", ".join(f"{c['case']['name']} ({c['left_out'].get('all', '')})" for c in failed)
    return text + (f" Not measured: {named}." if failed else "")


# --tune

check_device: Final = partial(
    require_gpu, keeps="keeps PyTorch's products, there is nothing to choose", lists="products"
)
WORTH: Final = 1.05
"""The gain from which a product counts as one."""
# rows, channels, columns: of ViT and Swin, from one image to eight
SHAPES: Final = (
    (197, 192, 576), (197, 768, 768), (197, 768, 2304), (197, 3072, 768), (1576, 192, 192),
    (1576, 192, 768), (1568, 384, 1536), (6272, 192, 768), (25088, 96, 288), (25088, 384, 96),
    (1576, 768, 768), (1576, 768, 2304), (1576, 3072, 768), (8200, 768, 3072), (8200, 3072, 768),
)  # fmt: skip


@dataclass(frozen=True)
class Product(Plain):
    """One product [rows, channels] x [columns, channels]^T that was tried.

    Attributes:
        gain: PyTorch's time over the kernels'; None where these did not run or were wrong: `reason`
            says so.
        error, peer_error: relative L2 distances from float64.
    """

    rows: int
    channels: int
    columns: int
    seconds: float | None = None
    peer_seconds: float | None = None
    gain: float | None = None
    error: float | None = None
    peer_error: float | None = None
    reason: str = ""

    @property
    def work(self) -> int:
        """Its multiply-adds."""
        return self.rows * self.channels * self.columns


def tune(
    device: torch.device,
    *,
    rounds: int = 15,
    budget_seconds: float = 5.0,
    progress: Progress | None = None,
) -> tuple[Product, ...]:
    """Measure every product of `SHAPES`; writes nothing."""
    check_device(device, measuring=True)
    found = []
    for i, shape in enumerate(SHAPES):
        if progress is not None:
            progress("x".join(map(str, shape)), i, len(SHAPES))
        with _tf32(False):
            found.append(_tried(Product(*shape), device, rounds, budget_seconds))
    return tuple(found)


def _tried(product: Product, device: torch.device, rounds: int, budget: float) -> Product:
    from elsa_core.backends.triton.linear import planner

    shape = (product.rows, product.channels, product.columns)
    x, weight, bias = _operands(product, device, 0)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    peer_error = reference.relative_l2(functional.linear(x, weight, bias), exact)
    try:
        out = planner.linear(x, weight, bias)
    except Exception as problem:  # a compiler may fail in any way; the product is left out
        return Product(*shape, peer_error=peer_error, reason=first_line(problem)[:160])
    if out is None:
        return Product(*shape, peer_error=peer_error, reason="the kernels do not take it")
    error = reference.relative_l2(out, exact)
    if not error <= 2 * peer_error + _ROUNDING:
        why = f"wrong: error {error:.1e}"
        return Product(*shape, error=error, peer_error=peer_error, reason=why)
    samples, _ = timing.time_cuda(
        [Contender(OWN, lambda: planner.linear(x, weight, bias)),
         Contender(PEER, lambda: functional.linear(x, weight, bias))],
        rounds=rounds, budget_seconds=budget,
    )  # fmt: skip
    own, peer = (percentile(samples[name], 0.5) for name in (OWN, PEER))
    return Product(*shape, digits(own), digits(peer), digits(peer / own), error, peer_error)


def least_work(products: Sequence[Product]) -> int | None:
    """The multiply-adds from which every product gained; None where the largest did not."""
    lost = max((p.work for p in products if p.gain is None or p.gain < WORTH), default=0)
    return min((p.work for p in products if p.work > lost), default=None)


def save(products: Sequence[Product], device: torch.device) -> Path | None:
    """Write the user's table; None on sm_90, whose figures are shipped."""
    from elsa_core.backends.triton.linear import gate, usertable

    if torch.cuda.get_device_capability(device) == (9, 0):
        return None
    described = environment.describe(device)
    facts = {key: described[key] for key in ("gpu", "gpu_details", "date", "packages")}
    rows = [product.to_dict() for product in products]
    file = usertable.path(str(described["gpu"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    written = write_text(usertable.document(least_work(products), rows, facts), file)
    gate.forget()
    return written
