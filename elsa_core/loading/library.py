"""What `loading` has to know of a library of models, and how any library's models are built.

Each library is one record, listed in `libraries`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.errors import UnavailableError
from elsa_core.loading import hub
from elsa_core.loading.names import Shapes

if TYPE_CHECKING:
    from elsa_core.loading.recipe import Preprocess, Recipe
    from elsa_core.loading.weights import Weights

Size: TypeAlias = tuple[int, int]
# What a constructor raises for a recipe that it cannot follow.
BUILD_ERRORS = (
    AssertionError, AttributeError, ArithmeticError, ImportError, IndexError, KeyError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Library:
    """One library. What is None, or left at its default, it does not have."""

    name: str  # in front of the colon of MODEL, and in saved configurations
    names: Callable[[], list[str]]  # its models; UnavailableError where it is not installed
    kind: str = "model"  # what one of them is, in messages
    # of what was typed after the colon, the full name and the tag of published weights; None for
    # an unknown one
    lookup: Callable[[str], tuple[str, str | None] | None]
    hub_owner: str | None = None  # of repositories on the hub whose names are models of the library
    takes_hub_ids: bool = False  # "hf-hub:OWNER/NAME" may follow the colon
    # the published weights of a name, where it can have several
    tags: Callable[[str], Sequence[str]] | None = None

    recipe: Callable[[str, str | None], Recipe]  # the library's own, of a name and a tag
    build: Callable[[Recipe], nn.Module] | None  # the model with random weights
    # the recipe for inputs of (height, width) pixels; ArgumentError for a size that is none
    resized: Callable[[Recipe, Size], Recipe] = lambda recipe, size: recipe.at(size)
    takes_any_size: Callable[[Recipe], bool] = lambda recipe: False
    # recipes with two blocks, to be tried in order
    shallow: Callable[[Recipe], Sequence[Recipe]] = lambda recipe: ()
    # what has to be run to compare a recipe, and the settings that are compared as text
    core: Callable[[Recipe], tuple[str, Recipe]] = lambda recipe: ("", recipe)

    # a model with its published weights, and their name
    published: Callable[[Recipe], tuple[nn.Module, str]] | None = None
    # the weights of a hub repository, the preferred name first
    hub_files: tuple[str, ...] = hub.TIMM_WEIGHTS

    # arguments that a config.json implies beside `model_args`; None where it describes none of the
    # library's models; and what it takes from a model's `pretrained_cfg`
    config_args: Callable[[Mapping[str, Any], Preprocess], dict[str, Any]] | None = None
    config_keys: tuple[str, ...] = ()
    # the model of the first recipe with the tensors of a file, which are those of the second; the
    # library renames and resizes them
    converted: Callable[[Recipe, Recipe, Weights], nn.Module] | None = None
    # the recipe with classifier and channels as in the tensors' shapes, and what else could have
    # these shapes, the likeliest first, as many for each recipe
    as_in: Callable[[Recipe, Shapes], Sequence[Recipe]] = lambda recipe, shapes: (recipe,)
    # whether the names of tensors are the library's; the first is asked for all others
    marks: Callable[[Shapes], bool] = lambda shapes: False
    # the models whose tensors could have these names, and one with one block, which is built before
    # the whole
    names_like: Callable[[Shapes], list[str]] = lambda shapes: []
    one_block: Callable[[Recipe, Shapes], Recipe] = lambda recipe, shapes: recipe


def imported(library: str, package: str) -> Any:
    """The library's module; UnavailableError where it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UnavailableError(
            f"{library} is not installed: pip install {package} ({error})"
        ) from None


class UninitialisedParameters(TorchFunctionMode):
    """Skips initialisers, which are most of the time of a build: for shapes, or before a fill.
    Buffers off the meta device are computed. Numbers of a meta tensor, which older releases of timm
    ask of drop path rates, are zeros."""

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
