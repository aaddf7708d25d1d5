"""The arguments of a call that a graph is captured of, and what tells two kinds of calls apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core import dispatch
from elsa_core.graphs import capture

CONSTANTS: Final = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
)  # fmt: skip


def _precisions() -> Iterator[Callable[[], Hashable]]:
    for place in ("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"):
        yield partial(torch._C._get_fp32_precision_getter, *place)
    try:
        torch._C._get_fp32_precision_getter("cuda", "rnn")
    except RuntimeError:  # an older PyTorch knows no precision of recurrent layers
        return
    yield partial(torch._C._get_fp32_precision_getter, "cuda", "rnn")


def _attention_backends() -> Iterator[Callable[[], Hashable]]:
    yield torch._C._get_flash_sdp_enabled
    yield torch._C._get_mem_efficient_sdp_enabled
    yield torch._C._get_math_sdp_enabled
    yield torch._C._get_cudnn_sdp_enabled
    # its name is not the same in every PyTorch that is supported
    order: Any = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is not None:
        yield lambda: tuple(order())


# Each gives what decides, beside the arguments, which kernels a call runs: PyTorch's settings, and
# what this package switches itself.
SETTINGS: Final[tuple[Callable[[], Hashable], ...]] = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
    *_precisions(),
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_accumulation, torch._C._get_deterministic_algorithms,
    torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic,
    *_attention_backends(), torch.backends.mha.get_fastpath_enabled, dispatch.switched,
)  # fmt: skip


class RefusedError(RuntimeError):
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

    def copied(self) -> Given:
        """The same with tensors of their own memory; one that is given twice stays one."""
        own = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for tensor in self.tensors()
        }
        return self._replace(leaves=[own.get(id(leaf), leaf) for leaf in self.leaves])

    def device(self) -> torch.device:
        """Raises RefusedError: no tensor, or on several devices."""
        found = {tensor.device for tensor in self.tensors()}
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
            raise RefusedError(f"an argument is a {type(leaf).__qualname__} of its own kind")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) not in CONSTANTS:
        raise RefusedError(f"an argument is a {type(leaf).__qualname__}")
    return type(leaf), repr(leaf)


def is_plain(tensor: Tensor) -> bool:
    """Whether all of a tensor is its sizes, strides, dtype and memory."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def without_cache(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, but casting weights anew: a cast that it keeps ends with the context."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    dtype = torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)
