"""`elsa profile`: what patching a model gains on this machine, where, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import completion, names, pipeline, targets
from elsa_cli.console import Session
from elsa_cli.errors import CommandError, VerdictError
from elsa_cli.options import (
    LARGEST_BATCH,
    PRECISIONS,
    Command,
    FilePath,
    Listed,
    Options,
    backend_option,
    example_options,
    output_options,
    pass_session,
    resolve_device,
    swept_model_options,
    typed,
)
from elsa_cli.site_options import site_options

if TYPE_CHECKING:
    from elsa_core.profiling.sweep import Configuration, Plan

Document = dict[str, Any]
_FILE = FilePath()
# What `load_model` is told about a weights file.
_SOURCE = ("arch", "weights", "model_kwargs", "mean", "std", "crop_pct", "interpolation")


class OutOfMemoryError(CommandError):
    """Nothing that was asked for fits in memory; the rows that say so are on stdout."""

    exit_code = 3


@click.command("profile", cls=Command)
@swept_model_options
@example_options
@click.option(
    "--batch-size", "-b", type=Listed(click.IntRange(1, LARGEST_BATCH)), default="1",
    show_default=True, metavar="N[,...]", help="Images a batch.",
)  # fmt: skip
@site_options
@click.option(
    "--precision", type=Listed(click.Choice(PRECISIONS)), default="strict", show_default=True,
    metavar="|".join(PRECISIONS) + "[,...]", help="What the kernels promise about rounding.",
)  # fmt: skip
@backend_option
@click.option(
    "--baselines", type=Listed(click.STRING), metavar="NAME[,...]",
    shell_complete=completion.baselines,
    help="What to measure against: eager, control, sdpa, compile, eager+graph, sdpa+graph, "
    "compile+graph, or all.  [default: eager; on CUDA also sdpa, compile and CUDA graphs]",
)  # fmt: skip
@click.option(
    "--train", is_flag=True,
    help="Measure training steps: forward, backward, AdamW; --dtype fp16 and bf16 are autocast.",
)  # fmt: skip
@click.option(
    "--sequence-parallel", is_flag=True,
    help="Under torchrun: shard the tokens of one forward over the ranks and show what that gains.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(3, 1000), default=20, show_default=True,
    help="Samples of each run at least; more until the interval decides.",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(0.1, 3600), default=60.0, show_default=True,
    metavar="SECONDS",
    help="Limit of one configuration's rounds; its sites take what is left. Where sites are timed "
    "whatever it says (--sites, or on CUDA), their time comes on top.",
)  # fmt: skip
@click.option(
    "--sites/--no-sites", default=None,
    help="Time every attention site, whatever the budget says, or none.  [default: on a CPU where "
    "the verdict has left enough of the budget]",
)  # fmt: skip
@click.option("--no-errors", is_flag=True, help="Leave out the sites' errors against float64.")
@click.option(
    "--output", "-o", type=_FILE, metavar="FILE",
    help="Keep the results (JSON) in FILE, renewed after each configuration.",
)  # fmt: skip
@click.option(
    "--resume", type=_FILE, metavar="FILE", help="Go on with the sweep that FILE holds, into FILE."
)
@click.option("--html", type=_FILE, metavar="FILE", help="Write a report with charts (one file).")
@click.option("--plot", type=_FILE, metavar="FILE", help="Draw the charts (.png or .svg).")
@click.option(
    "--policy", type=click.Choice(["faster"]),
    help="Write a plan for `elsa patch --plan` without the sites where ELSA was slower.",
)  # fmt: skip
@click.option(
    "--plan", type=_FILE, default="plan.json", show_default=True, metavar="FILE",
    help="Where --policy writes its plan.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace existing files.")
@output_options
@pass_session
def command(session: Session, /, model: str, **given: Any) -> None:
    """Measure MODEL patched against MODEL as it is, in one run and in turns: latency, throughput,
    memory, and the time of every attention site.

    The verdict comes first: rounds go on until the interval decides or --budget is over; what is
    left of it goes to the sites.

    "as it is" means the baselines: as loaded (eager), with PyTorch's fused attention (sdpa),
    compiled, and as CUDA graphs (elsa.graphed). `control` is eager once more, to see what this
    machine can tell apart. The last line names the fastest way and how to use it. Several sizes,
    batches, dtypes or precisions make a sweep, which --resume continues.
    """
    from elsa_cli import profile_view, sequence_parallel

    if given["sequence_parallel"]:
        sequence_parallel.profile(session, model, given)
        return
    files = _targets(given)
    names.check(model)
    with session.stage("importing torch", imports=True):
        from elsa_core.measuring import environment
        from elsa_core.profiling import sweep

        plan, points = _planned(session, model, given)
    document = _document(plan, given, environment.describe(plan.device))
    keep = _keeper(session, given["resume"] or given["output"])
    try:
        with session.stage("profiling") as update:
            sweep.run(plan, points, document, keep=keep, progress=update)
    except BaseException:
        # What is finished is a result, whatever ended the sweep.
        if document["results"]["points"]:
            _finish(session, document, files)
        raise
    _finish(session, document, files)
    rows = document["results"]["points"]
    if not any(row["status"] == "done" for row in rows):
        raise OutOfMemoryError(f"nothing fits in memory: {rows[0]['reason']}")
    if given["policy"] is not None:
        _write_policy(session, sweep.only(points, document), given["plan"])
    profile_view.next_steps(session, document, given)


def _targets(given: dict[str, Any]) -> dict[str, Path]:
    """The files to write, known to be writable: nothing is measured for nothing."""
    if given["resume"] is not None and given["output"] is not None:
        raise click.UsageError("--resume writes into its own FILE: leave --output out")
    if given["policy"] is not None and len(given["precision"]) > 1:
        raise click.UsageError("--policy needs one --precision: a plan has one")
    if given["policy"] is None and typed(("plan",)):
        raise click.UsageError("--plan is what --policy writes: name a --policy")
    if given["train"]:
        flags = {"--sites": given["sites"], "--policy": given["policy"],
                 "--no-errors": given["no_errors"]}  # fmt: skip
        for flag, value in flags.items():
            if value:
                raise click.UsageError(f"{flag} is about sites, and --train about whole steps")
    if given["policy"] is not None and given["sites"] is False:
        raise click.UsageError("--policy judges sites: leave --no-sites out")
    named = {name: given[name] for name in ("output", "html", "plot") if given[name] is not None}
    if given["policy"] is not None:
        named["plan"] = given["plan"]
    for name, path in named.items():
        hint = f", or --resume {path} to go on with it" if name == "output" else ""
        targets.check_new(path, given["force"], hint)
    if given["resume"] is not None:
        targets.check_writable(given["resume"])
    if len({path.resolve() for path in named.values()}) < len(named):
        raise click.UsageError("two of the files to write are the same")
    if "plot" in named:
        targets.check_plot(named["plot"])
    return named


def _planned(
    session: Session, model: str, given: dict[str, Any]
) -> tuple[Plan, tuple[Configuration, ...]]:
    """What to measure. Whatever can be known to be wrong ends the command here."""
    import torch

    device = torch.device(resolve_device(given["device"]))
    from elsa_core.loading import Loaded, check_sizes, load_model, parse
    from elsa_core.profiling import sweep
    from elsa_core.profiling.runs import training, variants

    spec = parse(model)
    baselines = (training if given["train"] else variants).chosen(given["baselines"], device)
    sizes = given["img_size"] or (None,)
    points = sweep.grid(sizes, given["batch_size"], given["dtype"], given["precision"])
    check_sizes(spec, [size for size in sizes if size is not None])

    source = Options.of({key: given[key] for key in _SOURCE}).source()

    inputs = {key: given[key] for key in ("inputs", "input_size")}
    if given["inputs"] is not None and typed(("batch_size",)):
        raise click.UsageError("--inputs has a batch of its own: leave --batch-size out")

    def load(size: tuple[int, int] | None, dtype: str) -> Loaded:
        loaded = load_model(
            spec, image_size=size, pretrained=given["pretrained"], device=device,
            dtype=Options(dtype=dtype).torch_dtype(), seed=given["seed"], **source,
        )  # fmt: skip
        pipeline.take_inputs(loaded, Options(**inputs))
        for line in loaded.warnings:
            session.warn(line, even_quiet=True)
        return loaded

    about = {
        "given": spec.given, "name": spec.name, "source": spec.source, "alias": spec.alias or "",
        "pretrained": given["pretrained"], "seed": given["seed"], "arch": given["arch"] or "",
        "model_kwargs": dict(given["model_kwargs"]),
    }  # fmt: skip
    if any(inputs.values()):
        about["inputs"] = str(given["inputs"] or list(given["input_size"]))
    if spec.path is not None:
        about["weights_sha256"] = sweep.weights_sha256(spec)
    sites = given["sites"]
    settings = {
        "baselines": list(baselines), "backend": given["backend"],
        "include": list(given["include"]), "exclude": list(given["exclude"]),
        "scope": given["scope"],
        "rounds": given["rounds"], "budget_seconds": given["budget"],
        "sites": sites, "device": str(device),
        "errors": not (sites is False or given["no_errors"]), "train": given["train"],
    }  # fmt: skip
    options = {
        "baselines": baselines, "backend": given["backend"],
        "include": list(given["include"]) or None, "exclude": list(given["exclude"]) or None,
        "scope": given["scope"],
        "rounds": given["rounds"], "budget_seconds": given["budget"],
    }  # fmt: skip
    if not given["train"]:
        # A policy judges sites: it needs them whatever the budget says.
        options["sites"] = True if given["policy"] is not None else sites
        options["errors"] = not given["no_errors"]
    plan = sweep.Plan(load, about, settings, options, device, given["seed"], train=given["train"])
    return plan, points


def _document(plan: Plan, given: dict[str, Any], environment: Document) -> Document:
    from elsa_core.profiling import sweep

    if given["resume"] is not None and given["resume"].exists():
        return sweep.resumed(given["resume"], plan, environment)
    return sweep.started(plan, environment)


def _keeper(session: Session, path: Path | None) -> Callable[[Document], None]:
    def keep(document: Document) -> None:
        if path is not None:
            from elsa_core.profiling.document import write

            write(document, path)
            if path not in session.written:
                session.written.append(path)

    return keep


def _finish(session: Session, document: Document, files: dict[str, Path]) -> None:
    """Show the result and write its pictures."""
    from elsa_cli import profile_view

    session.document("profile", document["environment"], document["results"])
    profile_view.show(session, document)
    done = any(row["status"] == "done" for row in document["results"]["points"])
    if not done:
        return
    # No stage: after Ctrl-C the first one would end the command, and these files are results.
    if "html" in files:
        from elsa_core.profiling import page

        session.written.append(page.write(document, files["html"]))
    if "plot" in files:
        from elsa_core.profiling import figures

        session.written.append(figures.plot(document, files["plot"]))
    for name in ("html", "plot"):
        if name in files:
            session.line(f"{name}: {files[name]}")


def _write_policy(session: Session, document: Document, path: Path) -> None:
    from elsa_core.profiling import policy

    plan = policy.faster(document)
    slower, unsure = len(plan.kept), policy.unsure(document)
    if not plan.sites:
        raise VerdictError(f"no plan was written: ELSA was slower at every site ({slower})")
    session.written.append(policy.write(plan, path))
    kept = f", {slower} left out: ELSA was slower" if slower else ", none was slower"
    if unsure:
        kept = (kept if slower else "") + f", {unsure} after too few rounds to tell"
    session.line(f"plan: {path} ({len(plan.sites)} sites patched{kept})")
