"""What is asked of the processor: its maker and its instruction set."""

from __future__ import annotations

from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """The maker, where Linux names it, and PyTorch's instruction set: "AuthenticAMD AVX512"."""
    maker = ""
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            line = next((line for line in lines if line.startswith("vendor_id")), "")
            maker = line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{maker} {torch.backends.cpu.get_cpu_capability()}"
