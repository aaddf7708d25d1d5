"""The cases of one site for `check`: what reached it, and hard cases made of that.

A fault shows where the arguments reach what it concerns. A model at its own size may reach neither
padded windows, nor a second block of keys, nor the limit of a logit scale; its sites are made to.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.proof.samples import jittered, random_weight
from elsa_core.proof.sides import Given

# exp overflows at 88.7 in float32 and at 11.1 in float16: logits of 100 need a running maximum.
TARGET_LOGIT = 100.0
MAX_GAIN = 64.0

# Words in the names of a forward's arguments that are no tokens: scaling them would be no hard
# case but another model.
_NO_TOKENS = ("mask", "rope", "bias", "pos", "freq", "shape", "size", "index")


FILLED = "zero weights filled"
CROPPED = "padded windows"
LONG = "many keys"
ROWS = "three images"
CLAMPED = "logit scale above its limit"

# A prime beyond 1024, the largest block of keys that a backend folds at once.
MANY_KEYS = 1031

# ln(100), Swin-V2's limit of the scale of cosine logits, is 4.6.
_BEYOND_LIMIT = 5.5


@dataclass(frozen=True)
class SiteCase:
    """One more run of a site, by arguments of its own, or of its `twin` with other weights.

    `may_refuse`: the original need not take these arguments; then nothing is judged.
    """

    name: str
    given: Given
    twin: nn.Module | None = None
    may_refuse: bool = False


@dataclass(frozen=True)
class Seen:
    """What the operator saw of a site's first call."""

    largest_logit: float = 0.0  # 0 or inf where it is not known
    keys: int = 0  # of the longest row of the attention operator; 0 where it did not run
    whole_windows: bool = False  # the window operator ran, and padded nothing


def site_cases(
    module: nn.Module, given: Given, entry: str, seen: Seen, *, is_first: bool
) -> Iterator[SiteCase]:
    """The hard cases of a site, made from arguments that its method `entry` really received.

    Without weights of zero; those of `hard_cases`; an image that the windows do not divide; more
    keys than any kernel folds at once; three images where one came; a logit scale above its limit.
    Many keys and images take time, and one site of a kind tells: `is_first`.
    """
    twin = zeros_filled(module, entry)
    if twin is not None:
        yield SiteCase(FILLED, given, twin)
    for name, args, kwargs in hard_cases(module, *given, seen.largest_logit, entry):
        yield SiteCase(name, (args, kwargs))
    method = getattr(type(module), entry)
    if seen.whole_windows:
        channels = _in_channels(module)
        cropped = _change_tokens(method, *given, lambda x: _cropped(x, channels))
        # With the copy: a padded token is the bias of the projection, which begins at zero.
        yield SiteCase(CROPPED, cropped, twin, may_refuse=True)
    dim = 1 if getattr(module, "batch_first", True) else 0
    if is_first:
        three = _change_tokens(method, *given, lambda x: _three(x, 1 - dim))
        if any(a is not b for a, b in zip(_values(three), _values(given), strict=True)):
            yield SiteCase(ROWS, three, may_refuse=True)
    if is_first and 0 < seen.keys < MANY_KEYS:
        longer = _change_tokens(method, *given, lambda x: _longer(x, dim))
        yield SiteCase(LONG, longer, may_refuse=True)
    clamped = beyond_limit(twin if twin is not None else module, entry)
    if clamped is not None:
        yield SiteCase(CLAMPED, given, clamped)


