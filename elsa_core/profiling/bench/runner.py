"""What `elsa bench models`, `training` and `linear` share: cases, documents, runs that go on.

Each result goes into the document at once, so that a long run can be stopped and resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elsa_core.base.messages import first_line
from elsa_core.base.reading import RESULT_BYTES, read_text
from elsa_core.errors import ArgumentError, ElsaError, ModelError, UnavailableError
from elsa_core.measuring import busy, environment
from elsa_core.measuring.documents import Document, Plain, started
from elsa_core.measuring.memory_limit import limited, release
from elsa_core.measuring.timing import float32_products
from elsa_core.profiling.bench.cases import selected
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import ProfileReport, Progress

Case = Any
"""What is measured at once: it has a table, a dtype, quick, to_dict, and a name of its own."""


@dataclass(frozen=True)
class ModelCase(Plain):
    """One model (`timm:...`, or `open_clip:...` for its image tower) at one size in pixels.

    `label` is what the tables call it; `window` the window size of a Swin, None for its own.
    """

    also = ("name",)
    table: str
    label: str
    model: str
    image_size: int
    batch: int
    dtype: str = "fp32"
    precision: str = "strict"
    window: int | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique in its device's tables: `batch8/ViT-B-224x8-fp32`."""
        label = self.label.replace(" ", "-")
        return f"{self.table}/{label}-{self.image_size}x{self.batch}-{self.dtype}"


@dataclass(frozen=True)
class Runner:
    """One kind of bench.

    Attributes:
        command: as documents name it.
        tables: cases by device type and table, in the order in which they are measured.
        measure: one case as plain data, of (case, device, settings, progress).
        aside: a table that is measured only where it is named.
        baselines: those of a device by what the user named; None: the bench has none.
    """

    command: str
    tables: Mapping[str, Mapping[str, tuple[Case, ...]]]
    measure: Callable[[Any, torch.device, Document, Progress], Document]
    aside: str = ""
    baselines: Callable[[Sequence[str] | None, torch.device], Sequence[str]] | None = None

    def select(self, device_type: str, **chosen: Any) -> tuple[Any, ...]:
        """The cases of a device; the rest as of `elsa_core.profiling.bench.cases.selected`."""
        return selected(self.tables, device_type, aside=self.aside, **chosen)

    def started(
        self, device: torch.device, *, baselines: Sequence[str] | None = None, rounds: int = 20,
        budget_seconds: float = 20.0, seed: int = 0, backend: str = "auto",
    ) -> Document:  # fmt: skip
        """An empty document: how to measure, and where."""
        chosen: Document = {}
        if self.baselines is not None:
            chosen["baselines"] = list(self.baselines(baselines, device))
        chosen |= {
            "rounds": rounds, "budget_seconds": budget_seconds, "seed": seed, "backend": backend,
        }  # fmt: skip
        results = {"settings": chosen, "busy": "", "complete": False, "cases": []}
        return started(self.command, environment.describe(device), results)

    def run(
        self,
        cases: Sequence[Case],
        document: Document,
        *,
        device: torch.device,
        keep: Callable[[Document], None] = lambda document: None,
        limit_seconds: float | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> Document:
        """Measure the cases that the document does not hold yet; it may hold others.

        A case that fails is a row with its reason. None begins after `limit_seconds`.
        """
        results = document["results"]
        present = {found["case"]["name"] for found in results["cases"]}
        missing = [case for case in cases if case.name not in present]
        places = {case.name: i for i, case in enumerate(cases)}
        results["complete"] = not missing
        end = None if limit_seconds is None else time.monotonic() + limit_seconds
        with float32_products():  # no peer may compute fp32 in TF32
            for i, case in enumerate(missing):
                if end is not None and time.monotonic() > end:
                    break
                # after a case, the GPU's utilisation would be that case's
                whole = device.type == "cpu" or i == 0
                occupied = busy.reason(device) if whole else busy.gpu_others(device)
                results["busy"] = results["busy"] or occupied
                variants.forget_compiled()
                try:
                    with limited(device), variants.on_device(device):
                        found = self.measure(
                            case, device, results["settings"],
                            lambda what, *_, i=i, name=case.name: progress(
                                f"{name}: {what}", i, len(missing)
                            ),
                        )  # fmt: skip
                except (ElsaError, RuntimeError, MemoryError) as error:
                    found = {
                        "case": case.to_dict(), "measurements": [], "best_peer": "", "best_own": "",
                        "gain": None, "sites": [0, 0], "errors": None, "wrong": [],
                        "left_out": {"all": first_line(error)}, "warnings": [],
                    }  # fmt: skip
                results["cases"].append(found)
                results["cases"].sort(
                    key=lambda each: places.get(each["case"]["name"], len(places))
                )
                results["complete"] = i == len(missing) - 1
                keep(document)
                release(device)
        return document


def read(path: Path, fresh: Document) -> Document:
    """The document that a run left in `path`, to go on with it."""
    alien = f"{path} is no result of `elsa {fresh['command']}`"
    try:
        document: Document = json.loads(read_text(path, RESULT_BYTES))
        found = document["results"]
        right = document["command"] == fresh["command"] and isinstance(found["busy"], str)
        right = right and isinstance(document["environment"], dict)
        names = [str(each["case"]["name"]) for each in found["cases"]]
        held = {key: found["settings"].get(key) for key in fresh["results"]["settings"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(alien) from error
    if not right or len(set(names)) < len(names):
        raise ModelError(alien)
    if held != fresh["results"]["settings"]:
        raise ArgumentError(f"{path} was measured with other settings; use another file or --force")
    environment.require_same(path, document, fresh, "use another file or --force")
    found["settings"] = fresh["results"]["settings"]  # equal, and of the right types
    return document


def require_gpu(device: torch.device, keeps: str, lists: str, *, measuring: bool = False) -> None:
    """For --tune: raise where the device is no GPU, or the one that is to measure is not there."""
    if device.type != "cuda":
        raise ArgumentError(f"--tune: {device.type} {keeps}; use --device cuda")
    if measuring and not torch.cuda.is_available():
        raise UnavailableError(f"--tune: torch sees no CUDA GPU; --dry-run lists the {lists}")


def result(case: ModelCase, found: ProfileReport, failures: list[str]) -> Document:
    """The plain data of a measured case.

    `measurements` are runs (`elsa_core.profiling.runs.runs.Run`) by `contender`; `errors` are (the
    fastest elsa run's, "eager"'s) relative errors against float64 of the very calls that were
    timed, None where they are not known; `wrong` are the elsa runs whose error is too large, and
    "patched" where a site failed its check.
    """
    own, original = (found.run(name).error for name in (found.best_patched, "eager"))
    wrong = ["patched"] if failures else []
    wrong += [run.name for run in found.runs if run.patched and run.name in found.wrong]
    runs = []
    for run in found.runs:
        plain = run.to_dict()
        plain["contender"] = plain.pop("name")
        plain["precision"] = case.precision if plain.pop("patched") else None
        runs.append(plain)
    return {
        "case": case.to_dict(),
        "measurements": runs,
        "best_peer": found.best_baseline,
        "best_own": found.best_patched,
        "gain": found.gain.to_dict(),
        "sites": [found.patched, found.patched + found.kept],
        "errors": None if original is None else [own, original],
        "wrong": list(dict.fromkeys(wrong)),
        "left_out": dict(found.left_out),
        "warnings": [*found.warnings, *failures],
    }
