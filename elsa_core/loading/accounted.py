"""Does a model hold every tensor of its file, unchanged?

Libraries convert older files as they load them: they rename, reshape, transpose and join tensors,
which keeps every number, and they resample and drop some, which does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from elsa_core.loading.fit import is_computed, is_unused


def changed(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    asked: Collection[str] = (),
    *,
    resized: bool = False,
) -> dict[str, str]:
    """Return the tensors of a file that the model does not hold as they are, each with what
    happened to it.

    Args:
        model: loaded, its parameters in any floating dtype.
        tensors: of the file.
        asked: names that another image size or window was asked to change.
        resized: the model has another image size or window than the file, and so other buffers
            that are computed from them.
    """
    own = {**dict(model.named_buffers()), **model.state_dict()}
    left: dict[str, Tensor] = {}
    taken: set[str] = set()
    found: dict[str, str] = {}
    for name, tensor in _converted(model, tensors).items():
        held = own.get(name)
        if is_computed(name):
            # What is computed for another image size differs, and is no weight.
            if held is not None and not resized and not _alike(held, tensor):
                found[name] = f"is not what the model computes ({_shape(tensor)})"
        elif (held is not None and _same(held, tensor)) or name in asked:
            taken.add(name)
        elif not is_unused(name):
            left[name] = tensor
    if left:
        rest = [t for name, t in model.state_dict().items() if name not in taken]
        for name in _lost(left, rest):
            held = own.get(name)
            found[name] = _words(tensors[name], held)
    return found


def _converted(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with what timm adds up or masks as it reads DINO's original files."""
    found = dict(tensors)
    own = model.state_dict()
    places, first = found.get("pos_embed"), found.get("cls_token")
    registers = "register_tokens" in found and "reg_token" in own
    if registers and first is not None and places is not None and places.ndim == 3:
        # timm adds the class token's position once, and keeps the patches' alone.
        found["cls_token"] = first + places[:, 0]
        found["pos_embed"] = places[:, 1:]
    for name, bias in tensors.items():
        if name.endswith("qkv.bias") and f"{name}_mask" in tensors and bias.shape[0] % 3 == 0:
            width = bias.shape[0] // 3
            found[name] = torch.cat([bias[:width], 0 * bias[:width], bias[2 * width :]])
    return found


def _lost(left: Mapping[str, Tensor], rest: list[Tensor]) -> list[str]:
    """Return the names of the tensors whose numbers are not among the rest's, whatever shape."""
    names, pool = [], list(rest)
    for name, tensor in left.items():
        if name.endswith("bias") and not tensor.count_nonzero():
            continue  # nothing is added without it
        place = next((i for i, held in enumerate(pool) if _same_numbers(held, tensor)), None)
        if place is None:
            names.append(name)
        else:
            pool.pop(place)
    if names and pool:
        # Joined (q, k and v into qkv) or split: the same numbers, zeros that are added apart.
        dtype = pool[0].dtype
        one = torch.cat([left[name].flatten().to(dtype) for name in names])
        other = torch.cat([tensor.flatten().to(dtype) for tensor in pool])
        one, other = (values[values != 0].sort().values for values in (one, other))
        if torch.equal(one, other):
            return []
    return names


def _same(held: Tensor, tensor: Tensor) -> bool:
    return held.shape == tensor.shape and torch.equal(held, tensor.to(held.dtype))


def _same_numbers(held: Tensor, tensor: Tensor) -> bool:
    """True for equal numbers in another shape, or transposed."""
    if held.numel() != tensor.numel():
        return False
    cast = tensor.to(held.dtype)
    if torch.equal(held.flatten(), cast.flatten()):
        return True
    return cast.ndim == 2 and torch.equal(held.flatten(), cast.t().flatten())


def _alike(held: Tensor, tensor: Tensor) -> bool:
    """True for buffers that two releases computed, each with its own rounding."""
    if held.shape != tensor.shape:
        return False
    return torch.allclose(held.double(), tensor.double(), rtol=1e-4, atol=1e-4)


def _words(tensor: Tensor, held: Tensor | None) -> str:
    if held is None:
        return f"({_shape(tensor)}) would be dropped"
    if held.shape != tensor.shape:
        return f"({_shape(tensor)}) would be resampled to {_shape(held)}"
    return f"({_shape(tensor)}) would be changed"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
