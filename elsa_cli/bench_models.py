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

    from elsa_core.bench.model_cases import ModelCase

Document = dict[str, Any]


def run(
    session: Session, given: dict[str, Any], published: Document | None, *, steps: bool = False
) -> None:
    """Measure the models that the options name, keep them in --output as they come, show them.

    `steps`: their training steps.
    """
    import torch

    from elsa_core.bench import families, models, training
    from elsa_core.errors import UnavailableError
    from elsa_core.measuring import environment

    bench: Any = training if steps else models
    # Listing what a GPU would measure needs none.
    listed = given["dry_run"] and given["device"] != "auto"
    device = torch.device(given["device"] if listed else resolve_device(given["device"]))
    cases = bench.select(
        device.type, tables=given["tables"], patterns=given["patterns"], quick=given["quick"],
        dtype=given["dtype"],
    )  # fmt: skip
    if given["dry_run"]:
        _list(session, cases, device, bench.COMMAND)
        return
    target: Path | None = given["output"]
    _check_target(target, device, given)
    named = {"rounds": "rounds", "budget": "budget_seconds", "baselines": "baselines"}
    how = {key: given[name] for name, key in named.items()}
    if not steps:
        plain = [key for name, key in named.items() if not typed((name,))]
        how |= families.protocol(device, cases, how | dict.fromkeys(plain))
    settings = bench.settings(device, **how, seed=given["seed"], backend=given["backend"])
    document = bench.started(settings, environment.describe(device))
    if given["resume"] and target is not None and target.exists():
        document = models.read(target, document)

    def keep(document: Document) -> None:
        if target is not None:
            models.write(document, target)
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
        raise UnavailableError(f"--backend {given['backend']} served no model: {reason}")
    left = models.left(cases, document)
    if left:
        hint = f"; --resume -o {target} goes on" if target is not None else ""
        session.line(f"{len(left)} of {len(cases)} models are left{hint}")
    wrong = [case["case"]["name"] for case in document["results"]["cases"] if case["wrong"]]
    if wrong:
        raise VerdictError(f"wrong results: {', '.join(wrong)}")
    if published is not None:
        bench_compare.judge(session, document, published)


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
    session: Session, cases: tuple[ModelCase, ...], device: torch.device, command: str
) -> None:
    from torch.cuda import is_available

    from elsa_core.measuring import environment

    there = device.type == "cpu" or is_available()
    results = {"dry_run": True, "models": [case.to_dict() for case in cases]}
    session.document(command, environment.describe(device if there else "cpu"), results)
    rows = [
        [case.name, case.model, "-" if case.window is None else str(case.window)]
        for case in cases
    ]  # fmt: skip
    session.table(("case", "model", ">window"), rows)
    session.line(f"{len(cases)} models on {device}; nothing was measured", even_quiet=True)


def _show(session: Session, document: Document, published: Document | None) -> None:
    from elsa_core.bench import model_tables
    from elsa_core.measuring import environment
    from elsa_core.messages import milliseconds

    results = document["results"] | bench_compare.added(document, published)
    session.document(document["command"], document["environment"], results)
    session.line(environment.label(document["environment"]), "bold")
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
    text = model_tables.summary(document)
    session.line(text.partition("Patched")[1] + text.partition("Patched")[2], even_quiet=True)
