"""Axes of attention scores, through every view: which part of the product's batch, left and right
operand each dimension holds.

A dimension is a tuple of atoms in order: (batch, heads) of a merged [B * H, N, M]. A view that cuts
a dimension cuts its atom in two. Dimensions of length 1 hold none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

BATCH, LEFT, RIGHT, INNER = "batch", "left", "right", "inner"


@dataclass(eq=False, slots=True)
class Atom:
    """An axis of one operand, or of both (batch, inner), or a part of one that a view cut."""

    kind: str
    size: int
    parts: tuple[Atom, Atom] | None = None
    # of all atoms: what was concluded before one may have too few of them
    cuts: ClassVar[int] = 0


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


def leaves(axis: Iterable[Atom]) -> Axis:
    """The atoms with those that were cut since replaced by their parts."""
    found: list[Atom] = []
    for atom in axis:
        if atom.parts is None:
            found.append(atom)
        else:
            found += leaves(atom.parts)
    return tuple(found)


def length(axis: Axis) -> int:
    """The length of a dimension."""
    total = 1
    for atom in axis:
        total = total * atom.size if total != 1 else atom.size
    return total


class Layout:
    """The dimensions of scores (`axes`) and of the two operands, which are multiplied over `inner`.
    Layouts of equal products are one object, so that what is concluded from one is kept in `memo`;
    None where lengths are a tracer's."""

    __slots__ = ("axes", "inner", "left", "memo", "right", "shape")

    def __init__(self, left: Axes, right: Axes, inner: Atom, axes: Axes, *, kept: bool):
        self.left, self.right, self.inner, self.axes = left, right, inner, axes
        self.shape = tuple(length(axis) for axis in axes)
        self.memo: dict[Any, Any] | None = {} if kept else None

    def known(self, key: Any, conclude: Callable[..., Any], *given: Any) -> Any:
        """conclude(*given), which depends on nothing else than `key` says."""
        memo = self.memo
        if memo is None:
            return conclude(*given)
        found = memo.get(key, memo)
        if found is memo:
            if len(memo) > _MOST:
                memo.clear()
            found = memo[key] = conclude(*given)
        return found

    def moved(self, axes: Axes) -> Layout:
        """The same scores with other dimensions."""
        make = functools.partial(Layout, kept=self.memo is not None)
        found: Layout = self.known(axes, make, self.left, self.right, self.inner, axes)
        return found


_MOST = 256  # conclusions from one layout


