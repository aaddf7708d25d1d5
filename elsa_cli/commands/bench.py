"""`elsa bench`: measure elsa against its peers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import (
    bench_compare,
    bench_linear,
    bench_models,
    bench_trace,
    bench_tune,
    completion,
    pipeline,
    targets,
)
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import (
    DTYPES,
    PRECISIONS,
    Command,
    DeviceName,
    FilePath,
    Listed,
    backend_option,
    output_options,
    pass_session,
    resolve_device,
    typed,
)

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.bench.cases import Case
    from elsa_core.profiling.bench.results import CaseResult, Report, Settings


@click.command("bench", cls=Command)
@click.argument(
    "kind", type=click.Choice(["attention", "linear", "models", "training"]),
    metavar="[attention|linear|models|training]", required=False,
)  # fmt: skip
@click.option(
    "--device", type=DeviceName(), default="auto", show_default=True,
    help="auto, cpu, cuda or cuda:N.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="A few representative cases only.")
@click.option("--dry-run", is_flag=True, help="List the cases; measure nothing.")
@click.option("--trace", is_flag=True, help="Show and prove how calls are cut and merged.")
@click.option("--tune", is_flag=True, help="Choose GPU tiles for these calls; writes your table.")
@click.option(
    "--table", "tables", multiple=True, metavar="NAME", shell_complete=completion.tables,
    help="Only these tables.",
)  # fmt: skip
@click.option(
    "--case", "patterns", multiple=True, metavar="GLOB",
    help="Only cases whose name matches (repeatable), like 'vit/1x12x*'.",
)  # fmt: skip
@click.option(
    "--shape", "shapes", multiple=True, metavar="B,H,N,D",
    help="A call of your own instead (repeatable); B,H,NQ:NK,D for NQ queries.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of --shape (fp32), or cases of it only.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Instead of the cases' own precisions."
)
@click.option(
    "--rounds", type=click.IntRange(3, 1000), default=15, show_default=True,
    help="Samples of each contender (models: at least).",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(0.1, 3600), default=20.0, show_default=True,
    metavar="SECONDS", help="Limit of one case; it takes fewer rounds then.",
)  # fmt: skip
@click.option(
    "--limit", type=click.FloatRange(1), metavar="SECONDS",
    help="Begin no further model or product after this time; --resume goes on.",
)  # fmt: skip
@click.option(
    "--baselines", type=Listed(click.STRING), metavar="NAME[,...]",
    shell_complete=completion.baselines,
    help="Of models and training: what to measure against, as in `elsa profile`.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@backend_option
@click.option("--flex", is_flag=True, help="Compile and measure FlexAttention too (CUDA).")
@click.option(
    "--output", "-o", type=FilePath(), metavar="FILE",
    help="Write the results (JSON); refused on a busy machine.",
)  # fmt: skip
@click.option(
    "--plot", type=FilePath(), metavar="FILE",
    help="Draw time and memory against tokens (.png or .svg).",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Not for attention: go on with what --output holds.")
@click.option(
    "--compare", metavar="FILE",
    help="Set this run beside the results in FILE, or a published one (attention_cpu, ...).",
)  # fmt: skip
@click.option(
    "--from", "earlier", type=FilePath(), metavar="FILE",
    help="With --compare: an earlier run instead of a new one.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--allow-busy", is_flag=True, help="Write results although others use the machine.")
@output_options
@pass_session
def command(session: Session, /, kind: str | None, **given: Any) -> None:
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
    if kind == "linear":
        bench_linear.run(session, given)
        return
    _check_modes(given)
    published = bench_compare.published(given["compare"])
    kind = _kind_of(kind, published, given)
    if given["earlier"] is not None:
        alone = typed(name for name in given if name not in ("compare", "earlier"))
        if alone:
            raise click.UsageError(f"{alone[0]} is about a new run: --from takes an earlier one")
        bench_compare.files(session, given["earlier"], published)
        return
    if published is not None and not (given["tables"] or given["patterns"] or given["quick"]):
        given["patterns"] = bench_compare.names(published)
    if given["plot"] is not None:
        targets.check_plot(given["plot"])
    pipeline.import_torch(session)
    if kind != "attention":
        bench_models.run(session, given, published, steps=kind == "training")
        return
    from torch import device as torch_device
    from torch.cuda import is_available

    from elsa_core.profiling.bench import results

    # Listing and planning the calls of a GPU needs none.
    absent = given["device"].startswith("cuda") and not is_available()
    listed = given["dry_run"] and given["device"] != "auto"
    listed = listed or (absent and (given["trace"] or given["tune"]))
    device = torch_device(given["device"] if listed else resolve_device(given["device"]))
    chosen = _chosen(device, given)
    settings = results.Settings(
        rounds=given["rounds"], budget_seconds=given["budget"], seed=given["seed"],
        backend=given["backend"], flex=given["flex"],
    )  # fmt: skip
    if given["tune"]:
        bench_tune.run(
            session, chosen, device, settings,
            dry_run=given["dry_run"], allow_busy=given["allow_busy"],
        )  # fmt: skip
        return
    if given["dry_run"]:
        _list(session, chosen, device)
        return
    if given["trace"]:
        bench_trace.run(session, chosen, device, backend=given["backend"], seed=given["seed"])
        return
    _check_targets(device, given)
    _measure(session, chosen, settings, device, given, published)


def _measure(
    session: Session,
    chosen: tuple[Case, ...],
    settings: Settings,
    device: torch.device,
    given: dict[str, Any],
    published: dict[str, Any] | None,
) -> None:
    """Measure the calls, show and write the result; what is wrong or became worse ends it."""
    from elsa_core.errors import UnavailableError
    from elsa_core.profiling.bench import attention, results

    with session.stage("measuring") as update:
        report = attention.run(chosen, device=device, settings=settings, progress=update)
    _show(session, report, published)
    served = any(m.precision is not None for r in report.cases for m in r.measurements)
    if given["backend"] != "auto" and not served:
        reason = next((why for r in report.cases for why in r.left_out.values()), "no case")
        raise UnavailableError(f"--backend {given['backend']} served no case: {reason}")
    wrong = [f"{r.case.name}: {name}" for r in report.cases for name in r.own_wrong]
    if wrong:
        raise VerdictError(f"wrong results, nothing was written: {', '.join(wrong)}")
    _write(session, report, given)
    if published is not None:
        bench_compare.judge(session, results.document(report), published)


def _kind_of(kind: str | None, published: dict[str, Any] | None, given: dict[str, Any]) -> str:
    """What is measured: named, or that of the document to compare with."""
    if given["earlier"] is not None and published is None:
        raise click.UsageError("--from goes with --compare")
    of_file = None if published is None else published["command"].partition(" ")[2]
    if kind is None and of_file is None:
        raise click.UsageError("Missing argument 'attention', 'linear', 'models' or 'training'")
    if None not in (kind, of_file) and kind != of_file:
        raise click.UsageError(f"--compare: {given['compare']} holds {of_file}, not {kind}")
    chosen = str(kind or of_file)
    of_models = {"--limit": given["limit"], "--baselines": given["baselines"],
                 "--resume": given["resume"]}  # fmt: skip
    of_attention = {"--trace": given["trace"], "--tune": given["tune"], "--shape": given["shapes"],
                    "--plot": given["plot"], "--flex": given["flex"],
                    "--precision": given["precision"]}  # fmt: skip
    for flag, value in (of_models if chosen == "attention" else of_attention).items():
        if value:
            raise click.UsageError(f"{flag} is not for {chosen}")
    return chosen


def _check_modes(given: dict[str, Any]) -> None:
    """Flags that contradict one another end the command at once."""
    if given["resume"] and given["output"] is None:
        raise click.UsageError("--resume goes on with what --output holds: name it")
    if given["trace"] and given["tune"]:
        raise click.UsageError("--trace and --tune exclude each other")
    for mode in ("trace", "tune"):
        for name in ("output", "plot", "compare"):
            if given[mode] and given[name] is not None:
                raise click.UsageError(f"--{name} needs measurements; --{mode} makes none of them")
    selects = {"--table": given["tables"], "--case": given["patterns"], "--quick": given["quick"]}
    for flag, value in selects.items():
        if given["shapes"] and value:
            raise click.UsageError(f"--shape and {flag} exclude each other")


def _chosen(device: torch.device, given: dict[str, Any]) -> tuple[Case, ...]:
    """The calls that the options name. --trace and --tune take few where none is named."""
    from elsa_core.profiling.bench import cases

    if given["tune"]:
        from elsa_core.profiling.bench import tune

        tune.check_device(device)
    precision, dtype = given["precision"], given["dtype"]
    if given["shapes"]:
        made = [
            cases.from_shape(text, dtype=dtype or "fp32", precision=precision or "strict")
            for text in given["shapes"]
        ]
        return tuple(dict.fromkeys(made))
    few = (given["trace"] or given["tune"]) and not (given["tables"] or given["patterns"])
    found = cases.select(
        device.type, tables=given["tables"], patterns=given["patterns"],
        quick=given["quick"] or few, dtype=dtype,
    )  # fmt: skip
    if precision is None:
        return found
    return tuple(cases.with_precision(case, precision) for case in found)


def _list(session: Session, chosen: tuple[Case, ...], device: torch.device) -> None:
    from torch.cuda import is_available

    from elsa_core.measuring import environment

    there = device.type == "cpu" or is_available()
    results = {"dry_run": True, "cases": [case.to_dict() for case in chosen]}
    described = environment.describe(device if there else "cpu")
    session.document("bench attention", described, results)
    rows = [
        [
            case.name, " ".join(case.precisions), "-" if case.goal is None else f"{case.goal:g}",
            f"{case.flops / 1e9:.3g}", f"{case.score_bytes / 2**20:.3g}",
        ]
        for case in chosen
    ]  # fmt: skip
    session.table(("case", "precisions", ">goal", ">GFLOP", ">scores MiB"), rows)
    session.line(f"{len(chosen)} cases on {device}; nothing was measured", even_quiet=True)


def _check_targets(device: torch.device, given: dict[str, Any]) -> None:
    """Whatever would keep the results from being written ends the command before it measures."""
    from elsa_core.errors import ArgumentError, UnavailableError
    from elsa_core.measuring import busy, plots

    target: Path | None = given["output"]
    for path in (target, given["plot"]):
        if path is not None and not path.parent.is_dir():
            raise ArgumentError(f"{path}: its folder does not exist; create it first")
    if given["plot"] is not None:
        plots.check(given["plot"], force=given["force"])
    if target is None:
        return
    if target.exists() and not given["force"]:
        raise ArgumentError(f"{target} exists; use --force to replace it")
    why = busy.reason(device)
    if why and not given["allow_busy"]:
        raise UnavailableError(f"{why}: wait until the machine is free, or use --allow-busy")


def _show(session: Session, report: Report, published: dict[str, Any] | None) -> None:
    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import results, summary

    added = bench_compare.added(results.document(report), published)
    session.document("bench attention", report.environment, report.to_dict() | added)
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
    text = summary.of_attention(results.document(report))
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


def _write(session: Session, report: Report, given: dict[str, Any]) -> None:
    from elsa_core.profiling.bench import plots, results

    if given["plot"] is not None:
        session.written.append(
            plots.plot(results.document(report), given["plot"], force=given["force"])
        )
        session.line(f"plot: {given['plot']}")
    if given["output"] is not None:
        session.written.append(
            results.publish(
                report, given["output"], force=given["force"], allow_busy=given["allow_busy"]
            )
        )
        session.line(f"results: {given['output']}")
