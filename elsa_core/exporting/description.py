"""What a bundle says of itself: manifest.json, README.md that is made from it, and labels.txt."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError
from elsa_core.exporting import ort_library
from elsa_core.exporting.artefacts import Choices, size_step
from elsa_core.exporting.export_target import ExportTarget
from elsa_core.exporting.manifest import FILES, KIND, SCHEMA_VERSION
from elsa_core.exporting.onnx import INT8_NOTE
from elsa_core.exporting.reference import Reference, cost_rows
from elsa_core.exporting.templates import load as template
from elsa_core.loading import names_of
from elsa_core.patching import sites_of
from elsa_core.precision import dtype_name

if TYPE_CHECKING:
    from elsa_core.proof import CheckReport

_PACKAGES = (
    "torch", "timm", "open_clip_torch", "torchvision", "onnx", "onnxruntime", "openvino", "numpy",
)  # fmt: skip
_NOTES = {
    "torchscript": "TorchScript is deprecated in PyTorch and kept for programs that already load "
    "it; model.pt2 is the format to build on",
    "aoti": "compiled for this platform; elsa's library is loaded beside it, not inside",
    "onnx-int8": INT8_NOTE,
}
LABELS_NAME = "labels.txt"
_TORCH = """## Python with torch

```bash
pip install {requirement} numpy pillow
{command}
```

`load.load("{format}")` is a function of numpy arrays, `load.load_torch("{format}")` the torch
module.
Either loads the operator library `{library}` first.
"""
_ONNX = """## ONNX Runtime

```bash
pip install {requirement} numpy pillow
{command}
```

From any language: {register}, then open `model.onnx`.
{openvino}{provider}
"""
_PROVIDER = """
It runs on ONNX Runtime's CUDAExecutionProvider (with `use_tf32` 0 its float32 products do not round
their factors to TF32, and load.py says so);
`load.load("onnx", device="cpu")` and `load.py --device cpu` run it on the CPU."""
_CPP = """## C++ with libtorch

Open the library before the model; nothing of Python is needed:

```cpp
#include <dlfcn.h>
#include <torch/script.h>
dlopen("{library}", RTLD_NOW | RTLD_GLOBAL);
torch::jit::Module model = torch::jit::load("model.ts");
torch::Tensor out = model.forward({{{example}}}).toTensor();
```
{plans}
`extra/elsa.txt` inside model.ts holds input_size, mean, std and dtype. TorchScript is deprecated in
PyTorch: use it for programs that already load it.
"""
_COMPILED = """## C++ with a compiled package

`model.aoti.pt2` is for the torch that compiled it; open the library before it:

```cpp
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
dlopen("{library}", RTLD_NOW | RTLD_GLOBAL);
torch::inductor::AOTIModelPackageLoader package("model.aoti.pt2");
torch::Tensor out = package.run({{{example}}})[0];
```
{plans}
`package.get_metadata()["elsa.txt"]` holds input_size, mean, std and dtype.
"""
_PLANS = """
Between the two hand the bytes of `{}` to `elsa_cuda_serve_file(bytes, size, "CUDA")` of the
library (`dlsym`), which answers null or what is wrong. The model and its inputs are on the GPU.
"""


def describe(
    exported: ExportTarget, chosen: Choices, reference: Reference, check: CheckReport,
    used: dict[str, tuple[str, ...]], libraries: dict[str, dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a bundle before its files have hashes and its artefacts have been run.

    `used` names elsa's operators in each format's graph, `libraries` what lies in lib/.
    """
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    given = {} if exported.preprocess is None else asdict(exported.preprocess)
    called = {name for format, names in used.items() if "onnx" not in format for name in names}
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "elsa_version": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": exported.name,
            "class": f"{type(exported.model).__module__}.{type(exported.model).__qualname__}",
            "tower": exported.tower,
            "weights": "".join(c if c.isprintable() else "?" for c in exported.weights),
            "dtype": dtype_name(exported.dtype),
            "device": exported.device,
            "precision": exported.plan.precision,
            "scope": exported.plan.scope,
            "sites": list(exported.plan.sites),
            "reloads_in_elsa": exported.loaded is not None,
            # What the architecture's name says and the weights' file does not.
            "assumed": {} if exported.loaded is None else dict(exported.loaded.recipe.unsaid),
        },
        "inputs": _inputs(exported, chosen),
        "outputs": [
            {"name": name, "dtype": dtype_name(exported.dtype), "shape": ["batch", *each.shape[1:]]}
            for name, each in zip(exported.output_names, reference.oracle, strict=False)
        ],
        "preprocess": {k: list(x) if isinstance(x, tuple) else x for k, x in given.items()} or None,
        "artefacts": {
            name: _artefact(name, chosen, used[name], exported.device) for name in chosen.formats
        },
        "operators": {
            f"elsa::{name}": {
                "schema": str(getattr(torch.ops.elsa, name).default._schema),
                "version": 1,
            }
            for name in sorted(called)
        },
        "libraries": libraries,
        "artefacts_libraries": {
            runtime: [name for name, one in libraries.items() if one["runtime"] == runtime]
            for runtime in ("torch", "onnxruntime", "cuda")
        },
        "reference": reference.to_dict(),
        "check": check.to_dict(),
        "provenance": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": packages,
        },
        "files": {},
    }


