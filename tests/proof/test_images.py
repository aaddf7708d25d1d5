"""Folders of images: what timm's own transform gives, and what a user may have in a folder."""

import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elsa_core.base.images import read_folder, reader
from elsa_core.errors import ArgumentError, ModelError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def write(path: Path, width: int = 50, height: int = 40, mode: str = "RGB", seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


def test_same_as_timm_transform(tmp_path: Path) -> None:
    from timm.data import create_transform

    file = write(tmp_path / "a.png", 61, 47)
    for mode in ("center", "squash", "border"):
        how = {"crop_pct": 0.9, "crop_mode": mode, "interpolation": "bicubic"}
        got = read_folder(tmp_path, (3, 32, 32), MEAN, STD, **how).images
        transform = create_transform((3, 32, 32), mean=MEAN, std=STD, **how)
        with Image.open(file) as image:
            expected = transform(image.convert("RGB"))
        assert got.shape == (1, 3, 32, 32) and got.dtype == torch.float32
        assert torch.equal(got[0], expected)


def test_sorted_recursive_and_ignored(tmp_path: Path) -> None:
    write(tmp_path / "b" / "z.JPG", seed=1)
    write(tmp_path / "a.png", seed=2)
    write(tmp_path / "c.webp", seed=3)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._a.png").write_bytes(b"left by a file system")
    batch = read_folder(tmp_path, (3, 16, 24), MEAN, STD)
    names = [str(file.relative_to(tmp_path)) for file in batch.files]
    assert names == ["a.png", str(Path("b") / "z.JPG"), "c.webp"]
    assert batch.left_out == 0 and batch.images.shape == (3, 3, 16, 24)
    few = read_folder(tmp_path, (3, 16, 16), MEAN, STD, limit=2)
    assert len(few.files) == 2 and few.left_out == 1


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "CMYK", "1"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    write(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"), mode=mode)
    tensor = read_folder(tmp_path, (3, 16, 16), MEAN, STD).images
    assert tensor.shape == (1, 3, 16, 16) and bool(tensor.isfinite().all())


def test_grey_model(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    assert read_folder(tmp_path, (1, 16, 16), (0.5,), (0.2,)).images.shape == (1, 1, 16, 16)
    with pytest.raises(ArgumentError, match="12"):
        read_folder(tmp_path, (12, 16, 16), (0.5,), (0.2,))


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "link", "long link"])
def test_broken_image_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a.png")
    bad = write(tmp_path / "broken.png", 200, 200)
    if damage == "truncated":
        bad.write_bytes(bad.read_bytes()[:2000])
    elif damage == "text":
        bad.write_text("not an image")
    elif damage == "empty":
        bad.write_bytes(b"")
    else:
        bad.unlink()
        bad.symlink_to(tmp_path / ("nowhere.png" if damage == "link" else "x" * 300))
    with pytest.raises(ModelError, match=r"broken\.png") as error:
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("side", "words"), [(12_000, "pixels"), (30_000, "bomb")])
def test_decompression_bomb_is_refused(tmp_path: Path, side: int, words: str) -> None:
    """By its header: the file of 100 bytes holds no pixels."""
    size = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    )
    (tmp_path / "big.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    with pytest.raises(ModelError, match=rf"big\.png.*{words}"):
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)


def test_threads_leave_the_filters_of_warnings_as_they_were(tmp_path: Path) -> None:
    """Decompression bombs were ignored in the whole process after `elsa_core.evaluate`."""
    files = [write(tmp_path / f"{i}.png", 300, 300) for i in range(64)]
    read = reader((3, 32, 32), MEAN, STD)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(read, files))) == len(files)
    assert list(warnings.filters) == before


def test_a_name_starts_no_interpreter(tmp_path: Path) -> None:
    """Pillow looks at the content: an EPS that is called .png was given to Ghostscript."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n0 0 20 20 rectfill\n"
    (tmp_path / "a.png").write_bytes(eps)
    with pytest.raises(ModelError, match=r"a\.png: cannot read this image \(none of JPEG, PNG"):
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)


def test_a_fifo_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ModelError, match=r"a\.png cannot be read: it is a FIFO"):
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)
    (tmp_path / "a.png").unlink()
    (tmp_path / "b.png").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=r"b\.png cannot be read: it is a device"):
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)


@pytest.mark.parametrize(("width", "height"), [(1, 60_000), (60_000, 1)])
def test_pixels_after_resizing_are_bounded(tmp_path: Path, width: int, height: int) -> None:
    """The shorter side is resized to the input's: 60 000 pixels became 3.7 thousand million."""
    Image.new("L", (width, height)).save(tmp_path / "thin.png")
    with pytest.raises(ModelError, match=r"thin\.png: .* after resizing, more than") as caught:
        read_folder(tmp_path, (3, 224, 224), MEAN, STD, crop_pct=0.9)
    assert "\n" not in str(caught.value)


def test_folders_nested_beyond_the_recursion_limit(tmp_path: Path) -> None:
    folders = [tmp_path]
    for _ in range(1100):
        folders.append(folders[-1] / "d")
        folders[-1].mkdir()
    file = write(folders[-1] / "a.png")
    assert read_folder(tmp_path, (3, 16, 16), MEAN, STD).files == (file,)
    file.unlink()
    for folder in reversed(folders[1:]):  # pytest removes folders by recursion
        folder.rmdir()


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no image"):
        read_folder(tmp_path, (3, 16, 16), MEAN, STD)
    with pytest.raises(ModelError, match="not a folder"):
        read_folder(tmp_path / "missing", (3, 16, 16), MEAN, STD)
    file = write(tmp_path / "a.png")
    with pytest.raises(ModelError, match="not a folder"):
        read_folder(file, (3, 16, 16), MEAN, STD)
    for limit in (0, -1):
        with pytest.raises(ArgumentError, match="limit"):
            read_folder(tmp_path, (3, 16, 16), MEAN, STD, limit=limit)
    with pytest.raises(ArgumentError, match="input_size"):
        read_folder(tmp_path, (3, 0, 16), MEAN, STD)


def test_links_in_a_loop(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "a.png")
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "twin").symlink_to(tmp_path / "sub", target_is_directory=True)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    batch = read_folder(tmp_path, (3, 16, 16), MEAN, STD)
    assert len(batch.files) == 1
