"""Eager calls on a GPU that wait for the host: which forward takes the host less. And the few sites
whose originals were measured to be the faster ones in CUDA graphs too.

A small call takes the host longer than the device. There a patched site keeps its original forward,
whose few calls take the host less than the questions of elsa's operators do. Who asks: a site for
itself; a block for all within it; a model once for each kind of call (`model.py`), after a call in
which every site that asked kept its original. Within `all_original` the sites ask nothing; within
`with_settled` those do not that run elsa's operators in calls of that kind.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.cuda import is_current_stream_capturing as _capturing

from elsa_core import calls, routing
from elsa_core.attention import attention
from elsa_core.messages import first_line
from elsa_core.patching.adapters.handing import for_nothing
from elsa_core.patching.adapters.makes import make_of
from elsa_core.patching.adapters.small import own_method

_LOG = logging.getLogger("elsa")


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, or a forward replaced on the instance.

    Hooks that a check watches sites with (`elsa_observer`) are none: what it judges must be what
    runs without them.
    """
    if "forward" in vars(module) or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not getattr(hook, "elsa_observer", False) for hook in hooks)


def noted(module: nn.Module, name: str) -> Any:
    """What `patch` noted on a module, None where it is not there.

    A compiler guards what it finds by getattr, not what it finds in `__dict__`; in eager mode the
    former takes 2.5 us where there is nothing.
    """
    return getattr(module, name, None) if is_dynamo_compiling() else module.__dict__.get(name)


def is_shown(layer: nn.Module) -> bool:
    """Whether a layer must be called, since a hook reads or changes what passes through it."""
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if (own or layer._backward_pre_hooks or "forward" in vars(layer)) and has_hooks(layer):
        return True
    seen: bool = torch.nn.modules.module._has_any_global_hook()
    return seen


class _Choices(threading.local):
    # Where the sites keep their originals, unasked: the modes and transforms around the call.
    within: calls.Surroundings | None = None
    # Where sites run elsa's operators, unasked: the same, and the ids of these sites.
    settled: tuple[calls.Surroundings, frozenset[int]] | None = None
    originals = 0  # of the answers that sites got
    others = 0
    # Takes up the sites that are told to keep their originals, those that run as a row of functions
    # for that, and those that were told otherwise.
    asked: tuple[set[Any], set[Any], set[Any]] | None = None
    reader: Any = None  # the redirected site whose call of attention comes next, for `asked`


_CHOICES = _Choices()


def is_captured() -> bool:
    """Whether a CUDA graph is being recorded."""
    return _capturing()


