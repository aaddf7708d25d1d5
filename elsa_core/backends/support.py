"""What a backend is asked, how it answers, and how it offers itself to `elsa_core.dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from elsa_core.backends.partition import Partition

# The relative error of exp(scores - lse) that is left to the rounding of a large lse.
WEIGHT_ERROR = 2.0**-13


class Support(NamedTuple):
    """A backend's answer.

    `reason` says why not, or what it serves slower than it could, in words fit for both a table and
    an exception.
    """

    ok: bool
    reason: str = ""


class Request(NamedTuple):
    """What decides whether a backend can serve a call: nothing here depends on a length.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: of the tensors.
        head_dim, value_dim: D and Dv; of `linear` the channels of input and output.
        precision: one of `elsa_core.precision.PRECISIONS`, already validated against `dtype`.
        operator: the name of a record of `elsa_core.ops`.
        mask: "none", "causal", "bool" or "additive"; of packed sequences "crossed": causal, where
            keys have lengths of their own.
        layout: "dense" where the last dim of each operand is, else "strided".
        gradient: the arguments that reverse mode wants a gradient of; none in inference.
        tokens: of a window, which a model fixes, in requests of `window_attention` for gradients;
            0 where they are not known.
        ordinal: of the device among those of its type; -1 for the current one.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    precision: str
    operator: str = "attention"
    mask: str = "none"
    layout: str = "dense"
    gradient: tuple[str, ...] = ()
    tokens: int = 0
    ordinal: int = -1

    @property
    def device(self) -> torch.device:
        """The device, or its type alone."""
        if self.ordinal < 0:
            return torch.device(self.device_type)
        return torch.device(self.device_type, self.ordinal)


@dataclass(frozen=True)
class Implementation:
    """One operator by one backend.

    Attributes:
        support: whether a request can be served, and why not; may load or build once.
        run: takes the arguments of the operator `elsa::<name>` and gives its results. Compilers and
            autograd meet it as it is, so it is an overload of `torch.ops` or made of PyTorch's own
            operations. None where a backend has gradients alone, as `support` then says.
        schedule: the same arguments without the scale; how the call would be cut and merged, in
            words.
        arithmetic: what a precision means here, in words.
        direct: the kernel behind `run`, for calls that no compiler, tracer or profiler needs to
            see; of `linear` (all arguments of the operator) and of `whole` what gives None where it
            is not the faster one. None where `run` is to be called.
        by_row: the output alone of calls that a row of the shipped table gives to this backend; of
            `whole` it is `direct`.
        gradient: as `support`, for the gradients of `run`; None where autograd records `run`.
        backward: takes the arguments of `elsa::<name>_backward`; gives None where it does not
            serve the call.
        partition: as `schedule`, as a record that `elsa bench attention --trace` proves; None where
            a backend does not tell.
        state: as `run`, for results that are merged with those of other keys: its lse may be
            float64. None where `run` serves.
        takes: whether query, key and mask are such that `run` loses nothing.
        serves: whether `direct` of `whole` takes query, key, value, mask and is_causal, for
            `explain`.
        whole: serves calls of a shipped table only, and those that ask for it by name; its `run`
            is differentiated by autograd and has no lse.
        asked: serves calls that ask for it by name alone, as kernels do that were not measured.
        unasked: precisions of which it serves other calls too, if no backend before it does.
    """

    support: Callable[[Request], Support]
    run: Callable[..., Any] | None
    schedule: Callable[..., str] | str
    arithmetic: Callable[[Request], str]
    direct: Callable[..., Any] | None = None
    by_row: Callable[..., Any] | None = None
    gradient: Callable[[Request], Support] | None = None
    backward: Callable[..., Any] | None = None
    partition: Callable[..., Partition] | None = None
    state: Callable[..., Any] | None = None
    takes: Callable[..., bool] | None = None
    serves: Callable[..., bool] | None = None
    whole: bool = False
    asked: bool = False
    unasked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """A name, the type of the devices it serves (None: every one) and its operators.

    `is_built`, of a backend that compiles itself when it is asked: whether asking compiles nothing.
    """

    name: str
    device: str | None
    operators: Mapping[str, Implementation]
    is_built: Callable[[], bool] | None = None


def loses_digits(lse: Tensor, shared: Callable[[Tensor], Tensor] | None = None) -> bool:
    """Whether the rounding of some finite lse shows in the weights exp(score - lse).

    `shared` takes the answer [1] of this process, on the device, and gives those of several.
    """
    if lse.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # a graph is recorded without values: be safe
    limit = WEIGHT_ERROR / torch.finfo(lse.dtype).eps
    found = ((lse.abs() > limit) & lse.isfinite()).any().view(1)
    return bool(found if shared is None else shared(found).any())
