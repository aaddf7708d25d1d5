"""Attention and models whose tokens are sharded over the ranks of a process group.

PyTorch moves every byte: the groups, device meshes and collectives of `torch.distributed`, and the
processes of `torchrun`. What happens here is the order of the messages and of the sums.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elsa_core.distributed.attention import attention, explain
from elsa_core.distributed.plan import Plan

if TYPE_CHECKING:
    from elsa_core.patching import reduce_gradients, require_shardable, shard

__all__ = ["Plan", "attention", "explain", "reduce_gradients", "require_shardable", "shard"]


def __getattr__(name: str) -> Any:  # what concerns models imports timm (PEP 562)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("elsa_core.patching"), name)
