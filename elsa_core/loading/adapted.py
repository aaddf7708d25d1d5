"""Other arguments for an architecture whose tensors do not agree with a file's: found by trying.

One search serves every family. The architecture is built on the meta device, and the arguments that
its constructor was called with are noted. What differs between its tensors and the file's then says
which arguments to change and to what: a dimension of 96 here and 64 there, a table for windows of 7
and of 8, six blocks and two. A change is kept where fewer dimensions differ afterwards, and the
result counts only where every name and every shape agrees; nothing is resampled.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, combinations, islice, takewhile
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.constructor import HEADS, WIDTH, Args, scaled, unshown, watched, with_args
from elsa_core.loading.fit import differences, fitted
from elsa_core.loading.imagesize import problem
from elsa_core.loading.libraries import label, resized
from elsa_core.loading.recipe import BLOCKS, MAX_BLOCKS, MAX_IMAGE_SIZE, Recipe
from elsa_core.loading.shown import Shapes

# Models built for one file at most; each takes 0.01 to 0.2 s, and the files of the tests need 31.
_TRIALS = 60
_FEW = 30
# Of the thread, after which a search ends.
SECONDS = 3.0
# A missing tensor counts as this many dimensions that differ.
_WHOLE = 4
# What is tried, whatever the file says. Some constructors list all pairs of places in a window.
_MAX_WIDTH = 65_536
_MAX_WINDOW = 64
_SIZES = frozenset(("img_size", "image_size", "input_size"))
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?=\.)")  # of a block or a stage
_NESTED = 4  # numbers of a name that are looked at: no library nests stages and blocks deeper

_Counts: TypeAlias = dict[str, list[int]]


class _State(NamedTuple):
    """The best so far: what its constructor was called with, and how many dimensions differ."""

    recipe: Recipe
    args: Args
    model: nn.Module
    left: int


def adapted(
    recipe: Recipe,
    shapes: Shapes,
    image_size: tuple[int, int] | None = None,
    fixed: Collection[str] = (),
    *,
    named: bool = True,
    until: float | None = None,
) -> Recipe | None:
    """Return the recipe with the constructor's arguments that make every name and shape agree.

    Args:
        recipe: of timm or torchvision.
        shapes: of the file's tensors, by name.
        image_size: (height, width) in pixels, to settle a grid that is not square.
        fixed: arguments that the user has typed; they stay.
        named: the user has named the architecture. Else only few changes are tried, and no other
            width, which would be with the heads of any name.
        until: of `time.thread_time`, when the search ends; None for some seconds from now.

    Returns:
        None where no such arguments were found, or none with which the model runs.

    Raises:
        ModelError: they were found for a name, with another width and heads that no tensor shows.
    """
    until = time.thread_time() + SECONDS if until is None else until
    try:
        model, args = watched(recipe)
    except ElsaError:
        return None
    first = args
    names = model.state_dict().keys()
    if 2 * len(names & shapes.keys()) < min(len(names), len(shapes)):
        return None  # another family
    state = _State(recipe, args, model, _distance(model, shapes))
    trials = _TRIALS if named else _FEW
    while (fit := fitted(state.recipe, shapes, image_size)) is None:
        refused: list[Recipe] = []
        seen = [state.recipe]
        counts = [with_args(state.recipe, change) for change in _other_counts(state, shapes, fixed)]
        others: Iterator[Recipe] = chain(
            _of_other_size(state, shapes, fixed, named), _in_twos(state.recipe, refused)
        )
        if any(differences(state.model, shapes)[:2]):
            # Names tell blocks, and little else that has a number.
            others = islice(others, _FEW if named else 0)
        better = None
        for candidate in islice(chain(counts, others), trials):
            if time.thread_time() > until:
                return None
            if not _is_bounded(candidate.args) or candidate in seen:
                continue
            trials -= 1
            seen.append(candidate)
            try:
                model, args = watched(candidate, until)
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
    guessed = _guessed_heads(fit, first, shapes, fixed)
    if guessed and named:
        found = ", ".join(f"{k}={v}" for k, v in fit.args.items() if recipe.args.get(k) != v)
        raise ModelError(
            f"the file does not fit {label(recipe)}: it would with {found}, and no tensor shows"
            f" {' or '.join(guessed)}; give what it was made with (--model-kwargs"
            f" {guessed[0]}=VALUE), or name its own architecture (--arch)"
        )
    # Some models run nowhere on the meta device, and say nothing there.
    return None if guessed or (not _can_run(fit) and _can_run(recipe)) else fit


def _can_run(recipe: Recipe) -> bool:
    try:
        return problem(recipe) is None
    except ElsaError:
        return False


def _guessed_heads(
    fit: Recipe, first: Args, shapes: Shapes, fixed: Collection[str]
) -> tuple[str, ...]:
    """Return the arguments for heads that are a guess: widths or heads are not the name's.

    Published siblings differ in width, and their heads with it: those of one's name are wrong for
    another, and the number that makes a width divisible is one of several.
    """
    args = watched(fit)[1]
    changed = {key for key, value in args.items() if first.get(key) != value} - {*fixed}
    if not any(HEADS.search(k) or (WIDTH.search(k) and "mlp" not in k) for k in changed):
        return ()
    keys = [key for key in args if HEADS.search(key) and key not in fixed]
    return tuple(unshown(fit, args, shapes, keys)[0])


def _is_bounded(args: Mapping[str, Any]) -> bool:
    """True where the numbers are such as a model could have, so that trying takes no minutes."""
    for key, value in args.items():
        if key in _SIZES:
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        counts = [n for n in numbers if type(n) in (int, float)]
        most = MAX_BLOCKS
        if "window" in key:
            most = _MAX_WINDOW
        elif WIDTH.search(key) and not BLOCKS.search(key):
            most = _MAX_WIDTH
        if max(counts, default=0) > most or (BLOCKS.search(key) and sum(counts) > most):
            return False
    return True


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
        if key not in fixed and (named or not (WIDTH.search(key) or HEADS.search(key)))
    }
    own = {**dict(model.named_buffers()), **model.state_dict()}
    pairs = _pairs({name: tuple(tensor.shape) for name, tensor in own.items()}, shapes)
    sizes = [] if _SIZES & set(fixed) else _sizes(recipe, pairs)
    yield from (resized(recipe, size) for size in sizes)
    for here, there in pairs:
        for change in _changes(free, here, there):
            yield with_args(recipe, change)
            # A window may need an image that it divides.
            height, width = (scaled(side, here, there) for side in recipe.size)
            if (height, width) in sizes:
                yield resized(with_args(recipe, change), (height, width))


def _in_twos(recipe: Recipe, refused: list[Recipe]) -> Iterator[Recipe]:
    """Two changes at once that a constructor refuses one by one: a width, and heads that divide it.

    The list is read as it stands when the first is asked for.
    """
    for one, other in combinations(tuple(refused), 2):
        yield with_args(one, {k: v for k, v in other.args.items() if recipe.args.get(k) != v})


def _pairs(own: Shapes, shapes: Shapes) -> list[tuple[int, int]]:
    """Return numbers of the model and what stands in their place in the file, the commonest first.

    A dimension of a position table stands for a side: of a square, or of all offsets in one.
    """
    found: dict[tuple[int, int], int] = {}
    for name in own.keys() & shapes.keys():
        if len(own[name]) != len(shapes[name]) or not all(shapes[name]):
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
    found = ([scaled(side, *pair) for side in recipe.size] for pair in sorted(pairs)[::-1])
    sizes = dict.fromkeys((s[0], s[1]) for s in found if all(0 < n <= MAX_IMAGE_SIZE for n in s))
    changed = (resized(recipe, size) for size in sizes)
    return [r.size for r in changed if r.args != recipe.args]


def _changes(args: Args, here: int, there: int) -> Iterator[Args]:
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
            numbers = [scaled(number, here, there) for number in value]
            if all(numbers):
                yield {key: numbers}
            for i, number in enumerate(numbers):
                if number:
                    yield {key: [*value[:i], number, *value[i + 1 :]]}
        elif value != here and (other := scaled(value, here, there)):
            yield {key: other}


# --- blocks and stages -------------------------------------------------------------------------


def _other_counts(state: _State, shapes: Shapes, fixed: Collection[str]) -> Iterator[Args]:
    """Arguments that are numbers of blocks in the model, with those of the file in their place."""
    own = {name: tuple(tensor.shape) for name, tensor in state.model.state_dict().items()}
    here, there = _counts(own), _counts(shapes)
    args = {key: value for key, value in state.args.items() if key not in fixed}
    for key, value in args.items():
        listed = value if isinstance(value, list) else [value]
        found = [there[kind] for kind in here if here[kind] == listed and kind in there]
        for counts in found:
            if counts == listed:
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
        for match in islice(_NUMBER.finditer(name), _NESTED):
            children.setdefault(name[: match.start()], set()).add(int(match.group()))
    grouped: dict[str, list[tuple[list[int], int]]] = {}
    for place, numbers in children.items():
        if numbers != set(range(len(numbers))):
            continue
        order = [int(number) for number in re.findall(r"\d{1,6}", place)]
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
        found_shapes = (shapes.get(f"{place}{i}.{leaf}") for i in range(count))
        row = list(takewhile(lambda shape: shape is not None, found_shapes))
        if len(row) < count:
            continue
        starts = [i for i in range(count) if i == 0 or row[i] != row[i - 1]]
        ends = [*starts[1:], count]
        found[f"{place}#.{leaf}"] = [end - start for start, end in zip(starts, ends, strict=True)]
    return found
