"""Where a forward spends its time: every attention site, and the rest of the model as one row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from elsa_core import dispatch, ops
from elsa_core.errors import ElsaError
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.intervals import Ratio, digits, middle_means, ratio
from elsa_core.measuring.rounds import Sample
from elsa_core.measuring.timing import between, mark
from elsa_core.ops.attention.api import explain
from elsa_core.ops.linear.api import explain_linear
from elsa_core.ops.window.api import explain_window_attention
from elsa_core.patching import AttentionSite, is_layer
from elsa_core.profiling.boundaries import around

REST: Final = "rest of the model"


@dataclass(frozen=True)
class SiteProfile(Plain):
    """One attention site, or the rest of the model, before and after patching.

    Attributes:
        path: its name in the model; `REST` for the rest, of which only times are known.
        seconds_before, seconds_after: a forward's time in it, mean over the middle half of the
            rounds, or of a CUDA graph's replays: attention with its projections, without the MLP
            and the norms of a block (`elsa_core.profiling.boundaries`).
        flops: of one image, as `AttentionSite` counts them; they tell layers of one class apart.
        within: paths of the sites that lie inside and have no row of their own, such as the
            projections of attention: their time is this row's.
        share: of the forward before patching; those of all rows add up to 1.
        ratio: how many times as fast it became: the quotient of the two.
        error, original_error: relative error of its output against float64, patched and before;
            None where it was not checked.
        backend, schedule, precision: what serves it; empty where it was not patched.
    """

    path: str
    module_class: str
    kind: str
    num_heads: int | None
    head_dim: int | None
    query_tokens: int | None
    key_tokens: int | None
    extra: tuple[str, ...]
    flops: int | None
    patched: bool
    reason: str
    seconds_before: float
    seconds_after: float
    share: float
    ratio: Ratio
    error: float | None
    original_error: float | None
    backend: str
    schedule: str
    precision: str
    within: tuple[str, ...] = ()


class SiteClock:
    """Sums the time that a model's forwards spend in the attention of the sites at some paths.

    On CUDA the times are those between two events on the current stream, so that watching waits
    for nothing.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []
        self._open: dict[str, list[Any]] = {path: [] for path in paths}
        for path in paths:
            enter, leave = partial(self._enter, path), partial(self._leave, path)
            around(model.get_submodule(path), enter, leave)

    def reset(self) -> None:
        """Forget what was seen."""
        self._spans.clear()

    def read(self) -> dict[str, float]:
        """Seconds by path since `reset`. On CUDA the caller has waited for the GPU."""
        found = dict.fromkeys(self._open, 0.0)
        for path, begin, end in self._spans:
            found[path] += between(begin, end)
        return found

    def _enter(self, path: str) -> None:
        self._open[path].append(mark(self._device))

    def _leave(self, path: str) -> None:
        end = mark(self._device)
        self._spans.append((path, self._open[path].pop(), end))


def outermost(
    sites: Sequence[AttentionSite], timed: Mapping[str, str] | None = None
) -> tuple[AttentionSite, ...]:
    """The sites that lie in no other one: their times add up. Arguments as of `inside`."""
    within = {path for paths in inside(sites, timed).values() for path in paths}
    return tuple(site for site in sites if site.path not in within)


