"""timm's ViT blocks as functions in a row, for eager calls on a GPU that wait for the host.

A small call takes the host longer than the device, and half of that time goes into calls of
modules. Where a patched block keeps PyTorch's kernels for that reason (`common.is_host_bound`), its
functions are called here one after another: the same functions of the same tensors in the same
order as in the original forward, so that results are equal bit by bit, but for attention and linear
layers, which are elsa's where that takes the host less (`common.attend_small`,
`short_calls.small_way`). Identities and dropout that drops nothing are not called.

What a block consists of is read once and compared at each call: a module that was replaced or has
another class is read anew; where a module within has hooks or drops something, or a class got
another forward than its own, nothing is served and the original forward runs. Weights and settings
are looked up at each call. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsa_core.patching.adapters.common import activation_of, attend_small
from elsa_core.patching.adapters.host import in_row, is_unasked
from elsa_core.short_calls import small_way

Space = dict[str, Any]  # what a module holds: its __dict__
# Asked of each module in each call: without a loop in Python.
_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)

_FORWARD = attrgetter("forward")

ATTENTION, MLP = "timm.layers.attention.Attention", "timm.layers.mlp.Mlp"
_NORMS: Final = ("torch.nn.modules.normalization.LayerNorm", "timm.layers.norm.LayerNorm")
_SCALE, DROP_PATH = "timm.layers.layer_scale.LayerScale", "timm.layers.drop.DropPath"
# Adapters in whose place the original may run: no others, which may compute something else.
_ADAPTERS: Final = {
    f"elsa_core.patching.adapters.{name}"
    for name in (
        *("timm_attention.ElsaAttention", "timm_attention.ElsaAttentionRope"),
        *("timm_eva.ElsaEvaAttention", "torch_layers.ElsaLinear"),
        *("timm_mlp.ElsaGluMlp", "timm_mlp.ElsaMlp", "timm_mlp.ElsaSwiGLU"),
    )
}
# Activations: modules whose forward reads nothing but its input.
_ACTIVATIONS: Final = (
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.SiLU",
    "timm.layers.activations.GELU",
    "timm.layers.activations.GELUTanh",
    "timm.layers.activations.QuickGELU",
)


@dataclass(frozen=True, eq=False)
class Reading:
    """What one module was read as.

    Attributes:
        owner: the module. modules: all within it, with their `types` and `spaces`.
        classes: those of all these, and those that elsa's stand for, with their `forwards`.
        children: for each module with children its space and them.
        sites: the spaces of those that are patched.
        drops: what may drop something: the space with `training`, that with the rate, its name.
        run: computes the owner's forward; None where it is no module of the known kind.
    """

    owner: weakref.ref[nn.Module]
    modules: tuple[nn.Module, ...]
    types: tuple[type, ...]
    spaces: tuple[Space, ...]
    classes: tuple[type, ...]
    forwards: tuple[Any, ...]
    children: tuple[tuple[Space, tuple[nn.Module | None, ...]], ...]
    sites: tuple[Space, ...]
    drops: tuple[tuple[Space, Space, str], ...]
    run: Run | None

    def holds(self) -> bool:
        """Whether the modules are still those that were read."""
        if tuple(map(type, self.modules)) != self.types:
            return False
        if tuple(map(_FORWARD, self.classes)) != self.forwards:
            return False
        return all(tuple(space["_modules"].values()) == found for space, found in self.children)

    def is_free(self) -> bool:
        """Whether no hook sees what passes through the modules, nothing is dropped, and no site
        was patched with a name or sparsity of its own.
        """
        if any(chain.from_iterable(map(_HOOKS, self.spaces))):
            return False
        if any(map(dict.__contains__, self.spaces, repeat("forward"))):
            return False
        if torch.nn.modules.module._has_any_global_hook():
            return False
        if not all(map(is_unasked, self.sites)):
            return False
        return not any(trains["training"] and rate[name] for trains, rate, name in self.drops)


Drops = list[tuple[Space, Space, str]]
Run = Callable[..., Tensor]
Way = Callable[..., Tensor | None]  # `short_calls.small_product`
UNASKED: Any = object()
Reader = Callable[[Any, Drops], Run | None]
_READINGS: dict[tuple[int, Callable[[Any, Drops], Any]], Reading] = {}


def served(module: nn.Module, read: Reader, x: Tensor) -> Tensor | None:
    """A module's forward as `read` reads it; None where the module must run itself."""
    run: Run | None = run_of(module, read)
    if run is None:
        return None
    in_row(module)
    try:
        return run(x)
    except KeyError:  # a weight is a parameter no longer
        return None


