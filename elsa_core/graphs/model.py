"""`graphed`: a model whose eager calls are replays of CUDA graphs, in inference and in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.base import calls
from elsa_core.errors import ArgumentError
from elsa_core.graphs import capture
from elsa_core.graphs.cache import Graphs
from elsa_core.graphs.entries import Inference, Training

_PARALLEL: Final = ("DistributedDataParallel", "DataParallel")
_SHARDED: Final = ("FullyShardedDataParallel", "FSDPModule")


def graphed(model: nn.Module, *, shapes: int = 8, copy_outputs: bool = True) -> GraphedModel:
    """The model with its eager calls as CUDA graphs, in inference and in training.

    The first call with arguments of some shapes captures a graph, in five runs of the forward;
    later ones copy their arguments into its memory and replay it. A call that wants gradients has a
    second graph, of its backward, which follows its forward before the next one, and runs once.
    Autocast, GradScaler, accumulation, clipping, any optimizer, frozen parameters, dropout and
    batch norm work as they do without.

    A replay reads the parameters where they lie. Every call looks for what a replay would not
    follow, and captures anew: tensors, attributes, modules or hooks replaced, a patch, `train()`
    and `eval()`, `requires_grad`. A forward runs no Python when it is replayed.

    Where a graph could be wrong, or cannot be, the call is the model's own, and one warning says
    why:

    - a model on another device, hooks, values that the host waits for;
    - random numbers of the host, and in inference of the device;
    - an argument that is written to or kept, and in inference a buffer that is written to;
    - sizes or numbers that are new in many calls in a row, until they come again;
    - attributes, lists or dicts of the model that its forward changes; more than 16384 of them;
    - a tensor that no module holds; arguments that are neither tensors nor numbers nor texts;
    - two forwards before a backward, activation checkpointing, older gradients held elsewhere.

    In training mode without gradients, within another capture and under a compiler, tracer,
    transform or dispatch mode it is so without a warning. Graphed calls on one device run one
    behind the other, whatever their streams and threads.

    Args:
        model: any module, patched or not. It is not changed and not copied. For DDP put the graphed
            model into `DistributedDataParallel`.
        shapes: graphs kept at most, of the last ones used, of inference and of training each.
        copy_outputs: False returns the graph's own memory, which the next call overwrites.

    Returns:
        A module around the model: its `state_dict`, `train`, `to` and copies are as ever; copies
        and pickles hold no graphs. `clear()` drops the graphs and their memory.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ArgumentError: `shapes` is no positive integer; the model is compiled, scripted, graphed or
            wrapped by DDP or FSDP.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(shapes, int) or isinstance(shapes, bool) or shapes < 1:
        raise ArgumentError(f"shapes must be a positive integer, not {shapes!r}")
    for module in model.modules():
        if isinstance(module, GraphedModel):
            raise ArgumentError("model: it is or holds a graphed model already")
        names = {cls.__name__ for cls in type(module).__mro__}
        if names.intersection(_PARALLEL):
            raise ArgumentError(
                "model: put the graphed model into DistributedDataParallel, not the other way round"
            )
        if names.intersection(_SHARDED):
            raise ArgumentError(
                "model: FSDP gathers parameters in hooks, which no graph calls; train it eagerly"
            )
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise ArgumentError(
                "model: graphs are captured of eager models; of a compiled one torch.compile "
                "captures them itself with mode='reduce-overhead'"
            )
    return GraphedModel(model, shapes, copy_outputs)


class GraphedModel(nn.Module):
    """What `graphed` returns; `model` is the model itself."""

    def __init__(self, model: nn.Module, shapes: int, copy_outputs: bool) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._graphs = Graphs(shapes, copy_outputs, Inference)
        self._steps = Graphs(shapes, copy_outputs, Training, self._graphs.warned)
        self.register_load_state_dict_pre_hook(_prefixed)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own result for its own arguments."""
        replica = "_is_replica" in self.__dict__  # of DataParallel, which shares this one's graphs
        if replica or calls.traced() or capture.BACKEND.is_capturing():
            return self.model(*args, **kwargs)
        if torch.is_grad_enabled():
            given = pytree.tree_leaves((args, kwargs))
            wants = any(isinstance(each, Tensor) and each.requires_grad for each in given)
            if wants or any(each.requires_grad for each in self.model.parameters()):
                return self._steps.call(self.model, args, kwargs)
        if self.model.training:
            return self.model(*args, **kwargs)
        return self._graphs.call(self.model, args, kwargs)

    def clear(self) -> None:
        """Drop every graph and its memory, and what is known of calls that no graph can hold."""
        self._graphs.clear()
        self._steps.clear()

    @property
    def captures(self) -> int:
        """How many calls have graphs now, of inference and of training."""
        return len(self._graphs.entries) + len(self._steps.entries)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why calls were the model's own, each reason once."""
        return tuple({**self._graphs.warned, **self._steps.warned})

    def replays(self) -> tuple[Callable[[], object], ...]:
        """The replays of the graphs of inference, without copies of arguments and results."""
        return tuple(entry.replay for entry in self._graphs.entries.values())

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
