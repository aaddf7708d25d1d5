"""timm's EVA blocks (EVA-02, DINOv3, Perception Encoder, ...) as functions in a row, see `flat.py`.

Where no gradient is wanted, queries and keys are rotated together: the same functions of each
element, half as many calls. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor
from torch.nn import functional

from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.common import attend_small
from elsa_core.short_calls import small_way

_Operands = tuple[Tensor, Tensor, Tensor]
# Queries, keys and values [3, B, H, N, D] of a packed projection, or each [B, H, N, D].
_Parts = Tensor | _Operands
_EVA: Final = "timm.models.eva.EvaAttention"
_ROPE: Final = "timm.layers.attention.AttentionRope"
_ALIGNED: Final = 16  # bytes: kernels of attention read operands that begin elsewhere by others


def block(module: Any, drops: flat.Drops, every: bool = False) -> flat.Run | None:
    """What computes a timm `EvaBlock` without a mask: of x, and of rotary embeddings or None."""
    attend, change = attention(module.attn, drops, every), _of_mlp(module.mlp, drops, every)
    first, second = norm(module.norm1), norm(module.norm2)
    known = all(flat.idles(drop, drops) for drop in (module.drop_path1, module.drop_path2))
    if not known or None in (attend, change, first, second):
        return None
    space = vars(module)

    def run(x: Tensor, rope: Tensor | None = None) -> Tensor:
        way = small_way(x)
        x = attend(first(x), rope, way, x, _term(space, "gamma_1"))  # type: ignore[misc]
        return change(second(x), way, x, _term(space, "gamma_2"))  # type: ignore[misc]

    return run


def any_block(module: Any, drops: flat.Drops) -> flat.Run | None:
    """As `block`, whose linear layers need not be patched to be elsa's."""
    return block(module, drops, every=True)


