"""What the kinds of `elsa bench` have in common: their device, and where results may be written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_cli.errors import TargetError
from elsa_cli.options import Options, resolve_device

if TYPE_CHECKING:
    import torch


def device_of(options: Options, *, plans: bool = False) -> torch.device:
    """The device to measure on. Listing what a GPU would measure needs none; `plans`: nor does what
    is only planned for one."""
    import torch

    named = options.device
    listed = options.dry_run and named != "auto"
    absent = named.startswith("cuda") and not torch.cuda.is_available()
    return torch.device(named if listed or (absent and plans) else resolve_device(named))


def described(device: torch.device) -> dict[str, Any]:
    """The environment of a document about a device, which need not be here."""
    from torch.cuda import is_available

    from elsa_core.measuring import environment

    return environment.describe(device if device.type == "cpu" or is_available() else "cpu")


def require_free(device: torch.device, options: Options) -> None:
    """Refuse to keep what is measured on a machine that others use, unless --allow-busy."""
    from elsa_core.errors import UnavailableError
    from elsa_core.measuring import busy

    why = busy.reason(device)
    if why and not options.allow_busy:
        raise UnavailableError(f"{why}: wait until the machine is free, or use --allow-busy")


def check_folder(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise TargetError(f"{path}: its folder does not exist; create it first")


def check_output(device: torch.device, options: Options, *, resumes: bool) -> None:
    """Whatever would keep --output from being written ends the command before it measures."""
    target = options.output
    check_folder(target)
    if target is None:
        return
    if target.exists() and not (options.force or (resumes and options.resume)):
        way = "--resume to go on, or --force" if resumes else "--force"
        raise TargetError(f"{target} exists; use {way} to replace it")
    require_free(device, options)
