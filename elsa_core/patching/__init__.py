"""Finding attention and layers in a model, and rewriting them.

The names below are what other packages import; every other name of this package is its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from elsa_core.base import lazy

if TYPE_CHECKING:
    from elsa_core.patching.adapters import attention_within, computes_otherwise, entry
    from elsa_core.patching.adapters.table import LAYERS, SWITCHES, register_adapter
    from elsa_core.patching.adapters.timm_sharded import reduce_gradients, require_shardable, shard
    from elsa_core.patching.frozen import FreezeReport, freeze, refresh, unfreeze
    from elsa_core.patching.layers import ATTENTION, AUTO, MODEL, is_layer, patched_scope, scope_of
    from elsa_core.patching.page import write_page
    from elsa_core.patching.rewrite import (
        PatchReport,
        layers_within,
        original,
        patch,
        patched_sites,
        shared_copy,
        unpatch,
    )  # fmt: skip
    from elsa_core.patching.sites import (
        AttentionSite,
        Inspection,
        find_sites,
        inspect,
        plain_model,
        sites_of,
    )  # fmt: skip

_HOMES = {
    "adapters": ("attention_within", "computes_otherwise", "entry"),
    "adapters.table": ("LAYERS", "SWITCHES", "register_adapter"),
    "frozen": ("FreezeReport", "freeze", "refresh", "unfreeze"),
    "layers": ("ATTENTION", "AUTO", "MODEL", "is_layer", "patched_scope", "scope_of"),
    "page": ("write_page",),
    "rewrite": (
        "PatchReport", "layers_within", "original", "patch", "patched_sites", "shared_copy",
        "unpatch",
    ),
    "adapters.timm_sharded": ("reduce_gradients", "require_shardable", "shard"),
    "sites": ("AttentionSite", "Inspection", "find_sites", "inspect", "plain_model", "sites_of"),
}  # fmt: skip

__all__ = [
    "ATTENTION", "AUTO", "LAYERS", "MODEL", "SWITCHES", "AttentionSite", "FreezeReport",
    "Inspection", "PatchReport", "attention_within", "computes_otherwise", "entry", "find_sites",
    "freeze", "inspect", "is_layer", "layers_within", "original", "patch", "patched_scope",
    "patched_sites", "plain_model", "reduce_gradients", "refresh", "register_adapter",
    "require_shardable", "scope_of", "shard", "shared_copy", "sites_of", "unfreeze", "unpatch",
    "write_page",
]  # fmt: skip

__getattr__ = partial(lazy.attribute, __name__, _HOMES)
