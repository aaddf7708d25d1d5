"""The README.md of a bundle, made from its manifest."""

from __future__ import annotations

from typing import Any

from elsa_core.exporting import accuracy
from elsa_core.exporting.templates import load as template
from elsa_core.patching import sites_of

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


def readme(manifest: dict[str, Any]) -> str:
    """Three ways to run the bundle, as far as its artefacts allow them."""
    model, artefacts = manifest["model"], manifest["artefacts"]
    parts = [
        f"# {model['name']}\n\n"
        f"Exported by elsa {manifest['elsa_version']}: {model['weights']}, {model['dtype']}, "
        f"{len(model['sites'])} {sites_of(model['scope'])} patched: exact linear-scan attention "
        f"(precision {model['precision']}). Everything about it is in manifest.json.\n"
    ]
    parts.append(_tensors(manifest))
    parts.append(_in_words(manifest))
    libraries = manifest["artefacts_libraries"]
    on_gpu = libraries.get("cuda")
    library = next(iter(libraries["torch"] or on_gpu or [""]))
    for name in ("pt2", "torchscript"):
        if name in artefacts:
            oldest = artefacts[name]["runtime"]["torch"]
            parts.append(
                _TORCH.format(
                    requirement=f"'torch{oldest}'",
                    format=name,
                    library=library,
                    command=_command(manifest, name),
                )
            )
            break
    if "onnx" in artefacts:
        oldest = artefacts["onnx"]["runtime"]["onnxruntime"]
        parts.append(
            _ONNX.format(
                requirement=f"'onnxruntime{'-gpu' if _on_gpu(manifest) else ''}{oldest}'",
                register=_register(manifest),
                openvino=_openvino(manifest["artefacts"]["onnx"]),
                provider=_PROVIDER if _on_gpu(manifest) else "",
                command=_command(manifest, "onnx"),
            )
        )
    if "torchscript" in artefacts or "aoti" in artefacts:
        first = manifest["inputs"][0]
        kind = "zeros" if first["dtype"] == "int64" else "rand"
        size = ", ".join(map(str, [1, *first["shape"][1:]]))
        dtype = ", torch::kLong" if first["dtype"] == "int64" else ""
        example = f"torch::{kind}({{{size}}}{dtype})"
        plans = _PLANS.format(on_gpu[1]) if on_gpu else ""
        if "torchscript" in artefacts:
            parts.append(_CPP.format(library=library, example=example, plans=plans))
        if "aoti" in artefacts:
            parts.append(_COMPILED.format(library=library, example=example, plans=plans))
    if manifest.get("accuracy"):
        parts.append(_accuracy(manifest))
    parts.append(_limits(manifest))
    return "\n".join(parts)


def _command(manifest: dict[str, Any], format: str) -> str:
    """One line of shell that runs the model once."""
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


def _tensors(manifest: dict[str, Any]) -> str:
    rows = ["| | name | shape | dtype |", "|---|---|---|---|"]
    for kind in ("inputs", "outputs"):
        for one in manifest[kind]:
            shape = " x ".join(map(str, one["shape"]))
            rows.append(f"| {kind[:-1]} | {one['name']} | {shape} | {one['dtype']} |")
    return "\n".join(rows) + "\n" + _sizes(manifest)


