"""Runs the model of this bundle with torch, onnxruntime or openvino, and numpy: without elsa.

    from load import load, preprocess
    model = load()     # or load("torchscript"), load("onnx"), load("onnx", device="cpu"), ...
    outputs = model(preprocess("cat.jpg"))

From a shell:  python load.py cat.jpg FOLDER ... [--format onnx] [-o out.csv]
Models take and return numpy arrays here; `load_torch` gives the torch module itself.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import importlib.util
import io
import json
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ != "__main__" or importlib.util.find_spec("numpy"):  # else `main` says what is missing
    import numpy as np

HERE = Path(__file__).resolve().parent
# The exact formats first: onnx-int8 approximates, and is taken where it is asked for.
ORDER = ("pt2", "torchscript", "onnx", "aoti", "onnx-int8")
CUDA = "CUDAExecutionProvider"
NO_OPENVINO = "OpenVINO reads no functions: `elsa export --onnx-mode standard` is for it."
# Raster formats alone: Pillow would run Ghostscript for an EPS, whatever its name is.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Pillow warns from so many; a long thin image has more of them after resizing.
MAX_PIXELS = 89_478_485
Model = Callable[..., "list[np.ndarray[Any, Any]]"]


def manifest(bundle: Path = HERE) -> dict[str, Any]:
    """What the bundle says of itself."""
    return dict(json.loads((bundle / "manifest.json").read_text(encoding="utf-8")))


def load(
    format: str | None = None, bundle: Path = HERE, *,
    library: bool = True, runtime: str = "", device: str = "",
) -> Model:  # fmt: skip
    """A function from numpy arrays to a list of numpy arrays.

    Args:
        format: one of `ORDER`; default: the first whose runtime is here.
        bundle: the directory of manifest.json.
        library: False runs model.onnx on standard operators, without the bundle's library.
        runtime: "onnxruntime" or "openvino" for ONNX; default: the first that is here.
        device: "cpu" or "cuda" (ONNX Runtime's CUDA provider); default: the model's own.
    """
    facts = manifest(bundle)
    own = facts["model"]["device"]
    # ONNX alone runs on another device too
    order = ORDER if device in ("", own) else ("onnx", *ORDER)
    here = [name for name in order if name in facts["artefacts"]]
    chosen = format or next((name for name in here if not _missing(facts, name)), here[-1])
    path = bundle / _file(facts, chosen)
    if line := _missing(facts, chosen):
        raise ImportError(line)
    runtime = runtime or runtime_of(facts, chosen)
    if runtime == "openvino":
        if device == "cuda":
            raise ValueError(f"{path.name} runs on cuda by onnxruntime-gpu: OpenVINO is for cpu")
        if facts["artefacts"][chosen].get("mode") != "standard":
            raise ValueError(NO_OPENVINO)
        return _openvino(path)
    if runtime == "onnxruntime":
        names = facts["artefacts_libraries"][runtime] if library else ()
        return _onnx(path, [bundle / name for name in names], device or own)
    if device not in ("", own):
        raise ValueError(f"{path.name} is for {own} alone: only ONNX runs on {device} too")
    import torch

    module, dtype = load_torch(chosen, bundle), getattr(torch, facts["model"]["dtype"])

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(own) for array in arrays]
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        with torch.no_grad():
            return _arrays(module(*tensors))

    return run


def load_torch(format: str, bundle: Path = HERE) -> Any:
    """The torch module: "pt2", "torchscript" or "aoti". Its operators are loaded first."""
    import torch

    file = bundle / _file(facts := manifest(bundle), format)
    load_operators(facts, bundle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each load that TorchScript is deprecated
        if format == "torchscript":
            return torch.jit.load(str(file), map_location=facts["model"]["device"])
        if format == "aoti":
            import torch._inductor.codecache  # which PyTorch 2.10 uses and does not import

            return torch._inductor.aoti_load_package(str(file))
        return torch.export.load(str(file)).module()


def _file(facts: dict[str, Any], format: str) -> str:
    """The file of a format, or one line that names those that are here."""
    if format in (here := facts["artefacts"]):
        return str(here[format]["file"])
    names = ", ".join(name for name in ORDER if name in here)
    raise ValueError(f"this bundle holds no {format!r}: choose one of {names}")


def runtime_of(facts: dict[str, Any], format: str) -> str:
    """The package that runs a format. OpenVINO reads no functions, and is for CPUs alone here."""
    if not format.startswith("onnx"):
        return "torch"
    standard = facts["artefacts"][format].get("mode") == "standard"
    names = ("onnxruntime", "openvino") if standard and facts["model"]["device"] == "cpu" else ()
    return next((name for name in names if importlib.util.find_spec(name)), "onnxruntime")


def _missing(facts: dict[str, Any], format: str) -> str:
    """How to install the runtime of a format; "" where it is here."""
    package = runtime_of(facts, format)
    if importlib.util.find_spec(package):
        return ""
    oldest = facts["artefacts"][format].get("runtime", {}).get(package, "")
    kind = "-gpu" * (package == "onnxruntime" and facts["model"]["device"] == "cuda")
    how = f"pip install '{package}{kind}{oldest}' numpy pillow"
    return f"{_file(facts, format)} needs {package}, which is not installed: {how}"


def load_operators(facts: dict[str, Any], bundle: Path = HERE) -> None:
    """Give torch the operators of the graphs. Without GPU plans a GPU's need elsa-attention."""
    import torch

    on_gpu, plans = facts["model"]["device"] != "cpu", facts["artefacts_libraries"].get("cuda")
    if on_gpu and (not plans or "elsa_core" in sys.modules):  # it serves them itself
        import elsa_core  # noqa: F401

        return
    missing = []
    for name in facts["operators"]:
        served = False
        with contextlib.suppress(RuntimeError):  # there is no such operator yet
            key = "CUDA" if on_gpu else "CPU"
            served = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        if not served:
            missing.append(name)
    if not missing:  # the package brings them, or a library that is loaded already
        return
    if on_gpu:
        serve = ctypes.CDLL(str(bundle / plans[0])).elsa_cuda_serve_file
        serve.restype, content = ctypes.c_char_p, (bundle / plans[1]).read_bytes()
        if error := serve(content, ctypes.c_uint64(len(content)), b"CUDA"):
            raise ImportError(error.decode())
        return
    # Where the package is imported it has defined the operators; twice would end the process.
    if hasattr(torch.ops.elsa, missing[0].partition("::")[2]):
        os.environ["ELSA_SCHEMA_DEFINED_BY_PYTHON"] = "1"
    try:
        for library in facts["artefacts_libraries"]["torch"]:
            torch.ops.load_library(str(bundle / library))
    finally:
        os.environ.pop("ELSA_SCHEMA_DEFINED_BY_PYTHON", None)


def _onnx(path: Path, libraries: Sequence[Path], device: str) -> Model:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for library in libraries:
        options.register_custom_ops_library(str(library))
    if (on_gpu := device == "cuda") and CUDA not in onnxruntime.get_available_providers():
        raise ImportError(f"no {CUDA}: pip install onnxruntime-gpu, or use device cpu", name=CUDA)
    if on_gpu and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # of NVIDIA's packages
    told = on_gpu and hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(told)))
    providers = [(CUDA, {"use_tf32": "0"})] * on_gpu + ["CPUExecutionProvider"]  # exact products
    session = onnxruntime.InferenceSession(str(path), options, providers)
    if on_gpu and CUDA not in session.get_providers():  # it has gone on with the CPU
        raise RuntimeError(f"{CUDA} does not start: see what onnxruntime wrote")
    for part in session.get_provider_graph_assignment_info() if told else ():
        if part.ep_name != CUDA and any(node.domain == "elsa" for node in part.get_nodes()):
            raise RuntimeError(f"{CUDA} has not taken elsa's nodes: are the plans in lib/?")
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        fed = zip(session.get_inputs(), arrays, strict=True)
        named = {i.name: np.ascontiguousarray(array, types.get(i.type)) for i, array in fed}
        return list(session.run(None, named))

    return run


