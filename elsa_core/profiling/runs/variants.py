"""The ways to run one model that are compared: as loaded, fused, compiled, graphed, patched.

All of them share the model's weights; only the modules around the weights are copies.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError, ElsaError, ModelError, UnavailableError
from elsa_core.graphs import capture
from elsa_core.graphs.model import graphed as elsa_graphed
from elsa_core.measuring.memory_limit import is_out_of_memory
from elsa_core.measuring.timing import Contender
from elsa_core.patching import SWITCHES, shared_copy

GRAPH: Final = "+graph"
CONTROL: Final = "control"
BASELINES: Final = (
    "eager",  # the model as it was loaded
    CONTROL,  # the same once more: shows which differences this machine can tell
    "sdpa",  # with PyTorch's fused attention forced wherever the model has a switch for it
    "compile",  # torch.compile of the model as it was loaded
    "eager+graph",  # through elsa.graphed, as the next one
    "sdpa+graph",
    "compile+graph",  # replayed as a CUDA graph
)


def how_to(name: str) -> str:
    """What a user writes to run a model in the way `name`."""
    base = name.removesuffix(GRAPH)
    steps = ["elsa.patch(model)"] if base.startswith("patched") else []
    if base.endswith("compile"):
        mode = ', mode="reduce-overhead"' if name.endswith(GRAPH) else ""
        steps.append(f"model = torch.compile(model{mode})")
    elif name.endswith(GRAPH):
        steps.append("model = elsa.graphed(model)")
    if base == "sdpa":
        steps.insert(0, "turn the model's switch for fused attention on")
    return "; ".join(steps) or "the model as it is"


_DEFAULTS: Final = {
    "cpu": ("eager",),
    "cuda": ("eager", "sdpa", "compile", "eager+graph", "compile+graph"),
}
_DEFAULTS_TRAINING: Final = {"cpu": ("eager",), "cuda": ("eager", "eager+graph", "compile")}
# What patching is measured as beside each baseline.
_OURS: Final = {
    "compile": "patched+compile",
    "eager+graph": "patched+graph",
    "sdpa+graph": "patched+graph",
    "compile+graph": "patched+compile+graph",
}
Calling = Callable[[Callable[..., object]], Callable[[], object]]
"""Makes the call that is timed of a model or of its compiled form."""


def first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    """What a call's device, dtype, batch and image size are read from; a scalar has no batch."""
    return next(value for value in arguments if isinstance(value, Tensor) and value.ndim)


@contextlib.contextmanager
def inputs_kept(arguments: tuple[Any, ...]) -> Iterator[None]:
    """A model may write to its inputs (`x.sub_(mean)`): they hold again what they held before."""
    tensors = [each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)]
    kept = [each.clone() for each in tensors]
    try:
        yield
    finally:
        with torch.inference_mode():
            for tensor, before in zip(tensors, kept, strict=True):
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's memory counters, events and graphs are those of the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def chosen(
    names: Sequence[str] | None, device: torch.device, *, trains: bool = False
) -> tuple[str, ...]:
    """The baselines to measure, "eager" first. None: the device's; "all": every one it has."""
    names = (names,) if isinstance(names, str) else names
    cuda, defaults = device.type == "cuda", _DEFAULTS_TRAINING if trains else _DEFAULTS
    if device.type not in defaults:
        raise ArgumentError(f"device: cpu and cuda can be profiled, not {device.type}")
    if names is None:
        names = defaults[device.type]
    elif not isinstance(names, Collection):
        raise TypeError(f"baselines must be names of baselines, not {type(names).__name__}")
    elif "all" in names:
        names = [name for name in BASELINES if cuda or not name.endswith(GRAPH)]
        names = [name for name in names if not (trains and name == "compile+graph")]
    if trains and "compile+graph" in names:
        raise ArgumentError("baselines: compile+graph is for inference: no step of it is captured")
    for name in names:
        if name not in BASELINES:
            known = ", ".join((*BASELINES, "all"))
            raise ArgumentError(f"baselines: {name!r} is unknown; choose from {known}")
        if name.endswith(GRAPH) and not cuda:
            raise UnavailableError(
                f"baselines: {name} needs a CUDA GPU, and this profile runs on {device.type}"
            )
    return tuple(dict.fromkeys(("eager", *names)))


def ours(baselines: Sequence[str]) -> tuple[str, ...]:
    """The patched ways that stand beside these baselines: "patched" always."""
    return tuple(dict.fromkeys(("patched", *(_OURS[n] for n in baselines if n in _OURS))))