def _in_words(manifest: dict[str, Any]) -> str:
    """What goes in and what comes out, for a person; load.py does it all."""
    lines = []
    given = manifest["preprocess"]
    if given is not None:
        channels, height, width = given["input_size"]
        mean, std = (", ".join(f"{value:g}" for value in given[key]) for key in ("mean", "std"))
        share = given["crop_pct"]
        colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels}-channel")
        lines.append(
            f"In: {colours} images of {height} x {width} pixels. `load.preprocess` resizes one\n"
            f"({given['interpolation']}{_cropped(given)}) so that the centre crop keeps\n"
            f"{share:g} of it, "
            f"scales it to 0..1, subtracts the mean {mean}\n"
            f"and divides by the standard deviation {std}, channel by channel.\n" + _batch(manifest)
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
        count = manifest["outputs"][0]["shape"][-1]
        names = manifest.get("labels")
        named = f"whose names are the lines of {names}" if names else "numbered from 0"
        lines.append(
            f"Out: logits of {count} classes, {named}; their softmax is the probabilities, which\n"
            "`python load.py` prints, or writes with `-o out.csv` or `-o out.json`. It takes files "
            "and folders."
        )
    else:
        lines.append("Out: features, no classes; `python load.py -o out.csv` writes them.")
    if manifest["model"]["weights"].startswith("random"):
        lines.append("**The weights are random: what comes out means nothing.**")
    return "\n\n".join(lines) + "\n"


def _cropped(given: dict[str, Any]) -> str:
    words = {"squash": ", both sides apart", "border": ", the longer side, with a border"}
    return words.get(given["crop_mode"], "")


def _batch(manifest: dict[str, Any]) -> str:
    if not manifest["artefacts_libraries"].get("cuda"):
        return "The batch comes first and may have any size."
    sizes = ", ".join(map(str, manifest["reference"]["batch_sizes"]))
    return (
        f"The batch comes first. On a GPU the kernels in lib/ serve batches of {sizes} alone,\n"
        "to which `python load.py` fills up those of images."
    )


def _sizes(manifest: dict[str, Any]) -> str:
    """Which other image sizes model.pt2 takes."""
    open_ = next((one for one in manifest["inputs"] if "dynamic_in_pt2" in one), None)
    if open_ is None:
        return ""
    step = open_.get("multiple_in_pt2")
    which = f", multiples of {step}" if step else ""
    return f"\nmodel.pt2 also takes images of other heights and widths{which}.\n"


def _register(manifest: dict[str, Any]) -> str:
    libraries = manifest["artefacts_libraries"]["onnxruntime"]
    if not libraries:
        return "no library is needed"
    alone = manifest["artefacts"]["onnx"].get("mode") == "custom-only"
    without = "" if alone else " (without it the file still runs, on standard operators)"
    return f"register `{libraries[0]}` with the session options{without}"


def _on_gpu(manifest: dict[str, Any]) -> bool:
    return bool(manifest["model"]["device"] == "cuda")


def _openvino(artefact: dict[str, Any]) -> str:
    if artefact.get("mode") != "standard":
        return template.NO_OPENVINO
    found = artefact.get("verification", {}).get("openvino", "")
    if found == "ok":
        return "OpenVINO reads it too, and reproduced the model where this bundle was written."
    return f"OpenVINO does not reproduce it: {found}." if found else "OpenVINO was not tried."


def _accuracy(manifest: dict[str, Any]) -> str:
    """What rounding costs, measured as the bundle was written."""
    given = manifest["accuracy"]
    lines = [
        "## What rounding costs\n",
        f"Errors of the {manifest['outputs'][0]['name']} against {given['against']}, on "
        f"{given['rows']} inputs\n({given['inputs']}); the exact values spread by "
        f"{given['output_std']:.2g} (standard deviation).\n",
        "| | mean error | largest error | class changed |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in accuracy.rows(given)),
    ]
    if "onnx-int8" in manifest["artefacts"]:
        lines.append(
            f"\nmodel.int8.onnx is {manifest['artefacts']['onnx-int8']['note']}.\n"
            "`python load.py --format onnx-int8` runs it; nothing else takes it by itself."
        )
    return "\n".join(lines) + "\n"


def _limits(manifest: dict[str, Any]) -> str:
    isa = sorted({i for one in manifest["libraries"].values() for i in one["isa"]})
    places = [one["platform"] for one in manifest["libraries"].values()]
    place = places[0] if places else "any platform"
    text = f"## Where it runs\n\nCPU: {place}, {', '.join(isa) or 'standard operators'}.\n"
    if manifest["artefacts_libraries"].get("cuda"):
        return text + _gpus(manifest)
    if set(manifest["artefacts"]) == {"onnx"} and _on_gpu(manifest):
        return text + "GPU: any that ONNX Runtime's CUDA provider serves.\n"
    if _on_gpu(manifest):
        return text + (
            "GPU: in Python, with `pip install elsa-attention` beside torch, which brings the\n"
            "Triton kernels. A C++ process cannot run this bundle on a GPU: the library holds CPU\n"
            "kernels only.\n"
        )
    return text + "GPU: export on a machine with one; this bundle is for the CPU.\n"


def _nodes(manifest: dict[str, Any]) -> str:
    """Where ONNX Runtime's CUDA provider finds those kernels."""
    libraries = manifest["artefacts_libraries"].get("onnxruntime")
    if not libraries:
        return ""
    plans = manifest["artefacts_libraries"]["cuda"][1]
    return f"ONNX Runtime's CUDA provider finds them in {plans}, beside {libraries[0]}.\n"


def _gpus(manifest: dict[str, Any]) -> str:
    """Which GPUs the kernels in lib/ are for, and where they were run."""
    entry = manifest["libraries"][manifest["artefacts_libraries"]["cuda"][0]]
    archs, gpus = entry["gpu_archs"], entry["gpus"]
    sizes = ", ".join(map(str, manifest["reference"]["batch_sizes"]))
    text = (
        f"GPU: {', '.join(archs)} alone, at batches of {sizes}, by the kernels in lib/: in\n"
        "Python with torch, and in a C++ process that calls `elsa_cuda_serve_file`.\n"
        + _nodes(manifest)
    )
    ran = [f"{arch} ({gpus[arch]})" for arch in archs if arch in entry["gpu_archs_verified"]]
    text += f"Verified where this bundle was written: {', '.join(ran)}.\n"
    rest = [
        f"{arch} (for {gpus[arch]})" for arch in archs if arch not in entry["gpu_archs_verified"]
    ]
    if rest:
        text += f"Compiled and not run: {', '.join(rest)}. `elsa verify` on such a GPU runs them.\n"
    return text
