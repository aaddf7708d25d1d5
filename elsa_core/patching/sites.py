"""`inspect`: every place in a model that computes attention, and whether elsa can take it over.

In the scope "model" layers are sites too (`elsa_core.patching.layers`). An attention site is a
module whose own code computes attention; where an adapter replaces the block around it (Swin), the
block. Tokens, windows, FLOPs and masks come from one run of a copy (`elsa_core.patching.probe`).
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elsa_core.backends.support import Support
from elsa_core.base.grouping import group, group_by
from elsa_core.base.inputs import resolved_input_size
from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ArgumentError
from elsa_core.patching import adapters, layers
from elsa_core.patching.adapters import table, watched
from elsa_core.patching.probe import Attentions, Example, Probe, ProbeError, probe, watch

_MAY_HOLD = "its code names what attention is made of: an example of the input tells what runs"
_DID_NOT_RUN = "the run on the example met no attention here that elsa can take over"
_RETURNED = "the model returns its attention weights, which PyTorch has to compute"
_NOT_OVER_TOKENS = ("linear", "channel", "other")
_NO_ATTENTION = (table.BLOCK, table.COMPANION, *table.LAYERS)  # kinds of rows
_TITLES = ("site", ">count", "class", "kind", ">heads", ">tokens", ">FLOPs", "terms")
# Names in the code of a class that may attend.
_CALLS: Final = {
    "scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS",
}  # fmt: skip
_SOFTMAXES: Final = {"softmax", "log_softmax"}
_PRODUCTS: Final = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_MOST = 64  # functions: a class whose forward reaches more is a whole model, no attention layer
# The terms that attributes of an attention module tell of.
_TERMS = {
    "relative bias": (
        "relative_position_bias_table", "relative_position_bias", "attention_biases", "rel_pos",
        "rel_pos_bias", "cpb_mlp", "meta_mlp",
    ),
    "decomposed relative positions": ("rel_pos_h", "use_rel_pos"),
    "rope": ("rope",),
    "qk-norm": ("q_norm", "ln_q"),
    "scale-norm": ("norm",),  # where an adapter knows the module
    "gate": ("gate",),
    "cosine": ("logit_scale", "temperature"),
}  # fmt: skip


@dataclass(frozen=True)
class AttentionSite:
    """One module that computes attention.

    Attributes:
        path: its name in the model ("blocks.0.attn"); "" is the model itself.
        module_class: its class before patching, qualified.
        kind: "global", "window", "cross", "pooling", "class", "linear", "channel",
            "talking-heads", "gated-positional", "outlook" or "other"; in the scope "model" also
            "linear-layer", "mlp" and "patch-embedding".
        num_heads: heads of the queries, None where the module does not say.
        head_dim: channels of a query head.
        query_tokens: queries in one attention problem (one window); None before a run and where the
            softmax is not over tokens (linear, channel).
        key_tokens: keys in one attention problem.
        extra: what comes on top of softmax(Q K^T * s) V: "relative bias", "mask", "rope", ...
        flops: for one image: of the two attention products without the projections, which are
            sites of their own in the scope "model"; of all products of a layer.
        flops_share: `flops` over the model's FLOPs.
        patchable: whether `patch` can take the site over.
        reason: how, or why not.
        adapter: the adapter's name, None where there is none.
        patched: whether the site runs on elsa now.
    """

    path: str
    module_class: str
    kind: str
    num_heads: int | None = None
    head_dim: int | None = None
    query_tokens: int | None = None
    key_tokens: int | None = None
    extra: tuple[str, ...] = ()
    flops: int | None = None
    flops_share: float | None = None
    patchable: bool = False
    reason: str = ""
    adapter: str | None = None
    patched: bool = False

    @property
    def class_name(self) -> str:
        """The class without its module."""
        return self.module_class.rpartition(".")[2]

    @property
    def alike(self) -> tuple[Any, ...]:
        """What sites that share a row of a table have in common."""
        return (
            self.module_class, self.kind, self.num_heads, self.head_dim, self.query_tokens,
            self.key_tokens, self.extra, self.patchable, self.reason, self.patched,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"extra": list(self.extra)}


@dataclass(frozen=True, repr=False)
class Inspection(Summarised):
    """What `inspect` found.

    Attributes:
        model_class: the model's class, qualified.
        input_size: the image (C, H, W) that tokens and FLOPs hold for.
        total_flops: of the model for one image; None where it could not be run.
        sites: in the model's own order.
        note: why tokens and FLOPs are missing, where they are.
        scope: "attention", or "model" with linear layers, MLPs and patch embeddings.
    """

    model_class: str
    input_size: tuple[int, int, int]
    total_flops: int | None
    sites: tuple[AttentionSite, ...]
    note: str = ""
    scope: str = layers.ATTENTION

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        sites = [site.to_dict() for site in self.sites]
        return vars(self) | {"input_size": list(self.input_size), "sites": sites}

    def summary(self) -> Summary:
        """Every site as a table, and why some cannot be patched."""
        patchable = sum(site.patchable for site in self.sites)
        title = f"{self.model_class} · {'x'.join(map(str, self.input_size))}"
        if self.total_flops:
            title += f" · {self.total_flops / 1e9:.2f} GFLOPs"
        stay = [site for site in self.sites if not site.patchable]
        return Summary(
            f"{title} · {patchable} of {len(self.sites)} {sites_of(self.scope)} patchable",
            *sites_table(self.sites),
            [*reasons(stay, "not patchable:"), *([self.note] if self.note else ())],
        )


def inspect(
    model: nn.Module,
    input_size: int | tuple[int, ...] | Example | None = None,
    *,
    scope: str = layers.AUTO,
) -> Inspection:
    """Find every site of a model. The model itself is neither run nor changed.

    A copy of its structure runs once on fake tensors, in eval mode, without memory for weights or
    activations; a model that fake tensors cannot run is copied and run for real.

    Args:
        model: any module; patched ones report the same sites with `patched` set.
        input_size: (C, H, W), (H, W), or H = W; default: the model's own (timm's `img_size` and
            `pretrained_cfg`, open_clip's `visual.image_size`), else 224. Or an example of the
            model's input, as `elsa_core.patch` takes it: sites are then what ran on it.
        scope: "attention", "model" or "auto", see `elsa_core.patch`.

    Returns:
        The sites with tokens and FLOPs for one image of that size.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ArgumentError: `input_size` is no image size, the model does not run on it, or there is no
            such scope.
    """
    model = plain_model(model)
    example: Example | None = None
    if any(isinstance(one, Tensor) for one in tree_leaves(input_size)):
        example, input_size = input_size, None  # type: ignore[assignment]
    size = resolved_input_size(model, input_size)  # type: ignore[arg-type]
    scope = layers.scope_of(model, scope)
    sites = find_sites(model, scope, example)
    note, total = "", None
    try:
        kinds = {site.path: site.kind in table.LAYERS for site in sites}
        result = probe(model, kinds, size, example)
        total, sites = result.total_flops, tuple(_observed(site, result) for site in sites)
    except ProbeError as error:
        if input_size is not None:
            raise ArgumentError(
                f"input_size={list(size)}: {type(model).__name__} does not run on it: {error}"
            ) from error
        note = f"tokens and FLOPs are unknown: the model could not be run ({error})"
    cls = table.qualified(adapters.base_class(model))
    return Inspection(cls, size, total, sites, note, scope)


def plain_model(model: object) -> nn.Module:
    """The model without the wrapper of `torch.compile`.

    Raises:
        TypeError: it is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        hint = f": elsa.load({model!r}) builds one" if isinstance(model, str) else ""
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}{hint}")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def find_sites(
    model: nn.Module, scope: str = layers.ATTENTION, example: Example | None = None
) -> tuple[AttentionSite, ...]:
    """The sites by code, or by a run on an example; tokens and FLOPs are None."""
    ran = None if example is None else watch(model, example)
    found: list[AttentionSite] = []
    for site in _sites(model, scope == layers.MODEL, ran):
        reason, within = "", f"{site.path}." if site.path else ""
        if ran is None or site.kind in table.LAYERS or not site.patchable or ran.paths[site.path]:
            pass  # of a run, what elsa serves is patchable, and nothing else
        elif any(f"{one}.".startswith(within) for one in ran.paths):
            if site.adapter == adapters.WATCHED:  # the modules within it are the sites
                continue
        elif site.path in ran.returning:
            if any(not one or within.startswith(f"{one}.") for one in ran.paths):
                continue  # its attention is that of a module around it
            reason = _RETURNED
        elif site.adapter == adapters.WATCHED or site.path not in ran.entered:
            reason = _DID_NOT_RUN  # else an adapter may fuse what is recognised in no forward
        changed = replace(site, patchable=False, reason=reason, adapter=None) if reason else site
        found.append(changed)
    return tuple(found)


