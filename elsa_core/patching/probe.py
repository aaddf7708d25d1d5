"""One run of a copy of a model: `probe` learns what its attention sites see (tokens, windows,
FLOPs), `watch` in which modules attention happens.

The copy shares no hook, cache or mode with the model; its weights are fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from elsa_core import dispatch
from elsa_core.base.calls import plain_multihead
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ArgumentError
from elsa_core.patching import adapters
from elsa_core.patching.recognition import Pending, Watch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_QUICK_VALUES, _QUICK_PIXELS = 2**25, 3 * 2**18  # weights and image of a ViT-S at 512 pixels
# Products of two activations, and those of a layer.
_PRODUCTS, _LAYER_PRODUCTS = ("bmm", "baddbmm"), ("mm", "addmm", "convolution")


class ProbeError(Exception):
    """The copy could not be made or run; the message says why."""


@dataclass
class Observation:
    """What one site did in the run, for one image."""

    ran: bool = False
    query_tokens: int | None = None  # rows of the largest softmax
    key_tokens: int | None = None  # its columns
    problems: int | None = None  # independent softmax matrices: heads, times windows
    heads: int | None = None  # the size of the dim before the queries
    head_dim: int | None = None  # the length that queries and keys were multiplied over
    flops: int = 0  # of products of two activations inside the site; of a layer, of all products
    # seen in the arguments: "mask", "rope", "relative bias", "causal", "returns weights"
    terms: dict[str, None] = field(default_factory=dict)


Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
_Result = TypeVar("_Result")


def run_copy(
    model: nn.Module,
    given: Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]],
    run: Callable[[nn.Module, Any, Any], _Result],
) -> _Result:
    """run(copy, args, kwargs) of an unpatched copy of the model in eval mode: on fake tensors, or
    on real ones where that takes less or fake ones cannot. `given` makes the arguments, for a model
    with a weight such as this; `run` is called again where it raised."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    args, kwargs = given(like)
    values = [t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    held = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    small = held <= _QUICK_VALUES and max(values, default=0) <= _QUICK_PIXELS
    # A real run sees the same shapes. Fake tensors import PyTorch's compiler, which takes longer.
    loaded = "torch._dynamo" in sys.modules
    if small and not loaded and not any(p.is_meta for p in model.parameters()):
        with contextlib.suppress(Exception):
            return run(_unpatched_copy(model, None), *given(like))
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        # torch logs the traceback of a fake run that fails; it is handled here
        with quiet(logging.ERROR), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            try:
                return run(_unpatched_copy(model, mode), *fake)
            finally:
                _clear_caches(model)
    except Exception as fake_error:
        # Values that decide shapes (a .item(), a boolean index) need real tensors.
        try:
            return run(_unpatched_copy(model, None), *given(like))
        except Exception as error:
            raise ProbeError(first_line(error)) from fake_error


def _clear_caches(model: nn.Module) -> None:
    """Empty the `lru_cache`s of the modules that the model's code lies in (positions of DINOv3 in
    transformers): a fake tensor in one would be a real model's."""
    names = {type(module).__module__ for module in model.modules()}
    for value in [v for name in names for v in vars(sys.modules.get(name, sys)).values()]:
        found = [value]
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                found.append(cell.cell_contents)
        for each in found:
            if isinstance(each, functools._lru_cache_wrapper):
                each.cache_clear()


def cast_to(like: Tensor, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an example on the device of a model's weight, floating ones in its dtype."""
    given: tuple[tuple[Any, ...], dict[str, Any]]
    if isinstance(example, Mapping):
        given = (), dict(example)
    elif isinstance(example, Tensor | tuple | list):
        given = ((example,) if isinstance(example, Tensor) else tuple(example)), {}
    else:
        raise TypeError(
            "example must be a tensor, a tuple of the model's arguments or a dict of named ones, "
            f"not {type(example).__name__}"
        )
    return tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda t: t.to(like.device, like.dtype if t.is_floating_point() else None), given
    )


def probe(
    model: nn.Module,
    paths: Mapping[str, bool],
    input_size: tuple[int, int, int],
    example: Example | None = None,
) -> Probe:
    """Run a copy of `model` once, on the example or on one image of `input_size`, and observe the
    modules at `paths`, which say whether each is a layer and no attention."""
    length = getattr(model, "context_length", None)
    tokens = length if isinstance(length, int) and hasattr(model, "encode_text") else None

    def given(like: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if example is not None:
            return cast_to(like, example)
        image = torch.zeros((1, *input_size), dtype=like.dtype, device=like.device)
        if tokens is None:
            return (image,), {}
        # the image tower and the text tower (open_clip)
        return (image, torch.zeros((1, tokens), dtype=torch.long, device=image.device)), {}

    def run(twin: nn.Module, args: Any, kwargs: Any) -> Probe:
        recorder = Probe(twin, paths)
        # The math path spells attention out as two products and a softmax, which it sees.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), plain_multihead(), recorder:
            twin(*args, **kwargs)
        return recorder

    return run_copy(model, given, run)


def _unpatched_copy(model: nn.Module, mode: FakeTensorMode | None) -> nn.Module:
    memo: dict[int, Any] = {}
    if mode is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            device = "cpu" if tensor.is_meta else tensor.device
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=False)
            memo[id(tensor)] = fake
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        module.__class__ = adapters.with_base(module, adapters.base_class(module))
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            # A plain function may refer to the caller's lists; deepcopy does not copy those. By its
            # own a model of transformers that has run once collects its hidden states.
            for key, hook in [*hooks.items()]:
                own = str(getattr(hook, "__module__", "")).startswith("transformers.")
                if isinstance(hook, types.FunctionType) and not own:
                    del hooks[key]
    return twin.eval()


class Probe(TorchDispatchMode):
    """Counts the model's FLOPs, and products and softmaxes for the innermost observed module."""

    def __init__(self, model: nn.Module, paths: Mapping[str, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observations = {path: Observation() for path in paths}
        self.total_flops = 0
        self._layers = paths
        self._stack: list[str] = []
        self._products: list[tuple[int, int]] = []  # (elements of the result, inner length)
        for path in paths:

            def enter(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                self._stack.append(path)
                self._products.clear()
                seen = self.observations[path]
                seen.ran = True
                seen.terms |= dict.fromkeys(_argument_terms(module, args, kwargs))

            module = model.get_submodule(path)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what a mode would be wrapped in imports PyTorch's compiler, and nothing compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else int(count(*args, **(kwargs or {}), out_val=out))
        self.total_flops += flops
        if self._stack:
            seen, name = self.observations[self._stack[-1]], func._schema.name[len("aten::") :]
            if name in _PRODUCTS:
                left = args[0] if name == "bmm" else args[1]
                self._products.append((out.numel(), left.shape[-1]))
            if name in _PRODUCTS or (name in _LAYER_PRODUCTS and self._layers[self._stack[-1]]):
                seen.flops += flops
            elif name in ("_softmax", "_safe_softmax"):
                self._softmax(out, int(args[1]))
        return out

    def _softmax(self, scores: Tensor, dim: int) -> None:
        seen = self.observations[self._stack[-1]]
        if dim not in (-1, scores.dim() - 1) or scores.dim() < 2:
            return
        queries, keys = int(scores.shape[-2]), int(scores.shape[-1])
        if seen.query_tokens is not None and queries * keys <= seen.query_tokens * (
            seen.key_tokens or 0
        ):
            return
        seen.query_tokens, seen.key_tokens = queries, keys
        seen.problems = math.prod(scores.shape[:-2])
        seen.heads = int(scores.shape[-3]) if scores.dim() > 3 else None
        lengths = [inner for size, inner in self._products if size == scores.numel()]
        seen.head_dim = lengths[-1] if lengths else None


def _argument_terms(module: nn.Module, args: Any, kwargs: Any) -> Iterator[str]:
    try:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        if value is None or name == "self":
            continue
        if name == "is_causal" and value is True:
            yield "causal"
        elif name == "need_weights" and value is True:  # these calls stay with PyTorch
            yield "returns weights"
        elif isinstance(value, Tensor | tuple | list):
            if "mask" in name:
                yield "mask"
            elif "rope" in name:
                yield "rope"
            elif "rel_pos" in name or "bias" in name:
                yield "relative bias"


class Attentions:
    """What happened in one run, by the paths of modules: what a `Watch` tells."""

    def __init__(self, model: nn.Module) -> None:
        # How many attentions each computed; of one that began in one module and ended in another,
        # the innermost that holds both. Weights that a forward returns are computed as it ends, so
        # that such a module's attention is its caller's.
        self.paths: Counter[str] = Counter()
        self.entered: set[str] = set()  # whose forward ran
        self.returning: set[str] = set()  # of these, whose weights were returned
        self._stack: list[str] = []
        for path, module in model.named_modules():

            def leave(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
                self._stack.pop()
                self.entered.add(path)
                # weights that it returns, say, and that are not computed yet
                pending = [one for one in tree_leaves(out) if type(one) is Pending]
                if self.paths[path] and any(one.made is None for one in pending):
                    self.returning.add(path)
                    count = self.paths.pop(path)
                    if self._stack:
                        self.paths[self._stack[-1]] += count

            module.register_forward_pre_hook(lambda *_, path=path: self._stack.append(path))
            module.register_forward_hook(leave, always_call=True)

    def place(self) -> tuple[str, ...]:
        """The modules whose forwards run now, outermost first."""
        return tuple(self._stack)

    def ran(self, begun: tuple[str, ...]) -> None:
        """Count an attention for the innermost module that saw all of it."""
        both = [a for a, b in zip(begun, self._stack, strict=False) if a == b]
        self.paths[both[-1] if both else ""] += 1


def watch(model: nn.Module, example: Example) -> Attentions:
    """Run a copy of the model once on the example, in eval mode and without gradients.

    Raises:
        TypeError: the example is none.
        ArgumentError: the model does not run on it.
    """

    def run(model: nn.Module, args: Any, kwargs: Any) -> Attentions:
        found = Attentions(model)
        watching = Watch("strict", dispatch.PLAIN, found)
        with torch.no_grad(), watching:
            out = model(*args, **kwargs)
        watching.close(out)
        return found

    try:
        return run_copy(model, lambda like: cast_to(like, example), run)
    except ProbeError as error:
        raise ArgumentError(
            f"example: {type(model).__name__} does not run on it: {error}"
        ) from error