def run_of(module: nn.Module, read: Callable[[Any, Drops], Any]) -> Any:
    """What `read` makes of a module; None where the module must run itself. It raises KeyError
    where a weight is a parameter no longer.
    """
    key = (id(module), read)
    reading = _READINGS.get(key)
    if reading is None or reading.owner() is not module or not reading.holds():
        _READINGS.pop(key, None)
        if any(any(_HOOKS(vars(m))) for m in module.modules()):
            return None
        reading = _READINGS[key] = _read(module, read)
    if reading.run is None:
        return None
    if not reading.is_free():
        # a hook may hold the model, which a reading of its modules would keep for ever
        if any(chain.from_iterable(map(_HOOKS, reading.spaces))):
            _READINGS.pop(key, None)
        return None
    return reading.run


def _read(module: nn.Module, read: Callable[[Any, Drops], Any]) -> Reading:
    drops: Drops = []
    key = (id(module), read)
    try:
        run = read(module, drops)
    except AttributeError:  # another forward left something of the module out
        run = None
    within = tuple(m for m in module.modules() if m is not module)
    types = {type(m) for m in (module, *within)}
    bases = (cls.__dict__.get("elsa_base") for cls in types)
    classes = tuple(types.union(base for base in bases if base is not None))
    if not all(map(_has_own_forward, classes)):
        run = None
    parents = (module, *(m for m in within if m._modules))
    return Reading(
        weakref.ref(module, lambda _: _READINGS.pop(key, None)),
        within,
        tuple(map(type, within)),
        tuple(vars(m) for m in within),
        classes,
        tuple(map(_FORWARD, classes)),
        tuple((vars(m), tuple(m._modules.values())) for m in parents),
        tuple(vars(m) for m in within if hasattr(type(m), "elsa_base")),
        tuple(drops),
        run,
    )


def _has_own_forward(cls: Any) -> bool:
    """Whether the forward of a class is the one that it, or a class that it inherits, was written
    with: recipes put in others.
    """
    owner = next(c for c in cls.__mro__ if "forward" in c.__dict__)
    written = f"{owner.__module__}.{owner.__qualname__}.forward"
    return f"{cls.forward.__module__}.{cls.forward.__qualname__}" == written


# Readers: what computes a module's forward from what it holds now, or None. `drops` takes up what
# must not drop.


def block(module: Any, drops: Drops, every: bool = False) -> Run | None:
    """What computes a timm `Block` without a mask."""
    attend = attention(module.attn, drops, every) if name_of(module.attn) == ATTENTION else None
    change = of_mlp(module.mlp, drops, every)
    norms = norm(module.norm1), norm(module.norm2)
    gammas = gamma_of(module.ls1), gamma_of(module.ls2)
    known = all(idles(drop, drops) for drop in (module.drop_path1, module.drop_path2))
    if attend is None or change is None or not known or None in norms or None in gammas:
        return None
    (first, second), (gamma1, gamma2) = norms, gammas

    def run(x: Tensor) -> Tensor:
        way = small_way(x)
        x = attend(first(x), way, x, gamma1())  # type: ignore[misc]
        return change(second(x), way, x, gamma2())  # type: ignore[misc]

    return run


def any_block(module: Any, drops: Drops) -> Run | None:
    """As `block`, whose linear layers need not be patched to be elsa's."""
    return block(module, drops, every=True)


