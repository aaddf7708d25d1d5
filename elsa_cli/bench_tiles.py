"""`elsa bench --trace`: how a call is cut and merged. `--tune`: tiles for a user's shapes on the
user's GPU, and whether split float32 products gain there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elsa_cli import bench_common
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import Options

if TYPE_CHECKING:
    import torch

    from elsa_core.backends.partition import Partition
    from elsa_core.backends.triton.attention.tiling import Tile
    from elsa_core.profiling.bench.attention import Settings
    from elsa_core.profiling.bench.cases import Case
    from elsa_core.profiling.bench.tune import Tuned

_SHOWN = 5


def tune_tiles(
    session: Session, cases: Sequence[Case], device: torch.device, settings: Settings,
    options: Options,
) -> None:  # fmt: skip
    """Tune `cases` and write the user's table, or only list the candidates."""
    from torch.cuda import is_available

    from elsa_core.errors import ArgumentError
    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import tune

    # Chosen by name or by default, a table also holds calls of one query, which have no tiles.
    tiled = [case for case in cases if case.queries > 1 and case.dtype != "fp64"]
    if not tiled:
        raise ArgumentError("--tune: none of these calls has tiles; one query is streamed without")
    if options.dry_run:
        here = device if is_available() else None
        listed: list[dict[str, Any]] = []
        for case, precision in tune.tasks_of(tiled):
            gpu, plans = tune.candidates_on(case, precision, here)
            found = [tune.Timed(plan.tile, plan.partitions, shipped) for plan, shipped in plans]
            candidates = [each.to_dict() for each in found]
            listed.append({"case": case.to_dict(), "precision": precision,
                           "candidates": candidates})  # fmt: skip
            session.line(f"{case.name} · {precision}", "bold")
            rows = [[tile_words(each.tile), str(each.partitions), "shipped" * each.shipped]
                    for each in found]  # fmt: skip
            session.table(("tile", ">splits", ""), rows)
            session.line()
        results = {"dry_run": True, "tune": listed}
        session.document("bench attention", results, bench_common.described(device))
        count = sum(len(each["candidates"]) for each in listed)
        session.line(f"{count} candidates for {gpu}; nothing was measured", even_quiet=True)
        return
    tune.check_device(device, measuring=True)
    bench_common.require_free(device, options)
    with session.stage("tuning") as update:
        tuned = tune.run(tiled, device=device, settings=settings, progress=update)
    path = tune.save(tuned, device)
    session.written += [path] if path else []
    document = {"tuned": [each.to_dict() for each in tuned], "table": path}
    session.document("bench attention", document, environment.describe(device))
    for each in tuned:
        _show(session, each)
    better = sum(each.chosen is not None for each in tuned)
    where = f"written to {path}" if path else "nothing was written"
    session.line(f"{better} of {len(tuned)} calls get another tile; {where}", even_quiet=True)


def tile_words(tile: Tile) -> str:
    """`64x32, 4 warps, 3 stages, ahead`."""
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


def tune_linear(session: Session, options: Options) -> None:
    """Measure the products and write the user's table, or only list them."""
    import torch

    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import linear

    device = torch.device("cuda" if options.device == "auto" else options.device)
    linear.check_device(device)
    columns = (">rows", ">channels", ">columns")
    if options.dry_run:
        listed = [linear.product(shape) for shape in linear.SHAPES]
        results: dict[str, Any] = {"dry_run": True, "products": listed}
        session.document("bench linear", results, bench_common.described(device))
        session.table(columns, [[*map(str, shape)] for shape in linear.SHAPES])
        session.line(f"{len(listed)} products; nothing was measured", even_quiet=True)
        return
    linear.check_device(device, measuring=True)
    bench_common.require_free(device, options)
    with session.stage("measuring") as update:
        products = linear.tune(
            device, rounds=options.rounds, budget_seconds=options.budget, progress=update
        )
    path = linear.save(products, device)
    session.written += [path] if path else []
    least = linear.least_work(products)
    results = {"products": products, "least_work": least, "table": path}
    session.document("bench linear", results, environment.describe(device))
    rows = [
        [
            *(str(p[size]) for size in ("rows", "channels", "columns")),
            *("-" if seconds is None else f"{seconds * 1e3:.3g}"
              for seconds in (p["peer_seconds"], p["seconds"])),
            p["reason"] or f"{p['gain']:.2f}",
        ]
        for p in products
    ]  # fmt: skip
    session.table((*columns, ">PyTorch, ms", ">elsa, ms", ">gain"), rows)
    said = "no product" if least is None else f"products of {least / 1e6:.4g} million multiply-adds"
    where = f"written to {path}" if path else "nothing was written"
    session.line(f"{said} and more gain on this GPU; {where}", even_quiet=True)


