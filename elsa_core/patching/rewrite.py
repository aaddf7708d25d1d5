"""`patch` and `unpatch`: swap the class of each site's module for elsa's, in place.

A patched module is the same object with the same parameters, buffers, hooks and `__dict__`, plus
the strings of `_ATTRIBUTES`; only its class differs. So state dicts, deepcopy, pickle,
`torch.compile` and `torch.export` see the model that they saw before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.base.messages import shown
from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError, UnavailableError
from elsa_core.ops.sparse.api import checked
from elsa_core.patching import adapters, layers
from elsa_core.patching.adapters import derived, watched
from elsa_core.patching.adapters.common import check_names
from elsa_core.patching.adapters.offloaded import may_offload, offloaded
from elsa_core.patching.adapters.table import LAYERS
from elsa_core.patching.probe import Example, cast_to
from elsa_core.patching.sites import (
    AttentionSite,
    find_sites,
    plain_model,
    reasons,
    sites_of,
    sites_table,
)
from elsa_core.precision import validate

_ATTRIBUTES = (
    "elsa_precision", "elsa_backend", "elsa_sparsity", "elsa_group", "elsa_lengths", "elsa_offload",
)  # fmt: skip
_HEAD_DIM = 64  # stands for one that a module does not say: every backend takes it
_MAX_NAMED = 3  # classes that an error line spells out


@dataclass(frozen=True, repr=False)
class PatchReport(Summarised):
    """What `patch` did.

    Attributes:
        patched: the sites that run on elsa now.
        kept: the sites left as they were; `reason` says why.
        precision, backend: what the patched sites ask for.
        include, exclude: the globs given, empty for all.
        scope: "attention", or "model" with linear layers, MLPs and patch embeddings.
        sparsity: what the sites may leave out, None for nothing.
        offload: "host" where what a backward needs is kept in host memory.
    """

    patched: tuple[AttentionSite, ...]
    kept: tuple[AttentionSite, ...]
    precision: str
    backend: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scope: str = layers.ATTENTION
    sparsity: str | float | None = None
    offload: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = vars(self) | {"include": list(self.include), "exclude": list(self.exclude)}
        sites = {name: [one.to_dict() for one in found[name]] for name in ("patched", "kept")}
        return found | sites

    def summary(self) -> Summary:
        """The patched sites as a table, and why the others were kept."""
        done, found = len(self.patched), len(self.patched) + len(self.kept)
        title = f"{done} of {found} {sites_of(self.scope)} patched"
        stored = "" if self.offload is None else f" · offload {self.offload}"
        return Summary(
            f"{title} · precision {self.precision} · backend {self.backend}{stored}",
            *sites_table(self.patched),
            reasons(self.kept, "kept"),
        )


def patch(
    model: nn.Module,
    example: Example | None = None,
    *,
    precision: str = "strict",
    backend: str = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = False,
    scope: str = layers.AUTO,
    mesh: Any = None,
    sparsity: str | float | None = None,
    offload: str | None = None,
) -> PatchReport:
    """Make the sites of a model run on elsa, in place.

    Patching again updates precision and backend; sites that this call does not select stay as they
    are, patched or not. The model changes only if the call succeeds.

    With an example the model runs once, as a copy; on a GPU the kernels that it needs are compiled
    side by side. A site is then the innermost module in whose
    forward attention happened: a softmax between two products, PyTorch's operator called by a
    helper, transformers' attention functions. What elsa does not compute in that run is not
    patched. Without an example, sites are known by their code.

    Args:
        model: any module, in any mode, dtype and device.
        example: an input of the model: a tensor, a tuple of its arguments, or a dict of named ones.
        precision: "strict", "ieee", "turbo" or "lean", see `elsa_core.precision`.
        backend: "auto", "native", "triton" or "eager".
        include: globs over site paths ("blocks.[0-5].attn"); default: every site.
        exclude: globs over site paths that are left alone.
        strict: make it an error if a selected site cannot be patched.
        scope: "attention": the attention sites alone. "model": linear layers, MLPs and patch
            embeddings too, with what follows a product (activation, LayerScale, residual) in its
            call. "auto": "model" where the shipped measurements say that it is faster, which is
            float32 on sm_90 and on AMD's processors with AVX-512, else "attention".
        mesh: where given, the model's tokens are sharded over its ranks too, see
            `elsa_core.distributed.shard`.
        sparsity: as `elsa_core.attention` takes it, for global attention alone. A number costs an
            error, which `check` reports, and has no gradients. Saved and exported models leave out
            nothing.
        offload: "host": what a backward needs stays in host memory from the forward on, pinned
            where it comes from a GPU. In inference, attention of a model in host memory streams
            through a GPU. See docs/offload.md. Excludes mesh.

    Returns:
        The sites patched and those kept, with reasons.

    Raises:
        TypeError: `model` is no `nn.Module`, or another argument is of a wrong type.
        ArgumentError: precision, backend, scope or offload is unknown, the model's dtype or class
            does not take it, a glob matches no site, or the model does not run on the example.
        UnavailableError: the backend asked for by name does not serve the model's device or dtype.
        NothingPatchedError: no site could be patched, or, with `strict`, not all of them.
        ModelError: with `mesh`, the model cannot be sharded.
    """
    model = plain_model(model)
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, not {type(strict).__name__}")
    if mesh is not None:
        from elsa_core.patching.adapters import timm_sharded

        timm_sharded.require_shardable(model)
    check_names(precision, backend)
    if offload is not None and mesh is not None:
        raise ArgumentError("offload and mesh exclude each other")
    if offload not in (None, "host"):
        raise ArgumentError(f"offload={offload!r}: offload must be 'host'")
    sparsity = checked(sparsity)
    wanted, unwanted = _texts("include", include), _texts("exclude", exclude)
    scope = layers.scope_of(model, scope)
    sites = find_sites(model, scope, example)
    selected, kept, refused = [], [], []
    for site in sites:
        reason = _why_left_out(site.path, wanted, unwanted)
        if reason is None and site.patchable:
            selected.append(site)
            continue
        kept.append(replace(site, reason=reason or site.reason))
        if reason is None:
            refused.append(site)
    if not selected:
        raise NothingPatchedError(_nothing_line(model, sites, refused, sites_of(scope)))
    _check_globs(sites, sites_of(scope), include=wanted, exclude=unwanted)
    if strict and refused:
        raise NothingPatchedError(
            f"strict: {len(refused)} of {len(refused) + len(selected)} sites cannot be patched: "
            + _named(refused)
        )
    _swap(model, selected, precision, backend, sparsity, offload)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if mesh is not None:
        timm_sharded.shard(model, mesh)
    elif example is not None and like.is_cuda:
        # what fails here, want of memory say, is the next call's to raise
        with suppress(Exception), shown(None) as tell:
            copied = shared_copy(model).eval()
            args, kwargs = cast_to(like, example)
            dispatch.compile_kernels(lambda: copied(*args, **kwargs), tell)
    done = tuple(replace(site, patched=True) for site in selected)
    return PatchReport(
        done, tuple(kept), precision, backend, wanted, unwanted, scope, sparsity, offload
    )


def unpatch(model: nn.Module) -> int:
    """Give every patched module its own class back; returns how many sites and layers there were.

    What was derived from the patched class since (parametrizations, `fully_shard`) stays on top.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ModelError: a class derived since cannot be put on the module's own; nothing has changed.
    """
    model = plain_model(model)
    # Inside `original` a patched module has its own class; it is known by elsa's attributes.
    modules = [
        module
        for module in model.modules()
        if adapters.patched_class(module) or "elsa_precision" in module.__dict__
    ]
    own = [_own_class(module) for module in modules]
    classes = [adapters.patched_class(module) for module in modules]
    count = sum(not getattr(cls, "elsa_companion", False) for cls in classes)
    for module, cls in zip(modules, own, strict=True):
        module.__class__ = cls
        derived.KEPT.pop(module, None)
        for name in _ATTRIBUTES:
            module.__dict__.pop(name, None)
    return count


def patched_sites(model: nn.Module) -> dict[str, nn.Module]:
    """The patched modules that are sites by path, in the model's order."""
    model = plain_model(model)
    patched: dict[str, nn.Module] = {}
    others: set[nn.Module] = set()
    for path, module in model.named_modules():
        cls = adapters.patched_class(module)
        if cls is None:
            continue
        others.update(adapters.parts(module))
        if not getattr(cls, "elsa_companion", False):
            patched[path] = module
    return {path: module for path, module in patched.items() if module not in others}