def attention(module: Any, drops: flat.Drops, every: bool = False) -> flat.Run | None:
    """What computes a timm `EvaAttention` or `AttentionRope` without a mask: of x, of rotary
    embeddings or None, and of what `flat.linear` takes further.
    """
    if flat.name_of(module) not in (_EVA, _ROPE):
        return None
    if not flat.idles(module.proj_drop, drops) or not flat.drops_weights(module, drops):
        return None
    gate = getattr(module, "gate", None)  # older versions have none
    opening: Any = flat.unchanged if gate is None else flat.linear(gate, every)
    parts, turn, last = _parts(module, every), _turning(module), norm(module.norm)
    proj = flat.linear(module.proj, every)
    if None in (opening, parts, turn, last, proj):
        return None
    space, owner = vars(module), weakref.ref(module)  # the module would be kept for ever
    own = type(module).__dict__.get("elsa_base", type(module)).forward
    as_wide = not _says_widths(module)  # as its input, else it refuses

    def run(
        x: Tensor, rope: Tensor | None = None, way: flat.Way | None = flat.UNASKED,
        residual: Tensor | None = None, gamma: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not space["fused_attn"]:
            return flat.followed(own(owner(), x, rope), residual, gamma)
        way = small_way(x) if way is flat.UNASKED else way
        opened = None if gate is None else opening(x, way).sigmoid()
        q, k, v = turn(parts(x, way), rope)  # type: ignore[misc]
        small = attend_small(q, k, v)
        out = functional.scaled_dot_product_attention(q, k, v) if small is None else small
        out = out.transpose(1, 2)
        joined = last(out.reshape(x.shape) if as_wide else out.flatten(2))  # type: ignore[misc]
        if opened is not None:
            joined = joined * opened
        return proj(joined, way, residual, gamma)  # type: ignore[misc]

    return run


def _parts(module: Any, every: bool) -> Callable[[Tensor, flat.Way | None], _Parts] | None:
    """What makes queries, keys and values of x."""
    space, known = vars(module), _says_widths(module)
    if module.qkv is None:
        layers = [
            flat.linear(each, every) for each in (module.q_proj, module.k_proj, module.v_proj)
        ]
        if None in layers:
            return None

        def apart(x: Tensor, way: flat.Way | None) -> _Operands:
            batch, tokens, _ = x.shape
            heads, dim = space["num_heads"], space["head_dim"] if known else -1
            fewer = space.get("num_kv_heads") or heads
            q, k, v = (
                layer(x, way).reshape(batch, tokens, count, dim).transpose(1, 2)  # type: ignore[misc]
                for layer, count in zip(layers, (heads, fewer, fewer), strict=True)
            )
            return q, k, v

        return apart
    packed = _packed(module, every)
    if packed is None:
        return None

    def together(x: Tensor, way: flat.Way | None) -> Tensor:
        batch, tokens, _ = x.shape
        dim = space["head_dim"] if known else -1
        found = packed(x, way).reshape(batch, tokens, 3, space["num_heads"], dim)
        return found.permute(2, 0, 3, 1, 4)

    return together


def _says_widths(module: Any) -> bool:
    """Whether an attention reshapes by its own widths, as later versions of `AttentionRope` do."""
    return hasattr(module, "attn_dim") and hasattr(module, "head_dim")


def _packed(module: Any, every: bool) -> flat.Run | None:
    """What computes the packed projection; in an `EvaAttention` keys have a bias of zeros."""
    layer = module.qkv
    plain = flat.linear(layer, every)
    if plain is None or flat.name_of(module) != _EVA:
        return plain
    space, held, owner = vars(module), vars(layer), weakref.ref(layer)
    own = "elsa_base" in type(layer).__dict__

    def run(x: Tensor, way: flat.Way | None) -> Tensor:
        queries = _term(space, "q_bias")
        if queries is None:
            return plain(x, way)
        others = _term(space, "k_bias", "_buffers"), _term(space, "v_bias")
        bias = torch.cat((queries, *others))  # type: ignore[arg-type]
        if space["qkv_bias_separate"]:
            packed = plain(x, way)
            packed += bias
            return packed
        weight = _term(held, "weight")
        if way is not None and (own or every):
            halves = owner().elsa_halves() if own else ()  # type: ignore[union-attr, operator]
            found = way(x, weight, bias, "none", None, None, "strict", *halves)
            if found is not None:
                return found
        return functional.linear(x, weight, bias)  # type: ignore[arg-type]

    return run


def _turning(module: Any) -> Callable[[_Parts, Tensor | None], _Operands] | None:
    """What norms and rotates queries and keys, and repeats the heads of grouped keys and values."""
    query, key = norm(module.q_norm), norm(module.k_norm)
    if query is None or key is None:
        return None
    space, plain = vars(module), query is key is flat.unchanged

    def run(parts: _Parts, rope: Tensor | None) -> _Operands:
        if plain and rope is not None and isinstance(parts, Tensor) and _may_join(parts[0], rope):
            v = parts[2]
            q, k = _rotated(parts[:2], rope, space, v).unbind(0)
            return q, k, v
        q, k, v = parts.unbind(0) if isinstance(parts, Tensor) else parts
        q, k = query(q), key(k)
        if rope is not None:
            if q.shape == k.shape and q.dtype == k.dtype and _may_join(q, rope):
                q, k = _rotated(torch.stack((q, k)), rope, space, v).unbind(0)
            else:
                q, k = _rotated(q, rope, space, v), _rotated(k, rope, space, v)
        groups = space.get("num_kv_groups", 1)  # older versions have none
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return q, k, v

    return run


def _may_join(x: Tensor, rope: Tensor) -> bool:
    """Whether a tensor behind such a one in memory begins as it would by itself, rotary embeddings
    are the same for both, and no gradient is wanted, which would be summed otherwise.
    """
    joins = x.numel() * x.element_size() % _ALIGNED == 0 and rope.dim() <= x.dim()
    return joins and not torch.is_grad_enabled()


def _rotated(x: Tensor, rope: Tensor, space: flat.Space, like: Tensor) -> Tensor:
    """Tokens [..., N, D], those after the prefix rotated, in `like`'s dtype."""
    prefix, half = space["num_prefix_tokens"], space.get("rotate_half", False)
    if not 0 <= prefix <= x.shape[-2]:  # the original cuts what there is
        raise KeyError("num_prefix_tokens")
    first, others = x.split_with_sizes((prefix, x.shape[-2] - prefix), -2)
    turned = apply_rot_embed_cat(others, rope, half=half)
    return torch.cat((first, turned), dim=-2).type_as(like)


def _of_mlp(module: Any, drops: flat.Drops, every: bool) -> flat.Run | None:
    """What computes a part that may be an MLP, of those with a gate too."""
    read = _MLPS.get(flat.name_of(module))
    return None if read is None else read(module, drops, every)


def swiglu(module: Any, drops: flat.Drops, every: bool = False) -> flat.Run | None:
    """What computes a timm `SwiGLU`: of x, and of what `flat.linear` takes further."""
    opening, value = flat.linear(module.fc1_g, every, module.act), flat.linear(module.fc1_x, every)
    if opening is None or value is None:
        return None

    def first(x: Tensor, way: flat.Way | None) -> Tensor:
        return opening(x, way) * value(x, way)

    return _ended(module, drops, first, flat.linear(module.fc2, every))


def glu(module: Any, drops: flat.Drops, every: bool = False) -> flat.Run | None:
    """What computes a timm `GluMlp` of linear layers, as `swiglu`."""
    both, activate, space = flat.linear(module.fc1, every), module.act.forward, vars(module)
    if both is None:
        return None

    def first(x: Tensor, way: flat.Way | None) -> Tensor:
        one, other = both(x, way).chunk(2, dim=space["chunk_dim"])
        product: Tensor = one * activate(other) if space["gate_last"] else activate(one) * other
        return product

    return _ended(module, drops, first, flat.linear(module.fc2, every))


_MLPS: Final = {
    flat.MLP: flat.mlp,
    "timm.layers.mlp.GluMlp": glu,
    "timm.layers.mlp.SwiGLU": swiglu,
}


def _ended(
    module: Any, drops: flat.Drops, first: flat.Run | None, second: flat.Run | None
) -> flat.Run | None:
    """What computes an MLP whose hidden channels `first` makes, and `second` reads."""
    between = norm(module.norm)
    known = flat.idles(module.drop1, drops) and flat.idles(module.drop2, drops)
    if not known or not flat.is_activation(module.act) or None in (first, second, between):
        return None

    def run(
        x: Tensor, way: flat.Way | None = flat.UNASKED, residual: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        way = small_way(x) if way is flat.UNASKED else way
        return second(between(first(x, way)), way, residual, gamma)  # type: ignore[misc]

    return run


def norm(module: Any) -> flat.Run | None:
    """As `flat.norm`, and of timm's `RmsNorm`."""
    if flat.name_of(module) != "timm.layers.norm.RmsNorm":
        return flat.norm(module)
    own, owner = type(module).forward, weakref.ref(module)
    return lambda x: own(owner(), x)  # type: ignore[no-any-return]


def _term(space: flat.Space, name: str, kind: str = "_parameters") -> Tensor | None:
    """A parameter or buffer, or None in its place; KeyError of what is neither."""
    held = space[kind]
    if name in space:  # an attribute that Python finds before them
        if space[name] is not None:
            raise KeyError(name)
        return None
    found: Tensor | None = held[name]
    return found
