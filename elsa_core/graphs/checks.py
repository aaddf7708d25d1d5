"""What the graph of a call depends on: arguments, settings, the model, and what a run touches.

A replay reads the memory that the capture read and runs none of the model's Python. It follows
writes to that memory; anything else that has changed must be noticed by `Guards`: a tensor
elsewhere, of another dtype, size or stride; another attribute, module, class or hook; training
mode. Not noticed is what no module holds as an attribute, in a dict, list or deque: fields of other
objects, class attributes and globals that are no tensors.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core import dispatch
from elsa_core.graphs import capture

CONSTANTS: Final = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
)  # fmt: skip
_DTYPE, _WANTS = attrgetter("dtype"), attrgetter("requires_grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)
# What every module has and a forward does not read.
_BASE = frozenset(nn.Module().__dict__) - {"training"}
_NESTED = (dict, OrderedDict, defaultdict, list, tuple, deque)
MOST_NESTED: Final = 16384
OTHER_LEAF: Final = "it reads a tensor that wants a gradient and is no parameter"
_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_, _ATEN._to_copy, _ATEN.to, _ATEN._copy_from}


def _settings() -> Iterator[Callable[[], Hashable]]:
    """Each gives what decides, beside the arguments, which kernels a call runs: PyTorch's settings,
    and what this package switches itself."""
    yield from (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype)
    for place in ("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"):
        yield partial(torch._C._get_fp32_precision_getter, *place)
    with suppress(RuntimeError):  # an older PyTorch knows no precision of recurrent layers
        torch._C._get_fp32_precision_getter("cuda", "rnn")
        yield partial(torch._C._get_fp32_precision_getter, "cuda", "rnn")
    yield from (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        torch._C._get_cublas_allow_fp16_accumulation, torch._C._get_deterministic_algorithms,
        torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark,
        torch._C._get_cudnn_deterministic, torch._C._get_flash_sdp_enabled,
        torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
        torch._C._get_cudnn_sdp_enabled,
    )  # fmt: skip
    # its name is not the same in every PyTorch that is supported
    order: Any = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is not None:
        yield lambda: tuple(order())
    yield from (torch.backends.mha.get_fastpath_enabled, dispatch.switched)


SETTINGS: Final = tuple(_settings())


class RefusedError(RuntimeError):
    """A call that no graph is to hold; the message says why."""


class Given(NamedTuple):
    """The arguments of a call, flat, and the tensors among them; `tree`: the number of positional
    tensors, or a TreeSpec."""

    leaves: Sequence[Any]
    tree: Any
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Calls with positional tensors alone, which most are, need no walk through a tree."""
        if not kwargs and all(type(each) is Tensor for each in args):
            return cls(args, len(args), args)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        return cls(leaves, tree, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.tree, int):
            return tuple(leaves), {}
        args, kwargs = pytree.tree_unflatten(list(leaves), self.tree)
        return args, kwargs

    def copied(self) -> Given:
        """The same with tensors of their own memory; one that is given twice stays one."""
        own = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for tensor in self.tensors
        }
        leaves = [own.get(id(leaf), leaf) for leaf in self.leaves]
        return self._replace(leaves=leaves, tensors=[own[id(each)] for each in self.tensors])

    def device(self) -> torch.device:
        """Raises RefusedError: no tensor, or on several devices."""
        found = {tensor.device for tensor in self.tensors}
        if len(found) != 1:
            devices = ", ".join(sorted(map(str, found)))
            raise RefusedError(
                f"the arguments are on {devices}" if found else "no argument is a tensor"
            )
        (device,) = found
        if device.type != capture.BACKEND.device_type:
            raise RefusedError(f"the arguments are on {device}: CUDA graphs need an NVIDIA GPU")
        return device

    def key(self, device: torch.device) -> Hashable:
        """All that a graph of the call depends on, besides the model; raises RefusedError."""
        kinds: list[Hashable] = []
        for leaf in self.leaves:
            kind = type(leaf)
            if isinstance(leaf, Tensor):
                if not is_plain(leaf):
                    raise RefusedError(f"an argument is a {kind.__qualname__} of its own kind")
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device,
                              leaf.requires_grad))  # fmt: skip
            elif kind not in CONSTANTS:
                raise RefusedError(f"an argument is a {kind.__qualname__}")
            else:
                kinds.append((kind, repr(leaf)))
        same = [*map(id, self.tensors)]
        autocast = None
        if torch.is_autocast_enabled(device.type):
            autocast = torch.get_autocast_dtype(device.type)
        return (
            self.tree if isinstance(self.tree, int) else str(self.tree),
            tuple(kinds),
            tuple(map(same.index, same)) if len(set(same)) < len(same) else None,
            autocast,
            tuple(ask() for ask in SETTINGS),
        )