def _values(given: Given) -> tuple[Any, ...]:
    return (*given[0], *given[1].values())


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Sites of one kind have one class and parameters of the same shapes."""
    return type(module), *(tuple(weight.shape) for weight in module.parameters())


def hard_cases(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], largest_logit: float,
    entry: str = "forward",
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
    """Hard cases for one attention site, made from arguments that its method `entry` received.

    `large logits`: tokens scaled so that the largest logit, which grows with the square, becomes
    100 (a site that normalises its queries and keys keeps its logits); `constant rows`: every
    token is the mean token; `dominant token`: the first token scaled up, so that its key outweighs
    every other for some queries and vanishes for the rest. `largest_logit` is 0 or inf where it is
    not known.
    """
    known = 0.0 < largest_logit < math.inf
    ratio = TARGET_LOGIT / largest_logit if known else MAX_GAIN
    channels = _in_channels(module)

    def constant(x: Tensor) -> Tensor:
        mean = x.float().mean(dim=_token_dims(x, channels), keepdim=True)
        return mean.to(x.dtype).expand_as(x).contiguous()

    def dominant(x: Tensor) -> Tensor:
        x = x.clone()
        first: list[Any] = [slice(None)] * x.ndim
        for dim in _token_dims(x, channels):
            first[dim] = 0
        x[tuple(first)] *= min(max(ratio, 4.0), MAX_GAIN)
        return x

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "large logits": lambda x: x * min(max(math.sqrt(ratio), 1.0), MAX_GAIN),
        "constant rows": constant,
        "dominant token": dominant,
    }
    for name, change in changes.items():
        yield (name, *_change_tokens(getattr(type(module), entry), args, kwargs, change))


def zeros_filled(module: nn.Module, entry: str) -> nn.Module | None:
    """A copy of a site with random weights for those that are all zero, None where none is. A last
    gain of zero hides everything that a site computes; a bias of zeros hides itself."""
    zeros = [
        name
        for name, weight in module.named_parameters()
        if weight.is_floating_point() and weight.numel() > 0 and not bool(weight.any())
    ]
    if not zeros:
        return None
    twin = _twin(module, entry)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in zeros:
            weight = twin.get_parameter(name)
            weight.copy_(random_weight(name, weight, generator))
    return twin


def _twin(module: nn.Module, entry: str) -> nn.Module:
    """A copy of a site in eval mode, not watched."""
    twin = copy.deepcopy(module)
    vars(twin).pop(entry, None)  # the hook on the module itself
    twin.train()  # until they train, some models keep what they made of a table of biases
    twin.eval()
    return twin


def beyond_limit(module: nn.Module, entry: str) -> nn.Module | None:
    """A copy of a site whose logit scales, a logarithm for each head, lie above Swin-V2's limit at
    every second head; None where it has none."""
    scales = [
        name
        for name, weight in module.named_parameters()
        if name.rpartition(".")[2] == "logit_scale" and weight.ndim > 0
    ]
    if not scales:
        return None
    twin = _twin(module, entry)
    with torch.no_grad():
        for name in scales:
            twin.get_parameter(name).flatten()[::2] = _BEYOND_LIMIT
    return twin


def _change_tokens(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    change: Callable[[Tensor], Tensor],
) -> Given:  # fmt: skip
    """Changes the token tensors among the arguments; one tensor given twice stays one tensor."""
    names = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][1:]
    changed: dict[int, Tensor] = {}

    def visit(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 3:
            return value
        if any(word in name.lower() for word in _NO_TOKENS):
            return value
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    names += [""] * (len(args) - len(names))
    return (
        tuple(visit(name, value) for name, value in zip(names, args, strict=False)),
        {name: visit(name, value) for name, value in kwargs.items()},
    )


def _in_channels(module: nn.Module) -> int | None:
    """The inner size of a site's first matrix or convolution. A table of relative positions is a
    matrix too, so that layers are asked before bare parameters."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for parameter in (*(layer.weight for layer in layers), *module.parameters()):
        if parameter.ndim in (2, 4):
            return int(parameter.shape[1])
    return None


def _token_dims(x: Tensor, channels: int | None) -> list[int]:
    """The dims that count tokens: all but the batch and the channels (last, or 1 as in NCHW)."""
    at_one = x.ndim == 4 and x.shape[1] == channels != x.shape[-1]
    return [2, 3] if at_one else list(range(1, x.ndim - 1))


def _cropped(x: Tensor, channels: int | None) -> Tensor:
    """An image [B, H, W, C] or [B, C, H, W] without its last row and its last two columns."""
    dims = _token_dims(x, channels)
    for dim, less in zip(dims, (1, 2), strict=False):
        x = x.narrow(dim, 0, max(1, x.shape[dim] - less)) if x.ndim == 4 else x
    return x.contiguous()


def _three(x: Tensor, batch: int) -> Tensor:
    """Three images of other tokens where one came; more than one stay as they are."""
    tokens = 0 if batch == 1 else -2
    return x if x.shape[batch] > 1 else torch.cat((x, x.roll(1, tokens), x.flip(tokens)), batch)


def _longer(x: Tensor, dim: int) -> Tensor:
    """One sequence of MANY_KEYS tokens, the first one's repeated with small changes."""
    if x.ndim != 3:
        return x
    first = x.narrow(1 - dim, 0, 1)
    repeats = [1, 1, 1]
    repeats[dim] = math.ceil(MANY_KEYS / x.shape[dim])
    longer: Tensor = jittered(first.repeat(repeats).narrow(dim, 0, MANY_KEYS), 0)
    return longer
