"""`elsa bench`: measure elsa against its peers on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from elsa_cli import (
    bench_common,
    bench_models,
    bench_tiles,
    completion,
    pipeline,
    targets,
)
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import Options, elsa_command, typed
from elsa_cli.values import DTYPES, Listed

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.bench.cases import Case
    from elsa_core.profiling.bench.results import CaseResult, Report, Settings

# What is about one kind of benchmark alone.
_OF_MODELS = {"--limit": "limit", "--baselines": "baselines", "--resume": "resume"}
_OF_ATTENTION = {"--trace": "trace", "--tune": "tune", "--shape": "shapes", "--plot": "plot",
                 "--flex": "flex", "--precision": "precision"}  # fmt: skip


@elsa_command(
    "bench",
    click.argument(
        "kind", type=click.Choice(["attention", "linear", "models", "training"]),
        metavar="[attention|linear|models|training]", required=False,
    ),
    shared.device_option("auto, cpu, cuda or cuda:N."),
    click.option("--quick", is_flag=True, help="A few representative cases only."),
    click.option("--dry-run", is_flag=True, help="List the cases; measure nothing."),
    click.option("--trace", is_flag=True, help="Show and prove how calls are cut and merged."),
    click.option(
        "--tune", is_flag=True, help="Choose GPU tiles for these calls; writes your table."
    ),
    click.option(
        "--table", "tables", multiple=True, metavar="NAME", shell_complete=completion.tables,
        help="Only these tables.",
    ),
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
        "--budget", type=click.FloatRange(0.1, 3600), default=20.0, show_default=True,
        metavar="SECONDS", help="Limit of one case; it takes fewer rounds then.",
    ),
    click.option(
        "--limit", type=click.FloatRange(1), metavar="SECONDS",
        help="Begin no further model or product after this time; --resume goes on.",
    ),
    click.option(
        "--baselines", type=Listed(click.STRING), metavar="NAME[,...]",
        shell_complete=completion.baselines,
        help="Of models and training: what to measure against, as in `elsa profile`.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True),
    shared.BACKEND,
    click.option("--flex", is_flag=True, help="Compile and measure FlexAttention too (CUDA)."),
    shared.file_option(
        "--output", "-o", text="Write the results (JSON); refused on a busy machine."
    ),
    shared.file_option("--plot", text="Draw time and memory against tokens (.png or .svg)."),
    click.option(
        "--resume", is_flag=True, help="Not for attention: go on with what --output holds."
    ),
    click.option(
        "--compare", metavar="FILE",
        help="Set this run beside the results in FILE, or a published one (attention_cpu, ...).",
    ),
    shared.file_option(
        "--from", "earlier", text="With --compare: an earlier run instead of a new one."
    ),
    click.option("--force", is_flag=True, help="Replace existing files."),
    click.option(
        "--allow-busy", is_flag=True, help="Write results although others use the machine."
    ),
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
    if kind == "linear":
        _check_linear(options, values)
        pipeline.import_torch(session)
        if options.tune:
            bench_tiles.tune_linear(session, options)
        else:
            bench_models.run(session, options, None, "linear")
        return
    _check_modes(options)
    published = bench_common.published(options.compare)
    kind = _kind_of(kind, published, options)
    if options.earlier is not None:
        alone = typed(name for name in values if name not in ("compare", "earlier"))
        if alone:
            raise click.UsageError(f"{alone[0]} is about a new run: --from takes an earlier one")
        bench_common.files(session, options.earlier, published)
        return
    if published is not None and not (options.tables or options.patterns or options.quick):
        options.patterns = bench_common.case_names(published)
    if options.plot is not None:
        targets.check_plot(options.plot)
    pipeline.import_torch(session)
    if kind == "attention":
        _attention(session, options, published)
    else:
        bench_models.run(session, options, published, kind)


def _attention(session: Session, options: Options, published: dict[str, Any] | None) -> None:
    """List, trace, tune or measure calls of the operator."""
    from elsa_core.profiling.bench import results

    device = bench_common.device_of(options, plans=options.trace or options.tune)
    chosen = _chosen(device, options)
    settings = results.Settings(
        rounds=options.rounds, budget_seconds=options.budget, seed=options.seed,
        backend=options.backend, flex=options.flex,
    )  # fmt: skip
    if options.tune:
        bench_tiles.tune_tiles(session, chosen, device, settings, options)
    elif options.dry_run:
        _list(session, chosen, device)
    elif options.trace:
        bench_tiles.trace(session, chosen, device, backend=options.backend, seed=options.seed)
    else:
        from elsa_core.profiling import figures

        bench_common.check_folder(options.output)
        bench_common.check_folder(options.plot)
        if options.plot is not None:
            figures.check(options.plot, force=options.force)
        bench_common.check_output(device, options, resumes=False)
        _measure(session, chosen, settings, device, options, published)


def _measure(
    session: Session, chosen: tuple[Case, ...], settings: Settings, device: torch.device,
    options: Options, published: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Measure the calls, show and write the result; what is wrong or became worse ends it."""
    from elsa_core.errors import UnavailableError
    from elsa_core.profiling import figures
    from elsa_core.profiling.bench import attention, results

    with session.stage("measuring") as update:
        report = attention.run(chosen, device=device, settings=settings, progress=update)
    document = results.document(report)
    _show(session, report, document, published)
    served = any(m.precision is not None for r in report.cases for m in r.measurements)
    if options.backend != "auto" and not served:
        reason = next((why for r in report.cases for why in r.left_out.values()), "no case")
        raise UnavailableError(f"--backend {options.backend} served no case: {reason}")
    wrong = [f"{r.case.name}: {name}" for r in report.cases for name in r.own_wrong]
    if wrong:
        raise VerdictError(f"wrong results, nothing was written: {', '.join(wrong)}")
    if options.plot is not None:
        session.written.append(figures.of_attention(document, options.plot, force=options.force))
        session.line(f"plot: {options.plot}")
    if options.output is not None:
        session.written.append(results.publish(
            report, options.output, force=options.force, allow_busy=options.allow_busy
        ))  # fmt: skip
        session.line(f"results: {options.output}")
    if published is not None:
        bench_common.judge(session, document, published)


