"""Whether a measurement can be believed: what else the machine did while it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from elsa_core.bench import environment

WIDE: Final = 0.10
"""Spread (10th to 90th percentile over the median) above which a contender is named."""
_THERMAL: Final = "/sys/devices/system/cpu"


class Watch:
    """Looks at the machine over the length of a measurement; `warnings` tells what was wrong."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks = environment.processor_times()
        self._throttles = throttle_count()

    def warnings(self, spreads: Mapping[str, float]) -> tuple[str, ...]:
        """One line for each reason to doubt.

        Args:
            spreads: relative spread of each contender's samples.
        """
        found = []
        share = environment.others_share_between(self._ticks, environment.processor_times())
        if share > environment.BUSY_CPU:
            found.append(f"other programs used {share:.0%} of the processors meanwhile")
        if self._device.type == "cuda":
            found += filter(None, [environment.gpu_others(self._device)])
            found += gpu_throttling(environment.nvidia_smi, self._device)
        more = throttle_count() - self._throttles
        if more > 0:
            found.append(f"the processor was throttled for heat {more} times meanwhile")
        wide = {name: spread for name, spread in spreads.items() if spread > WIDE}
        if wide:
            worst = max(wide, key=lambda name: wide[name])
            others = f", and of {len(wide) - 1} more" if len(wide) > 1 else ""
            found.append(f"times of {worst} spread over {wide[worst]:.0%} of their median{others}")
        return tuple(found)


def throttle_count(root: str = _THERMAL) -> int:
    """How often the kernel has slowed a core for heat since it booted; 0 where it does not tell."""
    total = 0
    for path in Path(root).glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text(encoding="ascii"))
    return total


def gpu_throttling(query: Any, device: torch.device) -> list[str]:
    """What slows the GPU's clocks right after the measurement, in words.

    Args:
        query: `environment.nvidia_smi`, or what stands for it.
        device: a CUDA device.
    """
    reasons = {
        "hw_thermal_slowdown": "heat (hardware)",
        "sw_thermal_slowdown": "heat (driver)",
        "hw_power_brake_slowdown": "its power supply",
        "sw_power_cap": "its power limit",
    }
    fields = ",".join(f"clocks_throttle_reasons.{name}" for name in reasons)
    lines = query(f"--query-gpu={fields}", environment.gpu_query(device))
    if not lines:
        return []
    states = [state.strip() for state in lines[0].split(",")]
    active = [
        word
        for word, state in zip(reasons.values(), states, strict=False)
        if state.lower() == "active"
    ]
    return [f"the GPU's clocks were held down by {', '.join(active)}"] if active else []