@contextmanager
def original(model: nn.Module) -> Iterator[nn.Module]:
    """The model with its own classes for the length of a `with` block, patched again afterwards.

    Not for use while another thread runs the model: it is the same object.
    """
    modules = plain_model(model).modules()
    patched = {m: (type(m), _own_class(m)) for m in modules if adapters.patched_class(m)}
    for module, (_, own) in patched.items():
        module.__class__ = own
    try:
        yield model
    finally:
        for module, (cls, own) in patched.items():
            # Patched or unpatched inside the block: that stands.
            if type(module) is own and "elsa_precision" in module.__dict__:
                module.__class__ = cls


def _swap(
    model: nn.Module,
    selected: Sequence[AttentionSite],
    precision: str,
    backend: str,
    sparsity: str | float | None,
    offload: str | None,
) -> None:
    modules = [model.get_submodule(site.path) for site in selected]
    for module, site in zip(modules, selected, strict=True):
        _check_served(module, site, precision, backend)
    modules += layers.companions(model, modules)
    named = [site.adapter for site in selected]
    named += [None] * (len(modules) - len(named))
    # Every class is made before the first is swapped: a failure leaves the model as it was.
    classes = []
    for module, adapter in zip(modules, named, strict=True):
        cls = adapters.base_class(module)
        written = None if adapter == adapters.WATCHED else adapters.written(cls)
        patched: Any = written or watched.watched(cls)
        patched.__prepare_scriptable__ = _refuse_script
        classes.append(adapters.with_base(module, patched))
    whole = None
    if offload is not None and not hasattr(type(model), "elsa_offloads"):
        if adapters.patched_class(model) or model in modules or not may_offload(model):
            raise ArgumentError(
                f"offload={offload!r} cannot change the class of {type(model).__name__}, which is "
                "patched or called in a way of its own: call it within "
                "torch.autograd.graph.save_on_cpu(pin_memory=True)"
            )
        whole = offloaded(type(model))
    wanted = {"elsa_sparsity": sparsity, "elsa_offload": offload}
    asked = {name: value for name, value in wanted.items() if value is not None}
    for module, cls in zip(modules, classes, strict=True):
        module.__class__ = cls
        for name in wanted:  # of an earlier call
            module.__dict__.pop(name, None)
        module.__dict__.update(elsa_precision=precision, elsa_backend=backend, **asked)
    if whole is not None:
        model.__class__ = whole
        model.__dict__.update(elsa_precision="strict", elsa_backend="auto")
    if hasattr(type(model), "elsa_offloads"):
        model.__dict__.pop("elsa_offload", None)
        model.__dict__.update({} if offload is None else {"elsa_offload": offload})