def _openvino(path: Path) -> Model:
    import openvino as ov

    # Left alone it computes in bfloat16 where the CPU has that.
    compiled = ov.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        ports = zip(arrays, compiled.inputs, strict=True)
        fed = [array.astype(port.get_element_type().to_dtype()) for array, port in ports]
        return [np.array(each) for each in compiled(fed).values()]

    return run


def preprocess(image: Any, bundle: Path = HERE) -> np.ndarray[Any, Any]:
    """An image file (or PIL image) as the model's input, float32 [1, channels, height, width]:
    resized so that the centre crop keeps the share `crop_pct`, scaled to 0..1, normalised.

    A model of one channel sees grey. One of other than 1 and 3 takes a .npy [height, width,
    channels] (integers are divided by their type's maximum) or a TIFF of as many bands or pages."""
    from PIL import Image

    given = manifest(bundle)["preprocess"]
    if given is None:
        raise ValueError("this model takes no images: see the inputs in manifest.json")
    channels, height, width = given["input_size"]
    bands = _bands(image, channels)
    picture = bands[0]
    rows, columns = (int(side / given["crop_pct"]) for side in (height, width))
    mode, fill = given.get("crop_mode"), [0] * channels
    if mode == "squash":
        size = (columns, rows)
    elif mode == "border":
        ratio = max(picture.width / columns, picture.height / rows)
        size = (round(picture.width / ratio), round(picture.height / ratio))
        fill = [round(255 * mean) for mean in given["mean"]]
    elif rows * picture.width < columns * picture.height:
        size = (columns, max(height, columns * picture.height // picture.width))
    else:
        size = (max(width, rows * picture.width // picture.height), rows)
    if max(picture.width * picture.height, size[0] * size[1]) > MAX_PIXELS:
        now = f"{picture.width} x {picture.height} pixels, {size[0]} x {size[1]} after resizing"
        raise ValueError(f"{now}, are more than the {MAX_PIXELS} that are read: crop it first")
    method = getattr(Image.Resampling, given["interpolation"].upper(), Image.Resampling.BICUBIC)
    # Cropped at its centre, or within a border.
    sides = zip(size, (width, height), strict=True)
    place = tuple((n - side) // 2 if side < n else -round((side - n) / 2) for side, n in sides)
    parts = []
    for band in bands:
        own, fill = fill[: len(band.getbands())], fill[len(band.getbands()) :]
        canvas = Image.new(band.mode, (width, height), tuple(own) if own[1:] else own[0])
        canvas.paste(band.resize(size, method), place)
        parts.append(np.asarray(canvas, dtype=np.float32).reshape(height, width, -1))
    pixels = np.concatenate(parts, -1) / 255.0
    pixels = (pixels - np.float32(given["mean"])) / np.float32(given["std"])
    return np.asarray(pixels.transpose(2, 0, 1)[None], dtype=np.float32)


def _bands(image: Any, channels: int) -> list[Any]:
    """The image as PIL images of one size that have the model's channels together, on 0..255."""
    from PIL import Image, ImageSequence

    if isinstance(image, (str, os.PathLike)) and not stat.S_ISREG(Path(image).stat().st_mode):
        # a FIFO would block, /dev/zero never ends
        raise ValueError(f"{os.fspath(image)} is not a regular file")
    if str(image).endswith(".npy"):
        array = np.load(image, allow_pickle=False)
        array = array[..., None] if array.ndim == 2 else array
        if array.ndim != 3 or array.shape[-1] != channels or array.dtype.kind not in "buif":
            found = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{found} is not [height, width, {channels}] of the model's channels")
        whole = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else 1.0
        planes = (array * (255.0 / whole)).astype(np.float32)
        return [Image.fromarray(np.ascontiguousarray(planes[..., i])) for i in range(channels)]
    Image.init()
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    given = isinstance(image, Image.Image)
    picture = image if given else Image.open(image, formats=formats)
    if channels in (1, 3):
        return [picture.convert("RGB" if channels == 3 else "L")]
    pages = [page.copy() for page in ImageSequence.Iterator(picture)]
    count = sum(len(page.getbands()) for page in pages)
    if count != channels or picture.format not in ("TIFF", None) or picture.mode == "P":
        raise ValueError(
            f"the image has {count} channels ({picture.format} {picture.mode}), the model takes "
            f"{channels}: give a .npy [height, width, {channels}] or a TIFF of {channels} bands"
        )
    return [band for page in pages for band in page.split()]


def _arrays(value: Any) -> list[np.ndarray[Any, Any]]:
    """The tensors of a nested result as arrays, in order."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [array for item in items for array in _arrays(item)]
    plain = value.detach().cpu()
    return [np.asarray(plain.float() if str(plain.dtype) == "torch.bfloat16" else plain)]


def class_names(facts: dict[str, Any], bundle: Path = HERE, file: str = "") -> list[str]:
    """The name of each class: the lines of `file`, else of the bundle's labels, if it has any."""
    path = Path(file) if file else bundle / (facts.get("labels") or os.devnull)
    return path.read_text(encoding="utf-8-sig").splitlines()


def images_in(paths: Sequence[str], arrays: bool = False) -> list[Path]:
    """The files, and those in folders and their sub-folders whose names are those of images, and
    of .npy files where `arrays`."""
    from PIL import Image

    suffixes = {s for s, kind in Image.registered_extensions().items() if kind in IMAGE_FORMATS}
    suffixes |= {".npy"} if arrays else set()
    found = []
    for path in map(Path, paths):
        inside = sorted(each for each in path.rglob("*.*") if each.suffix.lower() in suffixes)
        found += [each for each in inside if each.is_file()] if path.is_dir() else [path]
    if not found:
        raise ValueError(f"no image in {', '.join(paths)}")
    return found


def predictions(model: Model, files: Sequence[Path], given: Any) -> Iterator[dict[str, Any]]:
    """One entry for each image: its classes, most likely first, or its outputs; or its error."""
    names = class_names(facts := manifest(), file=given.labels)
    # A GPU's plans are for these batches alone; what fills one up is computed and left out.
    planned = facts.get("artefacts_libraries", {}).get("cuda") and given.device != "cpu"
    sizes = facts["reference"]["batch_sizes"] if planned else []
    most = min(given.batch_size, max(sizes, default=given.batch_size))
    for start in range(0, len(files), most):
        good, arrays = [], []
        for file in files[start : start + most]:
            try:
                arrays.append(preprocess(file))
                good.append(file)
            except Exception as error:  # decoders raise almost anything on a damaged file
                lines = str(error).splitlines() or [type(error).__name__]
                yield {"file": str(file), "error": lines[0]}
        rows = min((size for size in sizes if size >= len(arrays)), default=len(arrays))
        outputs = model(np.concatenate((arrays * rows)[:rows])) if arrays else []
        for row, file in enumerate(good):
            entry: dict[str, Any] = {"file": str(file)}
            if facts["outputs"][0]["name"] == "logits":
                shares = np.exp(outputs[0][row].astype(np.float64) - outputs[0][row].max())
                shares = shares / shares.sum()
                if names and len(names) != len(shares):
                    raise ValueError(f"--labels: {len(names)} names for {len(shares)} classes")
                entry["classes"] = [
                    {"class": i, "name": "".join(names[i : i + 1]), "probability": shares[i].item()}
                    for i in shares.argsort()[::-1][: given.top].tolist()
                ]
            else:
                entry["outputs"] = [each[row].tolist() for each in outputs]
            yield entry


def plain(text: str) -> str:
    """Text with control characters as `repr` shows them: a name must not steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def as_csv(entries: Sequence[dict[str, Any]]) -> str:
    """Entries as CSV: one line for each class of an image, or for each image's outputs."""
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    if any("classes" in entry for entry in entries):
        writer.writerow(["file", "rank", "class", "name", "probability"])
    for entry in entries:
        file = plain(entry["file"])
        if flat := [n for each in entry.get("outputs", ()) for n in np.ravel(each).tolist()]:
            writer.writerow([file, *flat])
        for rank, one in enumerate(entry.get("classes", ()), 1):
            writer.writerow([file, rank, one["class"], plain(one["name"]), one["probability"]])
    return text.getvalue()


def _arguments(arguments: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(description="Run the model of this bundle on images.")
    parser.add_argument("images", nargs="+", help="image files, and folders of them")
    parser.add_argument("--format", choices=ORDER, help="default: the first whose runtime is here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="for ONNX")
    parser.add_argument("--labels", default="", help="names of the classes, one a line")
    parser.add_argument("--top", type=int, default=5, help="classes of an image (default: 5)")
    parser.add_argument("--batch-size", type=int, default=8, help="images a batch (default: 8)")
    parser.add_argument(
        "--skip-unreadable", action="store_true", help="exit with 0 where images cannot be read"
    )
    parser.add_argument("-o", "--output", help="write to this .csv or .json file instead")
    given = parser.parse_args(arguments)
    if given.output and not given.output.endswith((".csv", ".json")):
        parser.error("-o: give a .csv or a .json file")
    if min(given.top, given.batch_size) < 1:
        parser.error("--top and --batch-size: give 1 or more")
    return given


def main(arguments: Sequence[str]) -> int:
    """Run images and print the likeliest classes of each, or write them to a file."""
    given, kept, failed = _arguments(arguments), [], 0
    try:
        if not all(map(importlib.util.find_spec, ("numpy", "PIL"))):
            raise ImportError("load.py needs numpy and pillow: pip install numpy pillow")
        of_images = (facts := manifest())["preprocess"] or {"input_size": [3]}
        if values := ", ".join(f"{key} {of_images[key]}" for key in of_images.get("assumed", ())):
            line = f"the weights did not say their preprocessing: {values} assumed"
            print(plain(f"warning: {line}"), file=sys.stderr)
        if facts["model"]["weights"].startswith("random"):
            print("warning: the weights are random, and so are the results", file=sys.stderr)
        channels = of_images["input_size"][0]
        files = images_in(given.images, arrays=channels not in (1, 3))
        for entry in predictions(load(given.format, device=given.device), files, given):
            if "error" in entry:
                failed = int(not given.skip_unreadable)
                word = "error" if failed else "skipped"
                print(plain(f"{word}: {entry['file']}: {entry['error']}"), file=sys.stderr)
            elif not given.output:
                lines, form = [entry["file"]], "{probability:8.2%}  {class:5}  {name}"
                lines += [form.format(**one).rstrip() for one in entry.get("classes", ())]
                outputs = map(np.shape, entry.get("outputs", ()))
                lines += [f"  output {list(shape)}: -o writes it" for shape in outputs]
                print("\n".join(map(plain, lines)))
            else:
                kept.append(entry)
        if given.output:
            text = as_csv(kept) if given.output.endswith(".csv") else json.dumps(kept, indent=1)
            Path(given.output).write_text(f"{text.rstrip()}\n", encoding="utf-8")
    except BrokenPipeError:  # the reader has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # ONNX Runtime's have no other base
        print(plain(f"error: {(str(error).splitlines() or [repr(error)])[0]}"), file=sys.stderr)
        return 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