def all_original(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """forward(...), within which the sites keep their original forwards too, unasked."""
    before, _CHOICES.within = _CHOICES.within, calls.surroundings()
    try:
        return forward(*arguments, **options)
    finally:
        _CHOICES.within = before


def with_settled(
    sites: frozenset[int], forward: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """forward(...), within which the sites of these ids run elsa's operators, unasked."""
    if not sites:
        return forward(*arguments, **options)
    now = _CHOICES
    before, now.settled = now.settled, (calls.surroundings(), sites)
    now.others += 1  # for a model around this one
    try:
        return forward(*arguments, **options)
    finally:
        now.settled = before


def is_settled(site: Any) -> bool:
    """Whether a site is called within `with_settled`, and is one of those: it answered in a call of
    the same kind that it does not wait for the host. That is a matter of speed alone.
    """
    if is_dynamo_compiling():
        return False
    settled = _CHOICES.settled
    return settled is not None and id(site) in settled[1] and settled[0] == calls.surroundings()


def asking_sites(forward: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """forward(...), and three sets of patched modules: those that kept their originals, those that
    ran as functions in a row (`flat.py`), and those that did not keep them.
    """
    now = _CHOICES
    before, now.asked, now.settled = (now.asked, now.settled), (set(), set(), set()), None
    try:
        return forward(*arguments, **options), now.asked
    finally:
        now.asked, now.settled = before
        now.reader = None


def observed(forward: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """forward(...), within which the sites ask, and whether all of them kept their originals: None
    where some or all did not.

    False where none asked, as in a compiled call. What one call found counts for a call around
    it that is observed as well.
    """
    now = _CHOICES
    before = now.within, now.originals, now.others, now.settled
    now.within = now.settled = None  # of a model around, which may have other kinds of calls
    now.originals = now.others = 0
    try:
        out = forward(*arguments, **options)
        return out, None if now.others else now.originals > 0
    finally:
        now.within, now.settled = before[0], before[3]
        now.originals += before[1]
        now.others += before[2]


def _answered(original: bool) -> bool:
    """What a site is answered, noted for the model around it. No compiler comes here."""
    if original:
        _CHOICES.originals += 1
    else:
        _CHOICES.others += 1
    return original


def told(site: Any, original: bool) -> bool:
    """`_answered`, of a site that is known."""
    if _CHOICES.asked is not None:
        _CHOICES.asked[0 if original else 2].add(site)
    return _answered(original)


def reads_switch(site: Any) -> None:
    """Note for `asking_sites` that a redirected site is about to call attention."""
    if not is_dynamo_compiling() and _CHOICES.asked is not None:
        _CHOICES.reader = site


def _told_reader(original: bool) -> bool:
    """`told` of the site that has read its switch, if that is known."""
    site, _CHOICES.reader = _CHOICES.reader, None
    return _answered(original) if site is None else told(site, original)


def warm_up(by_elsa: Callable[[], object]) -> None:
    """A call for nothing but the kernels that it loads: neither results nor answers count."""
    before = _CHOICES.originals, _CHOICES.others
    try:
        with torch.no_grad(), for_nothing():
            by_elsa()
    except Exception as error:  # of compilers, memory, Triton: the original needs none of it
        _LOG.info("CUDA graphs may keep the original of such calls: %s", first_line(error))
    finally:
        _CHOICES.originals, _CHOICES.others = before


def is_within_original(site: Any) -> bool:
    """Whether a site is called within `all_original`, where no mode or transform has begun since,
    and was patched without names and sparsity.
    """
    # a compiler reads no further than its own question; the shorter one, which every layer asks
    if is_dynamo_compiling() or not _CHOICES.within or _CHOICES.within != calls.surroundings():
        return False
    if _CHOICES.asked is not None:
        _CHOICES.asked[0].add(site)
    return is_unasked(site.__dict__)


def in_row(site: Any) -> None:
    """Note for `asking_sites` that a site runs as functions in a row."""
    if _CHOICES.asked is not None:
        _CHOICES.asked[1].add(site)


def is_original(backend: str, precision: str) -> bool:
    """As `is_within_original`, of a call with these names."""
    if is_dynamo_compiling() or not _CHOICES.within or _CHOICES.within != calls.surroundings():
        return False
    return backend == "auto" and precision == "strict"


def is_unasked(space: dict[str, Any]) -> bool:
    """Whether a patched module, given by its __dict__, was patched without names and sparsity."""
    return (
        space.get("elsa_backend", "auto") == "auto"
        and space.get("elsa_precision", "strict") == "strict"
        and space.get("elsa_sparsity") is None
    )


def is_host_bound(
    site: Any, operator: str, x: Tensor, work: int, by_elsa: Callable[[], object], form: Any = None
) -> bool:
    """Whether an eager call on a GPU keeps the original forward, because the host would be waited
    for: the original's few calls take less of it. In a CUDA graph that is recorded: whether the
    shipped table names the site (`routing.graphs_least`).

    Args:
        site: a patched module. operator: "attention" or "linear". x: what it is called with.
        work: multiply-adds of its largest call of the operator.
        by_elsa: calls the site by elsa's operators; so the first call of its kind loads kernels for
            a CUDA graph, and its result is not used.
        form: what else tells the kernels of such calls apart.
    """
    if is_settled(site) or is_compiling():  # no compiler may read a length, or what is noted
        return False
    waits = x.is_cuda and not calls.traced() and _waits(site, operator, x, work)
    if not waits or site.training:  # a warm-up would draw from the generator of its dropout
        return told(site, waits and torch.is_grad_enabled())
    if is_captured():  # which loads no kernels
        return told(site, True)
    kind = (make_of(site), operator, x.shape, x.dtype, x.get_device(), work, form, _cast())
    if not calls.was_seen(kind):
        # hooks would see the warm-up too, dropout would draw in it, ranks would wait for each other
        if any(is_shown(m) or m.training or "elsa_group" in vars(m) for m in site.modules()):
            return told(site, torch.is_grad_enabled())  # a checkpoint runs again what ran before
        calls.first_of_kind(kind)
        warm_up(by_elsa)
    return told(site, True)


def _cast() -> Any:
    """The dtype that autocast gives products on a GPU, of other kernels; False for none."""
    return torch._C._is_any_autocast_enabled() and torch.get_autocast_dtype("cuda")


def _waits(site: Any, operator: str, x: Tensor, work: int) -> bool:
    if work >= routing.eager_least(operator, x.dtype):
        one = operator == "attention" and x.shape[0] == 1 and _calls_sdpa(site)
        if not one or work >= routing.eager_least("one_image", x.dtype):
            return False
    if x.is_nested or not is_unasked(site.__dict__):
        return False
    return not is_captured() or _leads_in_graphs(site, operator, x, work)


def _leads_in_graphs(site: Any, operator: str, x: Tensor, work: int) -> bool:
    """Whether the original is the faster one in a CUDA graph of inference."""
    if operator != "attention" or site.training or torch.is_grad_enabled():
        return False
    base: type = getattr(type(site), "elsa_base", type(site))
    return work < routing.graphs_least(f"{base.__module__}.{base.__qualname__}", x.dtype)


def _calls_sdpa(site: Any) -> bool:
    """Whether the original of an attention, or of the one in a block, calls PyTorch's kernel."""
    part = site._modules.get("attn", site)
    return getattr(type(part), "elsa_calls_sdpa", False) and bool(part.fused_attn)


def by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str,
    precision: str,
    mask: Tensor | None = None,
) -> bool:
    """Whether a call is an eager one on a GPU that would wait for the host, for which
    `torch.nn.functional.scaled_dot_product_attention` takes less of its time.

    The first call of its kind loads the operator's kernels, for a CUDA graph of the same call.
    """
    if is_dynamo_compiling():  # as in `is_host_bound`
        return False
    if is_original(backend, precision):
        return True
    named = backend != "auto" or precision != "strict"
    if named or not query.is_cuda or calls.traced() or not _is_small(query, key, mask):
        return _told_reader(False)
    masked = None if mask is None else (mask.shape, mask.dtype, mask.stride())
    shapes = query.shape, key.shape, value.shape, masked
    kind = ("by_sdpa", shapes, query.stride(), query.dtype, query.device, _cast())
    if calls.first_of_kind(kind):
        warm_up(lambda: attention(query, key, value, mask, enable_gqa=True))
    return _told_reader(True)


def _is_small(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    work = query.numel() * key.shape[-2]
    if work >= routing.eager_least("attention", query.dtype):
        one = mask is None and query.shape[0] == 1 and query.dim() == 4
        if not one or work >= routing.eager_least("one_image", query.dtype):
            return False
    return (mask is None or mask.dtype in (torch.bool, query.dtype)) and not is_captured()


def original_by(work: Callable[[Any, Tensor], int]) -> Callable[..., Callable[..., Any]]:
    """Makes the forward of a patched attention over x, its first argument, choose: the original one
    within `all_original`, and in eager calls on a GPU that would wait for the host.

    work: from the module and x, the multiply-adds of query key^T.
    """

    def is_bound(site: Any, x: Tensor, by_elsa: Callable[[], object]) -> bool:
        return is_host_bound(site, "attention", x, work(site, x), by_elsa)

    return functools.partial(_or_original, is_bound=is_bound)


def image_or_original(axes: tuple[int, int]) -> Callable[..., Callable[..., Any]]:
    """`original_by` of all tokens of an image, whose axes these are of x; of three axes the second
    is that of the tokens.
    """
    rows, columns = axes

    def work(site: Any, x: Tensor) -> int:
        return x.numel() * (x.shape[1] if x.dim() == 3 else x.shape[rows] * x.shape[columns])

    return original_by(work)


def windows_or_original(channels: int) -> Callable[..., Callable[..., Any]]:
    """As `or_original`, of attention within windows of an image x, whose channels are this axis:
    where nothing is trained.
    """

    def is_bound(site: Any, x: Tensor, by_elsa: Callable[[], object]) -> bool:
        return is_window_bound(site, x, x.shape[channels], by_elsa)

    return functools.partial(_or_original, is_bound=is_bound)


def is_window_bound(site: Any, x: Tensor, channels: int, by_elsa: Callable[[], object]) -> bool:
    """`is_host_bound` of a block of windows in x, where no gradient is wanted."""
    if torch.is_grad_enabled() or site.training:
        return False if is_compiling() else told(site, False)
    # its largest product has four times as many channels, as MLPs have by default
    bound = "linear" if x.dtype == torch.float32 else "attention"
    return is_host_bound(site, bound, x, 4 * x.numel() * channels, by_elsa)


def _or_original(forward: Callable[..., Any], is_bound: Callable[..., bool]) -> Callable[..., Any]:
    name = forward.__name__

    @functools.wraps(forward)
    def chosen(self: Any, x: Tensor, *given: Any, **named: Any) -> Any:
        if is_within_original(self):
            return own_method(self, name)(self, x, *given, **named)
        if is_settled(self):
            return forward(self, x, *given, **named)

        def by_elsa() -> Any:
            return forward(self, x, *given, **named)

        # a compiler may read no length, not even for an estimate
        if not is_compiling() and is_bound(self, x, by_elsa):
            return all_original(own_method(self, name), self, x, *given, **named)
        return by_elsa()

    return chosen


or_original = original_by(lambda site, x: x.numel() * x.shape[-2])
"""`original_by` of tokens [..., N, C] that all meet each other."""
first_or_original = original_by(lambda site, x: x.numel())
"""`original_by` of tokens [..., N, C] whose first one alone is a query."""