def _kind_of(kind: str | None, published: dict[str, Any] | None, options: Options) -> str:
    """What is measured: named, or that of the document to compare with."""
    if options.earlier is not None and published is None:
        raise click.UsageError("--from goes with --compare")
    of_file = None if published is None else published["command"].partition(" ")[2]
    if kind is None and of_file is None:
        raise click.UsageError("Missing argument 'attention', 'linear', 'models' or 'training'")
    if None not in (kind, of_file) and kind != of_file:
        raise click.UsageError(f"--compare: {options.compare} holds {of_file}, not {kind}")
    chosen = str(kind or of_file)
    for flag, name in (_OF_MODELS if chosen == "attention" else _OF_ATTENTION).items():
        if getattr(options, name):
            raise click.UsageError(f"{flag} is not for {chosen}")
    return chosen


def _check_linear(options: Options, values: dict[str, Any]) -> None:
    """Flags that products do not take end the command at once."""
    takes: tuple[str, ...] = ("device", "tune", "dry_run", "rounds", "budget", "allow_busy")
    if not options.tune:
        takes += ("quick", "tables", "patterns", "limit", "seed", "backend", "output", "resume",
                  "force")  # fmt: skip
    alone = typed(name for name in values if name not in takes)
    if alone:
        raise click.UsageError(f"{alone[0]} is not for linear{' --tune' * options.tune}")
    _check_resume(options)


def _check_resume(options: Options) -> None:
    if options.resume and options.output is None:
        raise click.UsageError("--resume goes on with what --output holds: name it")


