"""What PyTorch's functions do to pending scores: one rule a kind of function.

A rule takes the arguments of a call, with `Scores` in the place of pending tensors, and returns
what the result stands for: `Scores`; SAME for the very tensor that was given; MISSING where it is
nothing that attention is made of, so that the call is computed. No call has an `out`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.base import calls
from elsa_core.patching.recognition.axes import LEFT, RIGHT, Axes, leaves, of_kind, reshaped
from elsa_core.patching.recognition.scores import (
    LEAST_FILL,
    MAXIMUM,
    POWERS,
    SCORES,
    SUM,
    USED,
    WEIGHTS,
    Scores,
)

MISSING: Final = object()
SAME: Final = object()
_HOMES = (torch, Tensor, F, torch.special)


def _all(*names: str) -> list[Any]:
    return [getattr(home, name) for home in _HOMES for name in names if hasattr(home, name)]


MATMUL: Final = frozenset({*_all("matmul", "bmm", "mm", "__matmul__"), torch.linalg.matmul})
BADDBMM: Final = frozenset(_all("baddbmm"))
EINSUM: Final = frozenset(_all("einsum"))
SDPA: Final = F.scaled_dot_product_attention
VIEW: Final = Tensor.view
SHAPES: Final = frozenset({Tensor.shape.__get__, Tensor.size})  # type: ignore[attr-defined]
_PROPERTIES = (
    "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse",
    "is_quantized", "requires_grad", "itemsize",
)  # fmt: skip
# Asked of a tensor without storage as of any.
METADATA: Final = SHAPES.union(
    (getattr(Tensor, name).__get__ for name in _PROPERTIES),
    _all("is_floating_point", "is_complex", "numel", "dim", "ndimension", "__len__",
         "element_size", "get_device"),
)  # fmt: skip


def _fits(scores: Scores, other: Any) -> bool:
    if not isinstance(other, Tensor) or other.layout is not torch.strided or other.is_nested:
        return False
    shape = scores.layout.shape
    lead = len(shape) - other.dim()
    if other.device != scores.left.device and other.dim():
        return False
    return lead >= 0 and all(
        size in (1, wanted) for size, wanted in zip(other.shape, shape[lead:], strict=True)
    )


def _key(scores: Scores, dim: Any) -> str:
    """The operand over all of whose tokens, and nothing else, a softmax along `dim` is, or ""."""
    layout = scores.layout
    if not isinstance(dim, int) or not -len(layout.axes) <= dim < len(layout.axes):
        return ""
    axis = leaves(layout.axes[dim])
    for kind, operand in ((RIGHT, layout.right), (LEFT, layout.left)):
        if axis and axis == of_kind(operand, kind) and scores.key in ("", kind):
            return kind
    return ""


def _combined(args: Any, kwargs: Any, *, kind: str) -> Any:  # noqa: PLR0911
    """A sum ("add"), a difference ("sub"), a product ("mul") or a quotient ("div")."""
    if kwargs or len(args) != 2:
        return MISSING
    scores, other = args
    if not isinstance(scores, Scores):
        if kind in ("sub", "div"):
            return MISSING
        scores, other = other, scores
    if isinstance(other, Scores):
        stages = kind, scores.stage, other.stage
        of_these = other.origin is scores
        if of_these and stages == ("div", POWERS, SUM):
            return scores._replace(stage=WEIGHTS)
        if of_these and stages == ("sub", SCORES, MAXIMUM):
            return scores.and_then("row", 0.0, scores.dtype)._replace(key=other.key)
        return MISSING
    if scores.stage != SCORES:
        return MISSING
    if isinstance(other, int | float) and not isinstance(other, bool):
        factor = kind in ("mul", "div")
        if not math.isfinite(other) or (factor and other <= 0):
            return MISSING
        number = -float(other) if kind == "sub" else float(other)
        return scores.and_then(kind if factor else "row", number, scores.dtype)
    if not _fits(scores, other) or not other.is_floating_point():
        return MISSING
    dtype = scores.dtype
    if other.dim() or not scores.layout.axes:
        dtype = torch.promote_types(dtype, other.dtype)
    return scores.and_then(kind, other, dtype)


def _hidden(args: Any, kwargs: Any, *, chosen: bool = False) -> Any:  # noqa: PLR0911
    """scores.masked_fill(mask, value), or what `torch.where` has `chosen`."""
    if not chosen:
        args = (*args, *(kwargs[name] for name in ("mask", "value") if name in kwargs))
    if len(args) != 3 or (chosen and kwargs):
        return MISSING
    scores, mask, value = args
    inverted = False
    if chosen and isinstance(value, Scores):  # where(mask, value, scores)
        mask, value, scores = args
    elif chosen:  # where(seen, scores, value), scores.where(seen, value)
        inverted = True
        if not isinstance(scores, Scores):
            scores, mask = mask, scores
    if not isinstance(scores, Scores) or scores.stage != SCORES:
        return MISSING
    if isinstance(value, Tensor):
        # on a GPU the host would wait for the value; a program has none
        if value.numel() != 1 or value.requires_grad or not value.is_cpu or calls.traced():
            return MISSING
        # one with dimensions broadcasts and promotes the others
        if value.dim() > len(scores.layout.axes) or (value.dim() and value.dtype != scores.dtype):
            return MISSING
        value = value.item()
    if not isinstance(value, int | float) or not value <= LEAST_FILL:
        return MISSING
    if not _fits(scores, mask) or mask.dtype != torch.bool:
        return MISSING
    return scores.and_then("fill", ~mask if inverted else mask, scores.dtype, float(value))


def _exponents(args: Any, kwargs: Any, *, stage: str) -> Any:
    """A softmax (WEIGHTS), or the exp (POWERS) of scores whose maximum was subtracted."""
    scores, *rest = args
    if scores.stage != SCORES:
        return MISSING
    key, dtype = scores.key, kwargs.get("dtype")
    if stage == WEIGHTS:
        key = _key(scores, kwargs.get("dim", rest[0] if rest else None))
        dtype = dtype or next((one for one in rest if isinstance(one, torch.dtype)), None)
    elif kwargs or rest:
        return MISSING
    if not key:  # without the maximum subtracted exp overflows, which softmax does not
        return MISSING
    if dtype is None:
        dtype = scores.dtype
        # autocast on a GPU computes both in float32
        if scores.left.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.promote_types(dtype, torch.float32)
    return scores._replace(stage=stage, key=key, dtype=dtype)


def _of_row(args: Any, kwargs: Any, *, stage: str, of: str) -> Any:
    scores, *rest = args
    given = dict(zip(("dim", "keepdim"), rest, strict=False)) | kwargs
    if set(given) != {"dim", "keepdim"} or given["keepdim"] is not True or scores.stage != of:
        return MISSING
    dim = given["dim"]
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    key = _key(scores, dim)
    if not key:
        return MISSING
    axes = list(scores.layout.axes)
    axes[dim] = ()
    layout = scores.layout.moved(tuple(axes))
    return scores._replace(stage=stage, key=key, layout=layout, origin=scores)


def _cast(args: Any, kwargs: Any, *, dtype: torch.dtype | None = None) -> Any:  # noqa: PLR0911
    scores, *rest = args
    if not isinstance(scores, Scores):  # another tensor, which takes the dtype of a pending one
        return MISSING
    if dtype is None:
        given = [*rest, *kwargs.values()]
        if not given:
            return MISSING
        found = [one.dtype if isinstance(one, Tensor | Scores) else one for one in given]
        dtypes = [one for one in found if isinstance(one, torch.dtype)]
        device = scores.left.device
        others = [one for one in found if not isinstance(one, torch.dtype)]
        if len(dtypes) > 1 or any(one not in (device, str(device), False) for one in others):
            return MISSING
        if any(isinstance(one, Tensor) and one.device != device for one in given):
            return MISSING
        dtype = dtypes[0] if dtypes else scores.dtype
    elif rest or kwargs:
        return MISSING
    if dtype == scores.dtype:
        return SAME
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if scores.stage not in (SCORES, WEIGHTS) or dtype not in floats:
        return MISSING
    return scores._replace(dtype=dtype)


def _viewed(args: Any, kwargs: Any, *, of: Callable[..., Axes | None]) -> Any:
    """A view of scores: of(axes, *arguments) are its axes, None where it is of another form."""
    scores, *rest = args
    if not isinstance(scores, Scores) or scores.stage not in (SCORES, WEIGHTS, USED):
        return MISSING
    given = tuple(tuple(one) if isinstance(one, list) else one for one in rest)
    layout = scores.layout
    key = (of, given, tuple(kwargs.items()))
    axes = layout.known(key, partial(of, **kwargs), layout.axes, *given)
    return MISSING if axes is None else scores._replace(layout=layout.moved(axes))


# An index that PyTorch refuses is an IndexError here too: `range(rank)[dim]`.


def _arranged(axes: Axes, *given: Any, permutes: bool, **named: Any) -> Axes | None:
    """A reshape or a permutation, which take numbers or one sequence of them, perhaps by name."""
    values: Sequence[Any] = (*given, *named.values())
    if len(values) == 1 and isinstance(values[0], tuple | list):
        values = values[0]
    others = (torch.dtype, str, torch.Size)
    if set(named) - {"dims" if permutes else "shape"}:
        return None
    if any(isinstance(one, others) or one is None for one in values):
        return None
    if not permutes:
        return reshaped(axes, values)
    order = [range(len(axes))[i] for i in values]
    return tuple(axes[i] for i in order) if sorted(order) == [*range(len(axes))] else None


def _flatten(axes: Axes, start_dim: int = 0, end_dim: int = -1) -> Axes | None:
    start, end = range(len(axes))[start_dim], range(len(axes))[end_dim]
    if start > end:
        return None
    merged = tuple(atom for axis in axes[start : end + 1] for atom in axis)
    return (*axes[:start], merged, *axes[end + 1 :])


def _unflatten(axes: Axes, dim: int, sizes: Sequence[int]) -> Axes | None:
    dim = range(len(axes))[dim]
    parts = reshaped(axes[dim : dim + 1], sizes)
    return None if parts is None else (*axes[:dim], *parts, *axes[dim + 1 :])


def _transpose(axes: Axes, *given: int, **named: int) -> Axes:
    first, second = (*given, *named.values()) or (-2, -1)
    found = list(axes)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def _single(axes: Axes, dim: int, *, made: bool) -> Axes | None:
    """A dimension of length 1, made or taken away."""
    dim = range(len(axes) + made)[dim]
    if made:
        return (*axes[:dim], (), *axes[dim:])
    return None if axes[dim] else (*axes[:dim], *axes[dim + 1 :])


def _averaged(args: Any, kwargs: Any) -> Any:
    scores, rest = args[0], [*args[1:], *kwargs.values()]
    if scores.stage != USED or len(rest) != 1 or not isinstance(rest[0], int):
        return MISSING
    axes = list(scores.layout.axes)
    del axes[rest[0]]
    return scores._replace(layout=scores.layout.moved(tuple(axes)))


def _dropout(args: Any, kwargs: Any) -> Any:
    names = ("input", "p", "training", "inplace")
    given = dict(zip(names, args, strict=False)) | kwargs
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    # inactive, it is the tensor itself
    return SAME if training is False or (p == 0.0 and training is True) else MISSING


def _copied(args: Any, kwargs: Any, *, detached: bool = False) -> Any:
    if kwargs or len(args) != 1:
        return MISSING
    scores = args[0]
    cuts = detached and scores.stage != MAXIMUM
    return MISSING if cuts and any(t.requires_grad for t in scores.sources()) else scores


Rule = Callable[[Any, Any], Any]

_KINDS: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        partial(_combined, kind="mul"),
        ("mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__"),
    ),
    (
        partial(_combined, kind="div"),
        ("div", "divide", "true_divide", "__truediv__", "__div__", "div_", "true_divide_",
         "__itruediv__", "__idiv__"),
    ),
    (partial(_combined, kind="add"), ("add", "__add__", "__radd__", "add_", "__iadd__")),
    (
        partial(_combined, kind="sub"),
        ("sub", "subtract", "__sub__", "sub_", "subtract_", "__isub__"),
    ),
    (_hidden, ("masked_fill", "masked_fill_")),
    (partial(_hidden, chosen=True), ("where",)),
    (partial(_exponents, stage=WEIGHTS), ("softmax",)),
    (partial(_exponents, stage=POWERS), ("exp", "exp_")),
    (partial(_of_row, stage=MAXIMUM, of=SCORES), ("max", "amax")),
    (partial(_of_row, stage=SUM, of=POWERS), ("sum",)),
    (_averaged, ("mean",)),
    (_cast, ("to", "type", "type_as")),
    (partial(_viewed, of=partial(_arranged, permutes=False)), ("view", "reshape")),
    (partial(_viewed, of=_flatten), ("flatten",)),
    (partial(_viewed, of=_unflatten), ("unflatten",)),
    (partial(_viewed, of=partial(_arranged, permutes=True)), ("permute",)),
    (partial(_viewed, of=_transpose), ("transpose", "swapaxes", "swapdims")),
    (partial(_viewed, of=partial(_single, made=True)), ("unsqueeze",)),
    (partial(_viewed, of=partial(_single, made=False)), ("squeeze",)),
    (_dropout, ("dropout",)),
    (_copied, ("clone", "contiguous")),
    (partial(_copied, detached=True), ("detach",)),
)  # fmt: skip

_CASTS = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
    "double": torch.float64,
}  # fmt: skip

RULES: Final[dict[Any, Rule]] = {
    **{function: rule for rule, names in _KINDS for function in _all(*names)},
    **{getattr(Tensor, name): partial(_cast, dtype=dtype) for name, dtype in _CASTS.items()},
    Tensor.mT.__get__: partial(_viewed, of=_transpose),  # type: ignore[attr-defined]
}
# What a view is of: a write into one shows in the other.
VIEWS: Final = frozenset(
    function
    for function, rule in RULES.items()
    if getattr(rule, "func", None) in (_viewed, _copied)
    or function is Tensor.contiguous  # which may be the tensor itself
)
MAXIMA: Final = frozenset({torch.max, Tensor.max})
IN_PLACE: Final = frozenset(
    function
    for function in RULES
    if (name := getattr(function, "__name__", "")).endswith("_")
    and (not name.endswith("__") or name.startswith("__i"))
)
_EXPOSE = frozenset({Tensor.numpy, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__})


def may_write(function: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call may write into an argument, or show its memory to something that does."""
    if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
        return True
    found = _writes(function)
    if type(found) is bool:
        return found
    return len(args) > found and bool(args[found])


@lru_cache(maxsize=4096)  # functions that a process calls
def _writes(function: Any) -> bool | int:  # noqa: PLR0911
    """Of a function that PyTorch writes in Python: the place of its argument `inplace`."""
    if function in _EXPOSE:
        return True
    name = getattr(function, "__name__", "")
    if name in ("__setitem__", "__set__", "__delete__"):
        return True
    if isinstance(function, torch._ops.OpOverloadPacket):
        found = [getattr(function, overload) for overload in function.overloads()]
        return any(one._schema.is_mutable for one in found)
    if isinstance(function, torch._ops.OpOverload):
        return bool(function._schema.is_mutable)
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    if name.endswith("_"):
        return True
    if isinstance(function, FunctionType) and "inplace" in function.__code__.co_varnames:
        return function.__code__.co_varnames.index("inplace")
    return False
