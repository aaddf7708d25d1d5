"""What an architecture's constructor was called with, and which numbers of it no tensor shows."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, TypeAlias

from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.fit import differences, is_computed
from elsa_core.loading.libraries import build_meta, default_recipe, resized
from elsa_core.loading.recipe import BLOCKS, MAX_IMAGE_SIZE, Recipe
from elsa_core.loading.shown import Shapes
from elsa_core.loading.spec import ModelSpec

Args: TypeAlias = dict[str, Any]

HEADS = re.compile("head")
WIDTH = re.compile(r"dim|channels|chs|width|features|hidden")
# What the classifier, the channels and the image size are set by elsewhere.
_ELSEWHERE = frozenset(("num_classes", "in_chans", "img_size", "image_size", "input_size"))
# Of the thread: comparing with other models ends after it.
_SECONDS = 4.0


class _Until(TorchFunctionMode):
    """Ends a build at a time of the thread: a constructor makes tensors all the while."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if time.thread_time() > self.until:
            raise ModelError("the model takes too long to build")
        return func(*args, **(kwargs or {}))


def watched(recipe: Recipe, until: float = math.inf) -> tuple[nn.Module, Args]:
    """Build a model on the meta device, and note what its constructor was called with.

    The constructor lies behind the library's builders, whose own arguments are others. It is the
    first of a module to be called, so that watching this thread's calls ends there. Under a
    profiler written in C (cProfile before Python 3.12), which could not go on, nothing is noted.

    Args:
        recipe: of timm or torchvision.
        until: of `time.thread_time`, when the build ends.

    Returns:
        The model, and the arguments that are numbers or lists of them.

    Raises:
        ModelError: the library cannot build it, or not in time.
    """
    first: nn.Module | None = None
    found: Args = {}
    before = sys.getprofile()
    if before is not None and not callable(before):
        return build_meta(recipe), {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal first
        if event != "call" or frame.f_code.co_name != "__init__":
            return
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            return
        first = module if first is None else first
        if module is not first or frame.f_code is nn.Module.__init__.__code__:
            sys.setprofile(before)
        else:
            for key, value in {**frame.f_locals, **frame.f_locals.get("kwargs", {})}.items():
                found.setdefault(key, value)

    sys.setprofile(watch)
    try:
        with _Until(until):
            model = build_meta(recipe)
    finally:
        sys.setprofile(before)
    args: Args = {}
    for key, value in found.items() if first is model else ():
        args |= _plain(key, value)
    return model, args


def _plain(key: str, value: Any) -> Args:
    """Return an argument if it is a number or numbers; those in a timm configuration's fields."""
    if key in _ELSEWHERE or type(value) is bool:
        return {}
    if dataclasses.is_dataclass(value):
        prefix = "" if key == "cfg" else f"{key.removesuffix('_cfg')}_"
        parts = (_plain(f"{prefix}{f.name}", getattr(value, f.name))
                 for f in dataclasses.fields(value))  # fmt: skip
        return {name: number for part in parts for name, number in part.items()}
    kinds = (int, float) if "ratio" in key else (int,)
    if isinstance(value, (list, tuple)):
        return {key: list(value)} if value and all(type(n) in kinds for n in value) else {}
    return {key: value} if type(value) in kinds else {}


def with_args(recipe: Recipe, change: Args) -> Recipe:
    """Return the recipe with these arguments in the place of its own."""
    return dataclasses.replace(recipe, args={**recipe.args, **change})


def usual_size(recipe: Recipe) -> tuple[int, int]:
    """Return the image size (height, width) in pixels that the recipe's name says."""
    spec = ModelSpec(recipe.library, recipe.name, recipe.name, recipe.tag)
    return default_recipe(spec).size


def scaled(number: Any, here: int, there: int) -> Any:
    """Return number * there / here; 0 where that of a whole number is none."""
    if type(number) is float:
        return number * there / here
    product, rest = divmod(number * there, here)
    return 0 if rest else product


# --- what fits as well -------------------------------------------------------------------------


def unshown(recipe: Recipe, args: Args, shapes: Shapes, keys: Collection[str]) -> tuple[Args, bool]:
    """Return those of the arguments in whose place others fit the tensors as well.

    Twice and half of each are tried: alone, with another image size, and heads with a width that
    is given for each of them. Heads are tried as 1 too, which divides any width. That another
    number would compute something else is not tried.

    Args:
        recipe: a model of timm or torchvision that has these tensors.
        args: what its constructor is called with, of `watched`.
        shapes: of the file's tensors, by name.
        keys: the arguments to try.

    Returns:
        The arguments, and whether the image size is one of them where it is not the name's.
    """
    until = time.thread_time() + _SECONDS
    like = _Like(recipe, args, shapes)
    sized = usual_size(recipe)
    found: Args = {}
    free = sized != recipe.size and any(map(like, _other_sizes(recipe, sized)))
    for key in keys:
        # Blocks are counted by names. Widths, but those of heads, are dimensions.
        if key not in args or BLOCKS.search(key):
            continue
        if time.thread_time() > until:
            # Heads that were not compared are not shown.
            found |= {key: args[key]} if HEADS.search(key) else {}
            continue
        if WIDTH.search(key) and not HEADS.search(key):
            continue
        fit = next(filter(like, _others(recipe, args, key, sized)), None)
        if fit is not None:
            found[key] = args[key]
            free = free or (fit.size != recipe.size != sized)
    return found, free


class _Like:
    """Tells whether a recipe's model has the tensors of a file as another's has.

    A model of one block a stage, which is built in a fraction of the time, is asked first.
    """

    def __init__(self, recipe: Recipe, args: Args, shapes: Shapes) -> None:
        self.shapes = shapes
        self.usual = differences(build_meta(recipe), shapes)
        self.short: Args = {
            key: [min(n, 1) for n in value] if isinstance(value, list) else min(value, 1)
            for key, value in args.items()
            if BLOCKS.search(key) and "ratio" not in key
        }
        self.few: Shapes | None = None
        try:
            small = build_meta(with_args(recipe, self.short))
        except ElsaError:
            return
        self.few = {name: tuple(tensor.shape) for name, tensor in small.state_dict().items()} | {
            name: tuple(tensor.shape)
            for name, tensor in small.named_buffers()
            if is_computed(name) and name in shapes
        }

    def __call__(self, other: Recipe) -> bool:
        try:
            if self.few is not None:
                small = build_meta(with_args(other, self.short))
                if any(differences(small, self.few)):
                    return False
            return differences(build_meta(other), self.shapes) == self.usual
        except ElsaError:
            return False


def _others(recipe: Recipe, args: Args, key: str, usual: tuple[int, int]) -> Iterator[Recipe]:
    """Recipes with another number for one argument, and what may go with it."""
    value = args[key]
    sides = {(recipe.size[0], usual[0]), (usual[0], recipe.size[0])} if usual != recipe.size else ()
    for here, there in ((1, 2), (2, 1), *sides):
        other = _times(value, here, there)
        if other is None:
            continue
        trial = with_args(recipe, {key: other})
        yield trial
        if HEADS.search(key):
            for width in args if (here, there) in ((1, 2), (2, 1)) else ():
                less = _times(args[width], there, here) if WIDTH.search(width) else None
                if width != key and less is not None:
                    yield with_args(trial, {width: less})
            continue
        yield from _at_sizes(trial, _times(list(recipe.size), here, there), usual)
    if HEADS.search(key):
        one: Any = [1] * len(value) if isinstance(value, list) else 1
        yield from [with_args(recipe, {key: one})] if one != value else []


def _other_sizes(recipe: Recipe, usual: tuple[int, int]) -> Iterator[Recipe]:
    for here, there in ((1, 2), (2, 1)):
        yield from _at_sizes(recipe, _times(list(recipe.size), here, there), usual)


def _at_sizes(recipe: Recipe, *sizes: Any) -> Iterator[Recipe]:
    """The recipe at other sizes, where the size is an argument."""
    for size in sizes:
        if size is not None and tuple(size) != recipe.size and max(size) <= MAX_IMAGE_SIZE:
            other = resized(recipe, (size[0], size[1]))
            yield from [other] if other.args != recipe.args else []


def _times(value: Any, here: int, there: int) -> Any:
    """Whole numbers in proportion; None where one is none."""
    numbers = value if isinstance(value, list) else [value]
    if any(type(number) is not int for number in numbers):
        return None
    others = [scaled(number, here, there) for number in numbers]
    return None if not all(others) else others if isinstance(value, list) else others[0]
