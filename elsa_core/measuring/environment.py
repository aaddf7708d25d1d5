"""Where a measurement was made: hardware and versions. Nothing here fails."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from elsa_core.errors import ArgumentError

_PACKAGES: Final = (
    "torch", "timm", "open_clip_torch", "torchvision", "onnxruntime", "triton", "numpy"
)  # fmt: skip
_ALIKE: Final[dict[str, tuple[str, ...]]] = {
    "": ("cpu", "threads", "gpu", "isa", "kernels"),
    "gpu_details": ("multiprocessors", "cuda", "driver"),
    "packages": ("torch", "triton", "timm", "open_clip_torch", "torchvision"),
}
"""What models that are timed side by side have in common, by part of the environment."""


def describe(device: torch.device | str) -> dict[str, Any]:
    """Hardware, versions and date, as plain data. What cannot be found out is None.

    The fields of every document of `elsa` (python, platform, machine, cpu, isa, threads, gpu,
    packages), and: date (UTC), device, cpu_count, kernels (the native library's instruction set)
    and gpu_details.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    kernels = details = None
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        details = {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": next(iter(nvidia_smi("--query-gpu=driver_version")), None),
        }
    else:
        native: Any = importlib.import_module("elsa_core.backends.native")
        with contextlib.suppress(Exception):  # a description must not end a measurement
            kernels = str(native.isa()) if native.load().ok else None
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(each for each in lines if each.startswith("model name"))
        cpu = line.partition(":")[2].strip()
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device.type,
        "python": platform.python_version(),
        "platform": "-".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "machine": platform.machine(),
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpu_details": details,
        "packages": versions,
    }


def of_gpu(device: torch.device | str) -> tuple[str, dict[str, Any]]:
    """The name of a GPU, and what a table of its own measurements says of it."""
    described = describe(device)
    facts = {key: described[key] for key in ("gpu", "gpu_details", "date", "packages")}
    return str(described["gpu"]), facts


def require_same(path: Path, there: dict[str, Any], now: dict[str, Any], advice: str) -> None:
    """Raise ArgumentError where the figures of a document, read from a file, cannot stand beside
    those of one of this machine. The environment of `there` may hold anything."""
    both = [{"elsa": document.get("elsa_version")} for document in (there, now)]
    for part, names in _ALIKE.items():
        for found, document in zip(both, (there, now), strict=True):
            held = document["environment"]
            held = held.get(part) if part else held
            found |= {name: held.get(name) if isinstance(held, dict) else None for name in names}
    before, after = both
    for name, value in after.items():
        if before[name] != value:
            differs = f"{name} was {str(before[name])[:60]}, now it is {str(value)[:60]}"
            raise ArgumentError(
                f"{path} was measured on another machine or with other versions ({differs}); "
                f"{advice}"
            )


def label(environment: dict[str, Any]) -> str:
    """One line for a table's heading: hardware, threads, versions and date."""
    packages = environment.get("packages", {})
    if environment.get("gpu"):
        where = f"{environment['gpu']}, CUDA {(environment.get('gpu_details') or {}).get('cuda')}"
        names = ("torch", "triton")
    else:
        kernels = environment.get("kernels") or environment.get("isa")
        count = environment.get("threads")
        where = f"{environment.get('cpu')}, {count} thread{'s' * (count != 1)}, {kernels}"
        names = ("torch", "onnxruntime")
    named = [f"{name} {packages[name]}" for name in names if packages.get(name)]
    return ", ".join([where, *named, str(environment.get("date", ""))[:10]])


def nvidia_smi(query: str, device: torch.device | None = None) -> list[str]:
    """The lines that nvidia-smi answers, of one GPU or of all, without heading and units; none
    where it cannot."""
    words = [query, "--format=csv,noheader,nounits"]
    if device is not None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        # CUDA_VISIBLE_DEVICES renumbers devices; the UUID names the same card for both.
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        words.append(f"--id=GPU-{uuid}" if uuid else f"--id={index}")
    program = shutil.which("nvidia-smi")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if program is not None:
            done = subprocess.run(
                [program, *words], capture_output=True, text=True, timeout=20, check=True
            )
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []
