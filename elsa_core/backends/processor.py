"""What is asked of the processor beyond its instruction set."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.lru_cache(maxsize=1)
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