def _sites(model: nn.Module, whole: bool, ran: Attentions | None) -> Iterator[AttentionSite]:
    within: set[nn.Module] = set()  # what is no site: parts of blocks and MLPs
    if whole:
        # and patch embeddings whose images a batch norm reads, and more convolutions after it: a
        # product would lay them out by channels last, which all of those take longer for
        pairs = [(m._modules.get("proj"), m._modules.get("norm")) for m in model.modules()]
        within = {p for p, n in pairs if isinstance(p, nn.Conv2d) and isinstance(n, nn.BatchNorm2d)}
    for path, module in model.named_modules():
        if module in within:
            continue
        cls, own = adapters.base_class(module), adapters.patched_class(module)
        patched, watches = own is not None, getattr(own, "__module__", "") == watched.__name__
        written = adapters.written(cls)
        adapter: str | None = adapters.WATCHED if written is None else written.__name__
        layer = layers.support(module) if whole else None
        if layer is not None:
            within.update(adapters.parts(module))
            known = table.row_of(cls)
            like = table.LAYER if known is None or known.kind not in table.LAYERS else known.kind
            yield AttentionSite(
                path, table.qualified(cls), like, patchable=layer.ok, reason=layer.reason,
                adapter=adapter if layer.ok else None, patched=patched,
            )  # fmt: skip
            continue
        attention = adapters.attention_within(module) or module
        if attention is not module:
            within.add(attention)
        kind: str | None = None
        inner: Any = adapters.base_class(attention)
        row = _row(inner)
        if row is not None:
            kind = None if row.kind == table.NONE else row.kind
        elif may_attend(inner, getattr(inner, "forward", None)):
            kind = table.GLOBAL
        seen = ran is not None and ran.paths[path] > 0
        if kind is None and not seen and not watches:
            continue
        answer, adapter = _support(module, cls, adapter, seen, watches)
        yield AttentionSite(
            path, table.qualified(cls), kind or table.GLOBAL, *_heads(attention),
            extra=_extras(module, attention), patchable=answer.ok, reason=answer.reason,
            adapter=adapter, patched=patched,
        )  # fmt: skip


