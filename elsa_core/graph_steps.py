"""Small training calls that a CUDA graph records: there the host's time does not count, and this
package's kernels serve where they were measured to be the faster ones (`routing/measured.json`).

In eager calls PyTorch's own kernels keep them, which take less of the host's time.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from elsa_core import calls, operators, routing
from elsa_core.messages import first_line
from elsa_core.routing import measured

_LOG = logging.getLogger("elsa")
Kind = tuple[str, torch.dtype, int, int, str]


def serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: Kind,
    gradient: tuple[str, ...],
    *,
    asked: bool = False,
) -> bool:
    """Whether the operator takes an eager call [B, H, N, D] on a GPU, without a mask, that
    PyTorch's own kernels serve because it is small.

    What warms up for a graph runs on a stream of its own, as PyTorch's documentation has it; so the
    first call of a kind there has the kernels compiled and loaded. Of a graph whose warm-up was
    elsewhere no.

    Args:
        kind: device, dtype, widths and precision, as routing has them.
        gradient: the operands that a gradient is wanted of.
        asked: only a question; no such call follows.
    """
    if not _matters(query.device, asked):
        return False
    row = measured.training("attention", "cuda", query.dtype)
    if row is None or not (row.in_graphs and row.in_graphs.holds(query, key, value)):
        return False
    if routing.training_name("attention", *kind, gradient):
        return False  # theirs not because it is small
    operands = tuple((t.shape, t.stride()) for t in (query, key, value))
    form: Any = ("small step", *kind, operands, gradient)
    if torch.cuda.is_current_stream_capturing():
        return calls.was_seen(form)
    if not calls.was_seen(form) and not calls.was_seen((form, "failed")):
        try:
            _load(query, key, value, kind[-1], gradient)
        except Exception as error:  # of compilers, memory, Triton: PyTorch needs none of it
            _LOG.info("CUDA graphs keep PyTorch's kernels for such steps: %s", first_line(error))
            form = (form, "failed")
        calls.first_of_kind(form)
    return False


def serve_packed(x: Tensor, heads: int, kind: Kind) -> bool:
    """`serve` of a module that projects x [B, N, C] to query, key and value side by side."""
    if not _matters(x.device):
        return False
    packed = x.new_empty((*x.shape[:2], 3, heads, kind[2]), dtype=kind[1])
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    kind = (calls.place(x), *kind[1:])
    return serve(query, key, value, kind, ("query", "key", "value"))


def _matters(device: torch.device, asked: bool = False) -> bool:
    """Whether a call is recorded in a CUDA graph, or may warm up for one."""
    if torch.cuda.is_current_stream_capturing():
        return True
    return not asked and calls.is_own_stream(device)


def _load(
    query: Tensor, key: Tensor, value: Tensor, precision: str, gradient: tuple[str, ...]
) -> None:
    """Run the operator and its gradients for the kernels that this loads: of gradients laid out as
    the output. What others need is loaded while the graph is recorded (seen with CUDA 13).
    """
    terms = (False, query.shape[-1] ** -0.5, precision)
    needs = [name in gradient for name in operators.ATTENTION.terms]
    with torch.no_grad():
        operands = [t.detach() for t in (query, key, value)]
        out, lse = operators.ATTENTION.overload(*operands, None, *terms)
        torch.ops.elsa.attention_backward.default(
            torch.ones_like(out), lse.new_zeros(0), *operands, None, out, lse, *terms, needs
        )
