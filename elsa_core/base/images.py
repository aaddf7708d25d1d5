"""A folder of images as one tensor, prepared the way timm's evaluation transform does it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.base.files import located
from elsa_core.base.reading import open_regular
from elsa_core.errors import ArgumentError, ModelError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})

# What is decoded, whatever the name: Pillow would run Ghostscript for an EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# Pillow warns from 89 million pixels and refuses at twice that; here the warning is the limit.
MAX_PIXELS = 89_478_485
_opening = threading.Lock()


class ImageBatch(NamedTuple):
    """Images of a folder [N, C, H, W], normalised, their files, and how many were left out."""

    images: Tensor
    files: tuple[Path, ...]
    left_out: int


def read_folder(
    directory: str | os.PathLike[str],
    input_size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    limit: int | None = 64,
    **transform: Any,
) -> ImageBatch:
    """Reads the images of a folder and its sub-folders in sorted order, `limit` at most.
    ArgumentError: an argument is not usable; ModelError: no image, or one that cannot be read
    (named)."""
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit={limit}: expected a positive number of images, or None for all")
    read = reader(input_size, mean, std, **transform)
    found = image_files(directory)
    files = found if limit is None else found[:limit]
    images = torch.stack([read(file) for file in files])
    return ImageBatch(images, tuple(files), len(found) - len(files))


def image_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The images of a folder and its sub-folders, sorted."""
    top = located(directory, ModelError)
    if not top.is_dir():
        raise ModelError(f"{directory}: not a folder; give a folder that holds images")
    files = list(_walk(top))
    # A leading dot marks files that systems leave behind, such as "._photo.jpg".
    found = [f for f in files if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
    if not found:
        raise ModelError(
            f"{directory}: no image in this folder ({len(files)} other files); "
            f"expected files such as .jpg or .png"
        )
    return sorted(found)


def reader(
    input_size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    interpolation: str = "bicubic",
) -> Callable[[Path], Tensor]:
    """A function from an image file to its tensor, [C, H, W] float32; it raises ModelError for a
    file that it cannot read. ArgumentError: `input_size` is not usable.

    Args:
        input_size: (C, H, W) in pixels; C is 3 (RGB) or 1 (grey).
        mean, std: C values each, in units of [0, 1] pixels.
        crop_pct, crop_mode, interpolation: as in a timm data config.
    """
    from timm.data import create_transform

    if len(input_size) != 3 or min(input_size) < 1:
        raise ArgumentError(f"input_size={tuple(input_size)}: expected (C, H, W), all positive")
    channels, height, width = input_size
    if channels not in (1, 3):
        raise ArgumentError(
            f"input_size={tuple(input_size)}: images have 3 channels (or 1, read as grey), "
            f"this model takes {channels}; pass a tensor instead"
        )
    transform = create_transform(
        input_size=(channels, height, width), is_training=False, interpolation=interpolation,
        mean=tuple(mean), std=tuple(std), crop_pct=crop_pct, crop_mode=crop_mode,
    )  # fmt: skip
    mode = "L" if channels == 1 else "RGB"
    # timm's other crop modes scale both sides to the input.
    shrunk = (height / (crop_pct or 1.0), width / (crop_pct or 1.0))
    target = shrunk if crop_mode in (None, "center") else None
    return lambda file: _read(file, mode, transform, target)


def _walk(top: Path) -> Iterator[Path]:
    """Every file below a folder. A stack, not recursion: folders may be nested by the thousand."""
    seen: set[tuple[int, int]] = set()
    folders = [top]
    while folders:
        directory = folders.pop()
        try:
            status = directory.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            entries = sorted(directory.iterdir())
        except OSError as error:
            where = str(directory)
            raise ModelError(
                f"{where[:200]}{'...' if len(where) > 200 else ''}: cannot read this folder"
                f" ({error.strerror})"
            ) from error
        for entry in entries:
            with suppress(OSError):  # a link that leads nowhere: reading it says why
                if entry.is_dir():
                    folders.append(entry)
                    continue
            yield entry


def _read(file: Path, mode: str, transform: Any, target: tuple[float, float] | None) -> Tensor:
    from PIL import Image

    try:
        with open_regular(file) as opened:
            # Filters of warnings are the process's: threads that read put back those of others.
            with _opening, warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                Image.init()
                known = [name for name in FORMATS if name in Image.OPEN]
                image = Image.open(opened, formats=known)
            with image:
                width, height = image.size
                scale = 1.0
                if target is not None and width and height:
                    scale = max(1.0, target[0] / height, target[1] / width)
                if width * height > MAX_PIXELS:
                    raise ModelError(
                        f"{file}: {width} x {height} pixels are more than the {MAX_PIXELS} that are"
                        " read; make the image smaller"
                    )
                if scale * scale * width * height > MAX_PIXELS:
                    raise ModelError(
                        f"{file}: {width} x {height} pixels would be {width * scale:.0f} x"
                        f" {height * scale:.0f} after resizing, more than the {MAX_PIXELS} that are"
                        " read; crop the image"
                    )
                pixels = image.convert(mode)
    except ModelError:
        raise
    # Pillow's decoders raise almost anything on a damaged file: OSError, SyntaxError, ValueError,
    # struct.error, DecompressionBombError and others, so only the file can be blamed here.
    except Exception as error:
        # Pillow names the open file by its address; which one it is has been said.
        unknown = type(error).__name__ == "UnidentifiedImageError"
        reason = f"none of {', '.join(FORMATS)}" if unknown else str(error) or type(error).__name__
        raise ModelError(
            f"{file}: cannot read this image ({reason}); repair or remove it"
        ) from error
    tensor: Tensor = transform(pixels)
    return tensor
