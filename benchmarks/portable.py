"""Portable kernels against Triton's `ieee` and PyTorch: `python -m benchmarks.portable`.

Times are under CUDA graphs; rates count the products alone, 4 B H Nq Nk D operations, also as a
share of what cuBLAS reaches with FMA.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from benchmarks.harness import Row, compared, main, options
from elsa_core import reference
from elsa_core.backends.portable import attention as portable
from elsa_core.measuring.intervals import percentile
from elsa_core.measuring.timing import Contender, time_cuda
from elsa_core.ops.attention.api import attention

Shape = tuple[int, int, int, int]
SHAPES: Final = ((8, 12, 1025, 64), (8, 12, 4096, 64), (8, 12, 197, 64), (4, 16, 2048, 128),
                 (8, 16, 729, 72), (2, 8, 2048, 256), (1, 3, 197, 64), (1, 12, 197, 64),
                 (1, 8, 16384, 64), (1, 3, 1025, 64), (4, 16, 1024, 80), (8, 12, 1024, 32),
                 (1, 12, 4097, 128))  # fmt: skip
_SIDE: Final = 8192


@functools.lru_cache(maxsize=1)
def cublas_rate() -> float:
    """Operations a second of a large float32 product without tensor cores."""
    a = torch.randn(_SIDE, _SIDE, device="cuda")
    samples, _ = time_cuda([Contender("cublas", partial(torch.mm, a, a))], rounds=5,
                           budget_seconds=2.0)  # fmt: skip
    return 2.0 * _SIDE**3 / percentile(samples["cublas"], 0.5)


def cases(given: Namespace) -> dict[str, Shape]:
    """Shapes [batch, heads, tokens, head_dim]."""
    return {"x".join(map(str, shape)): shape for shape in SHAPES}


def measure(name: str, shape: Shape, given: Namespace) -> list[Row]:
    """The kernels, Triton and PyTorch in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    scale = shape[3] ** -0.5
    exact = reference.attention(q[:1, :1], k[:1, :1], v[:1, :1])[0]
    ieee = partial(attention, q, k, v, precision="ieee", backend="triton")
    contenders = [
        Contender("portable", lambda: portable.attention(q, k, v, None, False, scale)[0]),
        Contender("triton ieee", ieee),
        Contender("pytorch", partial(F.scaled_dot_product_attention, q, k, v)),
    ]
    rows = compared(
        name, contenders, given,
        lambda each: {"error": reference.relative_l2(each.output()[:1, :1], exact)},
    )  # fmt: skip
    batch, heads, tokens, dim = shape
    for each in rows:
        if each.get("median"):
            rate = 4.0 * batch * heads * tokens**2 * dim / each["median"]
            each |= {"tflops": rate / 1e12, "share_of_cublas": rate / cublas_rate()}
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, device=torch.device("cuda")))
