"""What `loading` has to know of a library of models, and how any library's models are built.

Each library is one record, listed in `libraries`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ArgumentError, ElsaError, ModelError, UnavailableError
from elsa_core.loading.shown import Shapes, Shown

if TYPE_CHECKING:
    from elsa_core.loading.recipe import Preprocess, Recipe
    from elsa_core.loading.recognise import Search
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
    # whether a typed architecture says how images are preprocessed
    says_preprocessing: Callable[[str], bool] = lambda arch: False

    recipe: Callable[[str, str | None], Recipe]  # the library's own, of a name and a tag
    build: Callable[[Recipe], nn.Module]  # the model with random weights
    # the recipe for inputs of (height, width) pixels; which sizes are none
    resized: Callable[[Recipe, Size], Recipe] = lambda recipe, size: recipe.at(size)
    takes_any_size: Callable[[Recipe], bool] = lambda recipe: False
    takes_squares: Callable[[Recipe], bool] = lambda recipe: False
    # arguments that the constructor would take from a tag otherwise
    explicit: Callable[[Recipe], dict[str, Any]] = lambda recipe: {}
    # recipes with two blocks, to be tried in order
    shallow: Callable[[Recipe], Sequence[Recipe]] = lambda recipe: ()
    # what has to be run to compare a recipe, and the settings that are compared as text
    core: Callable[[Recipe], tuple[str, Recipe]] = lambda recipe: ("", recipe)

    # a model with its published weights, and their name; the preprocessing of each set by full name
    published: Callable[[Recipe], tuple[nn.Module, str]] | None = None
    preprocessings: Callable[[Recipe], dict[str, Preprocess]] = lambda recipe: {}
    # the weights of a hub repository, the preferred name first
    hub_files: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")

    # arguments that a config.json implies beside `model_args`; None where it describes none of the
    # library's models; and what it takes from a model's `pretrained_cfg`
    config_args: Callable[[Mapping[str, Any], Preprocess], dict[str, Any]] | None = None
    config_keys: tuple[str, ...] = ()
    # the model of the first recipe with the tensors of a file, which are those of the second; the
    # library renames and resizes them
    converted: Callable[[Recipe, Recipe, Weights], nn.Module] | None = None
    takes_heads: bool = True  # num_heads and window_size are arguments of its constructors
    # the recipe with classifier and channels as in the tensors' shapes
    as_in: Callable[[Recipe, Shapes], Recipe] = lambda recipe, shapes: recipe
    # what the shapes show of a named model's arguments, the likeliest first
    variants: Callable[[Shapes], list[Shown]] = lambda shapes: [Shown()]
    # whether the names of tensors are the library's; the first is asked for all others
    marks: Callable[[Shapes], bool] = lambda shapes: False
    candidates: Callable[[Search], Iterable[Recipe]] | None = None  # that fit a file's tensors


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
    """Build the model with fresh random weights, in eval mode; ModelError where the library does
    not know the name or cannot follow the arguments."""
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
