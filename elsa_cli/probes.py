"""What this machine offers, for `elsa doctor` and for the `environment` of every JSON document.

Only the standard library is imported here, and every probe is guarded: a broken torch, a missing
compiler or an unreadable cache becomes a line of the report, never an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Distribution, module, what elsa needs it for.
PACKAGES = (
    ("torch", "torch", "everything"),
    ("triton", "triton", "GPU kernels"),
    ("timm", "timm", "its models"),
    ("open_clip_torch", "open_clip", "open_clip: models"),
    ("torchvision", "torchvision", "torchvision: models"),
    ("safetensors", "safetensors", "weights"),
    ("onnx", "onnx", "ONNX export"),
    ("onnxruntime", "onnxruntime", "a peer in `elsa bench`"),
)
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CXX", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "TORCH_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "NO_COLOR",
)  # fmt: skip
# A cache of weights can hold 10^5 files: its size is then a lower bound.
SIZE_BUDGET_S = 0.5


@dataclass(frozen=True)
class Probe:
    """One line of the report. `ok` is None where nothing can be wrong or missing."""

    group: str
    name: str
    ok: bool | None
    value: str
    reason: str = ""


def examine(
    progress: Callable[[str], None] = lambda text: None, torch_error: Exception | None = None
) -> list[Probe]:
    """Every probe's answer, in the order of the report; never an exception. `torch_error`: why
    torch could not be imported, since a second attempt says that it is the second."""
    sections: dict[str, Callable[[], Iterator[Probe]]] = {
        "system": _system, "packages": lambda: _packages(torch_error), "gpu": _gpu,
        "native library": _native, "kernel packs": _packs, "backends": _backends,
        "caches": _caches, "variables": lambda: (
            Probe("variables", name, None, value)
            for name, value in sorted(os.environ.items())
            if name.startswith("ELSA_") or name in VARIABLES
        ),
    }  # fmt: skip
    found: list[Probe] = []
    for group, section in sections.items():
        progress(group)
        try:
            # One by one: what a section found before it broke is kept.
            found.extend(section())
        except Exception as error:
            found.append(Probe(group, group, False, "", _why(error)))
    return found


def environment() -> dict[str, Any]:
    """The facts that a result depends on: versions, processor, GPU, threads."""
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _guard(_cpuinfo, "model name", "hardware")
        or platform.processor()
        or platform.machine(),
        "isa": _guard(lambda: torch.backends.cpu.get_cpu_capability() if torch else None),
        "threads": _guard(lambda: torch.get_num_threads() if torch else os.cpu_count()),
        "gpu": _guard(
            lambda: torch.cuda.get_device_name(0) if torch and torch.cuda.is_available() else None
        ),
        "packages": {name: _guard(importlib.metadata.version, name) for name, _, _ in PACKAGES},
    }


def _cpuinfo(*keys: str) -> str | None:
    """The first line of /proc/cpuinfo that begins with one of the keys, without it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    for line in text.splitlines():
        if line.lower().startswith(keys):
            return line.partition(":")[2].strip()
    return None


