"""The result document of `elsa profile`, and its file, which may hold anything when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from elsa_core.base.reading import RESULT_BYTES, read_text
from elsa_core.errors import ModelError
from elsa_core.measuring.documents import SCHEMA_VERSION, Document

COMMAND: Final = "profile"
DONE: Final = "done"
NO_MEMORY: Final = "out of memory"
NOT_APPLICABLE: Final = "not applicable"


def read(path: Path) -> Document:
    """A document from a file that may be anything."""
    try:
        document: Document = json.loads(read_text(path, RESULT_BYTES), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON document: {str(error)[:100]}") from error
    try:
        _check(document)
    except ValueError as misfit:
        raise ModelError(f"{path} is no result of `elsa profile`: {misfit}") from None
    return document


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


_TEXT: Final = (str,)
_NUMBER: Final = (int, float)
_NONE: Final = type(None)
# What is asked of the objects of a document: the types of their values, and the keys.
_SHAPES: Final[dict[str, dict[tuple[type, ...], str]]] = {
    "document": {_TEXT: "command", (dict,): "environment results"},
    "result": {(dict,): "model settings", (bool,): "complete", (list,): "points"},
    "point": {(dict,): "configuration", _TEXT: "status reason", (dict, _NONE): "profile"},
    "configuration": {_TEXT: "dtype precision", (int,): "batch", (list, _NONE): "image_size"},
    "profile": {
        _TEXT: "device dtype precision backend best_baseline best_patched",
        (int,): "batch rounds weight_bytes patched kept", (list, _NONE): "image_size",
        (list,): "runs sites warnings notes", (dict,): "left_out gain",
    },
    "run": {
        _TEXT: "name bound", (bool,): "patched", (int, _NONE): "memory_bytes",
        _NUMBER: "seconds seconds_p10 seconds_p90 spread images_per_second",
        (*_NUMBER, _NONE): "host_seconds device_seconds joules",
        (dict, _NONE): "ratio ratio_to_best",
    },
    "site": {
        _TEXT: "path module_class kind reason backend schedule precision", (bool,): "patched",
        (int, _NONE): "num_heads head_dim query_tokens key_tokens", (list,): "extra",
        _NUMBER: "seconds_before seconds_after share", (*_NUMBER, _NONE): "error",
        (dict,): "ratio",
    },
    "ratio": {_NUMBER: "value low high", (int,): "rounds", _TEXT: "verdict"},
}  # fmt: skip
_LARGEST: Final = 1e300  # a whole number of JSON may have any length
_PARTS: Final = ("forward", "backward", "optimizer")
_POSITIVE: Final = ("seconds", "seconds_before", "seconds_after", "value", "low", "high", "batch")


def _check(document: Any) -> None:
    _fits(document, "document")
    if document["command"] != COMMAND or document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"it is not of the command {COMMAND}, schema_version {SCHEMA_VERSION}")
    _fits(document["results"], "result")
    for point in document["results"]["points"]:
        _fits(point, "point")
        _fits(point["configuration"], "configuration")
        if point["status"] not in (DONE, NO_MEMORY, NOT_APPLICABLE):
            raise ValueError("a point has an unknown status")
        if point["status"] != DONE:
            continue
        found = point["profile"]
        _fits(found, "profile")
        for run in found["runs"]:
            _fits(run, "run")
            parts = run.get("parts")  # of a training step
            named = isinstance(parts, dict) and tuple(parts) == _PARTS
            spans = parts.values() if named else ()
            right = all(type(s) in _NUMBER and 0 <= s < _LARGEST for s in spans)
            if parts is not None and not (named and right):
                raise ValueError("the parts of a run are no seconds of " + ", ".join(_PARTS))
        for site in found["sites"]:
            _fits(site, "site")
            within = site.get("within", [])
            if not (isinstance(within, list) and all(isinstance(path, str) for path in within)):
                raise ValueError("within of a site is no list of texts")
        names = {run["name"] for run in found["runs"]}
        if not {"eager", found["best_baseline"], found["best_patched"]} <= names:
            raise ValueError("a point lacks its runs")
        if not all(isinstance(line, str) for line in (*found["warnings"], *found["notes"])):
            raise ValueError("warnings or notes are no texts")


def _fits(value: Any, kind: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"a {kind} is no object")
    for types, names in _SHAPES[kind].items():
        for name in names.split():
            held = value.get(name)
            right = name in value and isinstance(held, types)
            # bool is an int to Python.
            if not right or (isinstance(held, bool) and bool not in types):
                raise ValueError(f"{name} of a {kind} is missing or of the wrong type")
            if isinstance(held, int | float) and not abs(held) < _LARGEST:  # NaN is not either
                raise ValueError(f"{name} of a {kind} is not finite")
            if name in _POSITIVE and isinstance(held, int | float) and not held > 0:
                raise ValueError(f"{name} of a {kind} is not positive")
            if name in ("gain", "ratio", "ratio_to_best") and held is not None:
                _fits(held, "ratio")
            if name == "image_size" and held is not None:
                whole = all(type(each) is int and each > 0 for each in held)
                if len(held) != 2 or not whole:
                    raise ValueError("an image_size is no height and width")
