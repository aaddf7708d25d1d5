"""Runs the window gradient kernels by Triton's interpreter; prints one JSON line per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported and must not
reach other tests.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from fence import fenced  # noqa: E402
from window_cases import composite  # noqa: E402

from elsa_core.backends import eager_window  # noqa: E402
from elsa_core.backends.triton.window import backward  # noqa: E402
from elsa_core.backends.triton.window.backward_plan import (  # noqa: E402
    Wants,
    plan_call,
    tile_plan,
)
from elsa_core.backends.window_call import WindowCall  # noqa: E402

F32, F16 = torch.float32, torch.float16
TERMS = ("qkv", "bias", "pad", "logit")
# name: (batch, size, heads, head_dim, window, shift), dtype, precision, options
CASES = {
    "half swin": ((1, (1, 7, 14), 2, 32, (1, 7, 7), (0, 3, 3)), F16, "strict", {}),
    "half, small windows": ((2, (1, 8, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict", {}),
    "half padded, head first": (
        (1, (1, 3, 5), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict",
        {"pad": True, "layout": "head"},
    ),
    "half table": (
        (1, (3, 4, 3), 2, 16, (3, 2, 3), (1, 1, 2)), F16, "strict", {"bias": "table", "pad": True}
    ),
    "half cosine": (
        (1, (1, 8, 16), 2, 32, (1, 8, 8), (0, 4, 4)), F16, "strict", {"cosine": True}
    ),
    "half small gradients": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F16, "strict", {"size": 1e-3}
    ),
    "strict swin": ((1, (1, 7, 14), 2, 32, (1, 7, 7), (0, 3, 3)), F32, "strict", {}),
    "strict unshifted": ((1, (1, 4, 4), 2, 16, (1, 4, 4), (0, 0, 0)), F32, "strict", {}),
    "padded with zeros": ((1, (1, 5, 3), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {}),
    "padded with a bias": (
        (2, (1, 9, 11), 2, 24, (1, 5, 6), (0, 2, 3)), F32, "strict", {"pad": True}
    ),
    "not padded, with a bias of padding": (
        (1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 0, 0)), F32, "strict", {"pad": True}
    ),
    "table": ((2, (1, 8, 8), 3, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"bias": "table"}),
    "no bias": ((1, (1, 3, 6), 1, 16, (1, 3, 3), (0, 1, 0)), F32, "strict", {"bias": None}),
    "strided bias": ((1, (1, 4, 4), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"bias": "mT"}),
    "minus infinity": (
        (1, (1, 10, 9), 1, 16, (1, 5, 3), (0, 2, 1)), F32, "strict", {"mask": -math.inf}
    ),
    "rows that see nothing": (
        (1, (1, 4, 4), 2, 16, (1, 2, 4), (0, 0, 0)), F32, "strict", {"dead": True}
    ),
    "cosine": ((1, (1, 8, 16), 2, 32, (1, 8, 8), (0, 4, 4)), F32, "strict", {"cosine": True}),
    "cosine padded": (
        (1, (1, 5, 7), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"cosine": True, "pad": True}
    ),
    "cosine ieee": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "ieee", {"cosine": True}),
    "ieee": ((1, (1, 7, 8), 1, 16, (1, 4, 4), (0, 0, 2)), F32, "ieee", {"pad": True}),
    "turbo": ((1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 1, 2)), F32, "turbo", {}),
    "lean": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 1, 2)), F32, "lean", {}),
    "grid": ((1, (1, 8, 12), 1, 16, (1, 4, 4), (0, 0, 0)), F32, "strict", {"grid": True}),
    "volume": ((1, (3, 4, 4), 1, 16, (2, 4, 4), (0, 2, 2)), F32, "strict", {"pad": True}),
    "unaligned": ((1, (1, 4, 4), 2, 20, (1, 4, 4), (0, 2, 1)), F32, "strict", {"view": True}),
    "negative scale": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 0, 1)), F32, "strict", {"scale": -0.7}),
    "zero scale": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 0, 1)), F32, "strict", {"scale": 0.0}),
    "large logits": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 6.0}),
    "small gradients": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"size": 1e-11}
    ),
    "gradients of 1e-30": (
        (1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"size": 1e-30}
    ),
    "outlier channels": (
        (2, (1, 4, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"outlier": True}
    ),
    "outlier channels, table": (
        (2, (1, 5, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict",
        {"outlier": True, "bias": "table", "pad": True},
    ),
    "expanded gradient": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"expanded": True}
    ),
    "bias alone": (
        (2, (1, 4, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"needs": (0, 1, 0, 0)}
    ),
    "qkv alone": (
        (2, (1, 5, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict",
        {"needs": (1, 0, 0, 0), "pad": True},
    ),
    "padding and logit scale alone": (
        (1, (1, 5, 7), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict",
        {"needs": (0, 0, 1, 1), "cosine": True, "pad": True},
    ),
}  # fmt: skip


def arguments(shape, dtype, precision, options) -> tuple[WindowCall, torch.Tensor]:
    """The operator's arguments, and the gradient of its result."""
    batch, size, heads, dim, win, shift = shape
    g = torch.Generator().manual_seed(sum(size) + dim)
    channels, tokens = 3 * heads * dim, math.prod(win)
    extra = 1 if options.get("view") else 0
    qkv = torch.randn(batch, *size, channels + extra, generator=g) * options.get("times", 1.0)
    qkv = qkv.to(dtype)[..., extra:]
    if options.get("outlier"):
        # one window of the first image
        qkv[0, 0, :4, :4, 5::16] *= 2.0**20
    bias = index = None
    kind = options.get("bias", "dense")
    if kind == "table":
        bias = torch.randn(40, heads, generator=g).to(dtype)
        index = torch.randint(40, (tokens, tokens), generator=g)
    elif kind:
        bias = torch.randn(heads, tokens, tokens, generator=g).to(dtype)
        bias = bias.mT if kind == "mT" else bias
    if options.get("dead"):
        bias[0, 3] = -math.inf
    pad = torch.randn(channels, generator=g).to(dtype) if options.get("pad") else None
    logit = torch.rand(heads, generator=g) * 10 if options.get("cosine") else None
    grad = torch.randn(batch, *size, heads * dim, generator=g) * options.get("size", 1.0)
    if options.get("expanded"):
        grad = grad[:, :, :1, :1].expand_as(grad)
    return WindowCall(
        qkv, bias, index, pad, logit, heads, win, shift, options.get("scale", dim**-0.5),
        options.get("mask", -100.0), options.get("layout", "qkv"), options.get("grid", False),
        precision,
    ), grad.to(dtype)  # fmt: skip