def product(
    labels: Sequence[Sequence[Any]], left: Sequence[int], right: Sequence[int], *, kept: bool = True
) -> Layout | None:
    """The layout of a product of tensors of such shapes; None for a product of another form."""
    sizes: dict[Any, int] = {}
    for names, shape in ((labels[0], left), (labels[1], right)):
        for name, size in zip(names, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = size
            elif size not in (1, sizes[name]):
                return None  # PyTorch has the words for it
    atoms: dict[Any, Atom] = {}
    inner: Atom | None = None
    for name, size in sizes.items():
        in_left, in_right = name in labels[0], name in labels[1]
        kind = BATCH if in_left and in_right else LEFT if in_left else RIGHT
        if name not in labels[2]:
            if kind != BATCH or inner is not None or size == 1:
                return None
            inner = atoms[name] = Atom(INNER, size)
        elif size != 1:
            atoms[name] = Atom(kind, size)
    if inner is None:
        return None
    operands = zip(labels, (left, right, [sizes[name] for name in labels[2]]), strict=True)
    one, other, axes = (
        tuple(
            (atoms[name],) if name in atoms and size != 1 else ()
            for name, size in zip(names, shape, strict=True)
        )
        for names, shape in operands
    )
    return Layout(one, other, inner, axes, kept=kept)


known_product = functools.lru_cache(maxsize=1024)(product)


def of_kind(axes: Axes, kind: str) -> Axis:
    """The atoms of one kind, in the order of these axes."""
    return tuple(atom for axis in axes for atom in leaves(axis) if atom.kind == kind)


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes of a reshape to `shape`, which may hold one -1; None where a new dimension is no
    run of whole or evenly cut atoms, where nothing is in them, and for lengths that are none."""
    rest = list(leaves(atom for axis in axes for atom in axis))
    if any(atom.size == 0 for atom in rest) or any(size < 1 and size != -1 for size in shape):
        return None
    unknown = next((i for i, size in enumerate(shape) if size == -1), len(shape))
    if any(size == -1 for size in shape[unknown + 1 :]):
        return None
    front = [_taken(rest, size, 0) for size in shape[:unknown]]
    back = [_taken(rest, size, -1) for size in reversed(shape[unknown + 1 :])]
    if None in front or None in back:
        return None
    if unknown == len(shape):
        return None if rest else tuple(front)  # type: ignore[arg-type]
    return (*front, tuple(rest), *reversed(back))  # type: ignore[arg-type]


def _taken(rest: list[Atom], size: int, end: int) -> Axis | None:
    found: list[Atom] = []
    while size != 1:
        if not rest:
            return None
        atom = rest.pop(end)
        if atom.size != size and size % atom.size != 0:
            if atom.size % size != 0:
                return None
            other = atom.size // size
            parts = [Atom(atom.kind, n) for n in ((other, size) if end else (size, other))]
            Atom.cuts += 1
            atom.parts = parts[0], parts[1]
            rest.insert(len(rest) if end else 0, parts[1 + end])
            atom = parts[end]
        found.append(atom)
        size = size // atom.size
    return tuple(found if end == 0 else reversed(found))


Steps = tuple[tuple[str, Any], ...]


def steps_to(have: Axes, want: Axes, whole: bool = True) -> Steps:
    """The views and copies that bring a tensor of the dimensions `have` to the dimensions `want`.
    Atoms that it lacks are broadcast; without `whole` a dimension of such alone has length 1."""
    if have == want:
        return ()
    steps: list[tuple[str, Any]] = []
    flat = tuple(atom for axis in have for atom in axis)
    shape = tuple(atom.size for atom in flat)
    if any(len(axis) != 1 for axis in have):
        steps.append(("reshape", shape))
    order = tuple(flat.index(atom) for axis in want for atom in axis if atom in flat)
    if order != tuple(range(len(order))):
        steps.append(("permute", order))
        shape = tuple(shape[i] for i in order)
    single: list[int] = []  # the lengths of single atoms before they are broadcast, and after
    wide: list[int] = []
    merged: list[int] = []
    for axis in want:
        filled = whole or any(atom in flat for atom in axis)
        merged.append(length(axis) if filled else 1)
        single += [atom.size if atom in flat else 1 for atom in axis]
        wide += [atom.size if filled else 1 for atom in axis]
    for name, sizes in (("reshape", single), ("expand", wide), ("reshape", merged)):
        if tuple(sizes) != shape:
            steps.append((name, tuple(sizes)))
            shape = tuple(sizes)
    return tuple(steps)


def broadcast(axes: Axes, shape: Sequence[int], want: Axes) -> Steps:
    """The same of a tensor of `shape` that broadcasts to dimensions `axes`."""
    last = axes[len(axes) - len(shape) :]
    have = tuple(leaves(axis) if n != 1 else () for axis, n in zip(last, shape, strict=True))
    return steps_to(have, want, whole=False)


def run(tensor: Tensor, steps: Steps) -> Tensor:
    for name, argument in steps:
        tensor = getattr(tensor, name)(argument)
    return tensor


@functools.lru_cache(maxsize=256)
def labels_of(equation: str | None, left: int, right: int) -> tuple[tuple[Any, ...], ...] | None:
    """Labels of the dimensions of both operands, of such ranks, and of the result of an `einsum`,
    or of a `matmul` where there is no equation; None for one that sums or repeats within one."""
    if equation is None:
        ranks = max(left, right)
        batch = tuple(range(ranks - 2))
        one, other = (*batch[ranks - left :], "i", "j"), (*batch[ranks - right :], "j", "k")
        return one, other, (*batch, "i", "k")
    given, arrow, result = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    if len(parts) != 2 or not arrow:
        return None
    # an ellipsis stands for dimensions that are counted from the right
    more = [n - len(part.replace("...", "")) for part, n in zip(parts, (left, right), strict=True)]
    more.append(max(more) if "..." in given else 0)
    found: list[tuple[Any, ...]] = []
    for part, n in zip((*parts, result), more, strict=True):
        front, dots, back = part.partition("...")
        found.append((*front, *(range(-n, 0) if dots else ()), *back))
    one, other, out = found
    if len(one) != left or len(other) != right:
        return None
    if any(len(set(labels)) != len(labels) for labels in (one, other, out)):
        return None
    return None if set(out) - {*one, *other} else (one, other, out)
