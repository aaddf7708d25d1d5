"""Where a forward spends its time: every attention site, and the rest of the model as one row; and
which backend and schedule serve each patched site, from one forward's own calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from elsa_core import dispatch, ops
from elsa_core.errors import ElsaError
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.intervals import Ratio, digits, middle_means, ratio
from elsa_core.measuring.rounds import Clock, Sample
from elsa_core.measuring.timing import between, mark
from elsa_core.ops.attention.api import explain
from elsa_core.ops.linear.api import explain_linear
from elsa_core.ops.window.api import explain_window_attention
from elsa_core.patching import AttentionSite, attention_within, entry, is_layer

REST: Final = "rest of the model"


@dataclass(frozen=True)
class SiteProfile(Plain):
    """One attention site, or the rest of the model, before and after patching.

    Attributes:
        path: its name in the model; `REST` for the rest, of which only times are known.
        seconds_before, seconds_after: a forward's time in it, mean over the middle half of the
            rounds: attention with its projections, without the MLP and the norms of a block
            (`around`).
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


def around(module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Have `enter` and `leave` called around the attention in every call of a site.

    Most sites are attention modules: all of the call is attention, projections included. Where an
    adapter takes over a block's way to its attention (Swin), the site is the block, whose MLP and
    norms are not. A block with a method of its own for attention is watched there. In any other
    block the calls of its children that have weights and do not hold the attention are left out:
    `leave` comes before, `enter` after each of them.
    """
    inner = attention_within(module)
    name = entry(module)
    if inner is not None and name != "forward":
        method = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            enter()
            out = method(*args, **kwargs)
            leave()
            return out

        setattr(module, name, called)
        return
    # A child may be a site of its own: whoever is inside leaves before another one enters.
    module.register_forward_pre_hook(lambda *_: enter())
    for child in () if inner is None else _others(module, inner):
        child.register_forward_pre_hook(lambda *_: leave(), prepend=True)
        child.register_forward_hook(lambda *_: enter())
    module.register_forward_hook(lambda *_: leave(), prepend=True)


def _others(module: nn.Module, inner: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with weights inside `module` that neither are nor hold `inner`."""
    for child in module.children():
        if child is inner:
            continue
        if any(each is inner for each in child.modules()):
            yield from _others(child, inner)
        elif next(child.parameters(), None) is not None:
            yield child


def site_clock(model: nn.Module, paths: Sequence[str], device: torch.device) -> Clock:
    """The time that a model's last forward spent in the attention of the sites at some paths.

    On CUDA it is that between two events on the current stream, so that watching waits for nothing.
    Events of a call that is captured become nodes of its CUDA graph, which every replay records
    anew.
    """
    spans: dict[str, list[tuple[Any, Any]]] = {path: [] for path in paths}
    depth = 0  # of forwards that call the model again

    def count(step: int, *_: Any) -> None:
        nonlocal depth
        if step > 0 and not depth:
            for each in spans.values():
                each.clear()
        depth += step

    model.register_forward_pre_hook(partial(count, 1))
    model.register_forward_hook(partial(count, -1), always_call=True)
    for path, taken in spans.items():
        begun: list[Any] = []
        around(
            model.get_submodule(path),
            lambda begun=begun: begun.append(mark(device)),  # type: ignore[misc]
            lambda begun=begun, taken=taken: taken.append(  # type: ignore[misc]
                (begun.pop(), mark(device))
            ),
        )
    return lambda: {path: sum(starmap(between, pairs), 0.0) for path, pairs in spans.items()}


def outermost(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, tuple[str, ...]]:
    """The paths of the sites whose times add up, each with those of the sites that lie in what is
    timed of it: the module, or of a block its attention alone."""
    paths = {module: path for path, module in model.named_modules()}
    within = {}
    for site in sites:
        inner = attention_within(model.get_submodule(site.path))
        part = site.path if inner is None else paths[inner]
        within[site.path] = tuple(
            other.path
            for other in sites
            if other.path != site.path and (part == "" or other.path.startswith(f"{part}."))
        )
    held = {path for inside in within.values() for path in inside}
    return {path: inside for path, inside in within.items() if path not in held}


def profiles(
    sites: Mapping[AttentionSite, tuple[str, ...]],
    before: Sequence[Sample],
    after: Sequence[Sample],
    routes: Mapping[str, Served],
    errors: Mapping[str, tuple[float, float]],
    seed: int,
) -> tuple[SiteProfile, ...]:
    """All rows, slowest first; the rest of the model is the last one.

    `sites`: each with the paths of those within. `routes` and `errors` (patched, before) by path.
    """
    order = [old.span * new.span for old, new in zip(before, after, strict=True)]
    (total,) = middle_means(order, [[sample.span for sample in before]])

    def row(
        site: AttentionSite, within: tuple[str, ...], pick: Callable[[Sample], float]
    ) -> SiteProfile:
        old, new = ([max(pick(each), 1e-9) for each in samples] for samples in (before, after))
        mean_old, mean_new = middle_means(order, (old, new))
        error, original_error = errors.get(site.path, (None, None))
        return SiteProfile(
            **{name: getattr(site, name) for name in _SHARED},
            seconds_before=digits(mean_old),
            seconds_after=digits(mean_new),
            share=digits(mean_old / total),
            ratio=ratio(old, new, seed, (mean_old, mean_new)),
            error=error,
            original_error=original_error,
            **routes.get(site.path, Served())._asdict(),
            within=within,
        )

    rows = [
        row(site, within, lambda sample, path=site.path: sample.sites[path])  # type: ignore[misc]
        for site, within in sites.items()
        if any(sample.sites.get(site.path, 0.0) for sample in before)
    ]
    rows.sort(key=lambda each: -each.seconds_before)
    # Two clocks: between events that follow one another at once, nothing may be left.
    rest = row(_REST_SITE, (), lambda sample: sample.span - sum(sample.sites.values()))
    return (*rows, rest)


_SHARED: Final = (
    "path", "module_class", "kind", "num_heads", "head_dim", "query_tokens", "key_tokens", "extra",
    "flops", "patched", "reason",
)  # fmt: skip
_REST_SITE: Final = AttentionSite(
    path=REST, module_class="", kind="rest", num_heads=None, head_dim=None, query_tokens=None,
    key_tokens=None, extra=(), flops=None, flops_share=None, patchable=False, reason="",
    adapter=None, patched=False,
)  # fmt: skip


class Served(NamedTuple):
    """What serves a site's calls of the operator; the schedule is empty where none explains it."""

    backend: str = ""
    schedule: str = ""
    precision: str = ""


def served(patched: nn.Module, inputs: tuple[Any, ...], paths: Sequence[str]) -> dict[str, Served]:
    """What serves each site. A layer that calls no operator of elsa's is plain PyTorch's."""
    watch, handles = _Watch(), []
    for path in paths:
        module = patched.get_submodule(path)
        enter = partial(lambda path, module, args: watch.sites.append((path, module)), path)
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
        self.sites: list[tuple[str, nn.Module]] = []  # a projection lies within attention

    def leave(self, module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        path, _ = self.sites.pop()
        if not is_layer(module) or path in self.found:
            return
        # It called no operator of elsa's: a CPU's kernels take eager calls alone, which one under
        # a dispatch mode is not. Those that are large enough for them.
        input = next(each for each in (*args, *named.values()) if isinstance(each, Tensor))
        asked, precision = (str(vars(module)[f"elsa_{name}"]) for name in ("backend", "precision"))
        self.found[path] = Served(dispatch.PLAIN, "", precision)
        weight = next((p for p in module.parameters() if p.dim() == 2), None)
        if weight is not None and not input.is_cuda and input.shape[-1] == weight.shape[1]:
            terms = (input, weight, None, "none", None, None, precision)
            serving = dispatch.SERVING.get(("linear", input.device.type, asked), ())
            with _disable_current_modes():
                if any(serve(*terms) is not None for serve in serving):
                    route = explain_linear(input, weight, precision=precision, backend=asked)
                    self.found[path] = Served(route.backend, "", precision)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        record = ops.BY_SCHEMA.get(schema.name)
        if self.sites and record is not None:
            path, module = self.sites[-1]
            if path not in self.found and is_layer(module) == (record.kind == "linear"):
                names = [argument.name for argument in schema.arguments]
                given = dict(zip(names, args, strict=False)) | (kwargs or {})
                self.found[path] = _route(record, schema.name, given, module)
        return func(*args, **(kwargs or {}))


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
    return Served(backend, "", precision)
