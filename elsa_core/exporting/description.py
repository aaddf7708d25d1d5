"""What manifest.json says of an export; `elsa_core.exporting.manifest` reads and checks it."""

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
from elsa_core.exporting.artefacts import FILES, Choices, size_step
from elsa_core.exporting.export_target import ExportTarget
from elsa_core.exporting.manifest import KIND, SCHEMA_VERSION
from elsa_core.exporting.onnx import INT8_NOTE
from elsa_core.exporting.reference import Reference
from elsa_core.loading import names_of
from elsa_core.precision import dtype_name

if TYPE_CHECKING:
    from elsa_core.proof import CheckReport

_PACKAGES = (
    "torch", "timm", "open_clip_torch", "torchvision", "onnx", "onnxruntime", "openvino", "numpy",
)  # fmt: skip
_TORCHSCRIPT_NOTE = (
    "TorchScript is deprecated in PyTorch and kept for programs that already load it; "
    "model.pt2 is the format to build on"
)
LABELS_NAME = "labels.txt"


def describe(
    exported: ExportTarget,
    chosen: Choices,
    reference: Reference,
    check: CheckReport,
    used: dict[str, tuple[str, ...]],
    libraries: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The manifest of a bundle before its files have hashes and its artefacts have been run.

    `used` names elsa's operators in each format's graph, `libraries` what lies in lib/.
    """
    by_runtime = {
        runtime: [name for name, one in libraries.items() if one["runtime"] == runtime]
        for runtime in ("torch", "onnxruntime", "cuda")
    }
    given = {} if exported.preprocess is None else asdict(exported.preprocess)
    preprocess = {key: list(x) if isinstance(x, tuple) else x for key, x in given.items()}
    called = {name for format, names in used.items() if "onnx" not in format for name in names}
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "elsa_version": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": _model(exported),
        "inputs": _inputs(exported, chosen),
        "outputs": [
            {
                "name": name,
                "dtype": dtype_name(exported.dtype),
                "shape": ["batch", *tensor.shape[1:]],
            }
            for name, tensor in zip(exported.output_names, reference.oracle, strict=False)
        ],
        "preprocess": preprocess or None,
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
        "artefacts_libraries": by_runtime,
        "reference": reference.to_dict(),
        "check": check.to_dict(),
        "provenance": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": _packages(),
        },
        "files": {},
    }


def _model(exported: ExportTarget) -> dict[str, Any]:
    return {
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
    }


def _inputs(exported: ExportTarget, chosen: Choices) -> list[dict[str, Any]]:
    result = []
    for name, tensor in zip(exported.input_names, exported.inputs, strict=True):
        shape: list[str | int] = ["batch", *tensor.shape[1:]]
        entry: dict[str, Any] = {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": shape,
            "dynamic": {"0": "batch"},
        }
        if chosen.dynamic_size and tensor.ndim == 4:
            entry["dynamic_in_pt2"] = {"2": "height", "3": "width"}
            if (step := size_step(exported)) > 1:
                entry["multiple_in_pt2"] = step
        result.append(entry)
    return result


def _artefact(name: str, chosen: Choices, used: tuple[str, ...], device: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"file": FILES[name], "operators": [f"elsa::{n}" for n in used]}
    if name.startswith("onnx"):
        oldest = ort_library.OLDEST_BY_OPSET[chosen.opset]
        if device == "cuda" and chosen.opset == min(ort_library.OLDEST_BY_OPSET):
            oldest = ort_library.OLDEST_ON_GPU
        entry["runtime"] = {"onnxruntime": f">={oldest}"}
        entry["mode"], entry["opset"] = chosen.onnx_mode, chosen.opset
        if name != "onnx":
            entry["note"] = INT8_NOTE
        return entry
    torch_version = ".".join(torch.__version__.split(".")[:2])
    # Only TorchScript's files are meant to load in an older torch than the one that wrote them.
    oldest = "2.10" if name == "torchscript" else torch_version
    entry["runtime"] = {"torch": f">={oldest}", "exported_with": torch.__version__}
    if name == "torchscript":
        entry["note"] = _TORCHSCRIPT_NOTE
    if name == "aoti":
        entry["note"] = "compiled for this platform; elsa's library is loaded beside it, not inside"
    return entry


def _packages() -> dict[str, str]:
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


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
