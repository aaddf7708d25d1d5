"""What is asked of the processor: its maker and its instruction set."""

from __future__ import annotations

from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """The maker as Linux names it and PyTorch's instruction set: "AuthenticAMD AVX512"."""
    return f"{vendor()} {torch.backends.cpu.get_cpu_capability()}"


def vendor() -> str:
    """As Linux names it, "AuthenticAMD" or "GenuineIntel"; empty where it does not."""
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            named = (
                line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")
            )
            return next(named, "")
    except OSError:
        return ""
