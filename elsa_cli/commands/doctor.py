"""`elsa doctor`: what this machine offers, and why a backend is off."""

from __future__ import annotations

import click

from elsa_cli.console import Session
from elsa_cli.options import Command, output_options, pass_session
from elsa_cli.probes import Probe, environment, examine


@click.command("doctor", cls=Command)
@output_options
@pass_session
def command(session: Session, /) -> None:
    """Show versions, processor, GPU, compiler, native library, backends and caches.

    Each thing that is off comes with its reason. Always ends with exit code 0.
    """
    with session.stage("looking around") as update:
        probes = examine(lambda group: update(group, 0, 0))
    probes += _config()
    results = {"probes": [probe.to_dict() for probe in probes]}
    session.document("doctor", environment(), results)
    for group in dict.fromkeys(probe.group for probe in probes):
        rows = [_row(probe) for probe in probes if probe.group == group]
        session.table((group, "", ""), rows, wrap=2)
        session.line()
    session.line(_verdict(probes), even_quiet=True)


def _row(probe: Probe) -> tuple[str, str, str]:
    mark = {True: "✓", False: "✗", None: ""}[probe.ok]
    words = f"{probe.value}: {probe.reason}" if probe.value and probe.reason else ""
    # One width for all groups keeps the marks in one column.
    return f"{probe.name:<16}", mark, words or probe.value or probe.reason


def _config() -> list[Probe]:
    meta = click.get_current_context().meta
    path, error = meta.get("elsa.config"), meta.get("elsa.config.error")
    if error:
        return [Probe("config", "file", False, "", error)]
    return [Probe("config", "file", None, path or "none (no elsa.toml, no [tool.elsa])")]


def _verdict(probes: list[Probe]) -> str:
    ready = [probe.name for probe in probes if probe.group == "backends" and probe.ok]
    if not ready:
        return "No backend is ready: repair torch first."
    fast = [name for name in ready if name != "eager"]
    if not fast:
        broken = any(probe.name == "compiler" and probe.ok is False for probe in probes)
        step = "install a C++ compiler, then run" if broken else "run"
        return f"Ready: eager only. Next: {step} `elsa build`."
    return f"Ready: {', '.join(ready)}. Next: elsa patch vit_base_patch16_224 --check"
