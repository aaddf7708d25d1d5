"""`elsa bench models`: whole models, patched against every way one would otherwise run them.

The models and sizes of the ELSA paper's tables, at batch 8 and over sweeps of resolution. Each case
is one `runs.runs.measure_runs`; its result goes into the document at once, so that
a long run can be stopped and resumed. `families` measures its own table.
"""

from __future__ import annotations

import fnmatch
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from elsa_core.base.files import write_text
from elsa_core.base.messages import first_line
from elsa_core.base.reading import RESULT_BYTES, read_text
from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError, ElsaError, ModelError
from elsa_core.measuring import busy, environment
from elsa_core.measuring.documents import finite
from elsa_core.measuring.memory_limit import limited, release
from elsa_core.measuring.rounds import Settings
from elsa_core.patching import patch, shared_copy
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench import families
from elsa_core.profiling.bench.model_cases import Document, ModelCase, empty, images, result
from elsa_core.profiling.bench.results import SCHEMA_VERSION
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import Progress, measure_runs
from elsa_core.proof import check

COMMAND: Final = "bench models"
_PEERS: Final = {"cpu": ("eager", "sdpa")}  # more than a profile measures by default
Tables = dict[str, dict[str, tuple[ModelCase, ...]]]
Measured = Callable[[ModelCase, torch.device, Document, Progress], Document]

_PAPER: Final = (
    # label, model, side, window, too long for a CPU at batch 8
    ("ViT-T", "timm:vit_tiny_patch16_224", 224, None, False),
    ("ViT-S", "timm:vit_small_patch16_224", 224, None, False),
    ("ViT-M", "timm:vit_medium_patch16_gap_256", 256, None, False),
    ("ViT-B", "timm:vit_base_patch16_224", 224, None, False),
    ("Swin-T W8", "timm:swin_tiny_patch4_window7_224", 256, 8, False),
    ("Swin-T W16", "timm:swin_tiny_patch4_window7_224", 256, 16, False),
    ("Swin-S W8", "timm:swin_small_patch4_window7_224", 256, 8, False),
    ("Swin-S W16", "timm:swin_small_patch4_window7_224", 256, 16, False),
    ("Swin-B W8", "timm:swin_base_patch4_window7_224", 256, 8, True),
    ("Swin-B W16", "timm:swin_base_patch4_window7_224", 256, 16, True),
    ("SwinV2-T W8", "timm:swinv2_tiny_window8_256", 256, None, False),
    ("CLIP B/32", "open_clip:ViT-B-32", 224, None, False),
    ("CLIP B/16", "open_clip:ViT-B-16", 224, None, False),
    ("CLIP L/14", "open_clip:ViT-L-14", 224, None, True),
    ("CLIP L/14@336", "open_clip:ViT-L-14-336", 336, None, True),
    ("SAM B", "timm:samvit_base_patch16", 1024, None, True),
)
_SWEPT: Final = (
    ("ViT-T", "timm:vit_tiny_patch16_224", (224, 384, 512, 768, 1024)),
    ("ViT-B", "timm:vit_base_patch16_224", (224, 384, 512, 768, 1024)),
    ("Swin-T", "timm:swin_tiny_patch4_window7_224", (224, 448, 672, 896)),
)
_QUICK: Final = ("ViT-T", "Swin-T W8", "CLIP B/32")


def _paper(device_type: str) -> Iterable[ModelCase]:
    for dtype in families.dtypes(device_type):
        for label, model, side, window, long in _PAPER:
            batch = 1 if long and device_type == "cpu" else 8
            yield ModelCase("batch8", label, model, side, batch, dtype, window=window,
                            quick=label in _QUICK)  # fmt: skip


def _sweeps(device_type: str) -> Iterable[ModelCase]:
    for dtype in families.dtypes(device_type):
        for label, model, sides in _SWEPT:
            for side in sides:
                quick = label == "ViT-T" and side in (224, 384)
                yield ModelCase("resolution", label, model, side, 1, dtype, quick=quick)


def _families(device_type: str) -> Iterable[ModelCase]:
    return (ModelCase(families.TABLE, *row) for row in families.rows(device_type))


_MADE: Final = {"batch8": _paper, "resolution": _sweeps, families.TABLE: _families}
TABLES: Final[Tables] = {
    device_type: {name: tuple(made(device_type)) for name, made in _MADE.items()}
    for device_type in ("cpu", "cuda")
}
"""Cases by device type and table, in the order in which they are measured."""


def select(
    device_type: str, *, tables: Sequence[str] = (), patterns: Sequence[str] = (),
    quick: bool = False, dtype: str | None = None, among: Tables | None = None,
) -> tuple[ModelCase, ...]:  # fmt: skip
    """The cases of a device; arguments as of `elsa_core.profiling.bench.cases.select`.

    `among`: tables of another bench. Families are chosen by their table, or by it in every pattern.

    Raises:
        ArgumentError: a table that does not exist, or nothing matches.
    """
    of_device = (TABLES if among is None else among).get(device_type, {})
    for table in tables:
        if table not in of_device:
            raise ArgumentError(f"table: no table {table!r}; use one of {', '.join(of_device)}")
    named = bool(patterns) and all(each.startswith(f"{families.TABLE}/") for each in patterns)
    chosen = tuple(
        case
        for name, cases in of_device.items()
        for case in cases
        if (name in tables if tables else name != families.TABLE or named)
        and (not quick or case.quick)
        and dtype in (None, case.dtype)
        and (not patterns or any(fnmatch.fnmatchcase(case.name, glob) for glob in patterns))
    )
    if not chosen:
        raise ArgumentError("cases: nothing matches the selection; --dry-run lists what there is")
    return chosen


