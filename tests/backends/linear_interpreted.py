"""Runs the linear kernel by Triton's interpreter; prints one JSON line per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import json
import os
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402

from elsa_core.backends.triton.linear import gemm as kernel  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (rows, channels, columns), dtype, options
CASES = {
    "one tile": ((64, 64, 64), F32, {}),
    "no bias": ((64, 64, 64), F32, {"bias": False}),
    "ragged": ((70, 36, 52), F32, {}),
    "several groups": ((600, 32, 68), F32, {}),
    "tall": ((150, 96, 72), F32, {"tile": kernel.TALL}),
    "large": ((130, 64, 132), F32, {"tile": kernel.LARGE}),
    "narrow": ((65, 100, 36), F32, {"tile": kernel.NARROW}),
    "images": ((3, 5, 7, 32, 64), F32, {}),
    "strided weight": ((64, 32, 64), F32, {"strided": True}),
    "half": ((70, 96, 72), F16, {}),
    "half, ragged": ((70, 40, 24), F16, {}),
    "large numbers": ((64, 32, 32), F32, {"times": 1e30}),
    "largest numbers": ((64, 32, 32), F32, {"largest": True}),
    "small numbers": ((64, 32, 32), F32, {"times": 1e-36}),
    "one small row": ((64, 32, 32), F32, {"row": 1e-36}),
    "zeros": ((64, 32, 32), F32, {"times": 0.0}),
    "whole numbers": ((70, 96, 68), F32, {"whole": True}),
    "infinity": ((130, 32, 36), F32, {"entry": float("inf")}),
    "not a number": ((130, 32, 36), F32, {"entry": float("nan")}),
}


def run(shape, dtype, options):
    torch.manual_seed(0)
    *rows, depth, columns = shape
    x = torch.randn(*rows, depth) * options.get("times", 1.0)
    if "largest" in options:
        x = torch.full_like(x, torch.finfo(F32).max)
    if "row" in options:
        x[3] *= options["row"]
    if "entry" in options:
        x[100, 5] = options["entry"]
    x = x.to(dtype)
    w = torch.randn(columns, 2 * depth if "strided" in options else depth)[:, :depth].to(dtype)
    if "largest" in options:
        w *= 1e-4
    if "whole" in options:
        x, w = (x * 4).round(), (w * 4).round()
    bias = torch.randn(columns).to(dtype) if options.get("bias", True) else None
    if {"times", "row", "whole"} & set(options):
        bias = None
    out = torch.full((*rows, columns), float("nan"), dtype=dtype)
    call = kernel.plan(x, w, bias, options.get("tile"))
    call(x, w, w if bias is None else bias, out)
    if options.get("tile") is None and kernel.planned(x, w, bias) is not None:
        again = [kernel.linear(x, w, bias) for _ in range(2)]  # planned, and found again
        assert all(torch.equal(out.nan_to_num(7.0), o.nan_to_num(7.0)) for o in again)
    exact = torch.nn.functional.linear(
        x.double(), w.double(), None if bias is None else bias.double()
    )
    peer = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
    finite = torch.isfinite(exact)
    scale = exact[finite].norm().item() or 1.0
    rows_of = (exact.reshape(-1, columns)[3], out.reshape(-1, columns)[3])
    row = ((rows_of[1].double() - rows_of[0]).norm() / (rows_of[0].norm() + 1e-300)).item()
    return {
        "error": (out.double() - exact)[finite].norm().item() / scale,
        "peer": (peer.to(dtype).double() - exact)[finite].norm().item() / scale,
        "row": row,
        "same": torch.equal(torch.isnan(out), torch.isnan(exact))
        and torch.equal(out[torch.isinf(exact)].double(), exact[torch.isinf(exact)]),
    }


def declined():
    """What the kernel leaves to PyTorch: few rows, few channels, rows off 16 bytes, turned ones."""
    for rows, depth, columns in [(63, 64, 64), (64, 60, 64), (64, 66, 64), (64, 64, 65)]:
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        yield x, w, torch.randn(columns)
    wide = torch.randn(64 * 65)
    yield wide[1 : 64 * 64 + 1].view(64, 64), torch.randn(64, 64), None
    yield torch.randn(64, 65)[:, :64], torch.randn(64, 64), None
    yield torch.randn(64, 64), torch.randn(64, 64).t(), None
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(128)[::2]
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(1)


def refused():
    """What PyTorch refuses: the kernel must not read or write beyond it."""
    yield torch.randn(64, 128), torch.randn(64, 64), None
    yield torch.randn(128, 64), torch.randn(64, 128), None
    yield torch.randn(64, 64), torch.randn(64, 64), torch.randn(4)
    yield torch.randn(64, 64), torch.randn(64, 64).half(), None
    yield torch.randn(64, 64), torch.randn(64, 64, device="meta"), None


if __name__ == "__main__":
    for given in (*declined(), *refused()):
        assert kernel.linear(*given) is None, [t if t is None else t.shape for t in given]
    for name, case in CASES.items():
        print(json.dumps({"name": name, **run(*case)}), flush=True)
