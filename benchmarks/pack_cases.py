"""Writes the list of cases that kernel packs are built for: what sites of named models compute.

    python -m benchmarks.pack_cases timm:vit_base_patch16_224 ... > cases.json

Models are built without weights, patched as a whole and run once, on PyTorch's meta device, with a
backend that writes down each call. Needs the models' library, no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.backends.support import Backend, Implementation, Support
from elsa_core.loading import meta_model
from elsa_core.patching import patch

ABOUT = (
    "The calls of the sites of these models at their default size, one image. "
    "Written by benchmarks/pack_cases.py, read by elsa_core/backends/triton/pack/cases.py."
)


class Rows:
    """The calls seen so far, each once, with the first model that made it."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.model = ""

    def add(self, row: dict[str, Any]) -> None:
        self.found.setdefault(json.dumps(row), {"model": self.model, **row})

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *_: Any
    ) -> tuple[Tensor, Tensor]:
        b, h, n, d = q.shape
        kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
        full = None if mask is None else [size > 1 for size in mask.shape]
        self.add(
            {
                "operator": "attention", "batch": b, "heads": h, "key_heads": k.shape[1],
                "queries": n, "keys": k.shape[2], "head_dim": d, "value_dim": v.shape[3],
                "mask": kind, "mask_full": full, "causal": causal,
            }
        )  # fmt: skip
        out = q.new_empty((b, n, h, v.shape[3])).transpose(1, 2)
        return out, q.new_empty((b, h, n), dtype=torch.float32)

    def window(
        self, qkv: Tensor, bias: Tensor | None, index: Tensor | None, pad: Tensor | None,
        logit: Tensor | None, heads: int, window: Any, shift: Any, scale: float, mask: float,
        layout: str, grid: bool, precision: str,
    ) -> Tensor:  # fmt: skip
        table = 0 if bias is None or index is None else bias.shape[0]
        self.add(
            {
                "operator": "window_attention", "batch": qkv.shape[0],
                "size": list(qkv.shape[1:4]), "channels": qkv.shape[4] // 3, "heads": heads,
                "window": list(window), "shift": list(shift), "bias": bias is not None,
                "table": table, "pad": pad is not None, "cosine": logit is not None,
                "layout": layout, "grid": grid,
            }
        )  # fmt: skip
        return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
        residual: Tensor | None = None, scale: Tensor | None = None, *_: Any,
    ) -> None:  # fmt: skip
        self.add(
            {
                "operator": "linear", "rows": x.numel() // x.shape[-1], "depth": x.shape[-1],
                "columns": weight.shape[0], "bias": bias is not None, "activation": activation,
                "scale": scale is not None, "residual": residual is not None,
            }
        )  # fmt: skip


@contextmanager
def written_down(rows: Rows) -> Iterator[None]:
    """Calls on the meta device go to `rows`."""
    runs: dict[str, Any] = {
        "attention": rows.attention, "window_attention": rows.window, "linear": rows.linear,
    }  # fmt: skip
    operators = {
        name: Implementation(
            lambda request: Support(True), run, lambda *_: "", lambda request: "", direct=run
        )
        for name, run in runs.items()
    }
    dispatch.register(Backend("collect", "meta", operators))
    try:
        yield
    finally:
        dispatch.unregister("collect")


def collect(names: list[str]) -> dict[str, Any]:
    """The document of `cases.json`."""
    rows = Rows()
    with written_down(rows), torch.no_grad():
        for name in names:
            model: Any = meta_model(name).eval()
            patch(model, scope="model")
            rows.model = name.partition(":")[2]
            size = model.default_cfg["input_size"]
            model(torch.empty((1, *size), device="meta"))
            sys.stderr.write(f"{name}: {len(rows.found)} cases\n")
    return {"about": ABOUT, "models": names, "cases": list(rows.found.values())}


def main() -> None:
    """Write the document to stdout, a case a line."""
    found = collect(sys.argv[1:])
    cases = ",\n".join(f"  {json.dumps(case)}" for case in found.pop("cases"))
    head = json.dumps(found, indent=1)[:-2]
    sys.stdout.write(f'{head},\n "cases": [\n{cases}\n ]\n}}\n')


if __name__ == "__main__":
    main()
