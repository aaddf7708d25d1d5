"""`elsa bench attention --tune`: choose tiles for a user's shapes on the user's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elsa_cli.console import Session

if TYPE_CHECKING:
    import torch

    from elsa_core.backends.triton.attention.tiling import Tile
    from elsa_core.profiling.bench.cases import Case
    from elsa_core.profiling.bench.results import Settings
    from elsa_core.profiling.bench.tune import Tuned

_SHOWN = 5


def run(
    session: Session, cases: Sequence[Case], device: torch.device, settings: Settings,
    *, dry_run: bool, allow_busy: bool,
) -> None:  # fmt: skip
    """Tune `cases` and write the user's table, or only list the candidates.

    Raises:
        ArgumentError: no case has tiles.
        UnavailableError: no GPU, or one that others use: what is measured there is kept for long.
    """
    from elsa_core.errors import ArgumentError, UnavailableError
    from elsa_core.measuring import busy, environment
    from elsa_core.profiling.bench import tune

    tune.check_device(device)
    # Chosen by name or by default, a table also holds calls of one query, which have no tiles.
    tiled = [case for case in cases if case.queries > 1 and case.dtype != "fp64"]
    if not tiled:
        raise ArgumentError("--tune: none of these calls has tiles; one query is streamed without")
    if dry_run:
        _list(session, tiled, device)
        return
    tune.check_device(device, measuring=True)
    why = busy.reason(device)
    if why and not allow_busy:
        raise UnavailableError(f"{why}: wait until the machine is free, or use --allow-busy")
    with session.stage("tuning") as update:
        tuned = tune.run(tiled, device=device, settings=settings, progress=update)
    path = tune.save(tuned, device)
    if path is not None:
        session.written.append(path)
    found = {
        "tuned": [each.to_dict() for each in tuned],
        "table": None if path is None else str(path),
    }
    session.document("bench attention", environment.describe(device), found)
    for each in tuned:
        _show(session, each)
    better = sum(each.chosen is not None for each in tuned)
    where = f"; written to {path}" if path is not None else "; nothing was written"
    session.line(f"{better} of {len(tuned)} calls get another tile{where}", even_quiet=True)


def _list(session: Session, cases: Sequence[Case], device: torch.device) -> None:
    from torch.cuda import is_available

    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import tune

    there = is_available()
    table, multiprocessors, shared = tune.shipped_table(device if there else None)
    listed: list[dict[str, Any]] = []
    for case, precision in tune.tasks_of(cases):
        plans = tune.candidates(
            case, precision, table, multiprocessors=multiprocessors, shared=shared,
            specialized=tune.may_specialize(case, device if there else None),
        )  # fmt: skip
        found = [tune.Timed(plan.tile, plan.partitions, shipped) for plan, shipped in plans]
        listed.append(
            {
                "case": case.to_dict(),
                "precision": precision,
                "candidates": [each.to_dict() for each in found],
            }
        )
        session.line(f"{case.name} · {precision}", "bold")
        rows = [
            [tile_words(each.tile), str(each.partitions), "shipped" if each.shipped else ""]
            for each in found
        ]
        session.table(("tile", ">splits", ""), rows)
        session.line()
    described = environment.describe(device if there else "cpu")
    session.document("bench attention", described, {"dry_run": True, "tune": listed})
    count = sum(len(each["candidates"]) for each in listed)
    session.line(f"{count} candidates for {table.gpu}; nothing was measured", even_quiet=True)


def tile_words(tile: Tile) -> str:
    """A tile in a few words: `64x32, 4 warps, 3 stages, ahead`."""
    parts = [
        f"{tile.block_m}x{tile.block_n}", f"{tile.warps} warps",
        *(["all keys on chip"] if tile.one_launch else [f"{tile.stages} stages"]),
        *(["ahead"] if tile.ahead else []),
        *(["copying warps"] if tile.specialized and tile.ahead else []),
        *([f"{tile.registers} registers"] if tile.registers else []),
        *(["one loop"] if tile.one_loop and not tile.specialized else []),
    ]  # fmt: skip
    return ", ".join(parts)


def _show(session: Session, tuned: Tuned) -> None:
    gain = "no ratio" if tuned.gain is None else f"{tuned.gain:.2f}x the shipped tile's speed"
    session.line(f"{tuned.case.name} · {tuned.precision} · fastest: {gain}", "bold")
    ran = [each for each in tuned.candidates if each.seconds is not None]
    shown = [each for i, each in enumerate(ran) if i < _SHOWN or each.shipped]
    rows = [
        [
            tile_words(each.tile), str(each.partitions), f"{(each.seconds or 0.0) * 1e3:.4g}",
            f"{each.error:.1e}", "shipped" if each.shipped else "",
        ]
        for each in shown
    ]  # fmt: skip
    session.table(("tile", ">splits", ">ms", ">error", ""), rows)
    left = len(tuned.candidates) - len(ran)
    session.line(f"{len(ran)} candidates measured, {left} did not run or were wrong")
    for each in tuned.candidates if session.verbose else ():
        if each.reason:
            session.log(f"{tile_words(each.tile)}: {each.reason}")
    session.line()