def exact(given: WindowCall, grad: torch.Tensor, needs) -> tuple[torch.Tensor, ...]:
    """The gradients in float64."""
    terms = [t if t is None or t.dtype == torch.int64 else t.double() for t in given[:5]]
    return eager_window.backward(grad.double(), *terms, *given[5:], needs)


def peers(given: WindowCall, grad: torch.Tensor, needs) -> list[torch.Tensor | None]:
    """What autograd makes of a model's own operations in the same dtype."""
    terms = {"qkv": given.qkv, "bias": given.bias, "pad_qkv": given.pad_qkv,
             "logit_scale": given.logit_scale}  # fmt: skip
    leaves = {
        name: t.detach().clone().requires_grad_()
        for (name, t), needed in zip(terms.items(), needs, strict=True)
        if t is not None and needed
    }
    out = composite(given._replace(**leaves))
    grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    found = dict(zip(leaves, grads, strict=True))
    return [found.get(name) for name in terms]


def distance(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def run(given: WindowCall, grad: torch.Tensor, options) -> dict:
    needs = tuple(bool(n) for n in options.get("needs", (1, 1, 1, 1)))
    expected, theirs = exact(given, grad, needs), peers(given, grad, needs)
    with fenced() as fence:
        found = backward.window_attention_backward(grad, *given, needs)
    again = backward.window_attention_backward(grad, *given, needs)
    terms = (given.qkv, given.bias, given.pad_qkv, given.logit_scale)
    errors, peer, dense = {}, {}, True
    for name, x, ref, their, term, needed in zip(
        TERMS, found, expected, theirs, terms, needs, strict=True
    ):
        if term is None or not needed:
            dense &= tuple(x.shape) == (0,)
            continue
        dense &= x.shape == term.shape and x.dtype == term.dtype and x.is_contiguous()
        errors[name] = distance(x, ref)
        peer[name] = 0.0 if their is None else distance(their, ref)
    return {
        "errors": errors, "peer": peer, "dense": dense, "fence": fence["intact"],
        "finite": all(bool(x.isfinite().all()) for x in found),
        "same": all(torch.equal(x, y) for x, y in zip(found, again, strict=True)),
    }  # fmt: skip


GROUPED = {
    "grouped": (
        (2, (1, 9, 8), 1, 16, (1, 4, 4), (0, 2, 1)), {"pad": True, "outlier": True},
        ((1, 12), (5, 3), (12, 1)),
    ),
}  # fmt: skip


def grouped(name: str) -> dict:
    """Rows of dqkv do not depend on how windows are grouped; sums do by their rounding alone."""
    shape, options, plans = GROUPED[name]
    given, grad = arguments(shape, F32, "strict", options)
    wants = Wants(True, True, True, False)
    rows, sums = [], []
    for count, groups in plans:
        grads = [t.new_full(t.shape, math.nan) for t in (given.qkv, given.bias, given.pad_qkv)]
        grads[2].zero_()
        plan = tile_plan(given)._replace(count=count, groups=groups)
        call = plan_call(given, wants, None, plan)
        backward.execute(call, given, grad, [*grads, grads[0]])
        rows.append(grads[0])
        sums.append(torch.cat([grads[1].flatten(), grads[2]]))
    return {
        "equal": all(torch.equal(rows[0], x) for x in rows),
        "sums": max(distance(x, sums[0].double()) for x in sums),
    }


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or [*CASES, *GROUPED]
    for name in chosen:
        if name in GROUPED:
            row = grouped(name)
        else:
            shape, dtype, precision, options = CASES[name]
            row = run(*arguments(shape, dtype, precision, options), options)
        sys.stdout.write(json.dumps({"name": name, **row}) + "\n")


if __name__ == "__main__":
    main()