def build(case: ModelCase, device: torch.device, seed: int) -> nn.Module:
    """The model of a case with random weights from `seed`; of a CLIP the image tower.

    Raises:
        ElsaError: its library is missing or cannot build it.
    """
    from elsa_core.loading import load

    size = case.image_size
    if case.window is None:
        model = load(case.model, image_size=size, seed=seed)
        tower: nn.Module = model.visual if case.model.startswith("open_clip:") else model  # type: ignore[assignment]
    else:
        import timm

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            tower = timm.create_model(
                case.model.removeprefix("timm:"), img_size=size, window_size=case.window
            )
    return tower.eval().to(device=device, dtype=DTYPES[case.dtype])


def run(
    cases: Sequence[ModelCase],
    document: Document,
    *,
    device: torch.device,
    keep: Callable[[Document], None] = lambda document: None,
    limit_seconds: float | None = None,
    progress: Progress | None = None,
    measured: Measured | None = None,
) -> Document:
    """Measure the cases that the document does not hold yet.

    A case that fails is a row with its reason. None begins after `limit_seconds`.

    Args:
        cases: from `select`.
        document: from `started` or `read`; changed in place.
        device: where the models run.
        keep: called with the document after each case.
        limit_seconds: of the whole run; None for no limit.
        progress: called with (what, index, number of cases).
        measured: as `measure`, which it is by default.
    """
    results, measured = document["results"], measured or measure
    missing = left(cases, document)
    results["complete"] = not missing
    end = None if limit_seconds is None else time.monotonic() + limit_seconds
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no peer may compute fp32 in TF32
    try:
        for i, case in enumerate(missing):
            if end is not None and time.monotonic() > end:
                break
            results["busy"] = results["busy"] or _busy(device, first=i == 0)

            def tell(what: str, done: int, total: int, i: int = i, name: str = case.name) -> None:
                if progress is not None:
                    progress(f"{name}: {what}", i, len(missing))

            results["cases"].append(measured(case, device, results["settings"], tell))
            _in_order(results["cases"], cases)
            results["complete"] = not left(cases, document)
            keep(document)
            release(device)
    finally:
        torch.set_float32_matmul_precision(matmul)
    return document


def left(cases: Sequence[ModelCase], document: Document) -> list[ModelCase]:
    """The cases that the document does not hold yet; it may hold others."""
    present = {result["case"]["name"] for result in document["results"]["cases"]}
    return [case for case in cases if case.name not in present]


def measure(case: ModelCase, device: torch.device, settings: Document, tell: Progress) -> Document:
    """One case as plain data; see `result`."""
    if case.table == families.TABLE:
        return families.measure(case, device, settings, tell)
    variants.forget_compiled()
    try:
        with limited(device):
            tell("building", 0, 0)
            model = build(case, device, settings["seed"])
            given = images(case, device, settings["seed"])
            how = Settings(settings["rounds"], settings["budget_seconds"], settings["seed"])
            found = measure_runs(
                model, given, how, baselines=settings["baselines"], precision=case.precision,
                backend=settings["backend"], progress=tell,
            )  # fmt: skip
            tell("checking", 0, 0)
            return result(case, found, _checked(model, given, case, settings["backend"]))
    except (ElsaError, RuntimeError, MemoryError) as error:
        return empty(case, first_line(error))


def _checked(model: nn.Module, given: torch.Tensor, case: ModelCase, backend: str) -> list[str]:
    """Which sites disagree on one image, each alone; the runs' own errors show less of one site."""
    patched = shared_copy(model)
    patch(patched, precision=case.precision, backend=backend)
    try:
        found = check(
            patched, given[:1], stress=False, batch_size=1, paths=("eager",), progress=False
        )
    except (ElsaError, RuntimeError, MemoryError):
        return []
    return list(found.failures)


def _busy(device: torch.device, *, first: bool) -> str:
    """Why the machine is not free; after a case, the GPU's utilisation would be that case's."""
    return busy.reason(device) if device.type == "cpu" or first else busy.gpu_others(device)


def _in_order(results: list[Document], cases: Sequence[ModelCase]) -> None:
    places = {case.name: i for i, case in enumerate(cases)}
    results.sort(key=lambda each: places.get(each["case"]["name"], len(places)))


def settings(
    device: torch.device, *, baselines: Sequence[str] | None = None, rounds: int = 20,
    budget_seconds: float = 20.0, seed: int = 0, backend: str = "auto",
) -> Document:  # fmt: skip
    """How to measure, as plain data.

    Raises:
        ArgumentError, UnavailableError: as `elsa_core.profiling.runs.variants.chosen`.
    """
    return {
        "baselines": list(variants.chosen(baselines or _PEERS.get(device.type), device)),
        "rounds": rounds,
        "budget_seconds": budget_seconds,
        "seed": seed,
        "backend": backend,
    }


def started(chosen: Document, described: Document, command: str = COMMAND) -> Document:
    """An empty document: settings from `settings`, environment from `environment.describe`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "elsa_version": __version__,
        "command": command,
        "environment": described,
        "results": {"settings": chosen, "busy": "", "complete": False, "cases": []},
    }


def read(path: Path, fresh: Document) -> Document:
    """The document that a run left in `path`, to go on with it.

    Args:
        path: the file.
        fresh: what `started` gives now; the file must be of the same machine, versions and
            settings.

    Raises:
        ArgumentError: it is of another machine, of other versions or of other settings.
        ModelError: it cannot be read, or is no such document.
    """
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
    differs = environment.difference(document, fresh)
    if differs:
        raise ArgumentError(
            f"{path} was measured on another machine or with other versions ({differs}); "
            "use another file or --force"
        )
    return document


def write(document: Document, path: Path) -> Path:
    """Write a document, whole or not at all. Raises OSError where that cannot be done."""
    return write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", path)