def trace(
    session: Session, cases: Sequence[Case], device: torch.device, *, backend: str, seed: int
) -> None:
    """Trace `cases`, show them, and fail where a claim fails."""
    from elsa_core.profiling.bench import trace as tracing

    with session.stage("tracing") as update:
        traces = tracing.run(cases, device=device, backend=backend, seed=seed, progress=update)
    found = {"traces": [each.to_dict() for each in traces]}
    session.document("bench attention", found, bench_common.described(device))
    marks = {True: "✓", False: "✗ no", None: "not tried"}
    for each in traces:
        part = each.partition
        session.line(f"{each.case.name} · {each.precision} · {part.backend}", "bold")
        session.line(f"{part.schedule} ({part.machine})")
        session.table(("", "of this call"), _structure(part), wrap=1)
        session.line()
        rows = [
            [claim.name, marks[claim.ok], *(
                "-" if size is None else f"{size:.1e}" if size else "0"
                for size in (claim.found, claim.allowed)
            ), claim.note]
            for claim in each.claims
        ]  # fmt: skip
        session.table(("claim", "holds", ">found", ">at most", "what"), rows, wrap=4)
        session.line()
    failed = [t.case.name for t in traces if any(claim.ok is False for claim in t.claims)]
    if failed:
        raise VerdictError(f"a structural claim does not hold: {', '.join(failed)}")
    untried = sum(claim.ok is None for each in traces for claim in each.claims)
    rest = f"; what the kernel returns needs a GPU ({untried} not tried)" if untried else ""
    noun = "call" if len(traces) == 1 else "calls"
    session.line(f"{len(traces)} {noun} traced: every tried claim holds{rest}", even_quiet=True)


def _structure(part: Partition) -> list[list[str]]:
    last, states, tree = part.spans()[-1], part.states, part.tree
    sizes = (states.written_bytes, states.read_bytes, states.resident_bytes, part.ahead_bytes)
    written, read, alive, ahead = (
        f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB" for size in sizes
    )
    trip = "none: states stay on chip from the first key to the output"
    if states.states:
        trip = (
            f"{states.states} states ({states.form}) through {states.where}: {written} written, "
            f"{read} read, {alive} alive"
        )
    splits = f"{part.splits} of {part.split_keys} keys (the last: {last[1] - last[0]})"
    rows = [
        ["query tiles", f"{part.query_tiles} a head, up to {part.query_tile} rows each"],
        ["key leaves", f"{part.key_tiles} a row, up to {part.key_tile} keys each"],
        ["key splits", "none: one fold over all keys" if part.splits == 1 else splits],
        ["programs", f"{part.programs} that can run at once"],
        ["operands ahead", f"{ahead} written, read by each tile"],
        ["round trip", trip],
        [
            "merge depth",
            f"{tree['depth']} = {tree['leaf_levels']} in a leaf + {tree['chain_merges']} in a "
            f"chain + {tree['tree_levels']} in a tree + 3",
        ],
        ["L(n, B)", f"{tree['scan_depth']} for a scan of the same leaves (Eq. 6)"],
        ["u x depth", f"{tree['bound']:.2e}; Theorem 1, u L(n, B): {tree['scan_bound']:.2e}"],
    ]
    return [row for row in rows if part.ahead_bytes or row[0] != "operands ahead"]
