"""`elsa inspect`: every attention site of a model, and what can be patched."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.options import Command, Options, model_options, output_options, pass_session


@click.command("inspect", cls=Command)
@model_options
@output_options
@pass_session
def command(session: Session, /, model: str, **given: Any) -> None:
    """List every attention site of MODEL: class, kind, heads, tokens, share of the FLOPs, and
    whether it can be patched or why not.

    MODEL is a timm name or the beginning of one (the shortest match is taken and shown),
    open_clip:NAME[/TAG], torchvision:NAME, hf-hub:OWNER/NAME, a .safetensors file, or a directory
    that `elsa patch -o` wrote.
    """
    from elsa_cli import pipeline, render
    from elsa_cli.probes import environment

    options = Options.of(given)
    loaded = pipeline.open_model(session, model, options)
    with session.stage("inspecting"):
        from elsa_core.models.sites import inspect

        found = inspect(loaded.model, loaded.input_size)
    results = {"model": render.described(loaded, options), "inspection": found.to_dict()}
    session.document("inspect", environment(), results)
    render.header(session, loaded, options)
    render.inspection(session, found)
    good = [site for site in found.sites if site.patchable]
    session.line(_verdict(loaded.name, len(good), len(found.sites), found.total_flops),
                 "bold", even_quiet=True)  # fmt: skip
    if good:
        session.line(f"Next: {session.again('patch', '--check')}", "dim")


def _verdict(name: str, good: int, total: int, flops: int | None) -> str:
    work = f" · {flops / 1e9:.2f} GFLOPs an image" if flops else ""
    if not total:
        return f"no attention found in {name}{work}"
    return f"{good} of {total} sites can be patched{work}"
