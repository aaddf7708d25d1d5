"""`elsa bench linear`: float32 linear layers, product by product, beside PyTorch's own.

`elsa` is the call as anyone makes it; `kernels` is there where `auto` leaves a product to PyTorch:
elsa's own launches all the same. `tf32` is a peer of another accuracy, which nothing is judged
against.

With `--tune` the kernels are measured on the user's GPU; the user's table then says from how many
multiply-adds on they serve: so many that every measured product of that size gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from elsa_core.measuring.documents import Document, Plain
from elsa_core.measuring.intervals import digits, percentile, ratio
from elsa_core.measuring.timing import Contender, float32_products
from elsa_core.ops.linear.api import linear
from elsa_core.profiling.bench.runner import Runner, require_gpu
from elsa_core.profiling.runs.runs import Progress

PEER, TF32 = "pytorch", "tf32"
OWN, KERNELS = "elsa", "kernels"
_ROUNDING: Final = 2.0**-24


@dataclass(frozen=True)
class ProductCase(Plain):
    """One product [rows, channels] x [columns, channels]^T + bias, of `table`."""

    also = ("name",)
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


Operands = tuple[Tensor, Tensor, Tensor]


def _operands(case: ProductCase, device: torch.device, seed: int) -> tuple[Operands, Tensor]:
    """Input, weight and bias, drawn on the host, and the product in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.rows, case.channels, generator=generator)
    weight = torch.randn(case.columns, case.channels, generator=generator) * case.channels**-0.5
    bias = torch.randn(case.columns, generator=generator)
    given = (x.to(device), weight.to(device), bias.to(device))
    x, weight, bias = (each.double() for each in given)
    return given, functional.linear(x, weight, bias)


def measure(
    case: ProductCase, device: torch.device, settings: Document, tell: Progress
) -> Document:
    """One product as plain data: `errors` are (elsa's, PyTorch's)."""
    tell("timing", 0, 0)
    given, exact = _operands(case, device, settings["seed"])
    plain = partial(functional.linear, *given)
    contenders = [
        Contender(PEER, plain),
        Contender(OWN, partial(linear, *given, backend=settings["backend"]), precision="strict"),
    ]
    if device.type == "cuda":
        contenders.append(Contender(TF32, plain, partial(float32_products, "high")))
        if dispatch.product_by_pytorch(*given[:2]) is not None:
            kernels = partial(torch.ops.elsa.linear.default, *given, "none", None, None, "strict")
            contenders.append(Contender(KERNELS, kernels, precision="strict"))
    runs: dict[str, Document] = {}
    samples, notes = timing.time_all(
        contenders, device, settings["rounds"], settings["budget_seconds"]
    )
    for each in contenders:
        taken = samples[each.name]
        middle = (percentile(samples[PEER], 0.5), percentile(taken, 0.5))
        gain = ratio(samples[PEER], taken, settings["seed"], middle).to_dict()
        runs[each.name] = {
            "contender": each.name, "precision": each.precision, "exact": each.name != TF32,
            "seconds": digits(middle[1]), "seconds_p10": digits(percentile(taken, 0.1)),
            "seconds_p90": digits(percentile(taken, 0.9)),
            "samples": [digits(sample) for sample in taken[:100]],
            "error": reference.relative_l2(each.output(), exact),
            "ratio_to_best": gain if each.precision else None,
        }  # fmt: skip
    own, peer = runs[OWN], runs[PEER]
    allowed = 2 * peer["error"] + _ROUNDING
    return {
        "case": case.to_dict(), "measurements": list(runs.values()), "best_peer": PEER,
        "best_own": OWN, "gain": own["ratio_to_best"], "errors": [own["error"], peer["error"]],
        "wrong": [n for n, run in runs.items() if run["precision"] and not run["error"] <= allowed],
        "left_out": {} if device.type == "cuda" else {TF32: "a GPU's"},
        "warnings": [f"{case.name}: {name}: {note}" for name, note in notes.items()],
    }  # fmt: skip


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
    """Which products are slower than PyTorch's."""
    cases = document["results"]["cases"]
    done = [case for case in cases if case["gain"] is not None]
    slower = [
        f"{case['case']['name']} ({case['gain']['value']:.2f})"
        for case in done
        if case["gain"]["verdict"] == "slower"
    ]
    text = f"Slower than PyTorch's float32 in {len(slower)} of {len(done)} products"
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


def product(shape: tuple[int, int, int], **found: Any) -> Document:
    """A product [rows, channels] x [columns, channels]^T that is tried, and what was `found`:
    `gain` is PyTorch's time over the kernels'; None where these did not run or were wrong, as
    `reason` says. Errors are relative L2 distances from float64."""
    names = ("seconds", "peer_seconds", "gain", "error", "peer_error")
    sizes = dict(zip(("rows", "channels", "columns"), shape, strict=True))
    return {**sizes, **dict.fromkeys(names), "reason": "", **found}


def tune(
    device: torch.device,
    *,
    rounds: int = 15,
    budget_seconds: float = 5.0,
    progress: Progress = lambda what, done, total: None,
) -> list[Document]:
    """Measure every product of `SHAPES`; writes nothing."""
    check_device(device, measuring=True)
    from elsa_core.backends.triton.linear import planner

    def tried(shape: tuple[int, int, int]) -> Document:
        given, exact = _operands(ProductCase("tune", *shape), device, 0)
        ways: dict[str, Callable[[], Any]] = {
            OWN: partial(planner.linear, *given), PEER: partial(functional.linear, *given),
        }  # fmt: skip
        errors = {"peer_error": reference.relative_l2(ways[PEER](), exact)}
        try:
            out = ways[OWN]()
        except Exception as problem:  # a compiler may fail in any way; the product is left out
            return product(shape, **errors, reason=first_line(problem)[:160])
        if out is None:
            return product(shape, **errors, reason="the kernels do not take it")
        errors["error"] = reference.relative_l2(out, exact)
        if not errors["error"] <= 2 * errors["peer_error"] + _ROUNDING:
            return product(shape, **errors, reason=f"wrong: error {errors['error']:.1e}")
        samples, _ = timing.time_cuda(
            [Contender(*way) for way in ways.items()], rounds=rounds, budget_seconds=budget_seconds
        )
        own, peer = (percentile(samples[name], 0.5) for name in (OWN, PEER))
        return product(
            shape, **errors, seconds=digits(own), peer_seconds=digits(peer), gain=digits(peer / own)
        )

    found = []
    with float32_products():
        for i, shape in enumerate(SHAPES):
            progress("x".join(map(str, shape)), i, len(SHAPES))
            found.append(tried(shape))
    return found


def least_work(products: Sequence[Document]) -> int | None:
    """The multiply-adds from which every product gained; None where the largest did not."""
    gains = [(p["rows"] * p["channels"] * p["columns"], p["gain"]) for p in products]
    lost = max((work for work, gain in gains if gain is None or gain < WORTH), default=0)
    return min((work for work, _ in gains if work > lost), default=None)


def save(products: list[Document], device: torch.device) -> Path | None:
    """Write the user's table; None on sm_90, whose figures are shipped."""
    from elsa_core.backends.triton.linear import gate
    from elsa_core.backends.triton.shared import usertable

    if torch.cuda.get_device_capability(device) == (9, 0):
        return None
    gpu, facts = environment.of_gpu(device)
    file = usertable.path(gpu, ".linear")
    file.parent.mkdir(parents=True, exist_ok=True)
    written = write_text(usertable.linear_document(least_work(products), products, facts), file)
    gate.forget()
    return written