def is_plain(tensor: Tensor) -> bool:
    """Whether all of a tensor is its sizes, strides, dtype and memory."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


@contextmanager
def as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers and the device's random state, which the runs of a capture change.
    Within, autocast casts weights anew: a cast that it keeps ends with its context."""
    casting: AbstractContextManager[Any] = nullcontext()
    if torch.is_autocast_enabled(device.type):
        casting = torch.autocast(device.type, cache_enabled=False)
    random_numbers = capture.BACKEND.random_numbers(device)
    offset = random_numbers.get_offset()
    storages = {storage_of(each): each.untyped_storage() for each in model.buffers()}
    kept = [(each, each.clone()) for each in storages.values()]
    try:
        with casting:
            yield
    finally:
        for storage, value in kept:
            storage.copy_(value)  # no write for autograd: nothing has changed
        random_numbers.set_offset(offset)


def storage_of(tensor: Tensor) -> int:
    """The number of a tensor's memory, among all memory alive."""
    return int(tensor.untyped_storage()._cdata)


def saved_tensor_hooks() -> Any:
    """What packs the tensors that autograd saves now; None where nothing does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def flat_results(result: Any, device: torch.device) -> tuple[list[Any], Any]:
    """What a call returned as leaves and their tree; raises RefusedError."""
    leaves, tree = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in CONSTANTS:
            raise RefusedError(f"it returns a {type(leaf).__qualname__}")
        if isinstance(leaf, Tensor) and (not is_plain(leaf) or leaf.device != device):
            raise RefusedError("it returns a tensor on another device or of its own kind")
    return leaves, tree


class Guards:
    """A model as it is now, to be compared with what it is later; with `backward` its backward is
    in the graph too, which runs hooks of its own. `alive` is asked before a replay, which reads the
    memory; `hold` may be asked while it runs. `complete`: whether all dicts and lists are compared,
    `MOST_NESTED` at most; `tensors`: those compared."""

    def __init__(self, model: nn.Module, *, backward: bool = False) -> None:
        self._modules = list(model.modules())
        self._types = [type(module) for module in self._modules]
        own = [vars(module) for module in self._modules]
        tables = _TABLES + (_BACKWARD_HOOKS if backward else ())
        self._dicts = own + [each[name] for each in own for name in tables]
        self._rows: list[Sequence[Any]] = []  # lists, tuples and deques
        seen = {id(each) for each in self._dicts}
        self.complete, self._most = True, len(seen) + MOST_NESTED
        for each in own:
            self._add((value for name, value in each.items() if name not in _BASE), seen)
        # most are empty, which is asked of all of them at once
        self._empty: list[Any] = [each for each in (*self._dicts, *self._rows) if not each]
        self._filled: list[Any] = [each for each in (*self._dicts, *self._rows) if each]
        self._counts = [*map(len, self._filled)]
        pairs = [
            (each, name)
            for number, each in enumerate(self._dicts)
            for name, value in each.items()
            if number >= len(own) or name not in _BASE or (name in tables and value)
        ]
        self._owners, self._names = [each for each, _ in pairs], [name for _, name in pairs]
        self._values = [*self._now()]  # keeps them, so that no other object has their ids
        self.tensors = [v for v in self._values if isinstance(v, Tensor) and is_plain(v)]
        self._addresses = [*map(Tensor.data_ptr, self.tensors)]
        self._layouts = self._layout()
        # Types, dtypes, sizes and strides compared at once, in a quarter of the time that Python
        # takes. It knows modes too, and may say no where nothing has changed.
        self._fast: Callable[..., bool] = lambda *_: False
        tensors = self.tensors
        sizes, strides = ([list(ask(t)) for t in tensors] for ask in (Tensor.size, Tensor.stride))
        with suppress(Exception):  # no part of PyTorch that stays as it is
            kind: Any = torch._C._dynamo.guards.TensorGuards
            found = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            found.check(*tensors)
            self._fast = found.check

    def _add(self, values: Iterable[Any], seen: set[int]) -> None:
        """Also the dicts, lists, tuples and deques within attributes, where models keep caches."""
        for value in values:
            if type(value) not in _NESTED or id(value) in seen:
                continue
            if len(seen) >= self._most:
                self.complete = False
                return
            seen.add(id(value))
            if isinstance(value, dict):
                self._dicts.append(value)
                self._add(value.values(), seen)
            else:
                self._rows.append(value)
                self._add(value, seen)

    def _now(self) -> Iterator[Any]:
        named = map(dict.__getitem__, self._owners, self._names)
        return chain(named, chain.from_iterable(self._rows))

    def _layout(self) -> list[Any]:
        held = self.tensors
        wants = [*map(_WANTS, held)] if torch.is_grad_enabled() else []
        return [*map(Tensor.size, held), *map(Tensor.stride, held), *map(_DTYPE, held), *wants]

    def alive(self) -> bool:
        """Whether every tensor is where it was."""
        return [*map(Tensor.data_ptr, self.tensors)] == self._addresses

    def hold(self) -> bool:
        """Whether nothing else has changed that a forward may read."""
        try:
            if (
                any(self._empty)
                or [*map(len, self._filled)] != self._counts
                or [*map(type, self._modules)] != self._types
            ):
                return False
            if not all(map(is_, self._now(), self._values)):
                now = [*self._now()]
                # Another number or text that is equal is no change: a forward may set such in
                # every call.
                if not all(a is b or _equal(a, b) for a, b in zip(now, self._values, strict=True)):
                    return False
                self._values = now
            return self._fast(*self.tensors) or self._layout() == self._layouts
        except (KeyError, RuntimeError):  # another thread changes a deque just now
            return False


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) in CONSTANTS and repr(a) == repr(b)


def why_not(model: nn.Module, device: torch.device, *, backward: bool = False) -> str:
    """Why a graph of the model on a device could be wrong, as far as its modules say; or empty."""
    hooks = _HOOKS + (_BACKWARD_HOOKS if backward else ())
    for path, module in model.named_modules():
        if any(getattr(module, name) for name in hooks):
            return f"{path or 'the model'} has hooks, and a replay calls none"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{path or 'the model'} is compiled"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not is_plain(tensor):
            return f"{name} is a {type(tensor).__qualname__} of its own kind"
        if tensor.device != device:
            return f"{name} is on {tensor.device} and the input on {device}"
    return ""


def check_state(
    guards: Guards, targets: Sequence[Tensor], reads: Reads | None = None,
    slopes: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Raises RefusedError: what the model holds is not the same before every call, or of `reads`
    something is in the memory of none of the tensors that are held."""
    if not guards.complete:
        raise RefusedError(f"its modules hold more than {MOST_NESTED} dicts and lists")
    if not (guards.alive() and guards.hold()):
        raise RefusedError(
            "its forward changes what the model holds (an attribute, a list or a dict)"
        )
    own = {storage_of(target) for target in targets}
    if any(storage_of(tensor) in own for tensor in guards.tensors):
        raise RefusedError("the model keeps an argument, which a replay would overwrite")
    held = (*targets, *slopes, *guards.tensors)
    if reads is not None and not reads.outer.keys() <= {storage_of(tensor) for tensor in held}:
        raise RefusedError("it reads a tensor that is no attribute of its modules")


