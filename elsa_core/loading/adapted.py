"""Other arguments for an architecture whose tensors do not agree with a file's: found by trying.

One search serves every family. The architecture is built on the meta device, and the arguments that
its constructor was called with are noted. What differs between its tensors and the file's then says
which arguments to change and to what: a dimension of 96 here and 64 there, a table for windows of 7
and of 8, six blocks and two. A change is kept where fewer dimensions differ afterwards, and the
result counts only where every name and every shape agrees; nothing is resampled.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Iterator
from itertools import chain, combinations, islice
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from elsa_core.errors import ElsaError
from elsa_core.loading.fit import differences, fitted
from elsa_core.loading.libraries import build_meta, resized
from elsa_core.loading.recipe import MAX_BLOCKS, MAX_IMAGE_SIZE, Recipe
from elsa_core.loading.shown import Shapes

# Models built for one file at most; each takes 0.01 to 0.2 s.
_TRIALS = 200
_FEW = 30
# A missing tensor counts as this many dimensions that differ.
_WHOLE = 4
# What the classifier, the channels and the image size are set by elsewhere.
_ELSEWHERE = frozenset(("num_classes", "in_chans", "img_size", "image_size", "input_size"))
_WIDTH = re.compile(r"dim|channels|width|heads")
_NUMBER = re.compile(r"\d+(?=\.)")  # of a block or a stage

_Args: TypeAlias = dict[str, Any]
_Counts: TypeAlias = dict[str, list[int]]


class _State(NamedTuple):
    """The best so far: what its constructor was called with, and how many dimensions differ."""

    recipe: Recipe
    args: _Args
    model: nn.Module
    left: int


def adapted(
    recipe: Recipe,
    shapes: Shapes,
    image_size: tuple[int, int] | None = None,
    fixed: Collection[str] = (),
    *,
    named: bool = True,
) -> Recipe | None:
    """Return the recipe with the constructor's arguments that make every name and shape agree.

    Args:
        recipe: of timm or torchvision.
        shapes: of the file's tensors, by name.
        image_size: (height, width) in pixels, to settle a grid that is not square.
        fixed: arguments that the user has typed; they stay.
        named: the user has named the architecture. Else only few changes are tried, and no other
            width, which would be with the heads of any name.

    Returns:
        None where no such arguments were found.
    """
    try:
        model, args = _watched(recipe)
    except ElsaError:
        return None
    names = model.state_dict().keys()
    if 2 * len(names & shapes.keys()) < min(len(names), len(shapes)):
        return None  # another family
    state = _State(recipe, args, model, _distance(model, shapes))
    trials = _TRIALS if named else _FEW
    while (fit := fitted(state.recipe, shapes, image_size)) is None:
        refused: list[Recipe] = []
        counts = [_with(state.recipe, change) for change in _other_counts(state, shapes, fixed)]
        others: Iterator[Recipe] = chain(
            _of_other_size(state, shapes, fixed, named), _in_twos(state.recipe, refused)
        )
        if any(differences(state.model, shapes)[:2]):
            # Names tell blocks, and little else that has a number.
            others = islice(others, _FEW if named else 0)
        better = None
        for candidate in islice(chain(counts, others), trials):
            trials -= 1
            try:
                model, args = _watched(candidate)
            except ElsaError:
                refused.append(candidate)
                continue
            left = _distance(model, shapes)
            if left < state.left:
                better = _State(candidate, args, model, left)
                break
        if better is None:
            return None
        state = better
    heads = {key: value for key, value in fit.args.items() if "head" in key and key not in fixed}
    one = {key: [1] * len(value) if isinstance(value, list) else 1 for key, value in heads.items()}
    # Where one head has the same shapes, the number that made a width divisible is a guess.
    return None if one and fitted(_with(fit, one), shapes) is not None else fit


def _watched(recipe: Recipe) -> tuple[nn.Module, _Args]:
    """Build a model on the meta device, and note what its constructor was called with.

    The constructor lies behind the library's builders, whose own arguments are others. It is the
    first of a module to be called, so that watching this thread's calls ends there. Under a
    profiler written in C (cProfile before Python 3.12), which could not go on, nothing is noted.
    """
    first: nn.Module | None = None
    found: _Args = {}
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
        model = build_meta(recipe)
    finally:
        sys.setprofile(before)
    args: _Args = {}
    for key, value in found.items() if first is model else ():
        args |= _plain(key, value)
    return model, args


def _plain(key: str, value: Any) -> _Args:
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


def _distance(model: nn.Module, shapes: Shapes) -> int:
    """Return how many dimensions differ; 0 where names and shapes agree."""
    own = {**dict(model.named_buffers()), **model.state_dict()}
    missing, unexpected, wrong = differences(model, shapes)
    unlike = (
        sum(a != b for a, b in zip(own[name].shape, shapes[name], strict=True))
        if own[name].ndim == len(shapes[name])
        else _WHOLE
        for name in wrong
    )
    return _WHOLE * (len(missing) + len(unexpected)) + sum(unlike)


def _of_other_size(
    state: _State, shapes: Shapes, fixed: Collection[str], named: bool
) -> Iterator[Recipe]:
    """Recipes with one change each: the image size first, then what other numbers may stand for."""
    recipe, model = state.recipe, state.model
    free = {
        key: value
        for key, value in state.args.items()
        if key not in fixed and (named or not _WIDTH.search(key))
    }
    own = {**dict(model.named_buffers()), **model.state_dict()}
    pairs = _pairs({name: tuple(tensor.shape) for name, tensor in own.items()}, shapes)
    sizes = [] if "img_size" in fixed else _sizes(recipe, pairs)
    yield from (resized(recipe, size) for size in sizes)
    for here, there in pairs:
        for change in _changes(free, here, there):
            yield _with(recipe, change)
            # A window may need an image that it divides.
            height, width = (_scaled(side, here, there) for side in recipe.size)
            if (height, width) in sizes:
                yield resized(_with(recipe, change), (height, width))


def _with(recipe: Recipe, change: _Args) -> Recipe:
    return dataclasses.replace(recipe, args={**recipe.args, **change})


def _in_twos(recipe: Recipe, refused: list[Recipe]) -> Iterator[Recipe]:
    """Two changes at once that a constructor refuses one by one: a width, and heads that divide it.

    The list is read as it stands when the first is asked for.
    """
    for one, other in combinations(tuple(refused), 2):
        yield _with(one, {k: v for k, v in other.args.items() if recipe.args.get(k) != v})


def _pairs(own: Shapes, shapes: Shapes) -> list[tuple[int, int]]:
    """Return numbers of the model and what stands in their place in the file, the commonest first.

    A dimension of a position table stands for a side: of a square, or of all offsets in one.
    """
    found: dict[tuple[int, int], int] = {}
    for name in own.keys() & shapes.keys():
        if len(own[name]) != len(shapes[name]):
            continue
        for dims in zip(own[name], shapes[name], strict=True):
            if dims[0] == dims[1]:
                continue
            for here, there in zip(*map(_sides, dims), strict=True):
                if here and there and here != there:
                    found[here, there] = found.get((here, there), 0) + 1
    return sorted(found, key=lambda pair: (-found[pair], pair))


def _sides(dim: int) -> tuple[int, ...]:
    """The number itself, and n of n^2, n^4, 2n - 1 and (2n - 1)^2; 0 for none."""
    root = _root(dim)
    return dim, root, _root(root), (dim + 1) // 2 * (dim % 2), (root + 1) // 2 * (root % 2)


def _root(number: int) -> int:
    root = math.isqrt(number)
    return root if root * root == number else 0


def _sizes(recipe: Recipe, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the image sizes that the pairs make of the recipe's."""
    # The largest side first: those of later stages are rounded.
    found = ([_scaled(side, *pair) for side in recipe.size] for pair in sorted(pairs)[::-1])
    sizes = dict.fromkeys((s[0], s[1]) for s in found if all(0 < n <= MAX_IMAGE_SIZE for n in s))
    changed = (resized(recipe, size) for size in sizes)
    return [r.size for r in changed if r.args != recipe.args]


