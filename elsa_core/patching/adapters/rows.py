"""timm's blocks by elsa's operators as functions in a row, in eager calls that are not small.

A block of which every layer is patched calls five operators. On the way to each, its modules ask
who handed them which residual, whether a hook reads them and what is small; for a block these have
one answer, that of `flat.served`. What is computed are the same operators of the same tensors in
the same order as by the modules, with gradients and without. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core import calls, routing
from elsa_core.linear import served
from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.common import (
    activation_of,
    attend,
    join_heads,
    split_packed,
    trains_by_pytorch,
)
from elsa_core.patching.adapters.handing import ACTIVATION, RESIDUAL, leaves_out

Product = Callable[..., Tensor]  # (x, activation, residual, scale)
Adding = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]  # (norm(x), x, gamma)


def by_row(module: Any, x: Tensor) -> Tensor | None:
    """A patched ViT block's forward without a mask; None where its modules must be called."""
    if x.dim() != 3 or torch.is_autocast_enabled("cuda"):
        return None
    return row_of(module, block, x)


def row_of(module: Any, read: flat.Reader, x: Tensor) -> Tensor | None:
    """A patched block's forward as `read` reads it, see `flat.served`; None where its modules must
    be called.
    """
    if calls.traced() or not x.is_cuda:
        return None
    if leaves_out(ACTIVATION) or leaves_out(RESIDUAL):  # a measurement
        return None
    if routing.linear_form(routing.NORM, x.device):  # a norm goes into the next product
        return None
    return flat.served(module, read, x)


# Readers, as in `flat.py`.


def block(module: Any, drops: flat.Drops) -> flat.Run | None:
    """What computes a timm `Block` of which every layer is patched."""
    attention, change = _attention(module.attn, drops), mlp(module.mlp, drops)
    norms = flat.norm(module.norm1), flat.norm(module.norm2)
    gammas = flat.gamma_of(module.ls1), flat.gamma_of(module.ls2)
    paths = path(module.drop_path1), path(module.drop_path2)
    if attention is None or change is None or None in (*norms, *gammas, *paths):
        return None
    (first, second), (gamma1, gamma2), (path1, path2) = norms, gammas, paths

    def run(x: Tensor) -> Tensor:
        x = added(attention, first(x), x, gamma1(), path1())  # type: ignore[misc]
        return added(change, second(x), x, gamma2(), path2())  # type: ignore[misc]

    return run


def added(compute: Adding, normed: Tensor, x: Tensor, gamma: Tensor | None, drop: Any) -> Tensor:
    """x + drop(gamma * compute(normed)), in the last product where nothing is dropped."""
    if drop is None:
        return compute(normed, x, gamma)
    kept: Tensor = drop(compute(normed, None, gamma))
    return x + kept


def _attention(module: Any, drops: flat.Drops) -> Adding | None:
    if flat.name_of(module) != flat.ATTENTION or not _is_patched(module):
        return None
    parts = module._modules
    if getattr(module, "gate", None) is not None or not flat.idles(module.proj_drop, drops):
        return None
    qkv, proj = linear(module.qkv), linear(module.proj)
    query, key = flat.norm(module.q_norm), flat.norm(module.k_norm)
    last = flat.norm(parts["norm"]) if "norm" in parts else flat.unchanged
    if None in (qkv, proj, query, key, last) or not flat.drops_weights(module, drops):
        return None
    space, owner = vars(module), weakref.ref(module)

    def run(y: Tensor, residual: Tensor | None, gamma: Tensor | None) -> Tensor:
        site: Any = owner()
        q, k, v = split_packed(qkv(y), space["num_heads"])  # type: ignore[misc]
        q, k = query(q), key(k)  # type: ignore[misc]
        scale = None if space["fused_attn"] else space["scale"]
        if trains_by_pytorch(site, y, site.qkv):
            out = functional.scaled_dot_product_attention(q, k, v)
        else:
            out = attend(site, q, k, v, scale=scale)
        return proj(last(join_heads(out)), "none", residual, gamma)  # type: ignore[misc]

    return run


def mlp(module: Any, drops: flat.Drops) -> Adding | None:
    """What computes a patched timm `Mlp`."""
    if flat.name_of(module) != flat.MLP or not _is_patched(module):
        return None
    first, second, between = linear(module.fc1), linear(module.fc2), flat.norm(module.norm)
    known = flat.idles(module.drop1, drops) and flat.idles(module.drop2, drops)
    if None in (first, second, between) or not known or not activation_of(module.act):
        return None
    act = weakref.ref(module.act)

    def run(y: Tensor, residual: Tensor | None, gamma: Tensor | None) -> Tensor:
        activation = activation_of(act())  # type: ignore[arg-type]
        hidden = between(first(y, activation))  # type: ignore[misc]
        return second(hidden, "none", residual, gamma)  # type: ignore[misc]

    return run


def linear(module: Any) -> Product | None:
    """What computes a patched `nn.Linear` and what goes into its call."""
    if not flat.is_linear(module) or not _is_patched(module):
        return None
    space, owner = vars(module), weakref.ref(module)

    def run(
        x: Tensor, activation: str = "none", residual: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        terms, layer = space["_parameters"], owner()
        return served(
            x, terms["weight"], terms["bias"], activation, residual, scale, "strict", "auto",
            *layer.elsa_halves(),  # type: ignore[union-attr, operator]
        )  # fmt: skip

    return run


def path(module: Any) -> Callable[[], Any] | None:
    """What finds the module that drops whole samples now; None of it where it drops none."""
    if type(module) is torch.nn.Identity:
        return lambda: None
    if flat.name_of(module) != flat.DROP_PATH:
        return None
    space, owner = vars(module), weakref.ref(module)
    return lambda: owner() if space["training"] and space["drop_prob"] else None


def _is_patched(module: Any) -> bool:
    return "elsa_base" in type(module).__dict__