@dataclass(frozen=True)
class Built:
    """The contenders in order, why others were left out, and what building them has shown.

    `graph_bytes` is the memory of each CUDA graph, `first_seconds` what each took to its first
    result, compiling and capturing included, `replays` what replays a graph of `elsa.graphed`
    without copying arguments and results.
    """

    contenders: list[Contender] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    graph_bytes: dict[str, int] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    replays: dict[str, Callable[[], object]] = field(default_factory=dict)


def build(
    model: nn.Module,
    patched: nn.Module,
    inputs: tuple[Any, ...],
    names: Sequence[str],
    progress: Callable[[str, int, int], None] | None = None,
    calling: Calling | None = None,
) -> Built:
    """Make and warm up the contenders `names` of a model and of its `patched` copy.

    One that fails is left out with its reason; "eager" and "patched" raise. `calling` makes the
    calls; None: each runs its model on `inputs`.
    """
    built, compiled = Built(), dict[str, Callable[[], object]]()
    calling = calling or (lambda module: lambda: module(*inputs))
    tell = progress or (lambda *_: None)
    for i, name in enumerate(names):
        tell(name, i, len(names))
        start, base = time.perf_counter(), name.removesuffix(GRAPH)
        try:
            if base != name and "compile" not in name:
                held = elsa_graphed(cast("nn.Module", _module(base, model, patched)))
                call = calling(held)
                built.graph_bytes[name] = _first(call, held)
                built.replays.update(zip((name,), held.replays(), strict=False))
            else:
                if base not in compiled:
                    compiled[base] = calling(_module(base, model, patched))
                call = compiled[base]
                if base != name:
                    call, built.graph_bytes[name] = graphed(call)
                with torch.inference_mode():
                    call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # an asynchronous failure must show here
        except Exception as error:
            # Compilers fail in many ways, and a baseline that fails ends nothing.
            if name not in ("eager", "patched"):
                built.left_out[name] = first_line(error)
            elif isinstance(error, ElsaError) or is_out_of_memory(error):
                raise
            else:
                why = f"profile: {name} does not run on these inputs: {first_line(error)}"
                raise ModelError(why) from error
        else:
            built.contenders.append(Contender(name, call))
            built.first_seconds[name] = time.perf_counter() - start
    return built


def _first(call: Callable[[], object], held: Any) -> int:
    """Make the first call of a graphed model, captured or not at all; the memory of its graphs."""

    def reserved() -> int:
        if not torch.cuda.is_initialized():
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = reserved()
    with torch.inference_mode():
        call()
    if not held.captures:
        raise RuntimeError(held.reasons[-1] if held.reasons else "no graph was captured")
    return max(0, reserved() - before)


def _module(name: str, model: nn.Module, patched: nn.Module) -> Callable[..., object]:
    if name == CONTROL:
        return shared_copy(model)
    if name == "sdpa":
        return with_sdpa(model)
    source = patched if name.startswith("patched") else model
    if not name.endswith("compile"):
        return source
    compiled: Callable[..., object] = torch.compile(shared_copy(source), dynamic=False)
    return compiled


def with_sdpa(model: nn.Module) -> nn.Module:
    """A copy of the model with every switch of its library for fused attention turned on.

    timm sets these switches from TIMM_FUSED_ATTN when it builds a model, and leaves some classes
    eager unless that is 2.
    """
    fused = shared_copy(model)
    switches = [
        (module, switch)
        for module in fused.modules()
        for switch in SWITCHES
        if isinstance(module.__dict__.get(switch), bool)
    ]
    if not switches:
        raise ModelError("the model has no switch for fused attention")
    if all(module.__dict__[switch] for module, switch in switches):
        raise ModelError("fused attention is on already: the same as eager")
    for module, switch in switches:
        setattr(module, switch, True)
    return fused


def graphed(call: Callable[[], object]) -> tuple[Callable[[], object], int]:
    """The replay of a call, compiled say, which returns its output, and the memory that its graph
    holds at its peak."""
    before = 0

    def ready() -> None:  # the libraries' workspaces exist from here on and are not counted
        nonlocal before
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    with torch.inference_mode():
        replay = capture.replayed(call, ready)
        torch.cuda.synchronize()
    return replay, max(0, torch.cuda.max_memory_allocated() - before)


def forget_compiled() -> None:
    """Drop what torch.compile made so far: its limit of recompilations would end a long sweep in
    plain eager, without a word."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
