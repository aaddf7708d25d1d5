"""The cases of one site for `check`: what reached it, and hard cases made of that.

A fault shows where the arguments reach what it concerns. A model at its own size may reach neither
padded windows, nor a second block of keys, nor the limit of a logit scale; its sites are made to.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.proof.samples import jittered, with_weights, zeros_filled
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

_Change = Callable[[Tensor], Tensor]


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

    Without weights of zero; large logits, constant rows and a dominant token; an image that the
    windows do not divide; three images where one came; more keys than any kernel folds at once; a
    logit scale above its limit. Many keys and images take time, and one site of a kind tells:
    `is_first`.
    """
    method = getattr(type(module), entry)
    twin = next(iter(zeros_filled(module)), None)
    if twin is not None:
        yield SiteCase(FILLED, given, twin)
    # The inner size of its first matrix or convolution. A table of relative positions is a matrix
    # too, so that layers are asked before bare parameters.
    layers = [m.weight for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    weights = (weight for weight in (*layers, *module.parameters()) if weight.ndim in (2, 4))
    channels = next((int(weight.shape[1]) for weight in weights), None)
    for name, hard in _hard_changes(channels, seen.largest_logit).items():
        yield SiteCase(name, _change_tokens(method, given, hard))

    def cropped(x: Tensor) -> Tensor:
        """An image [B, H, W, C] or [B, C, H, W] without its last row and its last two columns."""
        for dim, less in zip(_token_dims(x, channels), (1, 2), strict=False):
            x = x.narrow(dim, 0, max(1, x.shape[dim] - less)) if x.ndim == 4 else x
        return x.contiguous()

    if seen.whole_windows:
        # With the copy: a padded token is the bias of the projection, which begins at zero.
        yield SiteCase(CROPPED, _change_tokens(method, given, cropped), twin, may_refuse=True)
    tokens = 1 if getattr(module, "batch_first", True) else 0  # the dim that counts them
    batch = 1 - tokens

    def longer(x: Tensor) -> Tensor:
        """One sequence of MANY_KEYS tokens, the first one's repeated with small changes."""
        if x.ndim != 3:
            return x
        repeats = [1, 1, 1]
        repeats[tokens] = math.ceil(MANY_KEYS / x.shape[tokens])
        made = x.narrow(batch, 0, 1).repeat(repeats).narrow(tokens, 0, MANY_KEYS)
        return jittered(made, 0)  # type: ignore[no-any-return]

    if is_first:
        shifted = -2 if tokens else 0
        # three images of other tokens where one came; more than one stay as they are
        args, kwargs = _change_tokens(method, given, lambda x: (
            x if x.shape[batch] > 1
            else torch.cat((x, x.roll(1, shifted), x.flip(shifted)), batch)
        ))  # fmt: skip
        pairs = zip((*args, *kwargs.values()), (*given[0], *given[1].values()), strict=True)
        if any(a is not b for a, b in pairs):
            yield SiteCase(ROWS, (args, kwargs), may_refuse=True)
        if 0 < seen.keys < MANY_KEYS:
            yield SiteCase(LONG, _change_tokens(method, given, longer), may_refuse=True)
    clamped = _beyond_limit(twin if twin is not None else module)
    if clamped is not None:
        yield SiteCase(CLAMPED, given, clamped)


def _hard_changes(channels: int | None, largest_logit: float) -> dict[str, _Change]:
    """`large logits`: tokens scaled so that the largest logit, which grows with the square, becomes
    100 (a site that normalises its queries and keys keeps its logits); `constant rows`: every
    token is the mean token; `dominant token`: the first token scaled up, so that its key outweighs
    every other for some queries and vanishes for the rest."""
    known = 0.0 < largest_logit < math.inf
    ratio = TARGET_LOGIT / largest_logit if known else MAX_GAIN

    def dominant(x: Tensor) -> Tensor:
        x = x.clone()
        first: list[Any] = [slice(None)] * x.ndim
        for dim in _token_dims(x, channels):
            first[dim] = 0
        x[tuple(first)] *= min(max(ratio, 4.0), MAX_GAIN)
        return x

    return {
        "large logits": lambda x: x * min(max(math.sqrt(ratio), 1.0), MAX_GAIN),
        "constant rows": lambda x: (
            x.float().mean(_token_dims(x, channels), True).to(x.dtype).expand_as(x).contiguous()
        ),
        "dominant token": dominant,
    }


def _beyond_limit(module: nn.Module) -> nn.Module | None:
    """A copy of a site whose logit scales, a logarithm for each head, lie above Swin-V2's limit at
    every second head; None where it has none."""
    scales = {
        name: weight.detach().clone(memory_format=torch.contiguous_format)
        for name, weight in module.named_parameters()
        if name.rpartition(".")[2] == "logit_scale" and weight.ndim > 0
    }
    for scale in scales.values():
        scale.view(-1)[::2] = _BEYOND_LIMIT
    return with_weights(module, scales) if scales else None


def _change_tokens(method: Callable[..., Any], given: Given, change: _Change) -> Given:
    """Changes the token tensors among the arguments; one tensor given twice stays one tensor."""
    args, kwargs = given
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


def _token_dims(x: Tensor, channels: int | None) -> list[int]:
    """The dims that count tokens: all but the batch and the channels (last, or 1 as in NCHW)."""
    at_one = x.ndim == 4 and x.shape[1] == channels != x.shape[-1]
    return [2, 3] if at_one else list(range(1, x.ndim - 1))
