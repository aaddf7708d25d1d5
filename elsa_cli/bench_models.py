"""`elsa bench models` and `elsa bench training`: whole models, patched against every way one would
otherwise run or train them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_cli import bench_compare
from elsa_cli.console import Session
from elsa_cli.errors import TargetError, VerdictError
from elsa_cli.options import resolve_device, typed

if TYPE_CHECKING:
    import torch

Document = dict[str, Any]


def run(
    session: Session, given: dict[str, Any], published: Document | None, *, steps: bool = False,
    products: bool = False,
) -> None:  # fmt: skip
    """Measure the models that the options name, keep them in --output as they come, show them.

    `steps`: their training steps. `products`: linear layers instead.
    """
    import torch

    from elsa_core.errors import UnavailableError
    from elsa_core.measuring import documents, environment
    from elsa_core.profiling.bench import linear, models, runner, training

    bench = (linear if products else training if steps else models).RUNNER
    what = "products" if products else "models"
    # Listing what a GPU would measure needs none.
    listed = given["dry_run"] and given["device"] != "auto"
    device = torch.device(given["device"] if listed else resolve_device(given["device"]))
    cases = bench.select(
        device.type, tables=given["tables"], patterns=given["patterns"], quick=given["quick"],
        dtype=given["dtype"],
    )  # fmt: skip
    if given["dry_run"]:
        _list(session, cases, device, bench.command, what)
        return
    target: Path | None = given["output"]
    _check_target(target, device, given)
    settings = _settings(bench, cases, device, given)
    document = bench.started(settings, environment.describe(device))
    if given["resume"] and target is not None and target.exists():
        document = runner.read(target, document)

    def keep(document: Document) -> None:
        if target is not None:
            documents.write(document, target)
            if target not in session.written:
                session.written.append(target)

    try:
        with session.stage("measuring") as update:
            bench.run(
                cases, document, device=device, keep=keep, limit_seconds=given["limit"],
                progress=update,
            )  # fmt: skip
    except BaseException:
        if document["results"]["cases"]:
            _show(session, document, published)
        raise
    _show(session, document, published)
    done = document["results"]["cases"]
    if given["backend"] != "auto" and done and not any(case["measurements"] for case in done):
        reason = next(iter(done[0]["left_out"].values()), "")
        raise UnavailableError(f"--backend {given['backend']} served no {what[:-1]}: {reason}")
    left = runner.left(cases, document)
    if left:
        hint = f"; --resume -o {target} goes on" if target is not None else ""
        session.line(f"{len(left)} of {len(cases)} {what} are left{hint}")
    wrong = [case["case"]["name"] for case in document["results"]["cases"] if case["wrong"]]
    if wrong:
        raise VerdictError(f"wrong results: {', '.join(wrong)}")
    if published is not None:
        bench_compare.judge(session, document, published)


def _settings(bench: Any, cases: Any, device: torch.device, given: dict[str, Any]) -> Document:
    """The settings of a run: the user's, and the families' own protocol for what is not named."""
    from elsa_core.profiling.bench import families, models

    named = {"rounds": "rounds", "budget": "budget_seconds", "baselines": "baselines"}
    how = {key: given[name] for name, key in named.items()}
    if bench is models.RUNNER:
        plain = [key for name, key in named.items() if not typed((name,))]
        how |= families.protocol(device, cases, how | dict.fromkeys(plain))
    found: Document = bench.settings(device, **how, seed=given["seed"], backend=given["backend"])
    return found


def _check_target(target: Path | None, device: torch.device, given: dict[str, Any]) -> None:
    from elsa_core.errors import UnavailableError
    from elsa_core.measuring import busy

    if target is None:
        return
    if not target.parent.is_dir():
        raise TargetError(f"{target}: its folder does not exist; create it first")
    if target.exists() and not (given["force"] or given["resume"]):
        raise TargetError(f"{target} exists; use --resume to go on, or --force to replace it")
    why = busy.reason(device)
    if why and not given["allow_busy"]:
        raise UnavailableError(f"{why}: wait until the machine is free, or use --allow-busy")


def _list(
    session: Session, cases: tuple[Any, ...], device: torch.device, command: str, what: str
) -> None:
    from torch.cuda import is_available

    from elsa_core.measuring import environment

    there = device.type == "cpu" or is_available()
    results = {"dry_run": True, what: [case.to_dict() for case in cases]}
    session.document(command, environment.describe(device if there else "cpu"), results)
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

    results = document["results"] | bench_compare.added(document, published)
    session.document(document["command"], document["environment"], results)
    session.line(environment.label(document["environment"]), "bold")
    if document["command"] == linear.RUNNER.command:
        session.table(*linear.table_of(document["results"]["cases"]))
        session.line(linear.summary(document).partition(". ")[2], even_quiet=True)
        return
    rows = []
    for case in document["results"]["cases"]:
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
    lines = [w for case in document["results"]["cases"] for w in case["warnings"]]
    for line in dict.fromkeys(lines if session.verbose else ()):
        session.warn(line)
    if document["results"]["busy"]:
        session.warn(f"the machine was not free: {document['results']['busy']}")
    text = summary.of_models(document)
    session.line(text.partition("Patched")[1] + text.partition("Patched")[2], even_quiet=True)
