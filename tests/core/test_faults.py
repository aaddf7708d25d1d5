"""Calls that a kernel of PyTorch computes wrong: `auto` gives right values, by name it is refused.

Every call is compared with float64; its error may be twice that of PyTorch's own call.
"""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import elsa_core as elsa
from elsa_core.errors import UnavailableError

HALF = (torch.float16, torch.bfloat16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
NAMES = ("out", "query", "key", "value")
Kind = tuple[torch.dtype, str, bool, float, int]  # dtype, layout, is_causal, scale, head_dim
LAYOUTS = ("dense", "last axis not dense", "rows off 16 bytes")


def operand(layout: str, tokens: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    t = torch.randn(2, 3, tokens, width).to(device, dtype)
    if layout == "last axis not dense":
        return t.mT.contiguous().mT
    if layout == "rows off 16 bytes":
        return torch.cat([t, t[..., :3]], -1)[..., :width]
    return t


def results(call: object, given: list[Tensor], slope: Tensor) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in given]
    out = call(*given)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, given, slope.to(out.dtype))]


def calls_of() -> Iterator[Kind]:
    for dtype, layout in itertools.product((torch.float32, *HALF), LAYOUTS):
        for causal, scale in itertools.product((False, True), (0.0, -0.3, 0.3)):
            yield dtype, layout, causal, scale, 16
    for dtype, width in itertools.product((torch.float32, *HALF), (1, 20, 72)):
        yield dtype, "dense", True, 0.0, width
        yield dtype, "last axis not dense", False, width**-0.5, width


@pytest.mark.parametrize("device", DEVICES)
def test_calls_that_peers_compute_wrong(device: str) -> None:
    torch.manual_seed(0)
    wrong = []
    for kind in calls_of():
        dtype, layout, *_, width = kind
        given = [operand(layout, 70, width, dtype, device) for _ in range(3)]
        given[2] = given[2] + 2.0  # rowsum(grad_out * out) is large beside what is left of it
        slope = torch.randn(2, 3, 70, width, device=device).to(dtype)

        def positive(q: Tensor, k: Tensor, v: Tensor, kind: Kind = kind) -> Tensor:
            """PyTorch's own call of the same function, with a scale that it computes right."""
            _, _, causal, scale, _ = kind
            q, scale = (q * 0.0, 1.0) if scale == 0.0 else (q * math.copysign(1.0, scale), scale)
            if q.is_cuda:  # its kernels there do not take every layout
                q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
            call = functional.scaled_dot_product_attention
            return call(q, k, v, is_causal=causal, scale=abs(scale))

        def ours(*t: Tensor, kind: Kind = kind) -> Tensor:
            return elsa.attention(*t, is_causal=kind[2], scale=kind[3])

        oracle = results(positive, [t.double() for t in given], slope)
        found, peers = results(ours, given, slope), results(positive, given, slope)
        for name, a, b, o in zip(NAMES, found, peers, oracle, strict=True):
            error, allowed = ((x.double() - o).norm().item() for x in (a, b))
            if not error <= 2.0 * allowed + torch.finfo(dtype).eps * o.norm().item():
                wrong.append((*kind, name, error, allowed))
    assert not wrong


@pytest.mark.parametrize("device", DEVICES)
def test_a_peer_with_a_fault_is_refused_by_name(device: str) -> None:
    given = [torch.randn(1, 2, 9, 8, device=device) for _ in range(3)]
    for scale in (0.0, -0.5):
        terms = {"is_causal": True, "scale": scale, "backend": "sdpa"}
        for call in (elsa.attention, elsa.explain):
            with pytest.raises(UnavailableError, match="scale of 0 or below"):
                call(*given, **terms)  # type: ignore[operator]
    assert elsa.attention(*given, is_causal=True, backend="sdpa").isfinite().all()
