"""The two models that are measured against one another, over the same weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from elsa_core.patching import (
    PatchReport,
    find_sites,
    patch,
    patched_scope,
    patched_sites,
    shared_copy,
)
from elsa_core.profiling.runs import variants


def both(
    model: nn.Module, precision: str, backend: str,
    include: str | Sequence[str] | None, exclude: str | Sequence[str] | None, scope: str,
) -> tuple[nn.Module, nn.Module, PatchReport]:  # fmt: skip
    """Copies over the same weights: unpatched and patched."""
    plain = variants.unpatched_copy(model)
    already = patched_sites(model)
    if not already:
        patched = shared_copy(plain)
        report = patch(
            patched, precision=precision, backend=backend, include=include, exclude=exclude,
            scope=scope,
        )  # fmt: skip
        return plain, patched, report
    patched = shared_copy(model).eval()
    one = vars(next(iter(already.values())))
    scope = patched_scope(patched)
    everything = find_sites(patched, scope)
    report = PatchReport(
        tuple(site for site in everything if site.patched),
        tuple(site for site in everything if not site.patched),
        str(one["elsa_precision"]),
        str(one["elsa_backend"]),
        scope=scope,
    )
    return plain, patched, report
