"""The document of `elsa profile` as tables and lines for people, in 80 columns."""

from __future__ import annotations

import re
import shlex
from typing import Any

from elsa_cli.console import Session
from elsa_cli.options import Options
from elsa_core.profiling import words
from elsa_core.profiling.document import DONE
from elsa_core.profiling.runs import variants

Document = dict[str, Any]

_SLOWEST = 10
# What of a command line is about measuring alone, or what a plan says itself.
_OF_PROFILE = ("--sites", "--no-sites", "--no-errors", "--force")
_VALUED_OF_PROFILE = (
    "--budget", "--rounds", "--baselines", "--policy", "--plan", "--batch-size", "-b", "--include",
    "--exclude", "--scope", "--precision", "--backend", "--output", "-o", "--resume", "--html",
    "--plot",
)  # fmt: skip


def show(session: Session, document: Document) -> None:
    results, place = document["results"], document["environment"]
    model, rows = results["model"], results["points"]
    done = [row for row in rows if row["status"] == DONE]
    typed = f"{model['alias'].partition(' ')[0]} → " if model.get("alias") else ""
    # A file says what it holds once it is read; not even that is known where nothing was.
    weights = f" · weights: {model['weights']}" if model.get("weights") else ""
    session.line(f"{typed}{model.get('architecture') or model.get('name')}{weights}", "bold")
    if done:
        device = done[0]["profile"]["device"]
        count = place.get("threads")
        of = f"{count} thread{'s' * (count != 1)}" if device == "cpu" else place.get("gpu")
        session.line(f"{device} ({of}) · torch {place.get('packages', {}).get('torch')}")
    session.line()
    if len(rows) == 1 and done:
        _one(session, done[0])
    else:
        _sweep(session, rows)
    for line in words.warning_lines(done):
        session.warn(line)


def next_steps(session: Session, document: Document, options: Options) -> None:
    if options.policy is not None:
        # What loads the profiled model again, where there was one size and dtype, on the device
        # whose times the plan rests on.
        swept = [*["--img", "--img-size"] * (len(options.img_size or ()) > 1),
                 *["--dtype"] * (len(options.dtype) > 1)]  # fmt: skip
        line = session.again(
            "patch", "--plan", str(options.plan), "-o", "DIR", without=_OF_PROFILE,
            valued=(*_VALUED_OF_PROFILE, *swept),
        )  # fmt: skip
        session.line(f"Next: {line}", "dim")
    elif options.html is None and options.plot is None:
        # --output becomes the --resume that reads what it wrote
        again = (re.sub("^(-o|--output)$", "--resume", word) for word in session.arguments[1:])
        again = (re.sub("^(-o|--output=)(?=.)", "--resume=", word) for word in again)
        longer = ["elsa", "profile", *again, "--html", "report.html"]
        session.line(f"Next: {shlex.join(longer)}", "dim")
    done = [row["profile"] for row in document["results"]["points"] if row["profile"] is not None]
    if len(done) == 1:
        # The last line: the fastest way to run the model, and what to write for it.
        runs = [run for run in done[0]["runs"] if run["name"] != variants.CONTROL]
        best = min(runs, key=lambda run: float(run["seconds"]))
        time = f"{best['name']}, {words.duration(best['seconds'])}"
        session.line(f"Fastest: {time}: {variants.how_to(best['name'])}", "bold")


def _one(session: Session, row: Document) -> None:
    found = row["profile"]
    session.line(f"{words.point_name(row)} · {found['rounds']} rounds")
    rows = []
    for run in found["runs"]:
        memory = "-" if run["memory_bytes"] is None else f"{run['memory_bytes'] / 1e6:.1f}"
        span = f"{_ms(run['seconds_p10'])}-{_ms(run['seconds_p90'])}"
        rows.append([
            run["name"], _ms(run["seconds"]), span,
            f"{run['images_per_second']:.3g}", memory, _beside(run["ratio"]),
        ])  # fmt: skip
        costs = []  # of a run on a GPU, beside its time, as far as they are known
        if found["device"] != "cpu" and run["device_seconds"] is not None:
            host, device = _ms(run["host_seconds"]), _ms(run["device_seconds"])
            costs = [f"host {host} ms", f"GPU {device} ms"]
        if found["device"] != "cpu" and run["joules"] is not None:
            costs.append(f"{run['joules']:.3g} J a call")
        if found["device"] != "cpu" and run.get("first_seconds"):
            costs.append(f"first result after {words.duration(run['first_seconds'])}")
        if costs:
            session.line(f"{run['name']}: {', '.join(costs)}")
    session.table(
        ("run", ">ms", "~>10-90%", ">images/s", "~>MB", "times as fast as eager"), rows, wrap=0
    )
    for name, why in found["left_out"].items():
        session.line(f"without {name}: {why}", "dim")
    session.line()
    if all(run.get("parts") for run in found["runs"]):  # training steps
        parts = list(found["runs"][0]["parts"])
        rows = [
            [run["name"], *(_ms(run["parts"][part]) for part in parts)] for run in found["runs"]
        ]
        session.table(("run", *(f">{part}, ms" for part in parts)), rows)
        session.line()
    if len(found["sites"]) > 1:
        _sites(session, found["sites"])
    bound = words.bound_text(found)
    if bound:
        session.line(bound)
    sites = f"{found['patched']} of {found['patched'] + found['kept']} sites patched"
    session.verdict(f"{sites} · {words.verdict_text(found)}")