def human(size: float) -> str:
    """A size in bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _system() -> Iterator[Probe]:
    known = environment()
    yield Probe("system", "python", None, f"{known['python']} ({sys.executable})")
    yield Probe("system", "platform", None, known["platform"])
    yield Probe("system", "cpu", None, f"{known['cpu']}, {os.cpu_count()} logical cores")
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        yield Probe("system", "usable cores", None, str(len(os.sched_getaffinity(0))))
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "asimd", "sve")
    flags = (_cpuinfo("flags", "features") or "").split()
    isa = " ".join(flag for flag in wanted if flag in flags)
    yield Probe("system", "isa", None, isa or "unknown")


def _packages(torch_error: Exception | None) -> Iterator[Probe]:
    for distribution, module, use in PACKAGES:
        version = _guard(importlib.metadata.version, distribution)
        if version is None and importlib.util.find_spec(module) is None:
            required = distribution == "torch"
            reason = f"not installed; {use} need{'s' if required else ''} it"
            yield Probe("packages", distribution, False, "", reason)
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            known = torch_error if distribution == "torch" else None
            yield Probe("packages", distribution, False, str(version), _why(known or error))
        else:
            yield Probe("packages", distribution, True, str(version or "version unknown"))
    torch = sys.modules.get("torch")
    if torch is not None:
        yield Probe("packages", "torch threads", None, str(torch.get_num_threads()))
        yield Probe("packages", "torch CUDA", None, torch.version.cuda or "built without CUDA")


def _gpu() -> Iterator[Probe]:
    import torch

    if not torch.cuda.is_available():
        why = "torch sees no GPU" if torch.version.cuda else "torch was built without CUDA"
        yield Probe("gpu", "cuda", False, "", why)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        value = f"{facts.name}, sm_{facts.major}{facts.minor}, {human(facts.total_memory)}"
        yield Probe("gpu", f"cuda:{index}", True, value)


def _native() -> Iterator[Probe]:
    from elsa_core.backends import native

    group, status = "native library", native.status()
    missing = status.get("compiler_reason", "")
    compiler = "" if missing else f"{status['compiler']} ({status['compiler_version']})"
    yield Probe(group, "compiler", not missing, compiler, missing)
    if "reason" in status:
        reason = str(status["reason"])
        # Two lines need not say the same.
        reason = "not built: that takes a compiler" if reason == missing else reason
        yield Probe(group, "library", False, "", reason)
        return
    if not status["built"]:
        state = f"{status['path']} is damaged" if status["damaged"] else "not built yet"
        yield Probe(group, "library", None, f"{state}: `elsa build`, or its first use, builds it")
        return
    answer = native.load()
    ahead = "built ahead, serves without a compiler" if missing else ""
    yield Probe(group, "library", answer.ok, str(status["path"]), answer.reason or ahead)
    if answer.ok:
        yield Probe(group, "kernels", None, native.isa())


def _packs() -> Iterator[Probe]:
    from elsa_core.backends.triton.pack import lookup

    group, none = "kernel packs", True
    for pack in lookup.shipped():
        none = False
        held = f" ({pack.kernels} kernels, {human(pack.bytes)}, Triton {pack.triton})"
        value = f"{pack.folder}{held if pack.kernels else ''}"
        off = "" if lookup.wanted() else f"switched off: {lookup.VARIABLE} is 0"
        ok = False if pack.reason else (True if lookup.wanted() else None)
        yield Probe(group, pack.folder.name, ok, value, pack.reason or off)
    if none:
        yield Probe(group, "packs", None, "none here: `elsa build --cuda` compiles them")


def _backends() -> Iterator[Probe]:
    import torch

    from elsa_cli.values import BACKENDS
    from elsa_core import dispatch
    from elsa_core.backends import cuda
    from elsa_core.backends.support import Request

    answer = cuda.status()
    off = answer.ok or answer.reason.startswith("off")
    state = (answer.ok or None, answer.reason, "") if off else (False, "", answer.reason)
    yield Probe("gpu", "CUDA library", *state)
    known = {backend.name: backend for backend in dispatch.BACKENDS}
    for name, about in BACKENDS.items():
        if name == "auto":
            continue
        backend = known.get(name)
        device = (backend.device if backend else None) or "cpu"
        try:
            # Asking it would compile it; its state is known from its own section.
            if backend is not None and backend.is_built is not None and not backend.is_built():
                yield Probe("backends", name, False, about, "not built yet (see native library)")
                continue
            answer = dispatch.support(Request(device, torch.float32, 64, 64, "strict"), name)
        except Exception as error:
            yield Probe("backends", name, False, about, _why(error))
        else:
            yield Probe("backends", name, answer.ok, about, answer.reason)


def _caches() -> Iterator[Probe]:
    """Where elsa (its native library) and the packages it drives keep files."""
    import platformdirs

    own = os.environ.get("ELSA_CACHE_DIR") or platformdirs.user_cache_dir("elsa")
    home = Path.home()
    general = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    hugging = Path(os.environ.get("HF_HOME") or general / "huggingface")
    folders = {
        "elsa": Path(os.path.expanduser(own)),  # noqa: PTH111  # which never raises
        "hugging face": Path(hub) if hub else hugging / "hub",
        "torch hub": Path(os.environ.get("TORCH_HOME") or general / "torch"),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }
    for name, folder in folders.items():
        try:
            there = folder.is_dir()
        except OSError as error:  # the others' lines are still wanted
            yield Probe("caches", name, False, str(folder), error.strerror or str(error))
            continue
        if not there:
            yield Probe("caches", name, None, f"{folder} (empty)")
            continue
        size, late, deadline = 0, False, time.monotonic() + SIZE_BUDGET_S
        for here, _, files in os.walk(folder, onerror=None):
            for file in files:
                with suppress(OSError):
                    size += (Path(here) / file).lstat().st_size
            if late := time.monotonic() > deadline:
                break
        text = f"{folder} ({'more than ' if late else ''}{human(size)})"
        bad = "" if os.access(folder, os.W_OK) else "not writable"
        yield Probe("caches", name, False if bad else None, text, bad)


def _guard(probe: Callable[..., Any], *given: Any) -> Any:
    """What a probe finds; None where it raises."""
    try:
        return probe(*given)
    except Exception:
        return None


def _why(error: BaseException) -> str:
    lines = " ".join(str(error).split())
    return f"{type(error).__name__}: {lines[:200]}" if lines else type(error).__name__
