"""What `patch` says that it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elsa_core.base.summary import Summarised, Summary
from elsa_core.patching import layers
from elsa_core.patching.sites import AttentionSite, reasons, sites_of, sites_table


@dataclass(frozen=True, repr=False)
class PatchReport(Summarised):
    """What `patch` did.

    Attributes:
        patched: the sites that run on elsa now.
        kept: the sites left as they were; `reason` says why.
        precision, backend: what the patched sites ask for.
        include, exclude: the globs given, empty for all.
        scope: "attention", or "model" with linear layers, MLPs and patch embeddings.
        sparsity: what the sites may leave out, None for nothing.
        offload: "host" where what a backward needs is kept in host memory.
    """

    patched: tuple[AttentionSite, ...]
    kept: tuple[AttentionSite, ...]
    precision: str
    backend: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scope: str = layers.ATTENTION
    sparsity: str | float | None = None
    offload: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = vars(self) | {"include": list(self.include), "exclude": list(self.exclude)}
        sites = {name: [one.to_dict() for one in found[name]] for name in ("patched", "kept")}
        return found | sites

    def summary(self) -> Summary:
        """The patched sites as a table, and why the others were kept."""
        done, found = len(self.patched), len(self.patched) + len(self.kept)
        title = f"{done} of {found} {sites_of(self.scope)} patched"
        stored = "" if self.offload is None else f" · offload {self.offload}"
        return Summary(
            f"{title} · precision {self.precision} · backend {self.backend}{stored}",
            *sites_table(self.patched),
            reasons(self.kept, "kept"),
        )
