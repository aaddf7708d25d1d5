"""`graphed`: a model whose eager calls for inference are replays of CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core import calls
from elsa_core.errors import ArgumentError
from elsa_core.graphs.capture import Cuda
from elsa_core.graphs.guards import MOST_NESTED, Guards, why_not
from elsa_core.graphs.reads import Reads, is_plain, storage_of
from elsa_core.graphs.settings import SETTINGS
from elsa_core.messages import first_line

_LOG = logging.getLogger("elsa")
_WARM_UPS: Final = 2  # besides the one that is watched and the one of the capture
_FEW_REPLAYS: Final = 4
_MOST_LOST: Final = 4
_MOST_KNOWN: Final = 1024
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Graphs of one device share cuBLAS's workspaces, and a process captures one graph at a time.
_LOCK = threading.RLock()
BACKEND: Any = Cuda()


def graphed(model: nn.Module, *, shapes: int = 8, copy_outputs: bool = True) -> GraphedModel:
    """The model with its eager inference as CUDA graphs, for small batches on a GPU.

    The first call with arguments of some shapes captures a graph, later ones copy their arguments
    into its memory and replay it. That first call runs the forward five times (two warm-ups, one
    run that is watched, one before the capture and the capture itself); one that is refused runs it
    up to five times before the model's own call. A state that the forward keeps sees all of them.

    A replay reads the parameters where they lie, so it follows writes to them. Every call looks for
    what it would not follow (tensors, attributes, modules or hooks replaced, a patch, `train()` and
    `eval()`, what `elsa_core.freeze` keeps) and captures anew. Autocast, grad mode, PyTorch's
    settings of precision and determinism, and registered backends have graphs of their own.

    A call is the model's own, and one warning says why, where a graph could be wrong or cannot be:
    a model on another device; gradients wanted (use `torch.inference_mode`); hooks; random
    numbers; a buffer or argument written to; attributes, lists or dicts of the model that its
    forward changes; an argument that the model keeps; a tensor read that no module holds; values
    awaited by the host; more than 16384 dicts and lists in a model; arguments that are neither
    tensors nor numbers nor texts. In training mode, within another capture and under a compiler,
    tracer, transform or dispatch mode it is so without a warning.

    A forward runs no Python when it is replayed: its prints and changes of globals are left out.
    Graphed calls on one device run one behind the other, whatever their streams and threads.

    Args:
        model: any module, patched or not. It is not changed and not copied.
        shapes: graphs kept at most, of the last ones used. They share one pool of memory.
        copy_outputs: False returns the graph's own memory, which the next call overwrites.

    Returns:
        A module around the model: its `state_dict`, `train`, `to` and copies are as ever; copies
        and pickles hold no graphs. `clear()` drops the graphs and their memory.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ArgumentError: `shapes` is no positive integer; the model is compiled, scripted or graphed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(shapes, int) or isinstance(shapes, bool) or shapes < 1:
        raise ArgumentError(f"shapes must be a positive integer, not {shapes!r}")
    for module in model.modules():
        if isinstance(module, GraphedModel):
            raise ArgumentError("model: it is or holds a graphed model already")
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise ArgumentError(
                "model: graphs are captured of eager models; of a compiled one torch.compile "
                "captures them itself with mode='reduce-overhead'"
            )
    return GraphedModel(model, shapes, copy_outputs)


class GraphedModel(nn.Module):
    """What `graphed` returns.

    Attributes:
        model: the model itself.
    """

    def __init__(self, model: nn.Module, shapes: int, copy_outputs: bool) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._graphs = Graphs(shapes, copy_outputs)
        self.register_load_state_dict_pre_hook(_prefixed)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own result for its own arguments."""
        if self.model.training or calls.traced() or BACKEND.is_capturing():
            return self.model(*args, **kwargs)
        return self._graphs.call(self.model, args, kwargs)

    def clear(self) -> None:
        """Drop every graph and its memory, and what is known of calls that no graph can hold."""
        self._graphs.clear()

    @property
    def captures(self) -> int:
        """How many graphs are held now."""
        return len(self._graphs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.load_state_dict(*args, **kwargs)


def _prefixed(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """The names of `state_dict`, as a module that holds a graphed one reads them."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}model.{name.removeprefix(prefix)}"] = state_dict.pop(name)


class _RefusedError(Exception):
    """A call that no graph is to hold; the message says why."""


