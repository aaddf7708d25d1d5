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
    """The arguments of `patch` and the paths of the sites that it patched.

    `kept` are (path, reason) of sites left alone on purpose, because a profile found them slower.
    In the scope "model" a projection goes with the attention that it lies in, whose time a profile
    measures as one, unless `include`, `exclude` or `kept` say otherwise.
    """

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
    return Plan(
        report.precision,
        report.backend,
        _names(report.include),
        _names(report.exclude),
        tuple(site.path for site in report.patched),
        scope=report.scope,
        offload=report.offload,
    )


def read_plan(path: Path) -> Plan:
    """Read elsa_plan.json from a directory that may be hostile; ModelError where it is none."""
    content = read_json(path)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ModelError(
            f"{path} has schema_version {str(version)[:20]}, this elsa reads {SCHEMA_VERSION}"
        )
    names = [content.get(key) for key in ("precision", "backend")]
    lists = [content.get(key) for key in ("include", "exclude", "sites")]
    if not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: precision and backend must be text")
    for values in lists:
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ModelError(f"{path}: include, exclude and sites must be lists of text")
    kept = content.get("kept", {})
    if not isinstance(kept, dict) or not all(isinstance(why, str) for why in kept.values()):
        raise ModelError(f"{path}: kept must map sites to reasons")
    if not lists[2]:
        raise ModelError(f"{path} names no sites: nothing was patched in it")
    scope = content.get("scope", "attention")  # plans of elsa 0.1 do not say it
    if scope not in ("attention", "model"):
        raise ModelError(f"{path}: scope must be attention or model")
    offload = content.get("offload")
    if offload not in (None, "host"):
        raise ModelError(f"{path}: offload must be host")
    include, exclude, sites = (tuple(values or ()) for values in lists)
    reasons = tuple((str(site), why[:200]) for site, why in kept.items())
    return Plan(str(names[0]), str(names[1]), include, exclude, sites, reasons, scope, offload)


def apply_plan(
    model: nn.Module, plan: Plan, path: Path, example: tuple[Any, ...] | None = None
) -> PatchReport:
    """Patch exactly the sites that the plan names, in place.

    `path` is the plan's, for messages; on `example`, its arguments, the model runs where sites are
    found by a run. ModelError: the plan does not fit the model, or asks for what this elsa lacks.
    """
    from elsa_core.patching import find_sites, layers_within, patch, sites_of, watch

    modules = dict(model.named_modules())
    absent = [site for site in plan.sites if site not in modules]
    if absent:
        raise ModelError(f"{path} does not fit the model: it has no module {absent[0][:120]!r}")
    found = find_sites(model, plan.scope, None if example is None else watch(model, example))
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


def _names(globs: Any) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs or ())
