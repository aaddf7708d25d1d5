"""How a call is served, in words: what was chosen, why, and who computes the gradients."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from elsa_core import ops
from elsa_core.backends.support import Implementation, Request
from elsa_core.base.limits import HALF_KEYS_MAX
from elsa_core.dispatch.chooser import gradient_name, implementation, select
from elsa_core.dispatch.table import PLAIN


@dataclass(frozen=True)
class Route:
    """How a call would be served, and why.

    Attributes:
        backend: one of `names()` but "auto".
        schedule: how keys and queries are cut, in words.
        precision: the precision asked for.
        arithmetic: what that precision means on this backend.
        reasons: one line for each backend that was asked first and could not serve the call, and
            for anything the caller should know (a measured table, a gradient path, dropout).
    """

    backend: str
    schedule: str
    precision: str
    arithmetic: str
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}


def route(
    request: Request, backend: str = "auto", *, schedule: tuple[Any, ...] = (), because: str = ""
) -> Route:
    """How calls like `request` are served, gradients included; lengths are not looked at.

    Args:
        request: what the call is.
        backend: as the caller asks for it.
        schedule: what the backends' `schedule` takes, to have it in words.
        because: why the backend that `auto` takes for such calls does not serve this one.

    Raises:
        ArgumentError, UnavailableError: as `select`.
    """
    name, reasons = select(request, backend)
    found = implementation(request.operator, name)
    if because:
        first, reasons = select(request)
        reasons = (*reasons, f"{first}: {because}") if first != name else reasons
    if request.gradient:
        reasons = (*reasons, *_of_gradients(request, found))
    words = found.schedule(*schedule) if schedule else ""
    return Route(name, words, request.precision, found.arithmetic(request), reasons)


def _of_gradients(request: Request, found: Implementation) -> tuple[str, ...]:
    """Who computes the gradients of what `found` serves, and why not others."""
    record, by = ops.record(request.operator), "recomputed in plain PyTorch"
    reasons: tuple[str, ...] = ()
    if found.whole:
        by = "PyTorch's own kernels, forward and backward"
    elif found.gradient is not None and not (record.twin and found.run is record.eager):
        name, reasons = gradient_name(request)
        attention = request.operator == "attention"
        if name != PLAIN:
            by = f"by {name}" + (" from our output and lse" if attention else "")
            if name == "native" and attention and request.dtype.itemsize == 2:
                by += f" up to {HALF_KEYS_MAX} keys, beyond by PyTorch's kernels or plain PyTorch"
            if name == "triton" and request.operator == "entmax_attention":
                by += "; of an additive mask plain PyTorch"
        elif attention:
            by = "recomputed block by block in plain PyTorch from the lse"
        elif request.operator == "varlen_attention" and request.device_type == "cuda":
            by = "those of attention of a padded batch"
    return (*reasons, f"gradients: {by}")