class Given(NamedTuple):
    """The arguments of a call, flat.

    Attributes:
        leaves: tensors and constants.
        tree: how they are nested: the number of positional tensors, or a TreeSpec.
    """

    leaves: Sequence[Any]
    tree: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        if not kwargs and all(type(each) is Tensor for each in args):
            return cls(args, len(args))
        return cls(*pytree.tree_flatten((args, kwargs)))

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.tree, int):
            return tuple(leaves), {}
        args, kwargs = pytree.tree_unflatten(list(leaves), self.tree)
        return args, kwargs

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def device(self) -> torch.device:
        """Raises _RefusedError: no tensor, or on several devices."""
        found = {tensor.device for tensor in self.tensors()}
        if len(found) != 1:
            devices = ", ".join(sorted(map(str, found)))
            raise _RefusedError(
                f"the arguments are on {devices}" if found else "no argument is a tensor"
            )
        (device,) = found
        if device.type != BACKEND.device_type:
            raise _RefusedError(f"the arguments are on {device}: CUDA graphs need an NVIDIA GPU")
        return device

    def key(self, device: torch.device) -> Hashable:
        """All that a graph of the call depends on, besides the model; raises _RefusedError."""
        same = [*map(id, self.tensors())]
        autocast = None
        if torch.is_autocast_enabled(device.type):
            autocast = torch.get_autocast_dtype(device.type)
        return (
            self.tree if isinstance(self.tree, int) else str(self.tree),
            tuple(map(_kind, self.leaves)),
            tuple(map(same.index, same)) if len(set(same)) < len(same) else None,
            autocast,
            tuple(ask() for ask in SETTINGS),
        )


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        if not is_plain(leaf):
            raise _RefusedError(f"an argument is a {type(leaf).__qualname__} of its own kind")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if type(leaf) not in _CONSTANTS:
        raise _RefusedError(f"an argument is a {type(leaf).__qualname__}")
    return type(leaf), repr(leaf)


class _Entry:
    """A captured call: its arguments' memory, its replay, its results, the model as it was."""

    def __init__(self, model: nn.Module, given: Given, device: torch.device, pool: Any) -> None:
        own = {id(tensor): tensor.clone() for tensor in given.tensors()}
        held = [own.get(id(leaf), leaf) for leaf in given.leaves]
        self.given, self.replays = given._replace(leaves=held), 0
        self._targets = self.given.tensors()
        args, kwargs = given.arguments(held)
        result: list[Any] = [None]

        def run() -> None:
            result[0] = model(*args, **kwargs)

        with _without_cache(device):
            for _ in range(_WARM_UPS):
                run()
            self.guards = Guards(model)  # before other runs: they show what a forward changes
            reads = _watched_run(run, device)
            self._check_state()
            try:
                self._replay = BACKEND.captured(run, pool, device)
            except RuntimeError as error:
                raise _RefusedError(f"a graph cannot hold it: {first_line(error)}") from error
        self._check_state()  # also what only the capture changes: its memory is the graph's
        outer = (*self._targets, *self.guards.tensors, *self.guards.frozen.tensors)
        if reads.outside(outer):
            raise _RefusedError("it reads a tensor that is no attribute of its modules")
        self._results, self._tree = pytree.tree_flatten(result[0])
        for leaf in self._results:
            if not isinstance(leaf, Tensor) and type(leaf) not in _CONSTANTS:
                raise _RefusedError(f"it returns a {type(leaf).__qualname__}")
            if isinstance(leaf, Tensor) and (not is_plain(leaf) or leaf.device != device):
                raise _RefusedError("it returns a tensor on another device or of its own kind")

    def _check_state(self) -> None:
        """Raises _RefusedError: what the model holds is not the same before every call."""
        if not self.guards.complete:
            raise _RefusedError(f"its modules hold more than {MOST_NESTED} dicts and lists")
        if not self.guards.all_hold():
            raise _RefusedError(
                "its forward changes what the model holds (an attribute, a list or a dict)"
            )
        own = {storage_of(target) for target in self._targets}
        if any(storage_of(tensor) in own for tensor in self.guards.tensors):
            raise _RefusedError("the model keeps an argument, which a replay would overwrite")

    def run(self, given: Given, copy_outputs: bool) -> Any:
        """The results for other arguments of the same kind."""
        self.replays += 1
        for target, leaf in zip(self._targets, given.tensors(), strict=True):
            target.copy_(leaf)
        self._replay()
        found = self._results
        if copy_outputs:
            found = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in found]
        return pytree.tree_unflatten(list(found), self._tree)


