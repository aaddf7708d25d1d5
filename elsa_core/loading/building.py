"""How any library's models are built: errors in words, and shapes alone on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ArgumentError, ElsaError, ModelError, UnavailableError
from elsa_core.loading.recipe import Recipe

# What a constructor raises for a recipe that it cannot follow.
BUILD_ERRORS = (
    AssertionError, AttributeError, ArithmeticError, ImportError, IndexError, KeyError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def built(builder: Callable[[Recipe], nn.Module], recipe: Recipe) -> nn.Module:
    """Build the model with fresh random weights, in eval mode.

    Raises:
        ModelError: the library does not know the name or cannot follow the arguments.
        UnavailableError: the library, or one that this model needs, is not installed or offline.
    """
    try:
        with quiet():
            return builder(recipe).eval()
    except ElsaError:
        raise
    except ImportError as error:
        raise UnavailableError(f"{recipe.name} needs a package: {first_line(error)}") from None
    except BUILD_ERRORS as error:
        raise ModelError(
            f"{recipe.library} cannot build {recipe.name}: {first_line(error)}"
        ) from error


class UninitialisedParameters(TorchFunctionMode):
    """Skips initialisers, which are most of the time of a build: for shapes, or before a fill.

    Parameters are left as allocated and meta tensors as they are; buffers elsewhere are computed.
    Numbers of a meta tensor, which older releases of timm ask of drop path rates, are zeros.
    """

    SKIPPED = frozenset(
        (
            *("add_", "bernoulli_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_"),
            *("normal_", "sub_", "uniform_", "zero_"),
            # of torch.nn.init, which pass themselves with their arguments by name
            *("constant_", "kaiming_normal_", "kaiming_uniform_"),
        )
    )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in self.SKIPPED:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, nn.Parameter) or getattr(tensor, "is_meta", False):
                return tensor
        if func in (torch.Tensor.item, torch.Tensor.tolist) and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").tolist()
        return func(*args, **(kwargs or {}))


def checked_device(device: str | torch.device) -> torch.device:
    """The device of a name, which must be one of this machine that holds weights."""
    if not isinstance(device, str | int | torch.device):
        raise TypeError(f"device must be text or a torch.device, not {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        line = first_line(error)
        raise ArgumentError(f"device (--device) {device!r} is unknown: {line}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UnavailableError("device cuda is not available here: use --device cpu")
        if found.index is not None and found.index >= count:
            raise UnavailableError(f"device {found} is not there: this machine has {count}")
    elif found.type == "mps" and not torch.backends.mps.is_available():
        raise UnavailableError("device mps is not available here: use --device cpu")
    elif found.type == "meta":
        raise ArgumentError("device (--device) meta holds no weights: use cpu or cuda")
    return found
