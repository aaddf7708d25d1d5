"""Times float32 calls as the table hands them out, and as it would without the warp-specialised
kernel, beside PyTorch's fastest float32 kernel; rounds interleaved, in CUDA graphs.

    python tests/gpu/specialized.py tests/gpu/specialized_h200.json
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from elsa_core import reference
from elsa_core.backends.triton import launch

# (B, H, N, D), causal
CASES = [
    ((8, 12, 1025, 64), False), ((8, 16, 577, 64), False), ((1, 12, 1025, 64), False),
    ((1, 12, 577, 64), False), ((1, 6, 577, 64), False), ((4, 12, 577, 64), False),
    ((2, 12, 1025, 64), False), ((1, 12, 4097, 64), False), ((1, 8, 4096, 64), False),
    ((1, 8, 16384, 64), False), ((1, 4, 65536, 64), False), ((1, 4, 4096, 64), False),
    ((1, 2, 4096, 64), False), ((1, 1, 16384, 64), False), ((1, 6, 2048, 64), False),
    ((16, 12, 257, 64), False), ((8, 12, 257, 64), False), ((1, 12, 4097, 64), True),
    ((1, 8, 16384, 128), False), ((1, 8, 4096, 128), False), ((8, 8, 1024, 128), False),
    ((8, 8, 197, 128), False), ((1, 8, 1024, 128), False), ((1, 8, 2048, 128), False),
    ((2, 8, 577, 128), False),
]  # fmt: skip
PEER = "sdpa-efficient"
ROUNDS = 9


def graph(run: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(count):
            run()
    return captured


def plans(q: Any, k: Any, v: Any, causal: bool) -> dict[str, launch.Call]:
    """The call as the table has it, and without the specialised kernel."""
    scale = q.shape[3] ** -0.5
    now = launch.plan_call(q, k, v, None, causal, scale, "strict")
    serves, launch.may_specialize = launch.may_specialize, lambda *_: False
    try:
        before = launch.plan_call(q, k, v, None, causal, scale, "strict")
    finally:
        launch.may_specialize = serves
    return {"now": now, "before": before}


def measure(shape: tuple[int, int, int, int], causal: bool) -> dict[str, Any]:
    b, h, n, d = shape
    torch.manual_seed(0)
    q, k, v = torch.randn(b, n, 3, h, d, device="cuda").permute(2, 0, 3, 1, 4).unbind(0)
    calls = plans(q, k, v, causal)
    last = slice(max(0, n - 64), n)
    seen = torch.arange(n, device="cuda")[None] <= torch.arange(n, device="cuda")[last, None]
    some = (x[:1, :2] for x in (q[:, :, last], k, v))
    oracle, _ = reference.attention(*some, attn_mask=seen[None, None] if causal else None)
    count = max(1, min(20, int(3e9 / (b * h * n * n * d * 0.05 + 1e8))))
    graphs, errors = {}, {}
    for name, call in calls.items():
        out, _ = launch.execute(call, q, k, v, None)
        errors[name] = reference.relative_l2(out[:1, :2, last], oracle)
        graphs[name] = graph(lambda call=call: launch.execute(call, q, k, v, None), count), count
    peer_count = 1 if n > 9000 else 2
    with torch.inference_mode(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        own = graph(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), peer_count)
    graphs[PEER] = own, peer_count
    times: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(ROUNDS):
        for name, (captured, repeats) in graphs.items():
            if name == PEER and i > 2:
                continue
            begin.record()
            captured.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return {
        "shape": shape,
        "causal": causal,
        "microseconds": {name: round(statistics.median(own), 1) for name, own in times.items()},
        "errors": {name: float(f"{error:.0e}") for name, error in errors.items()},
        "schedule": calls["now"].words,
    }


def main() -> None:
    cases = []
    for shape, causal in CASES:
        cases.append(measure(shape, causal))
        print(cases[-1], flush=True)
        torch.cuda.empty_cache()
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cases": cases,
    }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
