"""What watches a module: then the module itself has to be called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, or a forward replaced on the instance. The hooks of a check
    (`elsa_observer`) do not count: it judges what runs without them."""
    space = module.__dict__  # every layer of a warm call is asked: most have nothing of all this
    if "forward" in space or space["_backward_hooks"] or space["_backward_pre_hooks"]:
        return True
    if not (space["_forward_hooks"] or space["_forward_pre_hooks"]):
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not getattr(hook, "elsa_observer", False) for hook in hooks)


def is_watched(*modules: nn.Module) -> bool:
    """As `has_hooks`, of one of the modules, or PyTorch's global hooks see every module."""
    for module in modules:  # no call for those that hold nothing
        space = module.__dict__
        holds = "forward" in space or space["_backward_hooks"] or space["_backward_pre_hooks"]
        if (holds or space["_forward_hooks"] or space["_forward_pre_hooks"]) and has_hooks(module):
            return True
    return bool(torch.nn.modules.module._has_any_global_hook())


def noted(module: nn.Module, name: str) -> Any:
    """What `patch` noted on a module, or None. A compiler guards what getattr finds, not what lies
    in `__dict__`; in eager mode getattr takes 2.5 us where nothing is found."""
    return getattr(module, name, None) if is_dynamo_compiling() else module.__dict__.get(name)
