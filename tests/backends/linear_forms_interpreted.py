"""Runs gated units and half-precision products by Triton's interpreter; prints one JSON
line per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from fence import fenced  # noqa: E402

from elsa_core.backends.triton.linear import gated, gemm, launches, planner  # noqa: E402
from elsa_core.ops.linear.gated_record import plain as gated_plain  # noqa: E402
from elsa_core.ops.linear.record import plain  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (rows, channels, columns), options
GATED = {
    "one tile": ((64, 64, 64), {}),
    "ragged": ((70, 72, 52), {}),
    "large": ((130, 264, 132), {"tile": launches.LARGE}),
    "shallow": ((70, 96, 132), {"tile": launches.SHALLOW}),
    "no biases": ((64, 64, 64), {"bias": False, "value_bias": False}),
    "one bias": ((64, 64, 64), {"value_bias": False}),
    "the other bias": ((64, 64, 64), {"bias": False}),
    "packed": ((70, 72, 52), {"packed": True}),
    "strided weights": ((64, 64, 64), {"strided": True}),
    "frozen": ((70, 136, 64), {"frozen": True}),
    "frozen, packed": ((70, 136, 64), {"frozen": True, "packed": True}),
    "gelu": ((64, 64, 8), {"activation": "gelu"}),
    "no activation": ((64, 64, 8), {"activation": "none"}),
    "small rows": ((64, 64, 8), {"times": 1e-15}),
    "one small row": ((64, 64, 8), {"row": 1e-15}),
    "large rows": ((64, 64, 8), {"times": 1e15}),
    "channels of other magnitude": ((64, 64, 8), {"channel": 1e12}),
    "zeros": ((64, 64, 8), {"times": 0.0, "bias": False}),
    "disjoint": ((64, 64, 64), {"times": 1.0, "disjoint": True, "activation": "none"}),
    "infinity": ((104, 64, 12), {"entry": float("inf")}),
    "not a number": ((104, 64, 12), {"entry": float("nan")}),
}  # fmt: skip
HALVES = {
    f"{name}, {str(dtype)[6:]}": (shape, dtype, terms)
    for dtype in (F16,)  # the interpreter's products of bfloat16 are wrong
    for name, shape, terms in (
        ("gelu", (70, 96, 72), ("gelu", False, False)),
        ("silu", (70, 40, 24), ("silu", False, False)),
        ("residual", (2, 35, 96, 72), ("none", True, False)),
        ("all terms", (2, 35, 40, 24), ("gelu_tanh", True, True)),
    )
}


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


def weights(columns, depth, options):
    """Two weights [columns, depth], side by side, or one above the other."""
    if "packed" in options:
        return torch.randn(2 * columns, depth).chunk(2)
    stride = 2 * depth if "strided" in options else depth
    return [torch.randn(columns, stride)[:, :depth] for _ in range(2)]


def inputs(rows, depth, options):
    x = torch.randn(*rows, depth) * options.get("times", 1.0)
    if "row" in options:
        x[3] *= options["row"]
    if "entry" in options:
        x[100, 5] = options["entry"]
    return x


def kept_of(first, second, options):
    if "frozen" not in options:
        return ()
    if "packed" in options:
        halves, powers = planner.split_weight(torch.cat((first, second)))
        pairs = zip(halves.chunk(2, 1), powers.chunk(2), strict=True)
        return tuple(t for pair in pairs for t in pair)
    return (*planner.split_weight(first), *planner.split_weight(second))


def errors(out, exact, peer):
    finite = torch.isfinite(exact) & (exact.abs() <= torch.finfo(F32).max)
    norm = exact[finite].norm().item() or 1.0
    return {
        "error": (out.double() - exact)[finite].norm().item() / norm,
        "peer": (peer.double() - exact)[finite].norm().item() / norm,
        "same": torch.equal(torch.isnan(out), torch.isnan(peer)),
    }


def gated_row(shape, options):
    *rows, depth, columns = shape
    x = inputs(rows, depth, options)
    gate, value = weights(columns, depth, options)
    biases = [
        torch.randn(columns) if options.get(name, True) else None for name in ("bias", "value_bias")
    ]
    if {"times", "row", "channel"} & set(options):
        biases = [None, None]
    if "channel" in options:
        x[..., 3] *= options["channel"]
        gate[:, 3] /= options["channel"]
        value[:, 3] /= options["channel"]
    if "disjoint" in options:  # rows and columns of large numbers share no channel
        x[:32, 32:], x[32:, :32], gate[:32, 32:], gate[32:, :32] = 0.0, 0.0, 0.0, 0.0
        x[:32] *= 1e15
        gate[32:] *= 1e30
    tile_for = launches.tile_for
    if "tile" in options:
        launches.tile_for = lambda *_: options["tile"]
    given = (x, gate, biases[0], value, biases[1], options.get("activation", "silu"))
    kept = kept_of(gate, value, options)
    with fenced() as fence:
        out, again = (gated.gated_linear(*given, "strict", *kept) for _ in range(2))
    launches.tile_for = tile_for
    assert out.shape == (*rows, columns)
    assert torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0))
    exact = gated_plain(*wide(*given[:5]), given[5])
    return errors(out, exact, gated_plain(*given)) | fence


def half_row(shape, dtype, terms):
    *rows, depth, columns = shape
    x, w = torch.randn(*rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    bias = torch.randn(columns).to(dtype)
    activation, residual, scale = terms
    residual = torch.randn(*rows, columns).to(dtype) if residual else None
    scale = (torch.rand(columns) + 0.5).to(dtype) if scale else None
    with fenced() as fence:
        out, again = (gemm.linear(x, w, bias, activation, residual, scale) for _ in range(2))
    assert torch.equal(out, again) and out.dtype == dtype
    exact = plain(*wide(x, w, bias), activation, *wide(residual, scale))
    return errors(out, exact, plain(x, w, bias, activation, residual, scale)) | fence


def show(name, compute, case):
    """Print a case, where it was asked for or nothing was."""
    if not sys.argv[1:] or name in sys.argv[1:]:
        torch.manual_seed(0)
        print(json.dumps({"name": name, **compute(*case)}), flush=True)


if __name__ == "__main__":
    assert gated.gated_linear(torch.randn(63, 64), *[torch.randn(64, 64), None] * 2) is None
    wide_value = (torch.randn(64, 128)[:, :64], None)
    assert gated.gated_linear(torch.randn(64, 64), torch.randn(64, 64), None, *wide_value) is None
    for kind, rows, compute in (
        ("gated", GATED, gated_row), ("half", HALVES, half_row),
    ):  # fmt: skip
        for name, case in rows.items():
            show(f"{kind}, {name}", compute, case)