def inside(
    sites: Sequence[AttentionSite], timed: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """By site, the paths of the others that lie in what is timed of it.

    `timed`: of a site of which only a part is timed (the attention of a Swin block) its path.
    """
    parts = {site.path: (timed or {}).get(site.path, site.path) for site in sites}
    return {
        own: tuple(
            site.path
            for site in sites
            if site.path != own and (part == "" or site.path.startswith(f"{part}."))
        )
        for own, part in parts.items()
    }


@dataclass(frozen=True)
class Served:
    """What serves a site's calls of the operator."""

    backend: str
    schedule: str
    precision: str


def served(patched: nn.Module, inputs: tuple[Any, ...], paths: Sequence[str]) -> dict[str, Served]:
    """Which backend and schedule serve each patched site, from one forward's own calls.

    A layer that calls no operator of elsa's is plain PyTorch's.
    """
    watch, handles = _Watch(), []
    for path in paths:
        module = patched.get_submodule(path)
        enter = partial(watch.enter, path)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(watch.leave, with_kwargs=True))
    try:
        with torch.inference_mode(), watch:
            patched(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return watch.found


class _Watch(TorchDispatchMode):
    """Asks for the route of the first call of elsa's operators in each site: of linear layers in
    those that are layers, of any other operator in those that are attention.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Served] = {}
        self._sites: list[tuple[str, nn.Module]] = []  # a projection lies within attention

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._sites.append((path, module))

    def leave(self, module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        path, _ = self._sites.pop()
        if is_layer(module) and path not in self.found:
            input = next(each for each in (*args, *named.values()) if isinstance(each, Tensor))
            self.found[path] = _unseen(module, input)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        record = ops.of(schema.name)
        if self._sites and record is not None:
            path, module = self._sites[-1]
            if path not in self.found and is_layer(module) == (record.kind == "linear"):
                names = [argument.name for argument in schema.arguments]
                given = dict(zip(names, args, strict=False)) | (kwargs or {})
                self.found[path] = _route(record, schema.name, given, module)
        return func(*args, **(kwargs or {}))


def _unseen(layer: nn.Module, input: Tensor) -> Served:
    """What serves a layer that called no operator of elsa's: a CPU's kernels take eager calls
    alone, which one under a dispatch mode is not. Those that are large enough for them."""
    asked, precision = (str(vars(layer)[f"elsa_{name}"]) for name in ("backend", "precision"))
    weight = next((p for p in layer.parameters() if p.dim() == 2), None)
    backend = dispatch.PLAIN
    if weight is not None and not input.is_cuda and input.shape[-1] == weight.shape[1]:
        terms = (input, weight, None, "none", None, None, precision, None, None)
        serving = dispatch.SERVING.get(("linear", input.device.type, asked), ())
        with _disable_current_modes():
            taken = any(serve(*terms) is not None for serve in serving)
        if taken:
            backend = explain_linear(input, weight, precision=precision, backend=asked).backend
    return Served(backend, "", precision)


def _route(
    record: ops.Operator, operator: str, given: Mapping[str, Any], module: nn.Module
) -> Served:
    asked = str(vars(module).get("elsa_backend", "auto"))
    precision = str(given.get("precision", "strict"))
    chosen = {"precision": precision, "backend": asked}
    # a mask beside causality, which the operator takes and its public face does not; or the backend
    # that was asked for is gone
    with contextlib.suppress(ElsaError):
        route: Any = None
        if record.kind == "attention":
            query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
            causal = bool(given["is_causal"]) and mask is None
            route = explain(query, key, value, mask, 0.0, causal, given["scale"], True, **chosen)
        elif record.kind == "window":
            route = explain_window_attention(**given, backend=asked)
        elif record.kind == "linear":
            value = given.get("value")
            route = explain_linear(
                given["input"], given["weight"], given.get("bias"),
                activation=given.get("activation", "none"), residual=given.get("residual"),
                scale=given.get("scale"),
                value=None if value is None else (value, given.get("value_bias")), **chosen,
            )  # fmt: skip
        if route is not None:
            return Served(route.backend, route.schedule, precision)
    tensor = next(value for value in given.values() if isinstance(value, Tensor))
    backend = dispatch.PLAIN
    if operator != str(record.eager._schema.name):
        backend = dispatch.kernels_of(record.name, tensor.device.type)
    return Served(backend, _KINDS.get(record.kind, ""), precision)


def profiles(
    sites: Sequence[AttentionSite],
    before: Sequence[Sample],
    after: Sequence[Sample],
    routes: Mapping[str, Served],
    errors: Mapping[str, tuple[float, float]],
    seed: int,
    within: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[SiteProfile, ...]:
    """All rows, slowest first; the rest of the model is the last one."""
    order = order_of(before, after)
    (whole,) = middle_means(order, [[_whole(sample) for sample in before]])

    def row(site: AttentionSite, pick: Callable[[Sample], float]) -> SiteProfile:
        route = routes.get(site.path, Served("", "", ""))
        error = errors.get(site.path, (None, None))
        old, new = ([pick(sample) for sample in samples] for samples in (before, after))
        shown = middle_means(order, (old, new))
        return SiteProfile(
            **{name: getattr(site, name) for name in _SHARED},
            seconds_before=digits(shown[0]),
            seconds_after=digits(shown[1]),
            share=digits(shown[0] / whole),
            ratio=ratio(old, new, seed, (shown[0], shown[1])),
            error=error[0],
            original_error=error[1],
            backend=route.backend,
            schedule=route.schedule,
            precision=route.precision,
            within=(within or {}).get(site.path, ()),
        )

    ran = [site for site in sites if any(sample.sites.get(site.path, 0.0) for sample in before)]
    rows = [row(site, lambda sample, path=site.path: max(sample.sites[path], 1e-9)) for site in ran]  # type: ignore[misc]
    rows.sort(key=lambda each: -each.seconds_before)
    # Two clocks: between events that follow one another at once, nothing may be left.
    left = row(_REST_SITE, lambda each: max(_whole(each) - sum(each.sites.values()), 1e-9))
    return (*rows, left)


def order_of(before: Sequence[Sample], after: Sequence[Sample]) -> list[float]:
    """A number for each round, the larger the slower it was; see `middle_means`."""
    pairs = zip(before, after, strict=True)
    return [math.log(_whole(old) * _whole(new)) for old, new in pairs]


def _whole(sample: Sample) -> float:
    """The time that the sites are part of: on CUDA that between events, not the caller's wait."""
    return sample.seconds if sample.device is None else sample.device


# What there is to say of a call whose operator has no `explain`.
_KINDS: Final = {
    "attention": "with a mask beside causality",
    "window": "attention within windows",
    "varlen": "sequences of several lengths, packed",
    "sparse": "a map of tiles",
}
_SHARED: Final = (
    "path", "module_class", "kind", "num_heads", "head_dim", "query_tokens", "key_tokens", "extra",
    "flops", "patched", "reason",
)  # fmt: skip
_REST_SITE: Final = AttentionSite(
    path=REST, module_class="", kind="rest", num_heads=None, head_dim=None, query_tokens=None,
    key_tokens=None, extra=(), flops=None, flops_share=None, patchable=False, reason="",
    adapter=None, patched=False,
)  # fmt: skip
