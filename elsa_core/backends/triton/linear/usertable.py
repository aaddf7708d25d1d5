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

_LOG = logging.getLogger("elsa")


def path(gpu: str) -> Path:
    """Where the table of a GPU model is kept; `gpu` is the name that its driver gives."""
    file = usertable.path(gpu)
    return file.with_name(f"{file.stem}.linear.json")


def least_work(gpu: str) -> int | None:
    """What the user's table says of a GPU model; None where there is none. Never raises."""
    if os.environ.get("ELSA_TUNING", "1") == "0":
        return None
    file = path(gpu)
    try:
        if not file.exists():
            return None
        least = usertable.document(file)["least_work"]
        if least is not None and (type(least) is not int or least < 0):
            raise ValueError(f"least_work {least!r} is not a count")
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, (ValueError, OSError)) else f"not a table: {error!r}"
        _LOG.warning("the user's table of products is left aside: %s: %s", file, reason)
        return None
    return least  # type: ignore[no-any-return]


def document(least: int | None, rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """A table's text; facts say where and when the rows were measured."""
    head = {"schema": usertable.SCHEMA, "elsa_version": __version__, "least_work": least}
    return json.dumps({**head, **facts, "products": rows}, indent=1) + "\n"