def _sites(session: Session, sites: list[Document]) -> None:
    rest, own = sites[-1], sites[:-1]
    shares = words.shares(sites)
    rows = []
    for site, share in zip(own[:_SLOWEST], shares, strict=False):
        error = "-" if site["error"] is None else f"{site['error']:.1e}"
        rows.append([
            site["path"] or "the model", words.tokens_text(site), str(site["num_heads"] or ""),
            _ms(site["seconds_before"]), _ms(site["seconds_after"]),
            words.ratio_text(site["ratio"], short=True), share, error, site["backend"] or "-",
        ])  # fmt: skip
    left = own[_SLOWEST:]
    if left:
        before, after = (sum(s[key] for s in left) for key in ("seconds_before", "seconds_after"))
        share = f"{sum(float(each.rstrip('%')) for each in shares[_SLOWEST:-1]):.1f}%"
        rows.append([f"{len(left)} more sites", "", "", _ms(before), _ms(after),
                     words.group_short(left), share, "", ""])  # fmt: skip
    rows.append([rest["path"], "", "", _ms(rest["seconds_before"]), _ms(rest["seconds_after"]),
                 words.ratio_text(rest["ratio"], short=True), shares[-1], "", ""])  # fmt: skip
    columns = "site", "~>tokens", "~>heads", ">ms", ">after", ">times", ">share", "~>error", "~by"
    session.table(columns, rows)
    session.line()


def _sweep(session: Session, rows: list[Document]) -> None:
    lines = []
    for row in rows:
        name = words.point_name(row)
        if row["profile"] is None:
            lines.append([name, f"no: {row['status']}", *[""] * 4])
            if len(rows) > 1:  # one alone ends the command with this line
                session.log(f"{name}: {row['status']}: {row['reason']}")
            continue
        found = row["profile"]
        runs = {run["name"]: run for run in found["runs"]}
        best, own = runs[found["best_baseline"]], runs[found["best_patched"]]
        lines.append([
            name, f"{best['name']} {_ms(best['seconds'])}", _ms(own["seconds"]),
            words.ratio_text(found["gain"], short=True), f"{own['images_per_second']:.3g}",
            "/".join("-" if m is None else f"{m / 1e6:.0f}"
                     for m in (best["memory_bytes"], own["memory_bytes"])),
        ])  # fmt: skip
    columns = ("point", ">best baseline, ms", ">patched", ">gain", "~>images/s", "~>MB")
    session.table(columns, lines, wrap=0)
    session.line()
    gains = [row["profile"]["gain"] for row in rows if row["profile"] is not None]
    counts = {
        verdict: sum(gain["verdict"] == verdict for gain in gains)
        for verdict in ("faster", "no difference", "slower", "unsure")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    lost = len(rows) - len(gains)
    out = f"; {lost} not measured" if lost else ""
    said = f"{said or 'nothing measured'}{out}"
    session.verdict(f"patched against the best baseline: {said}")


def _ms(seconds: float) -> str:
    milli = seconds * 1e3
    if milli >= 1000:
        return f"{milli:.0f}"
    # five characters, so that a table of sites keeps to 80 columns whatever the others hold
    return f"{milli:.3g}" if milli >= 0.1 else f"{milli:.2g}"


def _beside(ratio: Document | None) -> str:
    """The ratio of a run with its interval; why there is none where rounds decide nothing."""
    if ratio is None:
        return ""
    if ratio["verdict"] == "unsure":
        return f"{ratio['value']:.2f} ({ratio['rounds']} rounds)"
    if ratio["verdict"] == "no difference":
        return words.ratio_text(ratio, short=True)
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
