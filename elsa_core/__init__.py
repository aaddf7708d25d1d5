"""elsa: exact linear-scan attention for vision transformers. The public API, nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elsa_core.base import lazy
from elsa_core.base.version import __version__
from elsa_core.dispatch import Route
from elsa_core.monoid import State, merge
from elsa_core.ops.attention.api import attention, explain
from elsa_core.ops.entmax.api import (
    entmax_attention,
    entmax_varlen_attention,
    explain_entmax_attention,
    explain_entmax_varlen_attention,
)
from elsa_core.ops.linear.api import explain_linear, linear
from elsa_core.ops.sparse.api import SparsityReport, sparsity_report
from elsa_core.ops.varlen.api import explain_varlen_attention, varlen_attention
from elsa_core.ops.window.api import explain_window_attention, window_attention

if TYPE_CHECKING:
    from elsa_core import distributed, nn, offload
    from elsa_core.exporting.bundle import Bundle, export
    from elsa_core.exporting.verify import VerifyReport, verify
    from elsa_core.graphs.model import graphed
    from elsa_core.loading import load
    from elsa_core.patching import (
        AttentionSite,
        FreezeReport,
        Inspection,
        PatchReport,
        freeze,
        inspect,
        patch,
        refresh,
        register_adapter,
        unfreeze,
        unpatch,
    )
    from elsa_core.profiling.profile import ProfileReport, profile
    from elsa_core.proof import CheckReport, EvalReport, check, evaluate

_HOMES = {
    "loading": ("load",),
    "patching": (
        *("AttentionSite", "FreezeReport", "Inspection", "PatchReport", "freeze", "inspect"),
        *("patch", "refresh", "register_adapter", "unfreeze", "unpatch"),
    ),
    "proof": ("CheckReport", "EvalReport", "check", "evaluate"),
    "exporting.bundle": ("Bundle", "export"),
    "exporting.verify": ("VerifyReport", "verify"),
    "profiling.profile": ("ProfileReport", "profile"),
    "graphs.model": ("graphed",),
}

__all__ = [
    "AttentionSite",
    "Bundle",
    "CheckReport",
    "EvalReport",
    "FreezeReport",
    "Inspection",
    "PatchReport",
    "ProfileReport",
    "Route",
    "SparsityReport",
    "State",
    "VerifyReport",
    "__version__",
    "attention",
    "check",
    "distributed",
    "entmax_attention",
    "entmax_varlen_attention",
    "evaluate",
    "explain",
    "explain_entmax_attention",
    "explain_entmax_varlen_attention",
    "explain_linear",
    "explain_varlen_attention",
    "explain_window_attention",
    "export",
    "freeze",
    "graphed",
    "inspect",
    "linear",
    "load",
    "merge",
    "nn",
    "offload",
    "patch",
    "profile",
    "refresh",
    "register_adapter",
    "sparsity_report",
    "unfreeze",
    "unpatch",
    "varlen_attention",
    "verify",
    "window_attention",
]


def __getattr__(name: str) -> Any:
    """Import what concerns models at its first use (PEP 562): kernels alone need none of it."""
    if name in ("distributed", "nn", "offload"):
        return import_module(f"elsa_core.{name}")
    return lazy.attribute(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
