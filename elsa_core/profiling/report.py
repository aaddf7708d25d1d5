"""What `profile` found, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from elsa_core.patching.patch import PatchReport
from elsa_core.profiling.measure import Ratio
from elsa_core.profiling.sites import SiteProfile


@dataclass(frozen=True)
class Run:
    """One way to run the model. Times are seconds a call; None is "not measured".

    Attributes:
        name: a baseline, or "patched" and what goes with it.
        patched: whether it runs on elsa.
        seconds, seconds_p10, seconds_p90: median and percentiles over the rounds.
        spread: distance of these percentiles over the median.
        samples: the rounds, thinned evenly to at most 100.
        images_per_second: batch over the median.
        memory_bytes: growth at the peak of a call, output included, weights not: PyTorch's
            allocator on CUDA (for a CUDA graph its own pool), else the resident set.
        host_seconds: until the call returns (CUDA).
        device_seconds: of the GPU, for a call that follows another, without the host: of its CUDA
            graph (CUDA).
        bound: "host" where launching takes longer than computing, "device", or "".
        joules: energy of a call (CUDA with NVML).
        ratio: "eager"'s time over this one's; None for "eager".
        ratio_to_best: the fastest baseline's time over this one's (patched only).
    """

    name: str
    patched: bool
    seconds: float
    seconds_p10: float
    seconds_p90: float
    spread: float
    samples: tuple[float, ...]
    images_per_second: float
    memory_bytes: int | None
    host_seconds: float | None
    device_seconds: float | None
    bound: str
    joules: float | None
    ratio: Ratio | None
    ratio_to_best: Ratio | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self) | {"samples": list(self.samples)}
        for name in ("ratio", "ratio_to_best"):
            found: Ratio | None = getattr(self, name)
            plain[name] = None if found is None else found.to_dict()
        return plain


@dataclass(frozen=True)
class ProfileReport:
    """What patching gained for one model, one input size, one dtype and one precision.

    Attributes:
        device, dtype: of the model, as text.
        batch: images of a call.
        image_size: height and width; None where the first input is no image.
        precision, backend: what the patched sites ask for.
        rounds: samples of each run.
        weight_bytes: of parameters and buffers, the same for all runs.
        runs: baselines first, then the patched ones.
        left_out: {name: why it did not run or is no run of its own}.
        best_baseline, best_patched: the fastest of each kind ("control" is no baseline).
        gain: the fastest baseline's time over the fastest patched run's.
        sites: slowest first, the last one being the rest of the model; empty if not asked for.
        cover: for the two runs whose sites were timed ("eager" and "patched", or both as CUDA
            graphs), the time in which their sites were told apart over the run's own, median over
            the rounds. Graphs: the profiled replay over an undisturbed one.
        patched, kept: numbers of sites.
        warnings: reasons to doubt the figures.
        notes: what else a reader should know.
    """

    device: str
    dtype: str
    batch: int
    image_size: tuple[int, int] | None
    precision: str
    backend: str
    rounds: int
    weight_bytes: int
    runs: tuple[Run, ...]
    left_out: dict[str, str]
    best_baseline: str
    best_patched: str
    gain: Ratio
    sites: tuple[SiteProfile, ...]
    cover: dict[str, float]
    patched: int
    kept: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    patch: PatchReport

    def run(self, name: str) -> Run:
        """The run of this name.

        Raises:
            KeyError: it did not take part.
        """
        found = next((run for run in self.runs if run.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what was patched stands in the sites."""
        size = None if self.image_size is None else list(self.image_size)
        return {
            "device": self.device,
            "dtype": self.dtype,
            "batch": self.batch,
            "image_size": size,
            "precision": self.precision,
            "backend": self.backend,
            "rounds": self.rounds,
            "weight_bytes": self.weight_bytes,
            "runs": [run.to_dict() for run in self.runs],
            "left_out": dict(self.left_out),
            "best_baseline": self.best_baseline,
            "best_patched": self.best_patched,
            "gain": self.gain.to_dict(),
            "sites": [site.to_dict() for site in self.sites],
            "cover": dict(self.cover),
            "patched": self.patched,
            "kept": self.kept,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }
