"""Padding left out changes no gradient, copy or recorded program of NaFlexViT and SigLIP 2."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from judging import assert_agree, assert_as_exact, cast, outputs
from seen import Calls
from torch import Tensor

import elsa_core as elsa

# Of images whose padding is too little to be left out, or none: patches of each.
LITTLE = {
    "naflex": ((20, 20, 19), (20, 20, 20)),
    "siglip2": (((4, 5), (4, 5)), ((4, 5), (4, 5), (3, 6))),
}
PIXELS = {"naflex": "patches", "siglip2": "pixel_values"}
kinds = pytest.mark.parametrize("kind", LITTLE)


def of(kind: str) -> Any:
    """The file of this family's own tests, which makes its models and batches."""
    return importlib.import_module(f"test_adapters_{kind}")


def pair(kind: str, scope: str = "attention", dtype: torch.dtype = torch.float32) -> Any:
    original = of(kind).model().to(dtype)
    patched = copy.deepcopy(original)
    elsa.patch(patched, scope=scope)
    return original, patched


@kinds
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("of_pixels", [False, True])
def test_gradients_are_the_originals(
    kind: str, training: bool, of_pixels: bool, packed: list[Any]
) -> None:
    """Of each padded token's pixels too, which one token for all of them would not give.

    A key's bias has no gradient but rounding.
    """
    original, patched = pair(kind)

    def grads(m: Any, given: dict[str, Tensor]) -> Tensor:
        m.train(training).zero_grad()
        pixels = given[PIXELS[kind]].clone().requires_grad_(of_pixels)
        found = outputs(m, given | {PIXELS[kind]: pixels})
        torch.stack([each.square().sum() for each in found.values()]).sum().backward()
        if of_pixels:
            assert pixels.grad is not None
            return pixels.grad
        weights = [p.grad for n, p in m.named_parameters() if "k_proj.bias" not in n]
        return torch.cat([g.flatten() for g in weights if g is not None])

    given = of(kind).batch()
    exact = grads(copy.deepcopy(original).double(), cast(given, torch.float64))
    assert_agree(grads(patched, given), grads(original, given), exact)
    assert bool(packed) is (kind == "naflex" and not training)


@kinds
@torch.no_grad()
def test_little_padding_stays_masked(kind: str, packed: list[Any]) -> None:
    original, patched = pair(kind)
    for sizes in LITTLE[kind]:
        assert_as_exact(original, patched, of(kind).batch(sizes))
    assert not packed


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_other_dtypes(kind: str, dtype: torch.dtype, packed: list[Any]) -> None:
    given = cast(of(kind).batch(), dtype)
    assert_as_exact(*pair(kind, dtype=dtype), given, 8 * torch.finfo(dtype).eps)
    assert packed


@kinds
@torch.no_grad()
def test_what_is_recorded_keeps_the_mask(kind: str, packed: list[Any]) -> None:
    """A program must not depend on how many tokens this batch has."""
    original, patched = pair(kind)
    with Calls():
        found = outputs(patched, of(kind).batch())
    expected = outputs(original, of(kind).batch())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert not packed


@pytest.mark.parametrize(("kind", "scope"), [("naflex", "model"), ("siglip2", "attention")])
@torch.no_grad()
def test_copies_pickles_and_goes_back(kind: str, scope: str) -> None:
    original, patched = pair(kind, scope)
    given = of(kind).batch()
    plain, out = outputs(original, given), outputs(patched, given)
    torch.testing.assert_close(out, plain, atol=1e-4, rtol=1e-5)
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        torch.testing.assert_close(outputs(other, given), out, atol=0, rtol=0)
    assert patched.state_dict().keys() == original.state_dict().keys()
    assert elsa.unpatch(patched) >= 3 and type(patched) is type(original)
    torch.testing.assert_close(outputs(patched, given), plain, atol=0, rtol=0)
