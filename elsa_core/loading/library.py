"""What `loading` has to know of a library of models, and how any library's models are built.

Each library is one record, listed in `libraries`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ElsaError, ModelError, UnavailableError
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
    # Of what was typed after the colon, the full name and the tag of published weights; ModelError
    # for an unknown one, or None to have the close names of all libraries listed.
    lookup: Callable[[str], tuple[str, str | None] | None]
    hub_owner: str | None = None  # of repositories on the hub whose names are models of the library
    takes_hub_ids: bool = False  # "hf-hub:OWNER/NAME" may follow the colon
    has_tags: bool = False  # a name can have several published weights

    recipe: Callable[[str, str | None], Recipe]  # the library's own, of a name and a tag
    build: Callable[[Recipe], nn.Module]  # the model with random weights
    # the recipe for inputs of (height, width) pixels; ArgumentError for a size that is none
    resized: Callable[[Recipe, Size], Recipe] = lambda recipe, size: recipe.at(size)
    takes_any_size: Callable[[Recipe], bool] = lambda recipe: False
    # arguments that the constructor would take from a tag otherwise
    explicit: Callable[[Recipe], dict[str, Any]] = lambda recipe: {}
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
    # the recipe with classifier and channels as in the tensors' shapes
    as_in: Callable[[Recipe, Shapes], Recipe] = lambda recipe, shapes: recipe
    # whether the names of tensors are the library's; the first is asked for all others
    marks: Callable[[Shapes], bool] = lambda shapes: False
    # the models whose tensors could have these names, what else to build each with, the likeliest
    # first, and the same with one block, which is built before the whole
    names_like: Callable[[Shapes], list[str]] = lambda shapes: []
    variants: Callable[[Shapes], list[dict[str, Any]]] = lambda shapes: [{}]
    one_block: Callable[[Recipe, Shapes], Recipe] = lambda recipe, shapes: recipe


def imported(library: str, package: str) -> Any:
    """The library's module; UnavailableError where it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UnavailableError(
            f"{library} is not installed: pip install {package} ({error})"
        ) from None


def unknown(library: str, name: str, names: Sequence[str], kind: str = "") -> ModelError:
    """The error for a name that a library does not have, with the close ones."""
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"; close names: {', '.join(f'{library}:{c}' for c in close)}" if close else ""
    return ModelError(f"no {library} {kind}model is named {name!r}{hint}")


def check_tag(library: str, name: str, tag: str, tags: Sequence[str]) -> None:
    """Refuse a tag that no published weights have; the error lists those that there are."""
    if tag not in tags:
        known = ", ".join(sorted(tags)) if tags else "none are published"
        raise ModelError(f"{library} model {name} has no weights named {tag!r}: {known}")


def built(builder: Callable[[Recipe], nn.Module], recipe: Recipe) -> nn.Module:
    """Build the model with random weights, in eval mode; ModelError where the library cannot."""
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