def _scaled(number: Any, here: int, there: int) -> Any:
    """Return number * there / here; 0 where that of a whole number is none."""
    if type(number) is float:
        return number * there / here
    scaled, rest = divmod(number * there, here)
    return 0 if rest else scaled


def _changes(args: _Args, here: int, there: int) -> Iterator[_Args]:
    """Each argument that holds the one number with the other in its place, then in proportion."""
    for key, value in args.items():
        if isinstance(value, list):
            places = [i for i, number in enumerate(value) if number == here]
            each = [[i] for i in places] if len(places) > 1 else []
            for among in [places, *each] if places else []:
                yield {key: [there if i in among else n for i, n in enumerate(value)]}
        elif value == here and type(value) is int:
            yield {key: there}
    for key, value in args.items():
        if isinstance(value, list):
            scaled = [_scaled(number, here, there) for number in value]
            if all(scaled):
                yield {key: scaled}
            for i, number in enumerate(scaled):
                if number:
                    yield {key: [*value[:i], number, *value[i + 1 :]]}
        elif value != here and (other := _scaled(value, here, there)):
            yield {key: other}


# --- blocks and stages -------------------------------------------------------------------------


def _other_counts(state: _State, shapes: Shapes, fixed: Collection[str]) -> Iterator[_Args]:
    """Arguments that are numbers of blocks in the model, with those of the file in their place."""
    own = {name: tuple(tensor.shape) for name, tensor in state.model.state_dict().items()}
    here, there = _counts(own), _counts(shapes)
    args = {key: value for key, value in state.args.items() if key not in fixed}
    for key, value in args.items():
        listed = value if isinstance(value, list) else [value]
        found = [there[kind] for kind in here if here[kind] == listed and kind in there]
        for counts in found:
            if counts == listed or max(counts) > MAX_BLOCKS:
                continue
            if not isinstance(value, list):
                yield from [{key: counts[0]}] if len(counts) == 1 else []
            elif len(counts) == len(value):
                yield {key: counts}
            else:
                # Other stages: every argument with a number for each.
                yield {
                    **{k: _long(v, len(counts)) for k, v in args.items()
                       if isinstance(v, list) and len(v) == len(value)},
                    key: counts,
                }  # fmt: skip


