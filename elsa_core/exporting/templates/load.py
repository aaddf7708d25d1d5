"""Runs the model of this bundle with torch or onnxruntime, and numpy: without elsa.

From Python:

    from load import load, preprocess
    model = load()                      # or load("torchscript"), load("onnx"), load("aoti")
    outputs = model(preprocess("cat.jpg"))

From a shell:  python load.py cat.jpg [--format onnx]

Every model takes and returns numpy arrays here; `load_torch` gives the torch module itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ORDER = ("pt2", "torchscript", "onnx", "aoti")
MISSING_RUNTIME = 77
# Raster formats alone: Pillow would run Ghostscript for an EPS, whatever its name is.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Pillow warns from so many; a long thin image has more of them after resizing.
MAX_PIXELS = 89_478_485
Model = Callable[..., "list[np.ndarray[Any, Any]]"]


def manifest(bundle: Path = HERE) -> dict[str, Any]:
    """What the bundle says of itself."""
    content: dict[str, Any] = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    return content


def load(format: str | None = None, bundle: Path = HERE, *, library: bool = True) -> Model:
    """A function from numpy arrays to a list of numpy arrays.

    Args:
        format: "pt2", "torchscript", "onnx" or "aoti"; default: the first whose runtime is here.
        bundle: the directory of manifest.json.
        library: False runs model.onnx on standard operators, without the bundle's library.
    """
    facts = manifest(bundle)
    chosen = format or _first(facts)
    _file(facts, chosen)
    if chosen == "onnx":
        return _onnx(facts, bundle, library)
    import torch

    module = load_torch(chosen, bundle)
    dtype = getattr(torch, facts["model"]["dtype"])
    device = facts["model"]["device"]

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        with torch.no_grad():
            result = module(*tensors)
        return [_to_numpy(tensor) for tensor in _flat(result)]

    return run


def load_torch(format: str, bundle: Path = HERE) -> Any:
    """The torch module: "pt2", "torchscript" or "aoti". Its operators are loaded first."""
    import torch

    facts = manifest(bundle)
    file = bundle / _file(facts, format)
    load_operators(facts, bundle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each load that TorchScript is deprecated
        if format == "torchscript":
            return torch.jit.load(str(file), map_location=facts["model"]["device"])
        if format == "aoti":
            return torch._inductor.aoti_load_package(str(file))
        return torch.export.load(str(file)).module()


def _here(facts: dict[str, Any]) -> list[str]:
    return [name for name in ORDER if name in facts["artefacts"]]


def _file(facts: dict[str, Any], format: str) -> str:
    """The file of a format, or one line that names those that are here."""
    if format not in facts["artefacts"]:
        here = ", ".join(_here(facts))
        raise ValueError(f"this bundle holds no {format!r}: choose one of {here}")
    return str(facts["artefacts"][format]["file"])


def _first(facts: dict[str, Any]) -> str:
    """The first format whose runtime is installed."""
    for name in _here(facts):
        if importlib.util.find_spec("onnxruntime" if name == "onnx" else "torch"):
            return name
    runtimes = {"onnxruntime" if name == "onnx" else "torch" for name in _here(facts)}
    raise ImportError(f"this bundle needs {' or '.join(sorted(runtimes))}: install one with pip")


def load_operators(facts: dict[str, Any], bundle: Path = HERE) -> None:
    """Give torch the operators that the graphs call.

    The library serves the CPU. On a GPU the kernels are Triton's, which the package brings:
    `pip install elsa-attention` beside torch.
    """
    import torch

    if facts["model"]["device"] != "cpu":
        import elsa_core  # noqa: F401

        return
    for name in facts["operators"]:
        if not _served(torch, name):
            with _schemas_that_are_there(torch, name):
                for library in facts["artefacts_libraries"]["torch"]:
                    torch.ops.load_library(str(bundle / library))
            return


@contextlib.contextmanager
def _schemas_that_are_there(torch: Any, name: str) -> Iterator[None]:
    """Where the package is imported it has defined the operators; twice would end the process."""
    namespace, _, short = name.partition("::")
    if not hasattr(getattr(torch.ops, namespace), short):
        yield
        return
    os.environ["ELSA_SCHEMA_DEFINED_BY_PYTHON"] = "1"
    try:
        yield
    finally:
        del os.environ["ELSA_SCHEMA_DEFINED_BY_PYTHON"]


def _served(torch: Any, name: str) -> bool:
    """Whether a library that is loaded already brings this operator (the package does)."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))
    except RuntimeError:
        return False


def _onnx(facts: dict[str, Any], bundle: Path, library: bool) -> Model:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name in facts["artefacts_libraries"]["onnxruntime"] if library else ():
        options.register_custom_ops_library(str(bundle / name))
    session = onnxruntime.InferenceSession(
        str(bundle / _file(facts, "onnx")), options, ["CPUExecutionProvider"]
    )
    inputs = session.get_inputs()
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        fed = {
            item.name: np.ascontiguousarray(array, dtype=types.get(item.type))
            for item, array in zip(inputs, arrays, strict=True)
        }
        results: list[np.ndarray[Any, Any]] = session.run(None, fed)
        return results

    return run