def _row(cls: type) -> table.Row | None:
    for base in cls.__mro__:
        row = table.row_of(base)
        if row is not None and row.kind not in _NO_ATTENTION:
            return row
        if "forward" in base.__dict__:
            break  # what is known of further bases says nothing about this forward
    return None


def _support(
    module: nn.Module, cls: type[nn.Module], adapter: str | None, seen: bool, watches: bool
) -> tuple[Support, str | None]:
    """Whether a site can be patched, how or why not, and its adapter; `seen`: whether attention was
    recognised in a run of its forward, `watches`: whether it is patched and runs watched."""
    row = _row(cls)
    if row is not None and row.reason:
        return Support(False, row.reason), None
    if watches:
        return adapters.watch_support(module), adapters.WATCHED
    answer = adapters.support(module)
    if seen and not answer.ok:
        answer, adapter = adapters.watch_support(module), adapters.WATCHED
    elif row is None and not seen and adapter == adapters.WATCHED and answer.ok:
        answer = Support(True, _MAY_HOLD)
    return answer, adapter if answer.ok else None


def _observed(site: AttentionSite, result: Probe) -> AttentionSite:
    seen = result.observations.get(site.path)
    if seen is None or not seen.ran:
        return site
    share = seen.flops / result.total_flops if result.total_flops else None
    if site.kind in table.LAYERS:
        return replace(site, flops=seen.flops, flops_share=share)
    heads, kind = site.num_heads or seen.heads, site.kind
    if kind == table.GLOBAL:  # the class name leaves it open
        if heads and seen.problems and seen.problems > heads:
            kind = table.WINDOW
        elif seen.query_tokens == 1 and seen.key_tokens not in (None, 1):
            kind = table.POOLING
    return replace(
        site,
        kind=kind,
        num_heads=heads,
        head_dim=seen.head_dim if site.head_dim is None else site.head_dim,
        query_tokens=None if site.kind in _NOT_OVER_TOKENS else seen.query_tokens,
        key_tokens=None if site.kind in _NOT_OVER_TOKENS else seen.key_tokens,
        extra=site.extra + tuple(term for term in seen.terms if term not in site.extra),
        flops=seen.flops,
        flops_share=share,
    )


