"""Where float32 linear layers gain on a user's GPU, measured by `elsa bench linear --tune`.

One JSON file for each GPU model, in `<cache>/tuning/`, beside the tiles of attention. It holds the
products that were measured and the multiply-adds from which split products are used on that GPU; a
GPU without a file uses PyTorch's, but for sm_90, whose figures are shipped. Whatever is wrong with
the file, PyTorch's serve and one warning says why. It decides speed alone.

Environment variables: as in `elsa_core.backends.triton.shared.usertable`.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from elsa_core.backends.triton.shared import usertable
from elsa_core.base.version import __version__

SCHEMA = 1
_LOG = logging.getLogger("elsa")


def path(gpu: str) -> Path:
    """Where the table of a GPU model is kept; `gpu` is the name that its driver gives."""
    file = usertable.path(gpu)
    return file.with_name(f"{file.stem}.linear.json")


def read(file: Path) -> int | None:
    """The multiply-adds from which the kernels serve; None where they never do.

    Raises:
        ValueError: it is no such table, or was measured with another version of the kernels.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
        if data["elsa_version"] != __version__:
            raise ValueError(f"measured with elsa {data['elsa_version']}, this is {__version__}")
        least = data["least_work"]
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a table of products ({type(error).__name__}: {error})") from error
    if least is not None and (type(least) is not int or least < 0):
        raise ValueError(f"least_work {least!r} is not a count")
    found: int | None = least
    return found


def least_work(gpu: str) -> int | None:
    """What the user's table says of a GPU model; None where there is none. Never raises."""
    if os.environ.get("ELSA_TUNING", "1") == "0":
        return None
    try:
        file = path(gpu)
        return read(file) if file.exists() else None
    except (ValueError, OSError) as error:
        _LOG.warning("the user's table of products is left aside: %s: %s", path(gpu), error)
        return None


def document(least: int | None, rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """A table's text; facts say where and when the rows were measured."""
    head = {"schema": SCHEMA, "elsa_version": __version__, "least_work": least}
    return json.dumps({**head, **facts, "products": rows}, indent=1) + "\n"
