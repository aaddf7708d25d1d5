"""The cases of attention with its gradients: a forward, and those of query, key and value, of an
additive mask too. Who computes a forward computes its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import reference
from elsa_core.measuring.timing import Contender
from elsa_core.ops.attention.api import attention, explain
from elsa_core.ops.window.api import window_attention
from elsa_core.profiling.bench import peers
from elsa_core.profiling.bench.cases import GRADIENTS_TABLE, Case, Inputs, square
from elsa_core.profiling.bench.peers import Bench

# Shape: the least ratio to the best exact peer that is aimed at.
_CPU: Final = {(8, 12, 197, 64): 1.3, (1, 12, 1025, 64): 1.2}
_CUDA: Final = {
    "fp32": {
        (8, 12, 197, 64): 1.6, (8, 16, 577, 64): 2.2, (8, 12, 1025, 64): 2.5,
        (1, 8, 4096, 64): 3.0, (1, 8, 16384, 64): 3.0,
    },
    "fp16": {(8, 12, 197, 64): 1.0, (8, 12, 1025, 64): 0.95, (1, 8, 16384, 64): 0.9},
    "bf16": {(8, 12, 197, 64): 1.0, (8, 12, 1025, 64): 0.95, (1, 8, 16384, 64): 0.9},
}  # fmt: skip


def slope(query: Tensor) -> Tensor:
    """The gradient of the output [B, H, N, D] that all contenders of a case are given."""
    generator = torch.Generator(query.device).manual_seed(1)
    drawn = torch.randn(query.shape, generator=generator, device=query.device)
    return drawn.to(query.dtype)


def _trained(
    contender: Callable[[], Contender], forwards: Callable[[], Callable[..., Tensor]],
    leaves: Sequence[Tensor], grad: Tensor,
    parts: Callable[[Any], Sequence[Tensor]] = list,
) -> Contender:  # fmt: skip
    """A contender that computes forward(*leaves) and the leaves' gradients.

    parts: brings output and gradients to those of query, key, value and mask.
    """
    made, forward = contender(), forwards()
    learnt = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            out = forward(*learnt)
            return out, *torch.autograd.grad(out, learnt, grad)

    return replace(
        made, call=call,
        read=lambda returned: torch.cat([part.detach().flatten() for part in parts(returned)]),
    )  # fmt: skip


def _elsa(case: Case, tensors: Inputs, precision: str, backend: str) -> Contender:
    chosen: dict[str, Any] = {"precision": precision, "backend": backend}
    plain = partial(Contender, f"elsa-{precision}", lambda: None, precision=precision)
    grad = slope(tensors.query)
    if not case.window:
        query, key, value = (t.detach().requires_grad_() for t in tensors[:3])
        route = explain(query, key, value, tensors.mask, **chosen)
        told = [reason for reason in route.reasons if reason.startswith("gradients")]
        notes = {"backend": route.backend, "schedule": "; ".join([route.schedule, *told])}
        leaves = [t for t in tensors if t is not None]
        own: Any = partial(attention, **chosen)
        return _trained(partial(plain, notes=notes), lambda: own, leaves, grad)
    # within images as a projection leaves them
    assert tensors.mask is not None
    leaves = [peers.joined(case, *tensors[:3]), tensors.mask[0]]
    of_windows = partial(
        window_attention, num_heads=case.heads, window_size=(case.window,) * 2, **chosen
    )
    cut = partial(peers.windows_of, case)
    return _trained(
        plain, lambda: of_windows, leaves, peers.joined(case, grad),
        lambda found: [cut(found[0]), *map(cut, found[1].chunk(3, -1)), found[2]],
    )  # fmt: skip


def _peers(case: Case, tensors: Inputs, flex: bool) -> dict[str, Callable[[], Contender] | str]:
    leaves = [t for t in tensors if t is not None]
    grad = slope(tensors.query)

    found: dict[str, Callable[[], Contender] | str] = {}
    forwards: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "eager": lambda: peers.plain_attention, peers.FLASH_4: peers.flash_4_attention,
    }  # fmt: skip
    for name, made in peers.of_attention(case, tensors, False).items():
        if name == "onnxruntime":
            continue
        forward = forwards.get(name, lambda: F.scaled_dot_product_attention)
        found[name] = (
            made if isinstance(made, str) else partial(_trained, made, forward, leaves, grad)
        )
    return found


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Output and gradients in float64, flat; a head at a time: one score matrix in memory."""
    grad = slope(query)
    found = [torch.zeros_like(t, dtype=torch.float64) for t in (query, query, key, value)]
    of_mask = None if mask is None else torch.zeros_like(mask, dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            leaves = [t[b, h].double().requires_grad_() for t in (query, key, value)]
            q, k, v = (leaf[None, None] for leaf in leaves)
            if mask is not None:
                leaves.append(mask[0, h].double().requires_grad_())
            out = reference.attention(q, k, v, None if mask is None else leaves[3][None, None])[0]
            grads = torch.autograd.grad(out, leaves, grad[b, h].double()[None, None])
            for total, part in zip(found, (out.detach()[0, 0], *grads[:3]), strict=True):
                total[b, h] = part
            if of_mask is not None:
                of_mask[0, h] += grads[3]
    return torch.cat([t.flatten() for t in (*found, *([] if of_mask is None else [of_mask]))])


def _error(case: Case, found: Tensor, exact: Tensor) -> float:
    operand = case.batch * case.heads * case.queries * case.head_dim
    masks = case.heads * case.queries * case.keys if case.mask != "none" else 0
    sizes = [operand] * 4 + ([masks] if masks else [])
    pairs = zip(found.split(sizes), exact.split(sizes), strict=True)
    return max(reference.relative_l2(ours, wanted) for ours, wanted in pairs)


GRADIENTS = Bench(
    {
        "cpu": {
            GRADIENTS_TABLE: (
                *(square(GRADIENTS_TABLE, shape, goal=goal) for shape, goal in _CPU.items()),
                square(GRADIENTS_TABLE, (256, 3, 49, 32), mask="additive", window=7, goal=2.0),
            )
        },
        "cuda": {
            GRADIENTS_TABLE: tuple(
                square(GRADIENTS_TABLE, shape, dtype=dtype, goal=goal)
                for dtype, goals in _CUDA.items()
                for shape, goal in goals.items()
            )
        },
    },
    _elsa,
    _peers,
    _exact,
    error=_error,
)  # fmt: skip
