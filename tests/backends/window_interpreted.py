"""Runs the window kernels by Triton's interpreter; prints one JSON line of errors per case.

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

from elsa_core.backends import eager_window  # noqa: E402
from elsa_core.backends.triton.window import fold, planner, tile  # noqa: E402
from elsa_core.backends.window_call import WindowCall  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (batch, size, heads, head_dim, window, shift), dtype, precision, options
CASES = {
    "half": ((1, (1, 8, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict", {}),
    "half swin": ((1, (1, 7, 14), 1, 32, (1, 7, 7), (0, 3, 3)), F16, "strict", {}),
    "strict swin": ((1, (1, 7, 14), 1, 32, (1, 7, 7), (0, 3, 3)), F32, "strict", {}),
    "strict unshifted": ((1, (1, 4, 4), 2, 16, (1, 4, 4), (0, 0, 0)), F32, "strict", {}),
    "turbo": ((1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 1, 2)), F32, "turbo", {}),
    "lean": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 1, 2)), F32, "lean", {}),
    "ieee": ((1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 1, 2)), F32, "ieee", {}),
    "padded with zeros": ((1, (1, 5, 3), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {}),
    "padded with a bias": (
        (2, (1, 5, 3), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"pad": True}
    ),
    "padded half, head first": (
        (1, (1, 3, 5), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict",
        {"pad": True, "layout": "head"},
    ),
    "table": ((1, (1, 4, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"bias": "table"}),
    "table, half": (
        (1, (3, 4, 3), 2, 16, (3, 2, 3), (1, 1, 2)), F16, "strict", {"bias": "table", "pad": True}
    ),
    "no bias": ((1, (1, 3, 6), 1, 16, (1, 3, 3), (0, 1, 0)), F32, "strict", {"bias": None}),
    "strided bias": ((1, (1, 4, 4), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict", {"bias": "mT"}),
    "minus infinity": (
        (1, (1, 10, 9), 1, 16, (1, 10, 9), (0, 4, 4)), F16, "strict", {"mask": -math.inf}
    ),
    "cosine": ((1, (1, 4, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"cosine": True}),
    "cosine half": ((1, (1, 4, 8), 2, 16, (1, 4, 4), (0, 2, 1)), F16, "strict", {"cosine": True}),
    "cosine ieee": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "ieee", {"cosine": True}),
    "cosine long": ((1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F32, "strict", {"cosine": True}),
    "cosine long half": (
        (1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F16, "strict", {"cosine": True}
    ),
    "long": ((1, (1, 11, 10), 1, 24, (1, 12, 11), (0, 5, 4)), F32, "strict", {"pad": True}),
    "long half": ((1, (1, 12, 12), 1, 16, (1, 12, 12), (0, 6, 6)), F16, "strict", {}),
    "long ieee": ((1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F32, "ieee", {}),
    "longest": ((1, (1, 17, 16), 1, 16, (1, 17, 16), (0, 5, 4)), F32, "strict", {"bias": None}),
    "grid": ((1, (1, 8, 12), 1, 16, (1, 4, 4), (0, 0, 0)), F16, "strict", {"grid": True}),
    "volume": ((1, (3, 4, 4), 1, 16, (2, 4, 4), (1, 2, 2)), F32, "strict", {"pad": True}),
    "unaligned": ((1, (1, 4, 4), 2, 20, (1, 4, 4), (0, 2, 1)), F16, "strict", {"view": True}),
    "negative scale": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 0, 1)), F32, "strict", {"scale": -0.7}),
    "zero scale": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 0, 1)), F32, "strict", {"scale": 0.0}),
    "large logits": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 20.0}),
    "huge logits": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 1e15}),
    "overflow": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 5e37}),
    "overflow long": ((1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F32, "strict", {"times": 5e37}),
    "denormals": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 1e-40}),
    "zeros": ((1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"times": 0.0}),
    "outlier channels": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"outlier": True}
    ),
    "far values": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"far": True}
    ),
    "far values, turbo": (
        (1, (1, 4, 8), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "turbo", {"far": True}
    ),
    "far values, long": (
        (1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F32, "strict", {"far": True}
    ),
    "far values, long turbo": (
        (1, (1, 9, 9), 1, 16, (1, 9, 9), (0, 4, 4)), F32, "turbo", {"far": True}
    ),
    "cosine overflow": (
        (1, (1, 4, 4), 1, 16, (1, 4, 4), (0, 2, 1)), F32, "strict", {"cosine": True, "times": 1e25}
    ),
}  # fmt: skip


def arguments(shape, dtype, precision, options) -> WindowCall:
    batch, size, heads, dim, win, shift = shape
    g = torch.Generator().manual_seed(sum(size) + dim)
    channels, tokens = 3 * heads * dim, math.prod(win)
    extra = 1 if options.get("view") else 0
    qkv = torch.randn(batch, *size, channels + extra, generator=g) * options.get("times", 1.0)
    qkv = qkv.to(dtype)[..., extra:]
    if options.get("outlier"):
        qkv[:, :, :, :4, 5::16] *= 2.0**20
    if options.get("far"):  # a channel of the values, which a split holds no more, a half does
        qkv[:, :, :, :4, 37] *= 2.0**24
    bias = index = None
    kind = options.get("bias", "dense")
    if kind == "table":
        bias = torch.randn(40, heads, generator=g).to(dtype)
        index = torch.randint(40, (tokens, tokens), generator=g)
    elif kind:
        bias = torch.randn(heads, tokens, tokens, generator=g).to(dtype)
        bias = bias.mT if kind == "mT" else bias
    pad = torch.randn(channels, generator=g).to(dtype) if options.get("pad") else None
    logit = torch.rand(heads, generator=g) * 10 if options.get("cosine") else None
    return WindowCall(
        qkv, bias, index, pad, logit, heads, win, shift, options.get("scale", dim**-0.5),
        options.get("mask", -100.0), options.get("layout", "qkv"), options.get("grid", False),
        precision,
    )  # fmt: skip


def run(given: WindowCall) -> dict:
    terms = [t if t is None or t.dtype == torch.int64 else t.double() for t in given[:5]]
    reference = eager_window.attention(*terms, *given[5:])
    peer = eager_window.attention(*given)
    exact_rows.clear()
    with fenced() as fence:
        out = planner.window_attention(*given)
    size = reference.norm().clamp_min(1e-300)
    return {
        "error": ((out.double() - reference).norm() / size).item(),
        "peer": ((peer.double() - reference).norm() / size).item(),
        "finite": bool(out.isfinite().all()),
        "fence": fence["intact"],
        "exact_rows": len(exact_rows),
        "dense": out.is_contiguous() and out.shape == reference.shape and out.dtype == peer.dtype,
    }


def grouped() -> dict:
    """Several windows a program, one of them beyond the split: as one window a program."""
    shape = (2, (1, 8, 8), 1, 16, (1, 4, 4), (0, 2, 1))
    given = arguments(shape, F32, "strict", {"pad": True})
    given.qkv[0, 0, :4, 4:] *= 2.0**40
    plan = planner.tile_plan(given)
    outs = []
    for count, programs in ((1, 8), (3, 3)):
        out = torch.full((2, 1, 8, 8, 16), math.nan)
        call = planner.plan_call(given, plan._replace(count=count, programs=programs))
        call(*planner.pointers(given), out)
        outs.append(out)
    return {"equal": torch.equal(*outs), "finite": bool(outs[1].isfinite().all())}


def beyond_the_table() -> dict:
    """An index outside the table, a negative one too, gives NaN in its row and nothing else."""
    rows = []
    for outside in (40, -1):
        given = arguments(CASES["table"][0], F32, "strict", {"bias": "table"})
        given.bias_index[3, 5] = outside
        rows.append(int(planner.window_attention(*given).isnan().any(-1).sum()))
    return {"rows": rows, "windows": 2}


exact_rows: list[int] = []


def count_exact_rows() -> None:
    """The interpreter runs Python: what a kernel calls can be watched."""
    for kernel in (fold, tile):
        kernel.exact_rows = _counted(kernel.exact_rows)  # type: ignore[attr-defined]


def _counted(original):
    def counted(*arguments, **options):
        exact_rows.append(1)
        return original(*arguments, **options)

    return counted


def main() -> None:
    torch.set_num_threads(1)
    count_exact_rows()
    for name, (shape, dtype, precision, options) in CASES.items():
        row = {"name": name, **run(arguments(shape, dtype, precision, options))}
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps({"name": "grouped", **grouped()}) + "\n")
    sys.stdout.write(json.dumps({"name": "beyond the table", **beyond_the_table()}) + "\n")


if __name__ == "__main__":
    main()