def attention(module: Any, drops: Drops, every: bool = False) -> Run | None:
    """What computes a timm `Attention` without a mask: of x, and of what `linear` takes further."""
    space, parts = vars(module), module._modules
    if getattr(module, "gate", None) is not None or not idles(module.proj_drop, drops):
        return None
    qkv, proj = linear(module.qkv, every), linear(module.proj, every)
    query, key = norm(module.q_norm), norm(module.k_norm)
    last = norm(parts["norm"]) if "norm" in parts else unchanged
    if None in (qkv, proj, query, key, last) or not drops_weights(module, drops):
        return None
    own = type(module).__dict__.get("elsa_base", type(module)).forward
    owner = weakref.ref(module)  # what holds the module itself would keep it for ever

    def run(
        x: Tensor, way: Way | None = UNASKED, residual: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not space["fused_attn"]:
            return followed(own(owner(), x), residual, gamma)
        way = small_way(x) if way is UNASKED else way
        batch, tokens, _ = x.shape
        packed = qkv(x, way).reshape(batch, tokens, 3, space["num_heads"], space["head_dim"])  # type: ignore[misc]
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = query(q), key(k)  # type: ignore[misc]
        small = attend_small(q, k, v)
        out = functional.scaled_dot_product_attention(q, k, v) if small is None else small
        joined = last(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[misc]
        return proj(joined, way, residual, gamma)  # type: ignore[misc]

    return run


def drops_weights(module: Any, drops: Drops) -> bool:
    """Whether what drops attention weights is a plain dropout, whose rate counts in training: the
    attention's where it is fused, else its own (`common.drop_p`).
    """
    if type(module.attn_drop) is not nn.Dropout:
        return False
    drop = vars(module.attn_drop)
    drops += [(vars(module), drop, "p"), (drop, drop, "p")]
    return True


def of_mlp(module: Any, drops: Drops, every: bool = False) -> Run | None:
    """What computes a part that may be a timm `Mlp`."""
    return mlp(module, drops, every) if name_of(module) == MLP else None


def mlp(module: Any, drops: Drops, every: bool = False) -> Run | None:
    """What computes a timm `Mlp`: of x, and of what `linear` takes further."""
    first, second = linear(module.fc1, every, module.act), linear(module.fc2, every)
    between = norm(module.norm)
    known = idles(module.drop1, drops) and idles(module.drop2, drops)
    if first is None or second is None or between is None or not known:
        return None
    if not is_activation(module.act):
        return None

    def run(
        x: Tensor, way: Way | None = UNASKED, residual: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        way = small_way(x) if way is UNASKED else way
        return second(between(first(x, way)), way, residual, gamma)

    return run


def linear(module: Any, every: bool = False, act: nn.Module | None = None) -> Run | None:
    """What computes residual + gamma * act(layer(x)) of an `nn.Linear`, residual and gamma perhaps
    None: by `way` where it has one, and the layer is patched or `every` one may be elsa's.
    """
    if not is_linear(module):
        return None
    space, own, owner = vars(module), "elsa_base" in type(module).__dict__, weakref.ref(module)
    activate, acts = (None, None) if act is None else (act.forward, weakref.ref(act))

    def run(
        x: Tensor, way: Way | None = None, residual: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        terms = space["_parameters"]
        if "weight" in space or "bias" in space:  # an attribute that Python finds before them
            raise KeyError("weight")
        weight, bias = terms["weight"], terms["bias"]
        if way is not None and (own or every):
            name = "none" if acts is None else activation_of(acts())  # type: ignore[arg-type]
            halves = owner().elsa_halves() if own else ()  # type: ignore[union-attr, operator]
            terms = (name, residual, gamma, "strict", *halves)
            found = way(x, weight, bias, *terms) if name else None
            if found is not None:
                return found
        out = functional.linear(x, weight, bias)
        return followed(out if activate is None else activate(out), residual, gamma)

    return run


def followed(out: Tensor, residual: Tensor | None, gamma: Tensor | None) -> Tensor:
    """residual + gamma * out, as blocks compute it."""
    if gamma is not None:
        out = out * gamma
    return out if residual is None else residual + out


def is_activation(module: Any) -> bool:
    """Whether a module is an activation whose forward reads nothing but its input."""
    return name_of(module) in _ACTIVATIONS


def is_linear(module: Any) -> bool:
    """Whether a module is an `nn.Linear`, patched or not, whose weight is a parameter."""
    plain = name_of(module) == "torch.nn.modules.linear.Linear"
    return plain and "weight" in module._parameters


def norm(module: Any) -> Run | None:
    """What computes a layer norm, or an identity in its place."""
    if type(module) is nn.Identity:
        return unchanged
    if name_of(module) not in _NORMS or getattr(module, "_fast_norm", False):
        return None
    space = vars(module)

    def run(x: Tensor) -> Tensor:
        terms = space["_parameters"]
        shape = space["normalized_shape"]
        return functional.layer_norm(x, shape, terms["weight"], terms["bias"], space["eps"])

    return run


def gamma_of(module: Any) -> Callable[[], Tensor | None] | None:
    """What finds the factors of a LayerScale, or None of an identity in its place."""
    if type(module) is nn.Identity:
        return lambda: None
    if name_of(module) != _SCALE or module.inplace:  # which keeps the dtype of what it scales
        return None
    space = vars(module)

    def gamma() -> Tensor:
        if space["inplace"]:
            raise KeyError("gamma")
        found: Tensor = space["_parameters"]["gamma"]
        return found

    return gamma


def idles(module: Any, drops: Drops) -> bool:
    """Whether a module changes nothing as long as it drops nothing."""
    if type(module) is nn.Identity:
        return True
    rates = {"torch.nn.modules.dropout.Dropout": "p", DROP_PATH: "drop_prob"}
    rate = rates.get(name_of(module))
    if rate is not None:
        drops.append((vars(module), vars(module), rate))
    return rate is not None


def unchanged(x: Tensor) -> Tensor:
    """What an identity computes."""
    return x


def name_of(module: Any) -> str:
    """The name of a module's class, of `_ADAPTERS` that of the class which they stand for."""
    cls: Any = type(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _ADAPTERS:
        name = f"{cls.elsa_base.__module__}.{cls.elsa_base.__qualname__}"
    return name
