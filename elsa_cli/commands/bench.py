"""`elsa bench`: measure elsa against its peers on this machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import bench_common, bench_models, bench_tiles, names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError, VerdictError
from elsa_cli.options import Options, elsa_command, typed
from elsa_cli.values import BASELINE_LIST, DEVICE, DTYPES, Number

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.bench.attention import Settings
    from elsa_core.profiling.bench.cases import Case

Document = dict[str, Any]
_OF_CALLS = ("trace", "shapes", "plot", "flex", "precision")
_OF_LAYERS = (*_OF_CALLS, "dtype", "baselines")
_NOT_FOR = {
    "attention": ("limit", "baselines", "resume"),
    "models": (*_OF_CALLS, "tune"),
    "training": (*_OF_CALLS, "tune"),
    "linear": _OF_LAYERS,
    "linear --tune": (*_OF_LAYERS, "compare", "earlier", "quick", "tables", "patterns", "limit",
                      "seed", "backend", "output", "resume", "force"),
}  # fmt: skip
"""What a kind of benchmark does not take."""


@elsa_command(
    "bench",
    click.argument(
        "kind", type=click.Choice(["attention", "linear", "models", "training"]),
        metavar="[attention|linear|models|training]", required=False,
    ),
    click.option("--device", type=DEVICE, default="auto", help="auto, cpu, cuda or cuda:N."),
    shared.flag("--quick", text="A few representative cases only."),
    shared.flag("--dry-run", text="List the cases; measure nothing."),
    shared.flag("--trace", text="Show and prove how calls are cut and merged."),
    shared.flag("--tune", text="Choose GPU tiles for these calls; writes your table."),
    click.option("--table", "tables", multiple=True, metavar="NAME", help="Only these tables."),
    click.option(
        "--case", "patterns", multiple=True, metavar="GLOB",
        help="Only cases whose name matches (repeatable), like 'vit/1x12x*'.",
    ),
    click.option(
        "--shape", "shapes", multiple=True, metavar="B,H,N,D",
        help="A call of your own instead (repeatable); B,H,NQ:NK,D for NQ queries.",
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Of --shape (fp32), or cases of it only."
    ),
    click.option(
        "--precision", type=click.Choice(shared.PRECISIONS),
        help="Instead of the cases' own precisions.",
    ),
    click.option(
        "--rounds", type=click.IntRange(3, 1000), default=15, show_default=True,
        help="Samples of each contender (models: at least).",
    ),
    click.option(
        "--budget", type=Number(0.1, 3600), default=20.0, show_default=True,
        metavar="SECONDS", help="Limit of one case; it takes fewer rounds then.",
    ),
    click.option(
        "--limit", type=Number(1), metavar="SECONDS",
        help="Begin no further model or product after this time; --resume goes on.",
    ),
    click.option(
        "--baselines", type=BASELINE_LIST,
        help="Of models and training: what to measure against, as in `elsa profile`.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True),
    shared.BACKEND,
    shared.flag("--flex", text="Compile and measure FlexAttention too (CUDA)."),
    shared.path_option(
        "--output", "-o", text="Write the results (JSON); refused on a busy machine."
    ),
    shared.path_option("--plot", text="Draw time and memory against tokens (.png or .svg)."),
    shared.flag("--resume", text="Not for attention: go on with what --output holds."),
    click.option(
        "--compare", metavar="FILE",
        help="Set this run beside the results in FILE, or a published one (attention_cpu, ...).",
    ),
    shared.path_option(
        "--from", "earlier", text="With --compare: an earlier run instead of a new one."
    ),
    shared.flag("--force", text="Replace existing files."),
    shared.flag("--allow-busy", text="Write results although others use the machine."),
)  # fmt: skip
def command(session: Session, /, kind: str | None, **values: Any) -> None:
    """Time exact attention against every peer that takes the same case, side by side; or whole
    models, or their training steps, patched against every way one would otherwise run them.

    Peers are PyTorch's attention backends, an eager softmax, ONNX Runtime (CPU), FlashAttention 4
    where flash-attn-4 is installed (Hopper and Blackwell, half precision) and FlexAttention
    (--flex). Rounds are interleaved; errors are against float64; a ratio above 1 means that elsa
    is faster than the best peer. Exit code 1 if elsa's result is wrong anywhere.

    --trace measures nothing: it shows a call's partitions, what becomes of its states and how deep
    its merges are, and replays them; a GPU's schedule needs no GPU. --tune times tiles on a GPU.
    `linear` times float32 linear layers, product by product, beside PyTorch's own and TF32.
    `linear --tune` measures whether split float32 products gain on this GPU; patched models then
    use them there.
    --compare measures the cases of an earlier or published run again; exit code 1 if any became
    worse.
    """
    options = Options(**values)
    published = bench_common.published(options.compare)
    of_file = None if published is None else published["command"].partition(" ")[2]
    if options.earlier is not None and published is None:
        raise click.UsageError("--from goes with --compare")
    kind = kind or of_file
    if kind is None:
        raise click.UsageError("Missing argument 'attention', 'linear', 'models' or 'training'")
    if of_file not in (None, kind):
        raise click.UsageError(f"--compare: {options.compare} holds {of_file}, not {kind}")
    _check(kind, options)
    if published is not None and options.earlier is not None:
        if alone := typed(name for name in values if name not in ("compare", "earlier")):
            raise click.UsageError(f"{alone[0]} is about a new run: --from takes an earlier one")
        bench_common.files(session, options.earlier, published)
        return
    if published is not None:
        _select(options, [case["case"] for case in published["results"]["cases"]])
    if options.plot is not None:
        names.check_plot(options.plot)
    pipeline.import_torch(session)
    if kind == "attention":
        _attention(session, options, published)
    elif options.tune:
        bench_tiles.tune_linear(session, options)
    else:
        bench_models.run(session, options, published, kind)


def _select(options: Options, published: list[Document]) -> None:
    """Set in `options` the precision that all cases of a published run were measured in alone, and
    where none are named, these cases."""
    called = [str(case["name"]) for case in published]  # the file may say anything
    first = published[0].get("precisions") if published else None
    alone = all(case.get("precisions") == first for case in published)
    if options.precision is None and alone and isinstance(first, list) and len(first) == 1:
        options.precision = str(first[0])
    if options.tables or options.patterns or options.quick or options.shapes:
        return
    shapes = [re.fullmatch(f"shape/(.+)-({'|'.join(DTYPES)})", name) for name in called]
    found = [shape.groups() for shape in shapes if shape is not None]
    if found:  # a run of --shape, whose calls are in no table
        options.shapes = tuple(sizes.replace("x", ",") for sizes, _ in found)
        options.dtype = options.dtype or found[0][1]
    else:
        options.patterns = tuple(re.sub(r"([*?[])", r"[\1]", name) for name in called)


def _check(kind: str, options: Options) -> None:
    """Flags that the kind does not take, or that contradict one another, end the command."""
    name = "linear --tune" if kind == "linear" and options.tune else kind
    if alien := typed(_NOT_FOR[name]):
        raise click.UsageError(f"{alien[0]} is not for {name}")
    if options.resume and options.output is None:
        raise click.UsageError("--resume goes on with what --output holds: name it")
    both = [path.resolve() for path in (options.plot, options.output) if path is not None]
    if len(set(both)) < len(both):
        raise click.UsageError("--plot and --output write the same file")
    if options.trace and options.tune:
        raise click.UsageError("--trace and --tune exclude each other")
    for mode in ("trace", "tune"):
        for name in ("output", "plot", "compare"):
            if getattr(options, mode) and getattr(options, name) is not None:
                raise click.UsageError(f"--{name} needs measurements; --{mode} makes none of them")
    selects = {"--table": options.tables, "--case": options.patterns, "--quick": options.quick}
    for flag, value in selects.items():
        if options.shapes and value:
            raise click.UsageError(f"--shape and {flag} exclude each other")


def _attention(session: Session, options: Options, published: Document | None) -> None:
    from elsa_core.profiling import figures
    from elsa_core.profiling.bench import cases
    from elsa_core.profiling.bench.attention import Settings

    device = bench_common.device_of(options, plans=options.trace or options.tune)
    if options.tune:
        from elsa_core.profiling.bench import tune

        tune.check_device(device)
    if options.shapes:
        how = {"dtype": options.dtype or "fp32", "precision": options.precision or "strict"}
        chosen = tuple(dict.fromkeys(cases.from_shape(text, **how) for text in options.shapes))
    else:  # --trace and --tune take few where none is named
        few = (options.trace or options.tune) and not (options.tables or options.patterns)
        chosen = cases.select(
            device.type, options.precision, tables=options.tables, patterns=options.patterns,
            quick=options.quick or few, dtype=options.dtype,
        )  # fmt: skip
    settings = Settings(
        rounds=options.rounds, budget_seconds=options.budget, seed=options.seed,
        backend=options.backend, flex=options.flex,
    )  # fmt: skip
    if options.tune:
        bench_tiles.tune_tiles(session, chosen, device, settings, options)
    elif options.dry_run:
        results = {"dry_run": True, "cases": [case.to_dict() for case in chosen]}
        session.document("bench attention", results, bench_common.described(device))
        rows = [
            [
                case.name, " ".join(case.precisions),
                "-" if case.goal is None else f"{case.goal:g}",
                f"{case.flops / 1e9:.3g}", f"{case.score_bytes / 2**20:.3g}",
            ]
            for case in chosen
        ]  # fmt: skip
        session.table(("case", "precisions", ">goal", ">GFLOP", ">scores MiB"), rows)
        session.line(f"{len(chosen)} cases on {device}; nothing was measured", even_quiet=True)
    elif options.trace:
        bench_tiles.trace(session, chosen, device, backend=options.backend, seed=options.seed)
    else:
        if options.plot is not None:
            names.check_new(options.plot, options.force)
            planned = [{"case": case.to_dict(), "measurements": []} for case in chosen]
            figures.family({"results": {"cases": planned}})  # is there one to draw
        bench_common.check_output(device, options, resumes=False)
        _measure(session, chosen, settings, device, options, published)


def _measure(
    session: Session, chosen: tuple[Case, ...], settings: Settings, device: torch.device,
    options: Options, published: Document | None,
) -> None:  # fmt: skip
    from elsa_core.profiling import figures
    from elsa_core.profiling.bench import attention

    with session.stage("measuring") as update:
        document = attention.run(chosen, device=device, settings=settings, progress=update)
    _show(session, document, published)
    cases, busy = document["results"]["cases"], document["results"]["busy"]
    own = {m["contender"] for case in cases for m in case["measurements"] if m["precision"]}
    if options.backend != "auto" and not own:
        reason = next((why for case in cases for why in case["left_out"].values()), "no case")
        raise PlaceError(f"--backend {options.backend} served no case: {reason}")
    wrong = [f"{c['case']['name']}: {name}" for c in cases for name in c["wrong"] if name in own]
    if wrong:
        raise VerdictError(f"wrong results, nothing was written: {', '.join(wrong)}")
    if options.plot is not None:
        session.written.append(figures.of_attention(document, options.plot))
        session.line(f"plot: {options.plot}")
    if options.output is not None:
        if busy and not options.allow_busy:
            raise PlaceError(
                f"not written: {busy}; measure again on a free machine, or use --allow-busy"
            )
        session.keep(document, options.output)
        session.line(f"results: {options.output}")
    if published is not None:
        bench_common.judge(session, document, published)


def _show(session: Session, document: Document, published: Document | None) -> None:
    from elsa_core.base.messages import milliseconds
    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import summary

    results = document["results"]
    bench_common.print_document(session, document, published)
    session.line(environment.label(document["environment"]), "bold")
    columns = (">ms", "best peer", ">ms", ">ratio", ">GFLOP/s", ">error", ">peer's")
    for table in dict.fromkeys(case["case"]["table"] for case in results["cases"]):
        session.line()
        members = [case for case in results["cases"] if case["case"]["table"] == table]
        # A dtype that all have in common is said once.
        dtypes = {case["case"]["dtype"] for case in members}
        common = f"-{dtypes.pop()}" if len(dtypes) == 1 else ""
        rows = []
        for case in members:
            name = case["case"]["name"].partition("/")[2].replace(common, "", 1)
            runs = {m["contender"]: m for m in case["measurements"]}
            best = runs.get(case["best_peer"])
            peer = [best["contender"], milliseconds(best["seconds"])] if best else ["none", "-"]
            own = {who: m for who, m in runs.items() if m["precision"]}
            if not own:
                reason = next(iter(case["left_out"].values()), "not measured")
                rows.append([name, "-", f"no: {reason}", *["-"] * 5])
            for who, m in own.items():
                error, peers = (  # in a document NaN is None
                    "-" if one is None or one["error"] is None else f"{one['error']:.1e}"
                    for one in (m, best)
                )
                rows.append([
                    name if m["precision"] == "strict" else f"{name} {m['precision']}",
                    milliseconds(m["seconds"]), *peer,
                    "-" if m["ratio"] is None else f"{m['ratio']:.2f}",
                    f"{m['flops_per_second'] / 1e9:.4g}",
                    ("FAIL " if who in case["wrong"] else "") + error, peers,
                ])  # fmt: skip
        session.table((table + common.replace("-", " "), *columns), rows)
    for case in results["cases"] if session.verbose else ():
        for name, reason in case["left_out"].items():
            session.log(f"{case['case']['name']}: without {name}: {reason}")
    if results["busy"]:
        session.warn(f"the machine was not free: {results['busy']}")
    session.line(summary.of_attention(document), even_quiet=True)
