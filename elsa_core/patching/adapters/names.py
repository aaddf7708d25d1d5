"""Names: of precisions and backends that a caller asks for, checked in one place; of classes that
are made on demand, which pickle finds by them.
"""

from __future__ import annotations

import re

import torch

from elsa_core import dispatch
from elsa_core.backends.support import Request, Support
from elsa_core.errors import ArgumentError
from elsa_core.precision import PRECISIONS

_ESCAPES = str.maketrans({"_": "__", ".": "_d", "<": "_l", ">": "_g"})
_HEAD_DIM = 64  # stands for a head_dim that a module does not say: every backend takes it


def check_names(precision: str, backend: str) -> None:
    """Refuse a name that there is not."""
    asked = {"precision": (precision, tuple(PRECISIONS)), "backend": (backend, dispatch.names())}
    for name, (value, choices) in asked.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be text, not {type(value).__name__}")
        if value not in choices:
            raise ArgumentError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}")


def served(
    precision: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None,
) -> Support:
    """Whether a backend asked for by name serves a module's weights; "auto" always does."""
    if backend == "auto" or device.type == "meta":
        return Support(True)
    dim = head_dim or _HEAD_DIM
    ordinal = -1 if device.index is None else device.index
    request = Request(device.type, dtype, dim, dim, precision, ordinal=ordinal)
    return dispatch.support(request, backend)


def encoded(*fields: str) -> str:
    """One identifier for several dotted names; `decoded` is its inverse."""
    return "_s".join(field.translate(_ESCAPES) for field in fields)


def decoded(name: str) -> list[str]:
    """The fields of `encoded`."""
    marks = {"_": "_", "d": ".", "l": "<", "g": ">", "s": "\0"}
    return re.sub("_(.)", lambda match: marks.get(match[1], match[0]), name).split("\0")