def _long(numbers: list[int], length: int) -> list[int]:
    return (numbers + numbers[-1:] * length)[:length]


def _counts(shapes: Shapes) -> _Counts:
    """Return how many blocks there are: by stage where names tell stages, else by equal width.

    The names of the result say what was counted: the place with # for its numbers, and the tensor
    whose shape tells one stage from the next.
    """
    children: dict[str, set[int]] = {}
    for name in shapes:
        for match in _NUMBER.finditer(name):
            children.setdefault(name[: match.start()], set()).add(int(match.group()))
    grouped: dict[str, list[tuple[list[int], int]]] = {}
    for place, numbers in children.items():
        if numbers != set(range(len(numbers))):
            continue
        order = [int(number) for number in re.findall(r"\d+", place)]
        grouped.setdefault(re.sub(r"\d+", "#", place), []).append((order, len(numbers)))
    found = {kind: [count for _, count in sorted(each)] for kind, each in grouped.items()}
    for place, numbers in children.items():
        if numbers == set(range(len(numbers))) and not re.search(r"\d", place):
            found |= _runs(place, len(numbers), shapes)
    return found


def _runs(place: str, count: int, shapes: Shapes) -> _Counts:
    """Return how many blocks in a row have one shape, for each tensor that every block has."""
    first = f"{place}0."
    found: _Counts = {}
    for name in shapes:
        if not name.startswith(first):
            continue
        leaf = name[len(first) :]
        row = [shapes.get(f"{place}{i}.{leaf}") for i in range(count)]
        if None in row:
            continue
        starts = [i for i in range(count) if i == 0 or row[i] != row[i - 1]]
        ends = [*starts[1:], count]
        found[f"{place}#.{leaf}"] = [end - start for start, end in zip(starts, ends, strict=True)]
    return found
