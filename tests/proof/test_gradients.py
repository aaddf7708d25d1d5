"""`check(grad=True)`: right gradients pass, broken gradient kernels fail and are named."""

import json
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from elsa_core.backends import eager, eager_window
from elsa_core.proof.checking import CheckReport, check

from .test_blind_spots import checked, kernel, swin, vit


def failing(report: CheckReport) -> set[str]:
    return {one.path for one in report.gradients if not one.ok}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [vit, swin])
def test_right_gradients_pass(make: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    report = checked(model, grad=True)
    assert report.ok, report.failures
    assert [one.path for one in report.gradients] == [*(s.path for s in report.sites), "model"]
    for one in report.gradients:
        assert one.ok and 0 < one.patched_error <= one.allowed and one.excess <= 1.0
        assert not one.wrong
    # Every parameter, and the image.
    assert report.gradients[-1].gradients == len(before) + 1
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not checked(model).gradients
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_gradient_kernel_that_leaves_out_one_key() -> None:
    def broken(
        grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Any:
        found = eager.backward(grad_out, grad_lse, q, k[:, :, :-1], v[:, :, :-1], *rest)
        grad_k, grad_v = (nn.functional.pad(g, (0, 0, 0, 1)) for g in found[1:3])
        return found[0], grad_k, grad_v, found[3]

    model = vit()
    with kernel("attention_eager_backward", broken):
        report = checked(model, grad=True)
    assert all(site.ok for site in report.sites) and all(case.ok for case in report.cases)
    assert failing(report) == {"blocks.0.attn", "blocks.1.attn", "model"}
    assert report.failures[0].startswith("blocks.0.attn: gradients: noise")
    assert "input[0]" in report.gradients[0].wrong and not report.ok


def test_a_gradient_kernel_that_leaves_out_one_window() -> None:
    def broken(grad_out: Tensor, *rest: Any) -> Any:
        grad_out = grad_out.clone()
        grad_out[0, 0, :4, :4] = 0.0
        return eager_window.backward(grad_out, *rest)

    model = swin()
    with kernel("window_attention_eager_backward", broken):
        report = checked(model, grad=True)
    assert all(site.ok for site in report.sites)
    assert failing(report) == {"layers.0.blocks.0", "layers.0.blocks.1", "model"}


def test_a_gradient_kernel_without_the_bias_of_one_head() -> None:
    def broken(*given: Any) -> Any:
        grad_qkv, grad_bias, *rest = eager_window.backward(*given)
        if grad_bias.ndim == 3:
            grad_bias[1] = 0.0
        elif grad_bias.numel():
            grad_bias[:, 1] = 0.0
        return grad_qkv, grad_bias, *rest

    model = swin()
    with kernel("window_attention_eager_backward", broken):
        report = checked(model, grad=True)
    table = "attn.relative_position_bias_table"
    assert failing(report) == {"layers.0.blocks.0", "layers.0.blocks.1", "model"}
    assert [one.wrong for one in report.gradients[:2]] == [(table,)] * 2
    assert f"gradient of {table}: error" in report.failures[0]


def test_a_backward_that_raises_is_a_finding() -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("no gradient")

    model = vit()
    with kernel("attention_eager_backward", broken):
        report = checked(model, grad=True)
    assert failing(report) == {"blocks.0.attn", "blocks.1.attn", "model"}
    assert "raises ZeroDivisionError: no gradient" in report.failures[0]


def test_frozen_weights_are_left_out_and_inputs_written_to_are_taken() -> None:
    class Normalises(SwinTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5))

    model = swin()
    model.__class__ = Normalises
    for weight in model.parameters():
        weight.requires_grad_(False)
    model.head.fc.weight.requires_grad_(True)
    report = check(model, torch.randn(3, 3, 32, 32), grad=True)
    assert report.ok and report.gradients[-1].gradients == 2
