"""elsa_plan.json: which sites of a saved model run on elsa, and how."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from elsa_core.base.reading import read_json
from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError

if TYPE_CHECKING:
    from elsa_core.patching import PatchReport

PLAN_NAME = "elsa_plan.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The arguments of `patch` and the paths of the sites that it patched. `kept` are (path,
    reason) of sites left alone on purpose, because a profile found them slower; in the scope
    "model" a projection goes with the attention that it lies in, unless `include`, `exclude` or
    `kept` say otherwise."""

    precision: str
    backend: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    sites: tuple[str, ...]
    kept: tuple[tuple[str, str], ...] = ()
    scope: str = "attention"
    offload: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return elsa_plan.json."""
        said = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        said["kept"] = dict(self.kept)
        if self.offload is None:
            del said["offload"]
        return {"schema_version": SCHEMA_VERSION, "elsa_version": __version__, **said}


def plan_of(report: PatchReport) -> Plan:
    """Return the plan that repeats what `patch` reported."""
    given: tuple[Any, Any] = report.include, report.exclude
    include, exclude = ((g,) if isinstance(g, str) else tuple(g or ()) for g in given)
    sites = tuple(site.path for site in report.patched)
    return Plan(
        report.precision, report.backend, include, exclude, sites, scope=report.scope,
        offload=report.offload,
    )  # fmt: skip


def read_plan(path: Path) -> Plan:
    """Read elsa_plan.json from a directory that may be hostile; ModelError where it is none."""
    content = read_json(path)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ModelError(
            f"{path} has schema_version {str(version)[:20]}, this elsa reads {SCHEMA_VERSION}"
        )
    kept = content.get("kept", {})
    # plans of elsa 0.1 do not say a scope
    scope, offload = content.get("scope", "attention"), content.get("offload")
    precision, backend = content.get("precision"), content.get("backend")
    lists = [content.get(key) for key in ("include", "exclude", "sites")]
    texts = [isinstance(each, list) and all(isinstance(v, str) for v in each) for each in lists]
    named = isinstance(kept, dict) and all(isinstance(why, str) for why in kept.values())
    for good, what in (
        (
            isinstance(precision, str) and isinstance(backend, str),
            "precision and backend must be text",
        ),
        (all(texts), "include, exclude and sites must be lists of text"),
        (named, "kept must map sites to reasons"),
        (scope in ("attention", "model"), "scope must be attention or model"),
        (offload in (None, "host"), "offload must be host"),
    ):
        if not good:
            raise ModelError(f"{path} is no plan of elsa: {what}")
    include, exclude, sites = (tuple(values or ()) for values in lists)
    if not sites:
        raise ModelError(f"{path} names no sites: nothing was patched in it")
    reasons = tuple((str(site), why[:200]) for site, why in kept.items())
    return Plan(str(precision), str(backend), include, exclude, sites, reasons, scope, offload)


def apply_plan(
    model: nn.Module, plan: Plan, path: Path, example: tuple[Any, ...] | None = None
) -> PatchReport:
    """Patch exactly the sites that the plan at `path` names, in place; where sites are found by a
    run, on `example`. ModelError: the plan does not fit the model."""
    from elsa_core.patching import find_sites, layers_within, patch, sites_of

    modules = dict(model.named_modules())
    absent = [site for site in plan.sites if site not in modules]
    if absent:
        raise ModelError(f"{path} does not fit the model: it has no module {absent[0][:120]!r}")
    found = find_sites(model, plan.scope, example)
    reasons = {site.path: "" if site.patchable else site.reason for site in found}
    for site in plan.sites:
        if why := reasons.get(site, f"it is none of its {sites_of(plan.scope)}"):
            raise ModelError(f"{path} does not fit the model: {site!r} was not patched: {why}")
    kept = [path for path, _ in plan.kept]
    within = layers_within(model, found, plan.sites, kept, plan.include, plan.exclude)
    # globs that match these paths alone
    include = [re.sub(r"([*?[])", r"[\1]", site) for site in (*plan.sites, *within)]
    try:
        report = patch(
            model, example, precision=plan.precision, backend=plan.backend, include=include,
            scope=plan.scope, offload=plan.offload,
        )  # fmt: skip
    except (ArgumentError, NothingPatchedError) as error:
        raise ModelError(f"{path} cannot be applied: {error}") from None
    why_kept = dict(plan.kept)
    left = tuple(
        dataclasses.replace(site, reason=why_kept.get(site.path, site.reason))
        for site in report.kept
    )
    return dataclasses.replace(report, kept=left, include=plan.include, exclude=plan.exclude)