def _check_modes(options: Options) -> None:
    """Flags that contradict one another end the command at once."""
    _check_resume(options)
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


def _chosen(device: torch.device, options: Options) -> tuple[Case, ...]:
    """The calls that the options name. --trace and --tune take few where none is named."""
    from elsa_core.profiling.bench import cases

    if options.tune:
        from elsa_core.profiling.bench import tune

        tune.check_device(device)
    precision, dtype = options.precision, options.dtype
    if options.shapes:
        how = {"dtype": dtype or "fp32", "precision": precision or "strict"}
        return tuple(dict.fromkeys(cases.from_shape(text, **how) for text in options.shapes))
    few = (options.trace or options.tune) and not (options.tables or options.patterns)
    found = cases.select(
        device.type, tables=options.tables, patterns=options.patterns,
        quick=options.quick or few, dtype=dtype,
    )  # fmt: skip
    if precision is None:
        return found
    return tuple(cases.with_precision(case, precision) for case in found)


def _list(session: Session, chosen: tuple[Case, ...], device: torch.device) -> None:
    results = {"dry_run": True, "cases": [case.to_dict() for case in chosen]}
    session.document("bench attention", results, bench_common.described(device))
    rows = [
        [
            case.name, " ".join(case.precisions), "-" if case.goal is None else f"{case.goal:g}",
            f"{case.flops / 1e9:.3g}", f"{case.score_bytes / 2**20:.3g}",
        ]
        for case in chosen
    ]  # fmt: skip
    session.table(("case", "precisions", ">goal", ">GFLOP", ">scores MiB"), rows)
    session.line(f"{len(chosen)} cases on {device}; nothing was measured", even_quiet=True)


def _show(
    session: Session, report: Report, document: dict[str, Any], published: dict[str, Any] | None
) -> None:
    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import summary

    added = bench_common.added(document, published)
    session.document("bench attention", report.to_dict() | added, report.environment)
    session.line(environment.label(report.environment), "bold")
    columns = (">ms", "best peer", ">ms", ">ratio", ">GFLOP/s", ">error", ">peer's")
    for table in dict.fromkeys(result.case.table for result in report.cases):
        session.line()
        members = [result for result in report.cases if result.case.table == table]
        # A dtype that all have in common is said once.
        dtypes = {result.case.dtype for result in members}
        common = f"-{dtypes.pop()}" if len(dtypes) == 1 else ""
        rows = [row for result in members for row in _rows(result, common)]
        session.table((table + common.replace("-", " "), *columns), rows)
    for case in report.cases if session.verbose else ():
        for name, reason in case.left_out.items():
            session.log(f"{case.case.name}: without {name}: {reason}")
    if report.busy:
        session.warn(f"the machine was not free: {report.busy}")
    # The first sentence names the machine, which the heading has done.
    text = summary.of_attention(document)
    session.line(text.partition("At least")[1] + text.partition("At least")[2], even_quiet=True)


def _rows(result: CaseResult, common: str) -> list[list[str]]:
    from elsa_core.base.messages import milliseconds

    best = next((m for m in result.measurements if m.contender == result.best_peer), None)
    own = [m for m in result.measurements if m.precision is not None]
    peer = [best.contender, milliseconds(best.seconds)] if best else ["none", "-"]
    name = result.case.name.partition("/")[2].replace(common, "", 1)
    if not own:
        reason = next(iter(result.left_out.values()), "not measured")
        return [[name, "-", f"no: {reason}", *["-"] * 5]]
    return [
        [
            name if m.precision == "strict" else f"{name} {m.precision}",
            milliseconds(m.seconds), *peer, "-" if m.ratio is None else f"{m.ratio:.2f}",
            f"{m.flops_per_second / 1e9:.4g}",
            ("FAIL " if m.contender in result.wrong else "") + f"{m.error:.1e}",
            f"{best.error:.1e}" if best else "-",
        ]
        for m in own
    ]  # fmt: skip
