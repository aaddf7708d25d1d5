"""A folder of images with their classes: one folder a class, or a file that names them."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elsa_core.base.files import located
from elsa_core.base.images import image_files
from elsa_core.base.reading import read_text
from elsa_core.errors import ArgumentError, ModelError

_READERS = 4  # threads; Pillow decodes without Python's lock
_LARGEST_FILE = 64 * 2**20
_LONGEST_LINE = 4200  # a path and a class; Python reads no longer numbers
_IMAGENET = 1000


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes.

    Attributes: `root` the folder; `files` in order; `labels` as the model counts them, -1 where the
    class is not known; `how` classes were found, in words.
    """

    root: Path
    files: tuple[Path, ...]
    labels: tuple[int, ...]
    how: str

    def name(self, index: int) -> str:
        """An image's path below the folder."""
        return self.files[index].relative_to(self.root).as_posix()

    def batches(
        self, read: Callable[[Path], Tensor], size: int, unreadable: list[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [B, C, H, W], classes int64 [B]) of `size` images, read by `read` (of
        `elsa_core.base.images.reader`); the last one has the rest. The places of images that cannot
        be read go into `unreadable`; None raises ModelError for the first one."""

        def attempt(index: int) -> Tensor | None:
            try:
                return read(self.files[index])
            except ModelError:
                if unreadable is None:
                    raise
                unreadable.append(index)
                return None

        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(self.files), size):
                places = range(start, min(start + size, len(self.files)))
                found = zip(places, pool.map(attempt, places), strict=True)
                good = [(image, self.labels[i]) for i, image in found if image is not None]
                if good:
                    images, labels = zip(*good, strict=True)
                    yield torch.stack(images), torch.tensor(labels)

    def without(self, places: Collection[int]) -> LabelledImages:
        kept = [i for i in range(len(self.files)) if i not in set(places)]
        files, labels = (self.files[i] for i in kept), (self.labels[i] for i in kept)
        return LabelledImages(self.root, tuple(files), tuple(labels), self.how)


def labelled_images(
    directory: str | os.PathLike[str],
    classes: int,
    names: Sequence[str] = (),
    annotations: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> LabelledImages:
    """Find the images of a folder and the class of each.

    Without `annotations` the folders right below `directory` are the classes, by the first of these
    that holds for all of them: names of classes (upper and lower case alike, `_` like a space),
    ImageNet's synsets (n01440764) for a model of its 1000 classes, whole numbers, or, where the
    names are not known, folders in sorted order, which must be as many as the model has classes.
    `annotations` is a text file of lines `FILE CLASS` or `FILE,CLASS`: the path below `directory`,
    and a class as folders have it; a first line that ends in no class is a header.

    `classes` counts the model's outputs, `names` are those of the classes in order, empty where
    they are not known. The most images are `limit`, taken at equal distances, so that all classes
    take part.

    Raises:
        ModelError: the folder or the file cannot be read, or holds nothing.
        ArgumentError: the classes are not those of the model; the line says how to name them.
    """
    root = located(directory, ModelError)
    if names and len(names) != classes:
        raise ArgumentError(
            f"names (--labels): {len(names)} names of classes, the model has {classes}"
        )
    files = image_files(root)
    if limit is not None and limit < len(files):
        files = [files[i * len(files) // limit] for i in range(limit)]
    paths = [file.relative_to(root).as_posix() for file in files]
    known = {_plain(name): i for i, name in enumerate(names) if name}
    if len(known) < sum(map(bool, names)):  # two are alike
        known = {}
    synsets: dict[str, int] = {}
    if classes == _IMAGENET:
        from timm.data import ImageNetInfo

        synsets = {name: i for i, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    if annotations is not None:
        path = located(annotations, ModelError)
        given = _from_file(path, classes, known, synsets)
        found = [given.get(name, given.get(name.rpartition("/")[2], -1)) for name in paths]
        if not any(label >= 0 for label in found):
            raise ArgumentError(f"{path} (--annotations) names no image of {root}: {paths[0]}")
        return LabelledImages(root, tuple(files), tuple(found), f"classes from {path}")
    folders = [name.partition("/")[0] for name in paths]
    if not all("/" in name for name in paths):
        raise ArgumentError(
            f"{root} (--images) has images outside of class folders: put each into the folder of "
            "its class, or name their classes in a file (--annotations)"
        )
    numbers, how = _numbered(root, sorted(set(folders)), classes, known, synsets)
    return LabelledImages(root, tuple(files), tuple(numbers[folder] for folder in folders), how)


def _numbered(
    root: Path, folders: Sequence[str], classes: int, known: Mapping[str, int],
    synsets: Mapping[str, int],
) -> tuple[Mapping[str, int], str]:  # fmt: skip
    """The class of each folder, and how it was found."""
    if all(_plain(folder) in known for folder in folders):
        return {folder: known[_plain(folder)] for folder in folders}, "folders are names of classes"
    if all(folder in synsets for folder in folders):
        return synsets, "folders are ImageNet's synsets"
    if all(folder.isdecimal() for folder in folders):
        largest = max(folders, key=int)
        if int(largest) >= classes:
            raise ArgumentError(
                f"{root}: folder {largest} is no class of the model, which has 0 to {classes - 1}"
            )
        return {folder: int(folder) for folder in folders}, "folders are numbers of classes"
    if known:
        wrong = next(folder for folder in folders if _plain(folder) not in known)
        raise ArgumentError(
            f"{root}: folder {wrong[:60]!r} is none of the model's classes ({next(iter(known))!r}, "
            "...): name the folders by them or by their numbers, or give other names (--labels)"
        )
    if len(folders) != classes:
        raise ArgumentError(
            f"{root} has {len(folders)} class folders ({folders[0]}, ...), the model {classes} "
            "classes without names: name the folders by the classes' numbers, or give --labels"
        )
    how = "folders are classes in sorted order, since the model has no names"
    return {folder: i for i, folder in enumerate(folders)}, how


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _from_file(
    path: Path, classes: int, known: Mapping[str, int], synsets: Mapping[str, int]
) -> dict[str, int]:
    """The class of each file that a line names: the first two columns of CSV, else the last word is
    the class."""
    text = read_text(path, _LARGEST_FILE).removeprefix("\ufeff")
    found: dict[str, int] = {}
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, line in lines:
        if len(line) > _LONGEST_LINE:
            raise ArgumentError(f"{path} (--annotations), line {number}: too long for a path")
        if "," in line:
            name, given = [*next(csv.reader([line])), ""][:2]
        else:
            name, _, given = line.rpartition("\t" if "\t" in line else " ")
        name, given = name.strip().removeprefix("./"), given.strip()
        as_number = int(given) if given.isdecimal() and int(given) < classes else None
        label = known.get(_plain(given), synsets.get(given) if as_number is None else as_number)
        if label is not None:
            found[name] = label
        elif number > lines[0][0] or given.isdecimal():  # else it is a header
            raise ArgumentError(
                f"{path} (--annotations), line {number}: {given[:60]!r} is no class, 0 to"
                f" {classes - 1}"
            )
    if not found:
        raise ArgumentError(f"{path} (--annotations) holds no line of a file and its class")
    return found