def preprocess(image: Any, bundle: Path = HERE) -> np.ndarray[Any, Any]:
    """An image file (or PIL image) as the model's input, float32 [1, 3, height, width].

    Resized so that the centre crop keeps the share `crop_pct`, scaled to 0..1, normalised.
    """
    from PIL import Image

    given = manifest(bundle)["preprocess"]
    if given is None:
        raise ValueError("this model takes no images: see the inputs in manifest.json")
    picture = image if isinstance(image, Image.Image) else _opened(image)
    channels, height, width = given["input_size"]
    # The shorter side is resized to floor(size / crop_pct), the longer one follows.
    rows, columns = int(height / given["crop_pct"]), int(width / given["crop_pct"])
    if rows * picture.width >= columns * picture.height:
        size = (max(width, rows * picture.width // picture.height), rows)
    else:
        size = (columns, max(height, columns * picture.height // picture.width))
    if max(picture.width * picture.height, size[0] * size[1]) > MAX_PIXELS:
        raise ValueError(
            f"{picture.width} x {picture.height} pixels, {size[0]} x {size[1]} after resizing, are"
            f" more than the {MAX_PIXELS} that are read: crop the image first"
        )
    picture = picture.convert("RGB" if channels == 3 else "L")
    methods = {
        "nearest": Image.Resampling.NEAREST,
        "bilinear": Image.Resampling.BILINEAR,
        "lanczos": Image.Resampling.LANCZOS,
        "box": Image.Resampling.BOX,
        "hamming": Image.Resampling.HAMMING,
    }
    picture = picture.resize(size, methods.get(given["interpolation"], Image.Resampling.BICUBIC))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    picture = picture.crop((left, top, left + width, top + height))
    pixels = np.asarray(picture, dtype=np.float32).reshape(height, width, -1) / 255.0
    normalised = (pixels - np.float32(given["mean"])) / np.float32(given["std"])
    result: np.ndarray[Any, Any] = normalised.transpose(2, 0, 1)[None].astype(np.float32)
    return result


def _opened(image: Any) -> Any:
    """The image of a regular file: a FIFO would block, /dev/zero never ends."""
    from PIL import Image

    if isinstance(image, (str, os.PathLike)) and not stat.S_ISREG(Path(image).stat().st_mode):
        raise ValueError(f"{os.fspath(image)} is not a regular file")
    Image.init()
    return Image.open(image, formats=[name for name in IMAGE_FORMATS if name in Image.OPEN])


def _assumed(facts: dict[str, Any]) -> str:
    """One line about the preprocessing that the weights' source did not say; "" for none."""
    given = facts["preprocess"] or {}
    keys = given.get("assumed", ())
    values = ", ".join(f"{key} {given[key]}" for key in keys)
    return f"the weights did not say their preprocessing: {values} assumed" if keys else ""


def run_reference(format: str, bundle: Path, output: Path, *, library: bool = True) -> None:
    """Run the inputs of reference.npz at each of its batch sizes and write the outputs."""
    model = load(format, bundle, library=library)
    results = {}
    with np.load(bundle / "reference.npz", allow_pickle=False) as stored:
        inputs = [stored[f"input.{i}"] for i in range(len(manifest(bundle)["inputs"]))]
    for batch in manifest(bundle)["reference"]["batch_sizes"]:
        for index, array in enumerate(model(*(array[:batch] for array in inputs))):
            results[f"output.{batch}.{index}"] = array
    np.savez(output, **results)  # type: ignore[arg-type]


def _flat(value: Any) -> list[Any]:
    """The tensors of a nested result, in order."""
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _flat(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return [value]


def _to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    import torch

    plain = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (
        plain.float() if plain.dtype == torch.bfloat16 else plain
    ).numpy()
    return array


def main(arguments: Sequence[str]) -> int:
    """Run one image and print the five largest outputs, or the shapes of what comes out."""
    parser = argparse.ArgumentParser(description="Run the model of this bundle on an image.")
    parser.add_argument("image", help="an image file")
    parser.add_argument("--format", choices=ORDER, help="default: the first whose runtime is here")
    given = parser.parse_args(arguments)
    try:
        if line := _assumed(manifest()):
            print(f"warning: {line}", file=sys.stderr)
        for array in load(given.format)(preprocess(given.image)):
            if array.ndim == 2 and array.shape[0] == 1:
                for index in array[0].argsort()[::-1][:5]:
                    print(f"{index}\t{float(array[0][index]):.4f}")
            else:
                print(f"output {list(array.shape)} {array.dtype}")
    except (OSError, ValueError, ImportError, KeyError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
