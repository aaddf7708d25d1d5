"""`elsa bench linear`: float32 linear layers, product by product; with --tune whether they are the
kernels' on the user's GPU."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli import bench_models, pipeline
from elsa_cli.console import Session
from elsa_cli.options import typed

_TUNE = ("kind", "device", "tune", "dry_run", "rounds", "budget", "allow_busy")
_MEASURE = (
    *_TUNE, "quick", "tables", "patterns", "limit", "seed", "backend", "output", "resume", "force",
)  # fmt: skip


def run(session: Session, given: dict[str, Any]) -> None:
    """Measure products, or with --tune those of the user's table, which it writes; or list them."""
    takes = _TUNE if given["tune"] else _MEASURE
    alone = [flag for flag in typed(name for name in given if name not in takes) if flag]
    if alone:
        raise click.UsageError(f"{alone[0]} is not for linear{' --tune' * given['tune']}")
    if given["resume"] and given["output"] is None:
        raise click.UsageError("--resume goes on with what --output holds: name it")
    pipeline.import_torch(session)
    if given["tune"]:
        _tune(session, given)
    else:
        bench_models.run(session, given, None, products=True)


def _tune(session: Session, given: dict[str, Any]) -> None:
    """Measure the products and write the user's table, or only list them.

    Raises:
        ArgumentError: the device is no GPU.
        UnavailableError: no GPU, or one that others use: what is measured there is kept for long.
    """
    import torch

    from elsa_core.errors import UnavailableError
    from elsa_core.measuring import busy, environment
    from elsa_core.profiling.bench import linear

    name = "cuda" if given["device"] == "auto" else given["device"]
    device = torch.device(name)
    linear.check_device(device)
    if given["dry_run"]:
        listed = [linear.Product(*shape).to_dict() for shape in linear.SHAPES]
        there = torch.cuda.is_available()
        found = {"dry_run": True, "products": listed}
        session.document("bench linear", environment.describe(device if there else "cpu"), found)
        session.table((">rows", ">channels", ">columns"), _cells(linear.SHAPES))
        session.line(f"{len(listed)} products; nothing was measured", even_quiet=True)
        return
    linear.check_device(device, measuring=True)
    why = busy.reason(device)
    if why and not given["allow_busy"]:
        raise UnavailableError(f"{why}: wait until the machine is free, or use --allow-busy")
    with session.stage("measuring") as update:
        products = linear.tune(
            device, rounds=given["rounds"], budget_seconds=given["budget"], progress=update
        )
    path = linear.save(products, device)
    if path is not None:
        session.written.append(path)
    least = linear.least_work(products)
    results = {
        "products": [product.to_dict() for product in products],
        "least_work": least,
        "table": None if path is None else str(path),
    }
    session.document("bench linear", environment.describe(device), results)
    rows = [
        [*_cells([(p.rows, p.channels, p.columns)])[0], _ms(p.peer_seconds), _ms(p.seconds),
         p.reason or f"{p.gain:.2f}"]
        for p in products
    ]  # fmt: skip
    session.table((">rows", ">channels", ">columns", ">PyTorch, ms", ">elsa, ms", ">gain"), rows)
    said = "no product" if least is None else f"products of {least / 1e6:.4g} million multiply-adds"
    where = f"; written to {path}" if path is not None else "; nothing was written"
    session.line(f"{said} and more gain on this GPU{where}", even_quiet=True)


def _cells(shapes: Any) -> list[list[str]]:
    return [[str(n) for n in shape] for shape in shapes]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"
