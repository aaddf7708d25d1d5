"""Whether the machine was free for a measurement, before and while it ran. Nothing here fails."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from elsa_core.measuring import environment

BUSY_CPU: Final = 0.15
"""Share of the processors in use by others above which nothing is published."""
BUSY_GPU: Final = 8
"""Utilisation in percent above which a GPU counts as busy."""
WIDE: Final = 0.10
"""Spread (10th to 90th percentile over the median) above which a contender is named."""
_THERMAL: Final = "/sys/devices/system/cpu"
_MOMENT: Final = 0.3  # seconds
_THROTTLES: Final = {
    "hw_thermal_slowdown": "heat (hardware)", "sw_thermal_slowdown": "heat (driver)",
    "hw_power_brake_slowdown": "its power supply", "sw_power_cap": "its power limit",
}  # fmt: skip


def reason(device: torch.device | str) -> str:
    """Why this machine is too busy to publish from it; empty where it is free.

    Looks at other programs only: their share of the processors in a moment of idling, and for a
    GPU its other processes and its utilisation. Not right after work of one's own on a GPU: the
    driver's utilisation looks back for up to a second.
    """
    device, before = torch.device(device), processor_times()
    time.sleep(_MOMENT)
    share = _others_share(before)
    if share > BUSY_CPU:
        return f"other programs use {share:.0%} of the processors (limit {BUSY_CPU:.0%})"
    if device.type != "cuda":
        return ""
    others = gpu_others(device)
    lines = [] if others else environment.nvidia_smi("--query-gpu=utilization.gpu", device)
    used = [int(line) for line in lines if line.isdigit()]
    busy = used and used[0] > BUSY_GPU
    return f"the GPU is {used[0]}% in use (limit {BUSY_GPU}%)" if busy else others


def watch(device: torch.device) -> Callable[[Mapping[str, float]], tuple[str, ...]]:
    """Looks at the machine over the length of a measurement. What it returns is called at the end
    with the contenders' spreads, for one line for each reason to doubt."""
    ticks, throttles = processor_times(), throttle_count()

    def warnings(spreads: Mapping[str, float]) -> tuple[str, ...]:
        found = []
        share = _others_share(ticks)
        if share > BUSY_CPU:
            found.append(f"other programs used {share:.0%} of the processors meanwhile")
        if device.type == "cuda":
            found += filter(None, [gpu_others(device)])
            fields = ",".join(f"clocks_throttle_reasons.{name}" for name in _THROTTLES)
            (states,) = environment.nvidia_smi(f"--query-gpu={fields}", device)[:1] or [""]
            pairs = zip(_THROTTLES.values(), states.split(","), strict=False)
            active = [word for word, state in pairs if state.strip().lower() == "active"]
            if active:
                found.append(f"the GPU's clocks were held down by {', '.join(active)}")
        more = throttle_count() - throttles
        if more > 0:
            found.append(f"the processor was throttled for heat {more} times meanwhile")
        wide = {name: spread for name, spread in spreads.items() if spread > WIDE}
        if wide:
            worst = max(wide, key=lambda name: wide[name])
            others = f", and of {len(wide) - 1} more" if len(wide) > 1 else ""
            found.append(f"times of {worst} spread over {wide[worst]:.0%} of their median{others}")
        return tuple(found)

    return warnings


def throttle_count(root: str = _THERMAL) -> int:
    """How often the kernel has slowed a core for heat since it booted; 0 where it does not tell."""
    total = 0
    for path in Path(root).glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text(encoding="ascii"))
    return total


def processor_times() -> tuple[float, float]:
    """(busy time of everyone but this process, total time) in ticks; zeros where unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        ticks = [int(number) for number in line.split()[1:9]]
        own = os.times()
        own_ticks = (own.user + own.system) * os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle - own_ticks, float(sum(ticks))
    return 0.0, 0.0


def _others_share(before: tuple[float, float]) -> float:
    after = processor_times()
    total = after[1] - before[1]
    return max(0.0, (after[0] - before[0]) / total) if total > 0 else 0.0


def gpu_others(device: torch.device) -> str:
    """Other processes on the GPU, in words; empty where there are none."""
    lines = environment.nvidia_smi("--query-compute-apps=pid", device)
    others = [line for line in lines if line.isdigit() and int(line) != os.getpid()]
    if not others:
        return ""
    return f"{len(others)} other process(es) use the GPU: {', '.join(others)}"
