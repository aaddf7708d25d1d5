"""`elsa bench linear --tune`: whether split float32 products gain on the GPU at hand.

Each product is judged against float64, then timed under CUDA graph beside PyTorch's own, biases and
the splitting of input and weight included. The user's table then says from how many multiply-adds
on the kernels serve: so many that every measured product of that size gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from elsa_core import reference
from elsa_core.base.files import write_text
from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.measuring import environment, timing
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender

WORTH: Final = 1.05
"""The gain from which a product counts as one."""
# rows, channels, columns: of ViT and Swin, from one image to eight
SHAPES: Final = (
    (197, 192, 576), (197, 768, 768), (197, 768, 2304), (197, 3072, 768), (1576, 192, 192),
    (1576, 192, 768), (1568, 384, 1536), (6272, 192, 768), (25088, 96, 288), (25088, 384, 96),
    (1576, 768, 768), (1576, 768, 2304), (1576, 3072, 768), (8200, 768, 3072), (8200, 3072, 768),
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One product [rows, channels] x [columns, channels]^T.

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def check_device(device: torch.device, *, measuring: bool = False) -> None:
    """Only the GPU kernels are to be measured.

    Raises:
        ArgumentError: `device` is not a GPU.
        UnavailableError: there is none, and something is to be measured.
    """
    if device.type != "cuda":
        raise ArgumentError(
            f"--tune: {device.type} keeps PyTorch's products, there is nothing to choose; "
            "use --device cuda"
        )
    if measuring and not torch.cuda.is_available():
        raise UnavailableError("--tune: torch sees no CUDA GPU; --dry-run lists the products")


def run(
    device: torch.device,
    *,
    rounds: int = 15,
    budget_seconds: float = 5.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Product, ...]:
    """Measure every product of `SHAPES`; writes nothing.

    Raises:
        ArgumentError: the device is no GPU.
        UnavailableError: there is no GPU.
    """
    check_device(device, measuring=True)
    found = []
    for i, shape in enumerate(SHAPES):
        if progress is not None:
            progress("x".join(map(str, shape)), i, len(SHAPES))
        with _no_tf32():
            found.append(_measured(shape, device, rounds, budget_seconds))
    return tuple(found)


def least_work(products: Sequence[Product]) -> int | None:
    """The multiply-adds from which every product gained; None where the largest did not."""
    least = None
    for product in sorted(products, key=lambda p: (-p.work, p.gain or 0.0)):
        if product.gain is None or product.gain < WORTH:
            same = [p for p in products if p.work > product.work]
            return min((p.work for p in same), default=None)
        least = product.work
    return least


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


def _measured(
    shape: tuple[int, int, int], device: torch.device, rounds: int, budget: float
) -> Product:
    from elsa_core.backends.triton.linear import planner

    lines, channels, columns = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    x, weight, bias = random(lines, channels), random(columns, channels), random(columns)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    peer_error = reference.relative_l2(functional.linear(x, weight, bias), exact)
    try:
        out = planner.linear(x, weight, bias)
    except Exception as problem:  # a compiler may fail in any way; the product is left out
        return Product(*shape, peer_error=peer_error, reason=first_line(problem)[:160])
    if out is None:
        return Product(*shape, peer_error=peer_error, reason="the kernels do not take it")
    error = reference.relative_l2(out, exact)
    if not error <= 2 * peer_error + 2.0**-24:
        return Product(
            *shape, error=error, peer_error=peer_error, reason=f"wrong: error {error:.1e}"
        )
    samples, _ = timing.time_cuda(
        [Contender("elsa", lambda: planner.linear(x, weight, bias)),
         Contender("pytorch", lambda: functional.linear(x, weight, bias))],
        rounds=rounds, budget_seconds=budget,
    )  # fmt: skip
    own, peer = (percentile(samples[name], 0.5) for name in ("elsa", "pytorch"))
    return Product(*shape, digits(own), digits(peer), digits(peer / own), error, peer_error)


@contextmanager
def _no_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