def _inputs(exported: ExportTarget, chosen: Choices) -> list[dict[str, Any]]:
    inputs = []
    for name, tensor in zip(exported.input_names, exported.inputs, strict=True):
        entry: dict[str, Any] = {
            "name": name, "dtype": dtype_name(tensor.dtype),
            "shape": ["batch", *tensor.shape[1:]], "dynamic": {"0": "batch"},
        }  # fmt: skip
        if chosen.dynamic_size and tensor.ndim == 4:
            entry["dynamic_in_pt2"] = {"2": "height", "3": "width"}
            if (step := size_step(exported)) > 1:
                entry["multiple_in_pt2"] = step
        inputs.append(entry)
    return inputs


def _artefact(name: str, chosen: Choices, used: tuple[str, ...], device: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"file": FILES[name], "operators": [f"elsa::{n}" for n in used]}
    if name.startswith("onnx"):
        oldest = ort_library.OLDEST_BY_OPSET[chosen.opset]
        if device == "cuda" and chosen.opset == min(ort_library.OLDEST_BY_OPSET):
            oldest = ort_library.OLDEST_ON_GPU
        entry["runtime"] = {"onnxruntime": f">={oldest}"}
        entry["mode"], entry["opset"] = chosen.onnx_mode, chosen.opset
    else:
        # Only TorchScript's files are meant to load in an older torch than the one that wrote them.
        this = ".".join(torch.__version__.split(".")[:2])
        oldest = "2.10" if name == "torchscript" else this
        entry["runtime"] = {"torch": f">={oldest}", "exported_with": torch.__version__}
    return entry | ({"note": _NOTES[name]} if name in _NOTES else {})


