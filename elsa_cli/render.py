"""Reports as tables and lines for people, in 80 columns, and what JSON documents have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elsa_cli.console import Session
from elsa_cli.options import Options
from elsa_core.base.grouping import group, group_by
from elsa_core.patching import LAYERS

if TYPE_CHECKING:
    from elsa_cli.pipeline import Routes
    from elsa_core.loading import Loaded
    from elsa_core.patching import AttentionSite, Inspection, PatchReport
    from elsa_core.proof import CheckReport


def header(
    session: Session, loaded: Loaded, options: Options, routes: Routes | None = None, *,
    batch: bool = False,
) -> None:  # fmt: skip
    """The model, where it is, what serves its patched attention sites, and with `batch` the size of
    one; then notes on how it was built."""
    typed = f"{loaded.spec.given} → " if loaded.spec.alias else ""
    session.line(f"{typed}{loaded.name} · weights: {loaded.weights}", "bold")
    size = loaded.example_size or loaded.input_size
    if loaded.example is not None:
        size = next((tuple(one.shape) for one in loaded.example if hasattr(one, "shape")), ())
    import torch

    device, count = loaded.weight.device, torch.get_num_threads()
    place = str(device)
    if device.type == "cpu":
        place = f"cpu ({count} thread{'s' * (count != 1)})"
    elif device.type == "cuda":
        place = f"{device} ({torch.cuda.get_device_name(device)})"
    said = ["x".join(map(str, size)), options.dtype, place]
    if routes:
        backends = "/".join(dict.fromkeys(route.backend for route in routes.values()))
        said.append(f"{backends} kernels, {next(iter(routes.values())).precision}")
    session.line(" · ".join([*said, *[f"batch {options.batch_size}"] * batch]))
    for note in loaded.notes:
        if note != loaded.spec.alias:
            session.line(note, "dim")
    if loaded.unsaid:
        session.line(loaded.unsaid, "yellow")
    if assumed := loaded.preprocess.assumed:
        session.line(f"preprocessing: {', '.join(assumed)} assumed", "yellow")
    session.line()


def document(
    loaded: Loaded, options: Options, report: PatchReport | None = None,
    routes: Routes | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What JSON documents say of a model and, once it is patched, of that."""
    preprocess = loaded.preprocess
    model = {
        "given": loaded.spec.given, "name": loaded.name, "source": loaded.spec.source,
        "weights": loaded.weights, "input_size": list(loaded.input_size),
        "device": str(loaded.weight.device), "dtype": options.dtype,
        "notes": list(loaded.notes), "assumed": dict(loaded.recipe.unsaid),
        "preprocess": {
            "mean": list(preprocess.mean), "std": list(preprocess.std),
            "crop_pct": preprocess.crop_pct, "interpolation": preprocess.interpolation,
            "crop_mode": preprocess.crop_mode, "assumed": list(preprocess.assumed),
        },
    }  # fmt: skip
    if report is None or routes is None:
        return {"model": model}
    found = {str(dim): route.to_dict() for dim, route in routes.items()}
    return {"model": model, "patch": report.to_dict(), "routes": found}


def inspection(session: Session, found: Inspection) -> None:
    rows = []
    for label, members in group(found.sites, lambda site: site.alike):
        one = members[0]
        share = sum(site.flops_share or 0.0 for site in members)
        mark = "✓" if one.patchable else "✗"
        rows.append([f"{mark} {label or 'the model'}", f"{len(members)}x", one.class_name, one.kind,
                     *_numbers(one), f"{share:.1%}" if share else ""])  # fmt: skip
    # Paths stay whole on a narrow terminal, so that they can be copied.
    session.table(["  site", ">", "class", "~kind", "~>heads", ">tokens", ">FLOPs"], rows, wrap=2)
    if rows:
        session.line()
    for extra, members in group_by(found.sites, lambda site: ", ".join(site.extra)):
        if extra:
            session.line(f"with {extra}: {len(members)} site{'s' * (len(members) != 1)}")
    # what the numbers of the column FLOPs cover
    counted = {site.kind in LAYERS for site in found.sites if site.flops}
    if False in counted:
        session.line("FLOPs: only q k^T and the product with v, no projections", "dim")
    if True in counted:
        session.line("FLOPs of linear layers, MLPs and patch embeddings: of all their products",
                     "dim")  # fmt: skip
    if any(site.query_tokens != site.key_tokens for site in found.sites):
        session.line("tokens: queries:keys of a call where the two differ", "dim")
    stay = [site for site in found.sites if not site.patchable]
    for reason, members in group_by(stay, lambda site: site.reason):
        classes = "/".join(dict.fromkeys(site.class_name for site in members))
        count = f"{len(members)} site{'s' * (len(members) != 1)}"
        session.line(f"not patchable: {count} of {classes}: {reason}", "yellow")
    if found.note:
        session.line(found.note, "yellow")


def patched(session: Session, report: PatchReport) -> None:
    rows = [
        [f"✓ {label or 'the model'}", f"{len(members)}x", members[0].class_name, members[0].kind,
         _numbers(members[0])[0], ", ".join(members[0].extra)]
        for label, members in group(report.patched, lambda site: site.alike)
    ]  # fmt: skip
    session.table(["  patched", ">", "class", "~kind", "~>heads", "~extra"], rows, wrap=5)
    session.line()
    for reason, members in group_by(report.kept, lambda site: site.reason):
        labels = ", ".join(label for label, _ in group(members, lambda site: site.reason))
        session.line(f"kept {labels} ({members[0].class_name}): {reason}", "yellow")
    if report.kept:
        session.line()


def checked(session: Session, report: CheckReport) -> None:
    rows = [
        [f"{'✓' if one.ok else '✗'} {name}", f"{count}x" if count else "", *cells]
        for name, count, one, *cells in report.rows()
    ]
    titles = ["  rel. error", ">", ">elsa", ">original", ">allowed", "~worst input"]
    session.table(titles, rows, wrap=5)
    session.line()
    rates = [site.skip_rate for site in report.sites if site.skip_rate is not None]
    if rates:
        session.line(f"tiles left out: {min(rates):.1%} to {max(rates):.1%} a site", "dim")
    for path, reason in report.left_out.items():
        session.line(f"path {path} is left out: {reason}", "yellow")
    if report.fault_injection:
        session.line(f"ELSA_FAULT_INJECTION is on: {report.fault_injection}", "yellow")


def verdict(report: CheckReport) -> str:
    """The check in one phrase, with the model's errors on its worst input; with those of the worst
    site or gradients, where they fail and no output does."""
    if not report.tested:
        return "nothing was tested"
    said = "outputs agree" if report.ok else "outputs do NOT agree"
    found: list[tuple[str, Any]] = [("", case) for case in report.cases]
    if all(case.ok for case in report.cases):
        found = [(f"{name}: ", one) for name, _, one, *_ in report.rows() if not one.ok] or found
    where, worst = max(found, key=lambda pair: pair[1].excess, default=("", None))
    if worst is None:
        return said
    return f"{said} ({where}error {worst.patched_error:.1e}, original {worst.original_error:.1e})"


def _numbers(site: AttentionSite) -> list[str]:
    """Heads and their dimension, and tokens: queries:keys where the two differ. "?" is what is not
    known of attention; a layer has none of it."""
    dims = [site.num_heads, site.head_dim] if site.num_heads is not None else []
    tokens = dict.fromkeys([site.query_tokens, site.key_tokens])
    return [
        sign.join(str(n) for n in found if n is not None) or ("" if site.kind in LAYERS else "?")
        for sign, found in (("x", dims), (":", tokens))
    ]
