"""`elsa bench linear`: float32 linear layers, product by product, beside PyTorch's own.

A product is `x @ weight.T + bias`. Of elsa, `elsa` is the call as anyone makes it, which splits the
weight each time, and `elsa-frozen` reads halves that were kept; on a GPU both are timed as CUDA
graphs. `kernels` is there where `auto` leaves a product to PyTorch: elsa's own launches all the
same. `tf32` is PyTorch with TF32, a peer of another accuracy, which nothing is judged against.
Errors are those of the very outputs that were timed. Documents have the form of `elsa bench
models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core import dispatch, reference
from elsa_core.base.messages import first_line, milliseconds
from elsa_core.errors import ElsaError
from elsa_core.measuring import timing
from elsa_core.measuring.environment import label
from elsa_core.measuring.intervals import digits, percentile, ratio
from elsa_core.measuring.memory_limit import limited
from elsa_core.measuring.timing import Contender
from elsa_core.ops import SPLIT_WEIGHT
from elsa_core.ops.linear.api import linear, served
from elsa_core.profiling.bench import models
from elsa_core.profiling.bench.model_cases import Document
from elsa_core.profiling.runs.runs import Progress

COMMAND: Final = "bench linear"
PEER, TF32 = "pytorch", "tf32"
OWN, FROZEN, KERNELS = "elsa", "elsa-frozen", "kernels"
ROUNDING: Final = 2.0**-24


@dataclass(frozen=True)
class ProductCase:
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
        return {"name": self.name, **asdict(self)}


# Rows, channels, columns: of ViT-B, and of Swin-T's first stages for one image, eight, and 896 px.
_PRODUCTS: Final = ((1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072))
_STAGES: Final = {96: (3136, 25088, 50176), 192: (784, 6272, 12544)}


def _swin() -> list[ProductCase]:
    return [
        ProductCase("swin", rows, *sizes)
        for width, counts in _STAGES.items()
        for rows in counts
        for sizes in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    ]


_MADE: Final = {
    "products": tuple(ProductCase("products", *each, quick=each[0] < 32800) for each in _PRODUCTS),
    "swin": tuple(_swin()),
}
TABLES: Final[dict[str, Any]] = dict.fromkeys(("cpu", "cuda"), _MADE)


def select(device_type: str, **chosen: Any) -> tuple[ProductCase, ...]:
    """The products of a device, of "products" where no table is named; arguments and errors as of
    `elsa_core.profiling.bench.models.select`."""
    if not chosen.get("tables") and not chosen.get("patterns"):
        chosen["tables"] = ("products",)
    return models.select(device_type, **chosen, among=TABLES)  # type: ignore[return-value]


def settings(
    device: torch.device, *, rounds: int = 15, budget_seconds: float = 20.0, seed: int = 0,
    backend: str = "auto", **_: Any,
) -> Document:  # fmt: skip
    """How to measure, as plain data."""
    return {"rounds": rounds, "budget_seconds": budget_seconds, "seed": seed, "backend": backend}


def started(chosen: Document, described: Document) -> Document:
    """An empty document, as `elsa_core.profiling.bench.models.started`."""
    return models.started(chosen, described, COMMAND)


def run(
    cases: Sequence[ProductCase],
    document: Document,
    *,
    device: torch.device,
    keep: Callable[[Document], None] = lambda document: None,
    limit_seconds: float | None = None,
    progress: Progress | None = None,
) -> Document:
    """Measure the products that the document does not hold yet; as `models.run`."""
    products: Any = cases
    measuring: Any = measure
    return models.run(
        products, document, device=device, keep=keep, limit_seconds=limit_seconds,
        progress=progress, measured=measuring,
    )  # fmt: skip


def measure(
    case: ProductCase, device: torch.device, settings: Document, tell: Progress
) -> Document:
    """One product as plain data: `errors` are (elsa's, PyTorch's); one that fails says why."""
    try:
        with limited(device):
            tell("timing", 0, 0)
            return _measured(case, device, settings)
    except (ElsaError, RuntimeError, MemoryError) as error:
        return _document(case, [], {"all": first_line(error)})


@contextmanager
def allowing_tf32() -> Iterator[None]:
    """PyTorch's float32 products may use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class _Kept:
    """A call whose last output stays: of a CUDA graph the memory that its replays write to."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        self.output = torch.empty(0)

    def __call__(self) -> Tensor:
        self.output = self._call()
        return self.output


def _measured(case: ProductCase, device: torch.device, settings: Document) -> Document:
    generator = torch.Generator().manual_seed(settings["seed"])
    x = torch.randn(case.rows, case.channels, generator=generator).to(device)
    weight = torch.randn(case.columns, case.channels, generator=generator)
    weight = (weight * case.channels**-0.5).to(device)
    bias = torch.randn(case.columns, generator=generator).to(device)
    ways, left_out = _ways(case, x, weight, bias, settings["backend"])
    kept = {name: _Kept(call) for name, (call, _) in ways.items()}
    contenders = [Contender(name, kept[name], context=way[1]) for name, way in ways.items()]
    how = {"rounds": settings["rounds"], "budget_seconds": settings["budget_seconds"]}
    notes: dict[str, str] = {}
    if device.type == "cuda":
        samples, notes = timing.time_cuda(contenders, **how)
    else:
        samples = timing.time_cpu(contenders, **how)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    errors = {name: reference.relative_l2(each.output, exact) for name, each in kept.items()}
    runs = [_run(name, samples, errors[name], settings["seed"]) for name in ways]
    return _document(case, runs, left_out) | {
        "warnings": [f"{case.name}: {name}: {note}" for name, note in notes.items()]
    }


Ways = dict[str, tuple[Callable[[], Tensor], Callable[[], AbstractContextManager[object]]]]


def _ways(
    case: ProductCase, x: Tensor, weight: Tensor, bias: Tensor, backend: str
) -> tuple[Ways, dict[str, str]]:
    """The calls and their contexts by name, and why others take no part."""
    found: Ways = {
        PEER: (lambda: functional.linear(x, weight, bias), nullcontext),
        OWN: (lambda: linear(x, weight, bias, backend=backend), nullcontext),
    }
    if not x.is_cuda:
        return found, dict.fromkeys((TF32, FROZEN), "a GPU's")
    found[TF32] = (lambda: functional.linear(x, weight, bias), allowing_tf32)
    halves = SPLIT_WEIGHT.overload(weight)
    found[FROZEN] = (
        lambda: served(x, weight, bias, backend=backend, halves=halves[0], powers=halves[1]),
        nullcontext,
    )
    sizes = (x.numel(), case.channels, case.columns)
    if any(row.holds(*sizes) for row in dispatch.linear_by_pytorch(x.device, x.dtype)):
        terms = ("none", None, None, "strict")
        operator = torch.ops.elsa.linear.default
        found[KERNELS] = (lambda: operator(x, weight, bias, *terms), nullcontext)
    return found, {}


def _run(name: str, samples: dict[str, list[float]], error: float, seed: int) -> Document:
    taken = samples[name]
    own = name not in (PEER, TF32)
    middle = [percentile(each, 0.5) for each in (samples[PEER], taken)]
    gain = ratio(samples[PEER], taken, seed, (middle[0], middle[1])).to_dict() if own else None
    return {
        "contender": name,
        "precision": "strict" if own else None,
        "exact": name != TF32,
        "seconds": digits(middle[1]),
        "seconds_p10": digits(percentile(taken, 0.1)),
        "seconds_p90": digits(percentile(taken, 0.9)),
        "samples": [digits(each) for each in taken[:100]],
        "error": error,
        "ratio_to_best": gain,
    }


def _document(case: ProductCase, runs: list[Document], left_out: dict[str, str]) -> Document:
    by_name = {each["contender"]: each for each in runs}
    auto = [by_name[name] for name in (OWN, FROZEN) if name in by_name]
    best = min(auto, key=lambda each: float(each["seconds"]), default=None)
    allowed = 2 * by_name[PEER]["error"] + ROUNDING if runs else 0.0
    return {
        "case": case.to_dict(),
        "measurements": runs,
        "best_peer": PEER if runs else "",
        "best_own": "" if best is None else best["contender"],
        "gain": None if best is None else best["ratio_to_best"],
        "errors": None if best is None else [best["error"], by_name[PEER]["error"]],
        "wrong": [r["contender"] for r in runs if r["precision"] and not r["error"] <= allowed],
        "left_out": left_out,
        "warnings": [],
    }


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
    text = f"Measured on {label(document['environment'])}. Slower than PyTorch's float32 in "
    text += f"{len(slower)} of {len(done)} products" + (
        f": {', '.join(slower)}." if slower else "."
    )
    failed = [case for case in cases if case["gain"] is None]
    named = ", ".join(f"{c['case']['name']} ({c['left_out'].get('all', '')})" for c in failed)
    return text + (f" Not measured: {named}." if failed else "")