def write_labels(exported: ExportTarget, given: Sequence[str], staging: Path) -> str | None:
    """Write labels.txt, one name a line; returns its name, None where no names are known.

    Names that are not given are those that the weights' source has, or ImageNet's for published
    weights with as many classes as one of its sets.
    """
    count = getattr(exported.model, "num_classes", 0)
    if given and len(given) != count:
        raise ArgumentError(f"labels (--labels): {len(given)} names, the model has {count} classes")
    cfg = getattr(exported.model, "pretrained_cfg", None)
    own = names_of(cfg.get("label_names")) if isinstance(cfg, dict) else ()
    names = tuple(given) or (own if len(own) == count else ())
    if not names and "pretrained (" in exported.weights and exported.tower is None:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset({"num_classes": count})
        if subset is not None:
            names = tuple(map(ImageNetInfo(subset).index_to_description, range(count)))
    if not names:
        return None
    lines = (" ".join(name.split()) for name in names)
    (staging / LABELS_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return LABELS_NAME


def readme(manifest: dict[str, Any]) -> str:
    """Three ways to run the bundle, as far as its artefacts allow them."""
    model, artefacts = manifest["model"], manifest["artefacts"]
    libraries, on_gpu = manifest["artefacts_libraries"], model["device"] == "cuda"
    plans = libraries.get("cuda")
    rows, also = ["| | name | shape | dtype |", "|---|---|---|---|"], ""
    for kind in ("inputs", "outputs"):
        for one in manifest[kind]:
            shape = " x ".join(map(str, one["shape"]))
            rows.append(f"| {kind[:-1]} | {one['name']} | {shape} | {one['dtype']} |")
            if "dynamic_in_pt2" in one:
                step = one.get("multiple_in_pt2")
                which = f", multiples of {step}" if step else ""
                also = f"\nmodel.pt2 also takes images of other heights and widths{which}.\n"
    parts = [
        f"# {model['name']}\n\n"
        f"Exported by elsa {manifest['elsa_version']}: {model['weights']}, {model['dtype']}, "
        f"{len(model['sites'])} {sites_of(model['scope'])} patched: exact linear-scan attention "
        f"(precision {model['precision']}). Everything about it is in manifest.json.\n",
        "\n".join(rows) + "\n" + also,
        _in_words(manifest),
    ]
    library = next(iter(libraries["torch"] or plans or [""]))
    for name in [each for each in ("pt2", "torchscript") if each in artefacts][:1]:
        requirement = f"'torch{artefacts[name]['runtime']['torch']}'"
        parts.append(
            _TORCH.format(
                requirement=requirement, format=name, library=library,
                command=_command(manifest, name),
            )
        )  # fmt: skip
    if "onnx" in artefacts:
        parts.append(_onnx(manifest, on_gpu))
    first = manifest["inputs"][0]
    kind, dtype = ("zeros", ", torch::kLong") if first["dtype"] == "int64" else ("rand", "")
    example = f"torch::{kind}({{{', '.join(map(str, [1, *first['shape'][1:]]))}}}{dtype})"
    for name, text in (("torchscript", _CPP), ("aoti", _COMPILED)):
        if name in artefacts:
            between = _PLANS.format(plans[1]) if plans else ""
            parts.append(text.format(library=library, example=example, plans=between))
    if manifest.get("accuracy"):
        parts.append(_accuracy(manifest))
    parts.append(_limits(manifest))
    return "\n".join(parts)


def _command(manifest: dict[str, Any], format: str) -> str:
    if manifest["preprocess"] is not None:
        usual = manifest["preprocess"]["input_size"][0] in (1, 3)
        return f"python load.py {'cat.jpg' if usual else 'image.npy'} --format {format}"
    arrays = ", ".join(
        f"np.zeros(({', '.join(map(str, [1, *one['shape'][1:]]))}), '{one['dtype']}')"
        for one in manifest["inputs"]
    )
    program = f"import load, numpy as np; print(load.load('{format}')({arrays})[0].shape)"
    # -B: a __pycache__ would be a file that the manifest does not name.
    return f'python -B -c "{program}"'


def _onnx(manifest: dict[str, Any], on_gpu: bool) -> str:
    artefact, register = manifest["artefacts"]["onnx"], "no library is needed"
    if libraries := manifest["artefacts_libraries"]["onnxruntime"]:
        alone = artefact.get("mode") == "custom-only"
        without = "" if alone else " (without it the file still runs, on standard operators)"
        register = f"register `{libraries[0]}` with the session options{without}"
    openvino = template.NO_OPENVINO
    if artefact.get("mode") == "standard":
        found = artefact.get("verification", {}).get("openvino", "")
        openvino = {
            "": "OpenVINO was not tried.",
            "ok": "OpenVINO reads it too, and reproduced the model where this bundle was written.",
        }.get(found, f"OpenVINO does not reproduce it: {found}.")
    return _ONNX.format(
        requirement=f"'onnxruntime{'-gpu' * on_gpu}{artefact['runtime']['onnxruntime']}'",
        register=register, openvino=openvino, provider=_PROVIDER if on_gpu else "",
        command=_command(manifest, "onnx"),
    )  # fmt: skip


def _in_words(manifest: dict[str, Any]) -> str:
    lines = []
    given = manifest["preprocess"]
    if given is not None:
        channels, height, width = given["input_size"]
        mean, std = (", ".join(f"{value:g}" for value in given[key]) for key in ("mean", "std"))
        colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels}-channel")
        words = {"squash": ", both sides apart", "border": ", the longer side, with a border"}
        batch = "The batch comes first and may have any size."
        if manifest["artefacts_libraries"].get("cuda"):
            sizes = ", ".join(map(str, manifest["reference"]["batch_sizes"]))
            batch = (
                f"The batch comes first. On a GPU the kernels in lib/ serve batches of {sizes} "
                "alone,\nto which `python load.py` fills up those of images."
            )
        lines.append(
            f"In: {colours} images of {height} x {width} pixels. `load.preprocess` resizes one\n"
            f"({given['interpolation']}{words.get(given['crop_mode'], '')}) so that the centre "
            f"crop keeps\n{given['crop_pct']:g} of it, scales it to 0..1, subtracts the mean {mean}"
            f"\nand divides by the standard deviation {std}, channel by channel.\n{batch}"
        )
        if channels not in (1, 3):
            lines.append(
                f"load.py takes a .npy [height, width, {channels}] (integers are divided by their "
                f"type's\nmaximum) or a TIFF of {channels} bands or pages, and no photograph."
            )
        if assumed := given.get("assumed"):
            lines.append(
                f"**Assumed, since the weights do not say it: {', '.join(assumed)}.** If they were "
                "trained\nwith other values, results are wrong: export again with the right ones."
            )
    if manifest["outputs"][0]["name"] == "logits":
        names = manifest.get("labels")
        named = f"whose names are the lines of {names}" if names else "numbered from 0"
        lines.append(
            f"Out: logits of {manifest['outputs'][0]['shape'][-1]} classes, {named}; their softmax "
            "is the probabilities, which\n`python load.py` prints, or writes with `-o out.csv` or "
            "`-o out.json`. It takes files and folders."
        )
    else:
        lines.append("Out: features, no classes; `python load.py -o out.csv` writes them.")
    if manifest["model"]["weights"].startswith("random"):
        lines.append("**The weights are random: what comes out means nothing.**")
    return "\n\n".join(lines) + "\n"


