"""`elsa verify`: a bundle's files against its manifest, and its artefacts against the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from elsa_cli import names, pipeline
from elsa_cli.commands.export import artefact_row
from elsa_cli.console import Session
from elsa_cli.errors import ModelFileError, VerdictError, first_of
from elsa_cli.options import elsa_command, flag, path_option


@elsa_command(
    "verify",
    click.argument("bundle", type=click.Path(path_type=Path)),
    flag("--files-only", text="Compare the files; run nothing of the bundle."),
    flag("--trust", text="Run the bundle's library without asking."),
    path_option(
        "--key", metavar="PUB",
        text="Require a signature by this Ed25519 public key (PEM or ssh-ed25519); no question.",
    ),
)  # fmt: skip
def command(
    session: Session, /, bundle: Path, files_only: bool, trust: bool, key: Path | None, **_: Any
) -> None:
    """Check BUNDLE, a directory or .zip that `elsa export` wrote.

    Every file must match its SHA-256, with nothing missing and nothing extra. Then each artefact
    runs in a fresh process and must reproduce the model. That runs the bundle's own library, which
    can do anything that you can: it needs --trust, a signature (--key), or a yes on a terminal. Use
    --files-only for a bundle that you do not trust.
    """
    if not names.exists(bundle):
        raise ModelFileError(f"no such bundle: {bundle}")
    names.check_file(key, "public key")
    pipeline.import_torch(session)
    asks = not (files_only or trust or key)  # and a question is not drawn over
    with session.stage(f"verifying {bundle}", drawn=not asks) as update:
        from elsa_core.exporting.signature import read_key
        from elsa_core.exporting.verify import verify

        report = verify(
            bundle, run=not files_only, key=None if key is None else read_key(key, "public"),
            before_run=lambda signed: _ask(session, bundle, trust or signed),
            progress=update,
        )  # fmt: skip
    session.document("verify", report.to_dict())
    model = report.manifest["model"]
    session.line(f"{model.get('name')} · {model['dtype']} · {model['device']} · "
                 f"elsa {report.manifest.get('elsa_version')}", "bold")  # fmt: skip
    session.line()
    rows = [
        artefact_row(each, report.manifest["artefacts"][each.format]["file"])
        for each in report.artefacts
    ]
    session.table(["  artefact", "fresh process", ">error", ">allowed"], rows, wrap=1)
    if rows:
        session.line()
    for each in report.artefacts:
        if each.status == "skipped":
            session.warn(f"{each.format} was skipped: {each.reason}")
    if not report.ok:
        raise VerdictError(f"{bundle} does not verify: {first_of(report.failures)}")
    done = [each.format for each in report.artefacts if each.status == "ok"]
    exact = [name for name in done if name != "onnx-int8"]
    ran = f"; {', '.join(exact)} reproduce{'s' * (len(exact) == 1)} the model" if exact else ""
    ran += "; onnx-int8 errs as the manifest says" if len(exact) < len(done) else ""
    signed = " and the signature" if report.signed else ""
    line = f"{report.files} files{signed} match{ran or '; nothing was run'}"
    session.verdict(line)


def _ask(session: Session, bundle: Path, trusted: bool) -> None:
    about = f"about to run the library of {bundle}, which can do anything that you can"
    if trusted:
        if not session.quiet:
            session.log(about)
        return
    answer = session.ask(about, "Run it?")
    if answer is None:
        raise click.UsageError(
            f"the files of {bundle} match; running its library, which can do anything that you "
            "can, needs --trust or a signature (--key PUB); --files-only runs nothing"
        )
    if not answer:
        raise click.UsageError("nothing was run; --files-only compares only the files")