def _refuse_script(module: nn.Module) -> nn.Module:
    raise ModelError(
        f"torch.jit.script cannot read a patched {adapters.base_class(module).__name__}: "
        "elsa.export writes TorchScript with elsa's kernels (formats=['torchscript']), "
        "elsa.unpatch(model) gives the original back"
    )


def _check_served(module: nn.Module, site: AttentionSite, precision: str, backend: str) -> None:
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None:
        return
    path = site.path or "the model"
    try:
        validate(precision, weight.dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
    device = weight.device
    if backend == "auto" or device.type == "meta":
        return
    dim = site.head_dim or _HEAD_DIM
    ordinal = -1 if device.index is None else device.index
    request = Request(device.type, weight.dtype, dim, dim, precision, ordinal=ordinal)
    answer = dispatch.support(request, backend)
    if not answer.ok:
        raise UnavailableError(f"backend={backend!r} cannot serve {path}: {answer.reason}")


def _own_class(module: nn.Module) -> type[nn.Module]:
    try:
        return adapters.with_base(module, adapters.base_class(module))
    except ModelError:
        # a model derived since stays as it is: its class does nothing without `elsa_offload`
        if "elsa_offloads" in getattr(adapters.patched_class(module), "__dict__", {}):
            return type(module)
        raise


def layers_within(
    model: nn.Module,
    found: Sequence[AttentionSite],
    sites: Sequence[str],
    kept: Sequence[str],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Iterator[str]:
    """The layers of `found`, all sites of the model, that go with the attention modules of `sites`
    around them: patchable, not named by `sites` and `kept`, and not left out by the globs."""
    paths = {module: path for path, module in model.named_modules()}
    attention = [one.path for one in found if one.kind not in LAYERS and one.path in sites]
    modules = [model.get_submodule(path) for path in attention]
    around = tuple(f"{paths[adapters.attention_within(m) or m]}." for m in modules)
    named = {*sites, *kept}
    for site in found:
        within = site.kind in LAYERS and site.path.startswith(around) and site.path not in named
        if within and site.patchable and _why_left_out(site.path, include, exclude) is None:
            yield site.path


def _texts(name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a glob or several, as text, not {given!r}")
    return tuple(found)


def _check_globs(sites: Sequence[AttentionSite], what: str, **given: tuple[str, ...]) -> None:
    for name, globs in given.items():
        for glob in globs:
            if not any(fnmatchcase(site.path, glob) for site in sites):
                raise ArgumentError(
                    f"{name} (--{name}) {glob!r} matches none of the {len(sites)} {what} "
                    f"(the first is {sites[0].path!r})"
                )


def _why_left_out(path: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> str | None:
    hit = next((glob for glob in exclude if fnmatchcase(path, glob)), None)
    if hit is not None:
        return f"excluded by {hit!r}"
    if include and not any(fnmatchcase(path, glob) for glob in include):
        return "not named by include"
    return None


def _nothing_line(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    refused: Sequence[AttentionSite],
    what: str,
) -> str:
    name = type(model).__name__
    if not sites:
        return f"nothing to patch: {name} has no {what.removesuffix('s')}"
    if not refused:
        return (
            f"nothing to patch: include and exclude leave none of the {len(sites)} {what} "
            f"of {name} (the first is {sites[0].path!r})"
        )
    return f"nothing to patch in {name}: {_named(refused)}"


def _named(sites: Sequence[AttentionSite]) -> str:
    """The classes of some sites with count, first path and reason, for one line."""
    groups: dict[tuple[str, str], list[AttentionSite]] = {}
    for site in sites:
        groups.setdefault((site.module_class.rpartition(".")[2], site.reason), []).append(site)
    parts = [
        f"{len(group)} x {name} ({group[0].path or 'the model itself'}): {reason}"
        for (name, reason), group in list(groups.items())[:_MAX_NAMED]
    ]
    if len(groups) > _MAX_NAMED:
        parts.append(f"{len(groups) - _MAX_NAMED} further classes")
    return "; ".join(parts)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules over the very same parameters and buffers."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"this model cannot be copied, so there is no original to compare with ({error})"
        ) from error