def _accuracy(manifest: dict[str, Any]) -> str:
    given = manifest["accuracy"]
    lines = [
        "## What rounding costs\n",
        f"Errors of the {manifest['outputs'][0]['name']} against {given['against']}, on "
        f"{given['rows']} inputs\n({given['inputs']}); the exact values spread by "
        f"{given['output_std']:.2g} (standard deviation).\n",
        "| | mean error | largest error | class changed |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in cost_rows(given)),
    ]
    if "onnx-int8" in manifest["artefacts"]:
        lines.append(
            f"\nmodel.int8.onnx is {manifest['artefacts']['onnx-int8']['note']}.\n"
            "`python load.py --format onnx-int8` runs it; nothing else takes it by itself."
        )
    return "\n".join(lines) + "\n"


def _limits(manifest: dict[str, Any]) -> str:
    libraries = manifest["libraries"].values()
    isa = sorted({name for one in libraries for name in one["isa"]})
    place = next((one["platform"] for one in libraries), "any platform")
    text = f"## Where it runs\n\nCPU: {place}, {', '.join(isa) or 'standard operators'}.\n"
    if plans := manifest["artefacts_libraries"].get("cuda"):
        entry = manifest["libraries"][plans[0]]
        archs, gpus, verified = entry["gpu_archs"], entry["gpus"], entry["gpu_archs_verified"]
        sizes = ", ".join(map(str, manifest["reference"]["batch_sizes"]))
        text += (
            f"GPU: {', '.join(archs)} alone, at batches of {sizes}, by the kernels in lib/: in\n"
            "Python with torch, and in a C++ process that calls `elsa_cuda_serve_file`.\n"
        )
        if nodes := manifest["artefacts_libraries"].get("onnxruntime"):
            text += f"ONNX Runtime's CUDA provider finds them in {plans[1]}, beside {nodes[0]}.\n"
        ran = [f"{arch} ({gpus[arch]})" for arch in archs if arch in verified]
        text += f"Verified where this bundle was written: {', '.join(ran)}.\n"
        if rest := [f"{arch} (for {gpus[arch]})" for arch in archs if arch not in verified]:
            text += f"Compiled and not run: {', '.join(rest)}. "
            text += "`elsa verify` on such a GPU runs them.\n"
        return text
    if manifest["model"]["device"] != "cuda":
        return text + "GPU: export on a machine with one; this bundle is for the CPU.\n"
    if set(manifest["artefacts"]) == {"onnx"}:
        return text + "GPU: any that ONNX Runtime's CUDA provider serves.\n"
    return text + (
        "GPU: in Python, with `pip install elsa-attention` beside torch, which brings the\n"
        "Triton kernels. A C++ process cannot run this bundle on a GPU: the library holds CPU\n"
        "kernels only.\n"
    )
