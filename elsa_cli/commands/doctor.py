"""`elsa doctor`: what this machine offers, and why a backend is off."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from elsa_cli import pipeline
from elsa_cli.console import Session
from elsa_cli.errors import out_of_memory
from elsa_cli.options import elsa_command
from elsa_cli.probes import Probe, examine


@elsa_command("doctor")
def command(session: Session, /, **_: Any) -> None:
    """Show versions, processor, GPU, compiler, native library, backends and caches.

    Each thing that is off comes with its reason. Ends with exit code 0, but where a limit of memory
    leaves no room to look.
    """
    torch_error: Exception | None = None
    try:
        pipeline.import_torch(session)
    except Exception as error:
        if out_of_memory(error):  # NumPy would end the process, in words of its own
            raise
        torch_error = error
    with session.stage("looking around") as update:
        probes = examine(update, torch_error)
    meta = click.get_current_context().meta
    wrong = meta.get("elsa.config.error", "")
    used = "" if wrong else meta.get("elsa.config", "none (no elsa.toml, no [tool.elsa])")
    probes.append(Probe("config", "file", False if wrong else None, used, wrong))
    session.document("doctor", {"probes": [asdict(probe) for probe in probes]})
    marks = {True: "✓", False: "✗", None: ""}
    for group in dict.fromkeys(probe.group for probe in probes):
        rows = []
        for probe in probes:
            if probe.group == group:
                words = ": ".join(text for text in (probe.value, probe.reason) if text)
                # One width for all groups keeps the marks in one column.
                rows.append([f"{probe.name:<16}", marks[probe.ok], words])
        session.table((group, "", ""), rows, wrap=2)
        session.line()
    ready = [probe.name for probe in probes if probe.group == "backends" and probe.ok]
    off = {probe.name: probe.reason for probe in probes if probe.ok is False}
    said = f"Ready: {', '.join(ready)}. Next: elsa patch vit_base_patch16_224 --check"
    if not ready:
        why = off.get("eager") or off.get("backends", "see above")
        said = f"No backend is ready: {'install torch again first.' if 'torch' in off else why}"
    elif {"sdpa", "eager"}.issuperset(ready):
        named = os.environ.get("CXX")
        step = f"correct or unset CXX={named!r}" if named else "install a C++ compiler"
        step = f"Next: {step}, then run `elsa build`."
        if "library" not in off:
            step = "Next: run `elsa build`."
        elif "compiler" not in off:
            step = f"The native library is off: {off['library']}"
        said = f"Ready: {', '.join(ready)} only. {step}"
    session.line(said, even_quiet=True)