class Reads(TorchDispatchMode):
    """Notes the tensors that operators read on `device` and the call did not make, `outer`, by
    their storages. It may write to tensors of `writable`, buffers of a model that trains. `reason`:
    why a graph of the call could be wrong; empty where nothing was seen."""

    def __init__(self, device: torch.device, writable: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self._device = device
        self._writable = {storage_of(tensor) for tensor in writable}
        self._made: set[int] = set()  # storages; outer ones are never freed here: no number is both
        self.outer: dict[int, Tensor] = {}
        self._hooks = saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.reason:
            try:
                self._look(func, args, kwargs, result)
            except (NotImplementedError, RuntimeError):  # a tensor without a storage
                self.reason = f"{func} works on tensors that are not plain"
        return result

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = (
            [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), result)
        )
        if func is _ATEN.lift_fresh.default:  # torch.tensor has made it
            self._made.add(storage_of(given[0]))
        if any(not is_plain(tensor) for tensor in (*given, *made)):
            self.reason = f"{func} works on tensors that are not plain"
            return
        for tensor in given:
            number = storage_of(tensor)
            if number not in self._made:
                self.outer.setdefault(number, tensor)
                if tensor.device != self._device:
                    self.reason = f"it reads a tensor on {tensor.device}"
        for i, argument in enumerate(func._schema.arguments):
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = pytree.tree_leaves(written)
                numbers = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
                if not numbers <= self._made | self._writable:
                    self.reason = f"{func} writes to a tensor that the call did not make"
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.reason = "it draws from a random generator of its own"
        if saved_tensor_hooks() is not self._hooks:
            self.reason = (
                "it sets hooks for saved tensors (activation checkpointing, offloading), which no "
                "graph calls; torch's checkpointing also resets random states in its backward"
            )
        self._made.update({storage_of(tensor) for tensor in made} - self.outer.keys())
        # a copy from or to the host is recorded with addresses that the host may free
        here = {tensor.device == self._device for tensor in made}
        for tensor in given:
            crosses = (tensor.device == self._device) not in here if here else False
            number = tensor.device != self._device and tensor.dim() == 0  # a kernel's argument
            if crosses and not (number and func.overloadpacket not in _COPIES):
                self.reason = "it copies between the host and the GPU"


def watched(
    run: Callable[[], object], device: torch.device, writable: Iterable[Tensor] = (), *,
    draws: bool = False,
) -> Reads:  # fmt: skip
    """One run, and what it read; RefusedError: a replay could differ. `draws`: it may draw."""

    def state() -> Any:
        # of the host, where it is not the device's
        host = None if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
        return (random.getstate(), host), capture.BACKEND.random_numbers(device).get_offset()

    before, reads = state(), Reads(device, writable)
    with reads:
        run()
    after = state()
    if before[0] != after[0]:
        raise RefusedError("it draws random numbers on the host")
    if before[1] != after[1] and not draws:
        raise RefusedError("it draws random numbers")
    if reads.reason:
        raise RefusedError(reads.reason)
    return reads
