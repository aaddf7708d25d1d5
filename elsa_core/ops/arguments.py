"""What the public functions of the operators share: checks of types, layouts and requests."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.base import calls
from elsa_core.base.operands import leading_dims, require_number, require_tensor
from elsa_core.errors import ElsaError

Kind = tuple[str, torch.dtype, int, int, str]
_REQUIRED: Final = ("query", "key", "value", "cu_seqlens_q", "qkv", "input", "weight")
_TENSORS: Final = (*_REQUIRED, "attn_mask", "cu_seqlens_k", "bias", "residual")
_NUMBERS: Final = ("scale", "dropout_p", "mask_value")
_FLAGS: Final = ("is_causal", "enable_gqa", "grid")
_NAMES: Final = ("precision", "backend", "layout", "activation")


def explain_types(error: Exception, given: Mapping[str, Any]) -> None:
    """Raise the TypeError that names an argument of a wrong type, after a call has failed: so right
    calls cost nothing. given: arguments by name, `locals()` of a public function; other names are
    not read."""
    if isinstance(error, ElsaError):  # it says itself what was wrong
        return
    for name, each in given.items():
        if name in _TENSORS and (each is not None or name in _REQUIRED):
            require_tensor(name, each)
    for name, each in given.items():
        if name in _NUMBERS and not (name == "scale" and each is None):
            require_number(name, each)
        elif name in _FLAGS and not isinstance(each, bool):
            raise TypeError(f"{name} must be True or False, not {type(each).__name__}")
        elif name in _NAMES and not isinstance(each, str):
            raise TypeError(f"{name} must be text, not {type(each).__name__}")


def default_scale(query: Tensor) -> float:
    """1 / sqrt(D)."""
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def kind_of(query: Tensor, value: Tensor, precision: str) -> Kind:
    """What `dispatch.choose` takes behind the operator's name."""
    widths = index(query.shape[-1]), index(value.shape[-1])
    return calls.place(query), query.dtype, *widths, precision


def request_of(
    operator: str, tensors: tuple[Tensor, ...], precision: str, mask: str = "none",
    gradient: tuple[str, ...] = (),
) -> Request:  # fmt: skip
    """What backends are asked; tensors: query, key and value."""
    query, _, value = tensors
    return Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, operator,
        mask, "dense" if all(t.stride(-1) == 1 for t in tensors) else "strided", gradient,
        ordinal=query.get_device(),
    )  # fmt: skip


def restored(given: tuple[Tensor, ...], *found: Any) -> tuple[Any, ...]:
    """Results [B, H, Nq, ...] with the batch dims of the query, key and value given."""
    query, key, value = given
    if query.dim() == key.dim() == value.dim() == 4:
        return found
    leading = leading_dims(query, key, value)
    return tuple(t if t is None else t.reshape(*leading, *t.shape[2:]) for t in found)


def run(operator: str, name: str, arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
    """An operator by the backend of a name; below autograd where it would record none of the
    tensors."""
    kernel = dispatch.RUNS[operator, name]
    if calls.traced() or calls.differentiates(*tensors):
        return kernel(*arguments)
    return calls.below_autograd(kernel, *arguments)
