"""The ways to run a patched model that `check` judges: eager, compiled, either as a CUDA graph.

They are made as `elsa_core.profiling.runs.variants` makes what is timed: over the same weights, in
inference mode, `torch.compile(dynamic=False)`, one graph for each shape. A graph is what
`elsa_core.graphed` replays; where gradients are wanted, one of the forward and one of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.graphs import capture
from elsa_core.graphs.cache import Graphs
from elsa_core.graphs.entries import Inference, Training
from elsa_core.patching import shared_copy
from elsa_core.proof.sides import Given, Run

EAGER: Final = "eager"
GRAPH: Final = "graph"
COMPILE: Final = "compile"
COMPILED_GRAPH: Final = "compile+graph"
PATHS: Final = (EAGER, GRAPH, COMPILE, COMPILED_GRAPH)
_GRAPHS: Final = (GRAPH, COMPILED_GRAPH)
_DEFAULTS: Final = {"cuda": (EAGER, GRAPH, COMPILE)}
_MOST_PROGRAMS: Final = 1 << 16
_MOST_GRAPHS: Final = 8  # as many as `elsa_core.graphed` keeps
# What torch.compile raises where a machine lacks the compiler that it needs.
_NO_COMPILER: Final = ("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")
_copied = partial(pytree.tree_map_only, Tensor, Tensor.clone)  # of a nested value


def chosen(paths: Sequence[str] | None, device: torch.device) -> tuple[str, ...]:
    """The paths to judge, in the order of `PATHS`; None means the device's own: eager, and on CUDA
    graph and compile too.

    Raises:
        TypeError: no text and no collection.
        ArgumentError: no path, or one that does not exist.
        UnavailableError: a CUDA graph of a model that is not on a GPU.
    """
    if paths is None:
        return _DEFAULTS.get(device.type, (EAGER,))
    if isinstance(paths, str):
        paths = (paths,)
    if not isinstance(paths, Collection):
        raise TypeError(f"paths must be names of paths, not {type(paths).__name__}")
    for name in paths:
        if name not in PATHS:
            raise ArgumentError(f"paths: {name!r} is unknown; choose from {', '.join(PATHS)}")
    if not paths:
        raise ArgumentError(f"paths: none is given; choose from {', '.join(PATHS)}")
    for name in _GRAPHS:
        if name in paths and device.type != "cuda":
            raise UnavailableError(
                f"path {name} needs a CUDA GPU, and this model is on {device.type}"
            )
    return tuple(name for name in PATHS if name in paths)


def runner(name: str, model: nn.Module, *, faulty: bool = False) -> Run:
    """What runs a copy of the model by the path `name`, any but "eager"; `faulty`: with a
    deliberate error, which is a hook."""
    copied = shared_copy(model)
    if name == GRAPH and not faulty:
        # What `elsa_core.graphed` replays, and an error where it would make the model's own call,
        # as it does for hooks.
        graphs = {
            is_training: Graphs(_MOST_GRAPHS, copy_outputs=True, kind=kind)
            for is_training, kind in ((False, Inference), (True, Training))
        }

        def replayed(given: Given) -> Any:
            trains = torch.is_grad_enabled()
            with nullcontext() if trains else torch.inference_mode():
                return graphs[trains].answer(copied, *given)

        return replayed
    run = copied if name == GRAPH else torch.compile(copied, dynamic=False)
    if name != COMPILE:
        return _graphs(run, nullcontext if name == GRAPH else _compiling)

    def compiled(given: Given) -> Any:
        args, kwargs = _copied(given)
        with _compiling(), torch.inference_mode():
            return _copied(run(*args, **kwargs))

    return compiled


def _graphs(run: Callable[..., Any], capturing: Callable[[], AbstractContextManager[None]]) -> Run:
    """A graph for each shape of the arguments, made under `capturing`; its inputs are written
    before each replay."""
    graphs: dict[Any, tuple[Given, Callable[[], Any]]] = {}

    def replayed(given: Given) -> Any:
        leaves, spec = pytree.tree_flatten(given)
        key = (str(spec), *(
            (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in leaves
        ))  # fmt: skip
        with torch.inference_mode():
            if key not in graphs:
                mine: Given = _copied(given)
                with capturing():
                    replay = capture.replayed(lambda: run(*mine[0], **mine[1]))
                graphs[key] = mine, replay
            held, replay = graphs[key]
            for place, leaf in zip(pytree.tree_leaves(held), leaves, strict=True):
                if isinstance(leaf, Tensor):
                    place.copy_(leaf)
            result = replay()
            torch.cuda.synchronize()
            return _copied(result)

    return replayed


def lacks_compiler(error: BaseException | None) -> bool:
    """Whether torch.compile failed for want of a compiler on this machine."""
    while error is not None:
        names = {cls.__name__ for cls in type(error).__mro__}
        if names.intersection(_NO_COMPILER) or any(f"{n}:" in str(error) for n in _NO_COMPILER):
            return True
        error = error.__cause__
    return False


@contextmanager
def _compiling() -> Iterator[None]:
    """The compiler at work, also where it is turned off around; and no silent return to eager.

    Every shape has a program of its own, however many there are.
    """
    import torch._dynamo

    limits = torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True,
        recompile_limit=_MOST_PROGRAMS,
        accumulated_recompile_limit=_MOST_PROGRAMS,
    )
    with torch.compiler.set_stance("default"), limits:
        yield
