"""`elsa profile`: what patching a model gains on this machine, where, and how sure that is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError, VerdictError
from elsa_cli.options import Options, elsa_command, resolve_device, typed
from elsa_cli.values import BASELINE_LIST, Listed, Number

if TYPE_CHECKING:
    from elsa_core.profiling.sweep import Configuration, Plan

Document = dict[str, Any]


@elsa_command(
    "profile",
    *shared.model_options(swept=True),
    *shared.EXAMPLE,
    click.option(
        "--batch-size", "-b", type=Listed(click.IntRange(1, shared.LARGEST_BATCH)), default="1",
        metavar="N[,...]", help="Images a batch.",
    ),
    *shared.SITES,
    click.option(
        "--precision", type=Listed(click.Choice(shared.PRECISIONS)), default="strict",
        metavar="|".join(shared.PRECISIONS) + "[,...]",
        help="What the kernels promise about rounding.",
    ),
    shared.BACKEND,
    click.option(
        "--baselines", type=BASELINE_LIST,
        help="What to measure against: eager, control, sdpa, compile, eager+graph, sdpa+graph, "
        "compile+graph, or all.  [default: eager; on CUDA also sdpa, compile and CUDA graphs]",
    ),
    shared.flag(
        "--train",
        text="Measure training steps: forward, backward, AdamW; --dtype fp16 and bf16 are "
        "autocast.",
    ),
    shared.flag(
        "--sequence-parallel",
        text="Under torchrun: shard the tokens of one forward over the ranks and show what that "
        "gains.",
    ),
    click.option(
        "--rounds", type=click.IntRange(3, 1000), default=20,
        help="Samples of each run at least; more until the interval decides.",
    ),
    click.option(
        "--budget", type=Number(0.1, 3600), default=60.0,
        metavar="SECONDS",
        help="Limit of one configuration's rounds; its sites take what is left. Where sites are "
        "timed whatever it says (--sites, or on CUDA), their time comes on top.",
    ),
    click.option(
        "--sites/--no-sites", default=None,
        help="Time every attention site, whatever the budget says, or none.  [default: on a CPU "
        "where the verdict has left enough of the budget]",
    ),
    shared.flag("--no-errors", text="Leave out the sites' errors against float64."),
    shared.path_option(
        "--output", "-o",
        text="Keep the results (JSON) in FILE, renewed after each configuration.",
    ),
    shared.path_option("--resume", text="Go on with the sweep that FILE holds, into FILE."),
    shared.path_option("--html", text="Write a report with charts (one file)."),
    shared.path_option("--plot", text="Draw the charts (.png or .svg)."),
    click.option(
        "--policy", type=click.Choice(["faster"]),
        help="Write a plan for `elsa patch --plan` without the sites where ELSA was slower.",
    ),
    shared.path_option(
        "--plan", default="plan.json", text="Where --policy writes its plan."
    ),
    shared.flag("--force", text="Replace existing files."),
)  # fmt: skip
def command(session: Session, /, model: str, **values: Any) -> None:
    """Measure MODEL patched against MODEL as it is, in one run and in turns: latency, throughput,
    memory, and the time of every attention site.

    The verdict comes first: rounds go on until the interval decides or --budget is over; what is
    left of it goes to the sites.

    "as it is" means the baselines: as loaded (eager), with PyTorch's fused attention (sdpa),
    compiled, and as CUDA graphs (elsa.graphed). `control` is eager once more, to see what this
    machine can tell apart. The last line names the fastest way and how to use it. Several sizes,
    batches, dtypes or precisions make a sweep, which --resume continues.
    """
    from elsa_cli import sequence_parallel

    options = Options(**values)
    if options.sequence_parallel:
        sequence_parallel.profile(session, model, options)
        return
    files = _targets(options)
    names.check(model)
    with session.stage("importing torch", imports=True):
        from elsa_cli import profile_view
        from elsa_core.measuring import environment
        from elsa_core.profiling import sweep

        plan, points = _planned(session, model, options)
    place = environment.describe(plan.device)
    document = sweep.started(plan, place, options.resume)
    keep = partial(session.keep, path=options.resume or options.output)
    try:
        with session.stage("profiling") as update:
            sweep.run(plan, points, document, keep=keep, progress=update)
    finally:
        # What is finished is a result, whatever ended the sweep.
        if document["results"]["points"]:
            _finish(session, document, files)
    rows = document["results"]["points"]
    if not any(row["status"] == "done" for row in rows):
        raise PlaceError(f"nothing fits in memory: {rows[0]['reason']}")
    if options.policy is not None:
        from elsa_core.profiling import policy

        judged = sweep.only(points, document)
        found = policy.faster(judged)
        slower, unsure = len(found.kept), policy.unsure(judged)
        if not found.sites:
            raise VerdictError(f"no plan was written: ELSA was slower at every site ({slower})")
        session.keep(found.to_dict(), options.plan)
        left = f", {slower} left out: ELSA was slower" if slower else ", none was slower"
        if unsure:
            left = (left if slower else "") + f", {unsure} after too few rounds to tell"
        session.line(f"plan: {options.plan} ({len(found.sites)} sites patched{left})")
    profile_view.next_steps(session, document, options)


def _targets(options: Options) -> dict[str, Path]:
    """The files to write, known to be writable: nothing is measured for nothing."""
    policy = options.policy is not None
    if options.resume is not None and options.output is not None:
        raise click.UsageError("--resume writes into its own FILE: leave --output out")
    if policy and len(options.precision) > 1:
        raise click.UsageError("--policy needs one --precision: a plan has one")
    if not policy and typed(("plan",)):
        raise click.UsageError("--plan is what --policy writes: name a --policy")
    if options.train:
        flags = {"--sites": options.sites, "--policy": policy, "--no-errors": options.no_errors}
        for flag, value in flags.items():
            if value:
                raise click.UsageError(f"{flag} is about sites, and --train about whole steps")
    if policy and options.sites is False:
        raise click.UsageError("--policy judges sites: leave --no-sites out")
    files = {"output": options.output, "html": options.html, "plot": options.plot}
    named = {name: path for name, path in files.items() if path is not None}
    if policy:
        named["plan"] = options.plan
    for name, path in named.items():
        hint = f", or --resume {path} to go on with it" if name == "output" else ""
        names.check_new(path, options.force, hint)
    written = [path.resolve() for path in named.values()]
    if options.resume is not None:
        names.check_writable(options.resume)
        written.append(options.resume.resolve())
    if len(set(written)) < len(written):
        raise click.UsageError("two of the files to write are the same")
    if "plot" in named:
        names.check_plot(named["plot"])
    return named


def _planned(
    session: Session, model: str, options: Options
) -> tuple[Plan, tuple[Configuration, ...]]:
    """What to measure. Whatever can be known to be wrong ends the command here."""
    import torch

    device = torch.device(resolve_device(options.device))
    from elsa_core.loading import check_sizes, parse
    from elsa_core.profiling import sweep
    from elsa_core.profiling.runs import training, variants

    spec = parse(model)
    baselines = (training if options.train else variants).chosen(options.baselines, device)
    sizes = options.img_size or (None,)
    points = sweep.grid(sizes, options.batch_size, options.dtype, options.precision)
    check_sizes(spec, [size for size in sizes if size is not None])
    if options.inputs is not None and typed(("batch_size",)):
        raise click.UsageError("--inputs has a batch of its own: leave --batch-size out")
    if len(sizes) > 1 and (options.inputs is not None or options.input_size is not None):
        raise click.UsageError("--inputs and --input-size have one size: give one --img at most")

    load = partial(pipeline.load, session, spec, options, device)
    about = {
        "given": spec.given, "name": spec.name, "source": spec.source, "alias": spec.alias or "",
        "pretrained": options.pretrained, "seed": options.seed, "arch": options.arch or "",
        "model_kwargs": dict(options.model_kwargs),
    }  # fmt: skip
    if options.inputs or options.input_size:
        about["inputs"] = str(options.inputs or list(options.input_size))
    if spec.path is not None:
        about["weights_sha256"] = sweep.weights_sha256(spec)
    common = {
        "backend": options.backend, "scope": options.scope, "rounds": options.rounds,
        "budget_seconds": options.budget,
    }  # fmt: skip
    settings = common | {
        "baselines": list(baselines), "include": list(options.include),
        "exclude": list(options.exclude), "sites": options.sites, "device": str(device),
        "errors": not (options.sites is False or options.no_errors), "train": options.train,
    }  # fmt: skip
    how = common | {
        "baselines": baselines, "include": settings["include"] or None,
        "exclude": settings["exclude"] or None,
    }  # fmt: skip
    if not options.train:
        # A policy judges sites: it needs them whatever the budget says.
        how["sites"] = True if options.policy is not None else options.sites
        how["errors"] = not options.no_errors
    plan = sweep.Plan(load, about, settings, how, device, options.seed, train=options.train)
    return plan, points


def _finish(session: Session, document: Document, files: dict[str, Path]) -> None:
    """Show the result and write its pictures."""
    from elsa_cli import profile_view

    session.document("profile", document["results"], document["environment"])
    profile_view.show(session, document)
    if not any(row["status"] == "done" for row in document["results"]["points"]):
        return
    # No stage: after Ctrl-C the first one would end the command, and these files are results.
    if "html" in files:
        from elsa_core.base import pages
        from elsa_core.profiling.page import page

        session.written.append(pages.write(page(document), files["html"]))
    if "plot" in files:
        from elsa_core.profiling import figures

        session.written.append(figures.of_profile(document, files["plot"]))
    for name in ("html", "plot"):
        if name in files:
            session.line(f"{name}: {files[name]}")
