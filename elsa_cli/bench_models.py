"""`elsa bench models`, `training` and `linear`: whole models, their training steps or single linear
layers against every way one would otherwise run them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elsa_cli import bench_common
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError, VerdictError
from elsa_cli.options import Options, typed

if TYPE_CHECKING:
    import torch

Document = dict[str, Any]


def run(session: Session, options: Options, published: Document | None, kind: str) -> None:
    """Measure what the options name of a kind, keep it in --output as it comes, show it."""
    bench = import_module(f"elsa_core.profiling.bench.{kind}").RUNNER
    what = "products" if kind == "linear" else "models"
    device = bench_common.device_of(options)
    cases = bench.select(
        device.type, tables=options.tables, patterns=options.patterns, quick=options.quick,
        dtype=options.dtype,
    )  # fmt: skip
    if options.dry_run:
        _list(session, cases, device, bench.command, what)
        return
    from elsa_core.profiling.bench import families, models, runner

    bench_common.check_output(device, options, resumes=True)
    target = options.output
    named = {"rounds": "rounds", "budget": "budget_seconds", "baselines": "baselines"}
    how = {key: getattr(options, name) for name, key in named.items()}
    if bench is models.RUNNER:
        plain = [key for name, key in named.items() if not typed((name,))]
        how |= families.protocol(device, cases, how | dict.fromkeys(plain))
    document = bench.started(device, **how, seed=options.seed, backend=options.backend)
    if options.resume and target is not None and target.exists():
        document = runner.read(target, document)

    try:
        with session.stage("measuring") as update:
            bench.run(
                cases, document, device=device, keep=partial(session.keep, path=target),
                limit_seconds=options.limit, progress=update,
            )  # fmt: skip
    finally:
        if document["results"]["cases"]:
            _show(session, document, published)
    done = document["results"]["cases"]
    if options.backend != "auto" and done and not any(case["measurements"] for case in done):
        reason = next(iter(done[0]["left_out"].values()), "")
        raise PlaceError(f"--backend {options.backend} served no {what[:-1]}: {reason}")
    left = len({case.name for case in cases} - {each["case"]["name"] for each in done})
    if left:
        hint = f"; --resume -o {target} goes on" if target is not None else ""
        session.line(f"{left} of {len(cases)} {what} are left{hint}")
    wrong = [case["case"]["name"] for case in done if case["wrong"]]
    if wrong:
        raise VerdictError(f"wrong results: {', '.join(wrong)}")
    if published is not None:
        bench_common.judge(session, document, published)


def _list(
    session: Session, cases: tuple[Any, ...], device: torch.device, command: str, what: str
) -> None:
    results = {"dry_run": True, what: [case.to_dict() for case in cases]}
    session.document(command, results, bench_common.described(device))
    if what == "products":
        sizes = ("rows", "channels", "columns")
        rows = [[case.name, *(str(getattr(case, size)) for size in sizes)] for case in cases]
        session.table(("case", *(f">{size}" for size in sizes)), rows)
    else:
        rows = [
            [case.name, case.model, "-" if case.window is None else str(case.window)]
            for case in cases
        ]  # fmt: skip
        session.table(("case", "model", ">window"), rows)
    session.line(f"{len(cases)} {what} on {device}; nothing was measured", even_quiet=True)


def _show(session: Session, document: Document, published: Document | None) -> None:
    from elsa_core.base.messages import milliseconds
    from elsa_core.measuring import environment
    from elsa_core.profiling.bench import linear, summary

    results = document["results"]
    bench_common.print_document(session, document, published)
    session.line(environment.label(document["environment"]), "bold")
    if document["command"] == linear.RUNNER.command:
        session.table(*linear.table_of(results["cases"]))
        session.line(linear.summary(document), even_quiet=True)
        return
    rows = []
    for case in results["cases"]:
        runs = {m["contender"]: m for m in case["measurements"]}
        name = case["case"]["name"]
        if not runs:
            rows.append([name, "no: not measured", *[""] * 4])
            session.log(f"{name}: {next(iter(case['left_out'].values()), '')}")
            continue
        best, own, gain = runs[case["best_peer"]], runs[case["best_own"]], case["gain"]
        verdict = "FAIL wrong" if case["wrong"] else gain["verdict"]
        span = f"{gain['low']:.2f}-{gain['high']:.2f}"
        rows.append([
            name, f"{best['contender']} {milliseconds(best['seconds'])}",
            milliseconds(own["seconds"]), f"{gain['value']:.2f}",
            f"{gain['rounds']} rounds" if gain["verdict"] == "unsure" else span, verdict,
        ])  # fmt: skip
    session.table(("model", ">best baseline, ms", ">patched", ">gain", ">95%", ""), rows)
    lines = [line for case in results["cases"] for line in case["warnings"]]
    for line in dict.fromkeys(lines if session.verbose else ()):
        session.warn(line)
    if results["busy"]:
        session.warn(f"the machine was not free: {results['busy']}")
    session.line(summary.of_models(document), even_quiet=True)
