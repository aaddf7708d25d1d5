"""The result document of `elsa profile`, and its file, which may hold anything when it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from elsa_core.base.files import write_text
from elsa_core.base.reading import RESULT_BYTES, read_text
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.measuring.documents import finite

SCHEMA_VERSION: Final = 1
COMMAND: Final = "profile"
DONE: Final = "done"
NO_MEMORY: Final = "out of memory"
NOT_APPLICABLE: Final = "not applicable"
_STATES: Final = (DONE, NO_MEMORY, NOT_APPLICABLE)

Document = dict[str, Any]


def write(document: Document, path: Path) -> None:
    """Write a document, whole or not at all.

    Raises:
        UnavailableError: the file cannot be written.
    """
    try:
        write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror or error}") from error


def read(path: Path) -> Document:
    """A document from a file that may be anything.

    Raises:
        ModelError: it cannot be read, or is no document of `elsa profile`.
    """
    try:
        document: Document = json.loads(read_text(path, RESULT_BYTES), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON document: {str(error)[:100]}") from error
    try:
        _check(document)
    except _MisfitError as misfit:
        raise ModelError(f"{path} is no result of `elsa profile`: {misfit}") from None
    return document


class _MisfitError(Exception):
    """What is wrong with a document."""


_NUMBER: Final = (int, float)
_MAYBE: Final = (int, float, type(None))
_TEXT: Final = (str,)
# What is asked of the objects of a document: keys, and the types of their values.
_SHAPES: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "document": {"command": _TEXT, "environment": (dict,), "results": (dict,)},
    "result": {"model": (dict,), "settings": (dict,), "complete": (bool,), "points": (list,)},
    "point": {
        "configuration": (dict,), "status": _TEXT, "reason": _TEXT, "profile": (dict, type(None)),
    },
    "configuration": {
        "image_size": (list, type(None)), "batch": (int,), "dtype": _TEXT, "precision": _TEXT,
    },
    "profile": {
        "device": _TEXT, "dtype": _TEXT, "batch": (int,), "image_size": (list, type(None)),
        "precision": _TEXT, "backend": _TEXT, "rounds": (int,), "weight_bytes": (int,),
        "runs": (list,), "left_out": (dict,), "best_baseline": _TEXT, "best_patched": _TEXT,
        "gain": (dict,), "sites": (list,), "patched": (int,), "kept": (int,), "warnings": (list,),
        "notes": (list,),
    },
    "run": {
        "name": _TEXT, "patched": (bool,), "seconds": _NUMBER, "seconds_p10": _NUMBER,
        "seconds_p90": _NUMBER, "spread": _NUMBER, "images_per_second": _NUMBER,
        "memory_bytes": (int, type(None)), "host_seconds": _MAYBE, "device_seconds": _MAYBE,
        "bound": _TEXT, "joules": _MAYBE, "ratio": (dict, type(None)),
        "ratio_to_best": (dict, type(None)),
    },
    "site": {
        "path": _TEXT, "module_class": _TEXT, "kind": _TEXT, "num_heads": (int, type(None)),
        "head_dim": (int, type(None)), "query_tokens": (int, type(None)),
        "key_tokens": (int, type(None)), "extra": (list,), "patched": (bool,), "reason": _TEXT,
        "seconds_before": _NUMBER, "seconds_after": _NUMBER, "share": _NUMBER, "ratio": (dict,),
        "error": _MAYBE, "backend": _TEXT, "schedule": _TEXT, "precision": _TEXT,
    },
    "ratio": {
        "value": _NUMBER, "low": _NUMBER, "high": _NUMBER, "rounds": (int,), "verdict": _TEXT,
    },
}  # fmt: skip
_PARTS: Final = ("forward", "backward", "optimizer")
_POSITIVE: Final = ("seconds", "seconds_before", "seconds_after", "value", "low", "high", "batch")


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _check(document: Any) -> None:
    """Raise unless everything is there that is read from a document later."""
    _fits(document, "document")
    if document["command"] != COMMAND or document.get("schema_version") != SCHEMA_VERSION:
        raise _MisfitError(f"it is not of the command {COMMAND}, schema_version {SCHEMA_VERSION}")
    _fits(document["results"], "result")
    for point in document["results"]["points"]:
        _fits(point, "point")
        _fits(point["configuration"], "configuration")
        _fits_size(point["configuration"]["image_size"])
        if point["status"] not in _STATES:
            raise _MisfitError("a point has an unknown status")
        if point["status"] == DONE:
            _check_profile(point["profile"])


def _check_profile(found: Any) -> None:
    _fits(found, "profile")
    _fits_size(found["image_size"])
    _fits(found["gain"], "ratio")
    for run in found["runs"]:
        _fits(run, "run")
        _fits_parts(run.get("parts"))
        for name in ("ratio", "ratio_to_best"):
            if run[name] is not None:
                _fits(run[name], "ratio")
    for site in found["sites"]:
        _fits(site, "site")
        _fits(site["ratio"], "ratio")
        within = site.get("within", [])  # older documents have none
        if not isinstance(within, list) or not all(isinstance(each, str) for each in within):
            raise _MisfitError("within of a site is no list of texts")
    names = {run["name"] for run in found["runs"]}
    if not {"eager", found["best_baseline"], found["best_patched"]} <= names:
        raise _MisfitError("a point lacks its runs")
    if not all(isinstance(line, str) for line in (*found["warnings"], *found["notes"])):
        raise _MisfitError("warnings or notes are no texts")


def _fits(value: Any, kind: str) -> None:
    if not isinstance(value, dict):
        raise _MisfitError(f"a {kind} is no object")
    for name, types in _SHAPES[kind].items():
        held = value.get(name)
        right = name in value and isinstance(held, types)
        # bool is an int to Python.
        if not right or (isinstance(held, bool) and bool not in types):
            raise _MisfitError(f"{name} of a {kind} is missing or of the wrong type")
        if isinstance(held, float) and not math.isfinite(held):
            raise _MisfitError(f"{name} of a {kind} is not finite")
        if name in _POSITIVE and isinstance(held, int | float) and not held > 0:
            raise _MisfitError(f"{name} of a {kind} is not positive")


def _fits_parts(parts: Any) -> None:
    """The parts of a training step; other runs have none."""
    if parts is None:
        return
    spans: list[Any] = [None]
    if isinstance(parts, dict) and tuple(parts) == _PARTS:
        spans = list(parts.values())
    if not all(type(span) in _NUMBER and math.isfinite(span) and span >= 0 for span in spans):
        raise _MisfitError("the parts of a run are no seconds of forward, backward, optimizer")


def _fits_size(size: Any) -> None:
    sides = size if isinstance(size, list) else []
    whole = len(sides) == 2 and all(type(each) is int and each > 0 for each in sides)
    if size is not None and not whole:
        raise _MisfitError("an image_size is no height and width")
