"""How calls are served, in words: what was chosen, why, and who computes the gradients."""

from __future__ import annotations

from typing import Any

from elsa_core import ops
from elsa_core.backends.support import Implementation, Request
from elsa_core.base.limits import HALF_KEYS_MAX
from elsa_core.dispatch.chooser import gradient_name, implementation, select
from elsa_core.dispatch.route import Route
from elsa_core.dispatch.table import PLAIN


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
    return Route(
        backend=name,
        schedule=found.schedule(*schedule) if schedule else "",
        precision=request.precision,
        arithmetic=found.arithmetic(request),
        reasons=reasons,
    )


def _of_gradients(request: Request, found: Implementation) -> tuple[str, ...]:
    """Who computes the gradients of what `found` serves, and why not others."""
    if found.whole:
        return ("gradients: PyTorch's own kernels, forward and backward",)
    if found.own_gradients:
        of_mask = "attn_mask" in ops.record(request.operator).terms
        masks = "; of an additive mask plain PyTorch" if of_mask else ""
        return (f"gradients: kernels of the same backend{masks}",)
    record = ops.record(request.operator)
    if found.gradient is not None and not (record.twin and found.run is record.eager):
        name, reasons = gradient_name(request)
        if name != PLAIN:
            of = " from our output and lse" if request.operator == "attention" else ""
            if name == "native" and request.operator == "attention" and request.dtype.itemsize == 2:
                of += f" up to {HALF_KEYS_MAX} keys, beyond by PyTorch's kernels or plain PyTorch"
            return (*reasons, f"gradients: by {name}{of}")
        by = "recomputed in plain PyTorch"
        if request.operator == "attention":
            by = "recomputed block by block in plain PyTorch from the lse"
        elif request.operator == "varlen_attention" and request.device_type == "cuda":
            by = "those of attention of a padded batch"
        return (*reasons, f"gradients: {by}")
    return ("gradients: recomputed in plain PyTorch",)