def _without_cache(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, but casting weights anew: a cast that it keeps ends with the context."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    dtype = torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def _watched_run(run: Callable[[], None], device: torch.device) -> Reads:
    """One run, and what it read; raises _RefusedError where a replay could differ from it."""
    before = BACKEND.random_state(device), torch.get_rng_state()
    with Reads(device) as reads:
        run()
    after = BACKEND.random_state(device), torch.get_rng_state()
    if before[0] != after[0] or not torch.equal(before[1], after[1]):
        raise _RefusedError("it draws random numbers")
    if reads.reason:
        raise _RefusedError(reads.reason)
    return reads


class Graphs:
    """The graphs of one model, the one used last at the end. Copies and pickles are empty."""

    def __init__(self, shapes: int, copy_outputs: bool) -> None:
        self._most, self._copy_outputs = shapes, copy_outputs
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._lost: Counter[Hashable] = Counter()  # graphs dropped after few replays
        self._warned: set[str] = set()
        self._device: torch.device | None = None  # of all entries
        self._pool: Any = None

    def __reduce__(self) -> Any:
        return Graphs, (self._most, self._copy_outputs)

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be at its end
            if self._entries and not BACKEND.is_capturing():
                self._drop(*self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop everything."""
        with _LOCK:
            self._drop(*self._entries)
            self._refused.clear()
            self._lost.clear()

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result: of a replay, or of its own call."""
        try:
            return self._graphed(model, args, kwargs)
        except _RefusedError as refusal:
            reason = str(refusal)
        if reason not in self._warned and len(self._warned) < _MOST_KNOWN:
            self._warned.add(reason)
            _LOG.warning("graphed: such calls run without a CUDA graph: %s", reason)
        return model(*args, **kwargs)

    def _graphed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = Given.of(args, kwargs)
        device = given.device()
        if torch._C._len_torch_function_stack():
            raise _RefusedError("a TorchFunctionMode is active (a default device is one)")
        if torch.nn.modules.module._has_any_global_hook():
            raise _RefusedError("hooks of all modules are set, and a replay calls none")
        if torch.is_grad_enabled() and calls.differentiates(*given.tensors(), *model.parameters()):
            raise _RefusedError("gradients are wanted: call it under torch.inference_mode()")
        key = given.key(device)
        with _LOCK:
            if key in self._refused:
                raise _RefusedError(self._refused[key])
            entry = self._entries.get(key)
            if entry is not None:
                BACKEND.order(device)
                same = entry.given.tree == given.tree and entry.guards.alive()
                result = entry.run(given, self._copy_outputs) if same else None
                if same and entry.guards.hold():  # asked while the GPU is at work
                    self._entries.move_to_end(key)
                    return result
                self._lose(key)
                stale = [k for k, e in self._entries.items() if not e.guards.all_hold()]
                self._drop(*stale)  # they would keep what the model no longer has
            entry = self._captured(key, model, given, device)
            return entry.run(given, self._copy_outputs)

    def _captured(
        self, key: Hashable, model: nn.Module, given: Given, device: torch.device
    ) -> _Entry:
        """A new graph, in the place of the one that was not used for longest."""
        reason = why_not(model, device)
        if reason:
            raise _RefusedError(reason)
        if device != self._device:
            self._drop(*self._entries)
        while len(self._entries) >= self._most:
            self._lose(next(iter(self._entries)))
        if not self._entries:
            self._pool, self._device = BACKEND.pool(device), device
        try:
            if self._lost[key] >= _MOST_LOST:
                raise _RefusedError(
                    f"its graphs were dropped after few replays: more than shapes={self._most} "
                    "take turns, or the model changes between calls"
                )
            BACKEND.order(device)
            entry = _Entry(model, given, device, self._pool)
        except _RefusedError as refusal:
            if len(self._refused) >= _MOST_KNOWN:
                self._refused.clear()
            self._refused[key] = str(refusal)
            raise
        self._entries[key] = entry
        return entry

    def _lose(self, key: Hashable) -> None:
        """Drop a graph; where that happens again and again, capturing is not worth its time."""
        few = self._entries[key].replays < _FEW_REPLAYS
        if len(self._lost) >= _MOST_KNOWN:
            self._lost.clear()
        self._lost[key] = self._lost[key] + 1 if few else 0
        self._drop(key)

    def _drop(self, *keys: Hashable) -> None:
        if keys and self._device is not None:
            BACKEND.wait(self._device)
        for key in keys:
            del self._entries[key]
