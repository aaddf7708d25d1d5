"""`torch.utils.flop_counter` counts for elsa's operators what it counts for PyTorch's own calls."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import elsa_core as elsa
from elsa_core import ops


def count(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as mode:
        call()
    return int(mode.get_total_flops())


def test_every_operator_with_products_has_a_formula() -> None:
    names = [name for record in ops.RECORDS.values() if record.fake for name in record.names]
    names += [
        f"{name}_backward" for record in ops.RECORDS.values() for name in record.names
        if record.backward
    ]  # fmt: skip
    names = [name for name in names if not name.startswith("elsa::test_")]  # of other tests
    packets = [getattr(torch.ops.elsa, name.removeprefix("elsa::")) for name in names]
    packets.append(torch.ops.elsa.attention_portable)
    missing = [str(packet) for packet in packets if packet not in flop_registry]
    assert missing == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_counts_as_pytorchs(device: str) -> None:
    query = torch.randn(2, 4, 33, 16, device=device)
    key, value = (torch.randn(2, 2, 40, n, device=device) for n in (16, 24))
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        wanted = count(
            lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        )
    for backend in ("auto", "eager"):
        terms = {"enable_gqa": True, "backend": backend}
        assert count(lambda t=terms: elsa.attention(query, key, value, **t)) == wanted
    assert count(lambda: elsa.entmax_attention(query, key, value, enable_gqa=True)) == wanted


def test_packed_sequences_count_their_pairs() -> None:
    bounds = torch.tensor([0, 3, 10])
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    wanted = 4 * (9 + 49) * 2 * 8
    assert count(lambda: elsa.varlen_attention(q, k, v, bounds, bounds, 7, 7)) == wanted
    assert count(lambda: elsa.entmax_varlen_attention(q, k, v, bounds, bounds, 7, 7)) == wanted


def test_gradients_count_five_products() -> None:
    given = [torch.randn(2, 3, 33, 16, requires_grad=True) for _ in range(3)]
    forward = 2 * 2 * 2 * 3 * 33 * 33 * 16

    def step() -> None:
        elsa.attention(*given, backend="native").sum().backward()

    assert count(step) == forward + forward // 2 * 5


def test_a_linear_layer_counts_as_pytorchs() -> None:
    x, weight = (torch.randn(5, 8, requires_grad=True) for _ in range(2))

    def step(layer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: layer(x, weight).sum().backward()

    operator = torch.ops.elsa.linear.default
    wanted = count(step(functional.linear))
    assert count(step(lambda x, w: operator(x, w, None))) == wanted


def test_a_patched_model_has_the_count_of_its_original() -> None:
    options = {"depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2), "img_size": 112}
    model = timm.create_model("swin_tiny_patch4_window7_224", **options).eval()
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    x = torch.randn(1, 3, 112, 112)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        assert count(lambda: patched(x)) == count(lambda: model(x))