def _extras(site: nn.Module, module: nn.Module) -> tuple[str, ...]:
    """The terms beyond softmax(Q K^T * s) V, by the attributes of the site and of the attention
    module within it."""
    heads, kv_heads = getattr(module, "num_heads", None), getattr(module, "num_kv_heads", None)
    dropout = getattr(getattr(module, "attn_drop", None), "p", 0.0)
    shift = getattr(site, "shift_size", None)
    known = adapters.written(adapters.base_class(module)) is not None
    found = {}
    for term, names in _TERMS.items():
        values = [getattr(module, name, None) for name in names]
        found[term] = (known or term != "scale-norm") and any(
            value is True
            or (isinstance(value, Tensor | nn.Module) and type(value) is not nn.Identity)
            for value in values
        )
    found["mask"] = isinstance(shift, tuple | list) and any(shift)  # between regions of windows
    found["grouped keys"] = isinstance(kv_heads, int) and kv_heads != heads
    found["dropout"] = isinstance(dropout, float) and dropout > 0
    return tuple(term for term, present in found.items() if present)


def _heads(module: nn.Module) -> tuple[int | None, int | None]:
    """The heads of an attention module and the channels of one, by its attributes."""
    found = []
    for names in (
        ("num_heads", "heads", "n_heads", "groups"),
        ("head_dim", "dim_head", "key_dim"),
        ("embed_dim", "attn_dim", "dim"),
    ):
        values = (getattr(module, name, None) for name in names)
        found.append(next((v for v in values if isinstance(v, int) and type(v) is not bool), None))
    heads, head_dim, width = found
    projection = getattr(module, "qkv", None)
    if isinstance(projection, nn.Linear):
        width = projection.out_features // 3
    if head_dim is None and heads and width is not None:
        head_dim = width // heads
    return heads, head_dim


# Bound: reading the code of a class takes milliseconds, and a process sees some hundred classes.
@functools.lru_cache(maxsize=1024)
def may_attend(cls: type, forward: object) -> bool:
    """Whether `forward`, its helpers of the same package and the methods that they call name an
    attention function, or a softmax and a product of matrices. A class may get another forward."""
    if cls.__module__.startswith("torch.nn."):
        return False
    package = cls.__module__.partition(".")[0]
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    seen: set[Any] = set()
    pending: list[Any] = [forward]
    names: set[str] = set()
    while pending and len(seen) < _MOST:
        found = pending.pop(0)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        function = unwrap(found) if callable(found) else found
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        for code in codes:  # and of the lambdas and comprehensions inside it
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            names.update(code.co_names)
            names.update("@" for i in dis.get_instructions(code) if i.argrepr in ("@", "@="))
            for name in code.co_names:
                pending += [base.__dict__[name] for base in bases if name in base.__dict__]
                helper = function.__globals__.get(name)
                if callable(helper):
                    names.add(str(getattr(helper, "__name__", name)))
                if str(getattr(helper, "__module__", "")).partition(".")[0] == package:
                    pending.append(helper)
    return bool(_CALLS & names) or bool(_SOFTMAXES & names and _PRODUCTS & names)


# As rows and lines: identical sites of one pattern become `blocks.0-11.attn`, 12 times.


def sites_table(sites: Sequence[AttentionSite]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles, and a row for each group of equal sites, without columns that are empty."""
    rows = []
    for label, members in group(sites, lambda site: site.alike):
        one = members[0]
        share = sum(site.flops_share or 0.0 for site in members)
        heads, tokens = str(one.num_heads or ""), str(one.query_tokens or "")
        if one.num_heads and one.head_dim:
            heads = f"{heads}x{one.head_dim}"
        if one.query_tokens != one.key_tokens:
            tokens = f"{tokens}:{one.key_tokens}"
        row = (
            label or "the model", f"{len(members)}x", one.class_name, one.kind, heads, tokens,
            f"{share:.1%}" if share else "", ", ".join(one.extra),
        )  # fmt: skip
        rows.append(row)
    kept = [i for i, title in enumerate(_TITLES) if title == "site" or any(row[i] for row in rows)]
    return tuple(_TITLES[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def reasons(sites: Sequence[AttentionSite], word: str) -> list[str]:
    """One line for each reason why sites stay as they are; `word` says what they are."""
    lines = []
    for reason, members in group_by(sites, lambda site: site.reason):
        labels = ", ".join(
            label or "the model" for label, _ in group(members, lambda site: site.reason)
        )
        lines.append(f"{word} {labels} ({members[0].class_name}): {reason}")
    return lines


def sites_of(scope: str) -> str:
    """What the sites of a scope are called in a sentence."""
    return "attention sites" if scope == "attention" else "sites"
