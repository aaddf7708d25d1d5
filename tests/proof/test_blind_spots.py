"""Broken kernels that a check of one image, of whole windows or of few keys does not see.

Each test shows both: the check that passes, and the default one, which fails and names the site.
The last one shows that right kernels pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from elsa_cli.options import CHECKED_ROWS
from elsa_core.backends import eager, eager_window
from elsa_core.base.inputs import generated_inputs
from elsa_core.patching.rewrite import patch
from elsa_core.proof import capture
from elsa_core.proof.checking import CheckReport, check
from elsa_core.proof.site_cases import CLAMPED, CROPPED, LONG, MANY_KEYS, ROWS

WINDOWS = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 24, "num_classes": 40}


@contextmanager
def kernel(name: str, broken: Callable[..., Any]) -> Iterator[None]:
    """`elsa::<name>` on the CPU, replaced for the length of a `with` block."""
    with torch.library._scoped_library("elsa", "IMPL") as library:
        library.impl(name, broken, "CPU")
        yield


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = VisionTransformer(**sizes, num_classes=40).eval()
    patch(model, backend="eager")
    return model


def swin(cls: type[nn.Module] = SwinTransformer) -> nn.Module:
    torch.manual_seed(0)
    model = cls(**WINDOWS, depths=(2,), num_heads=(2,)).eval()
    patch(model, backend="eager")
    return model


def checked(model: nn.Module, rows: int = CHECKED_ROWS, **how: Any) -> CheckReport:
    given = generated_inputs((3, 32, 32), rows, seed=0, dtype=torch.float32, device="cpu")
    return check(model, {"noise": given["noise"]}, **how)


def failing(report: CheckReport) -> dict[str, str]:
    assert report.ok is not bool(report.failures)
    return {site.path: site.worst_case for site in report.sites if not site.ok}


def test_a_key_left_out_from_the_second_image_on() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = eager.attention(q, k, v, *rest)
        other, other_lse = eager.attention(q[1:], k[1:, :, :-1], v[1:, :, :-1], *rest)
        out[1:], lse[1:] = other, other_lse
        return out, lse

    model = vit()
    assert CHECKED_ROWS >= 2 and CHECKED_ROWS % 2
    with kernel("attention_eager", broken):
        assert checked(model, rows=1, stress=False).ok
        assert failing(checked(model, rows=1)) == {"blocks.0.attn": f"noise, {ROWS}"}
        assert set(failing(checked(model))) == {"blocks.0.attn", "blocks.1.attn"}


@pytest.mark.parametrize("cls", [SwinTransformer, SwinTransformerV2])
def test_a_window_of_a_later_image(cls: type[nn.Module]) -> None:
    """The caller's one image is no reason to look at one image."""

    def broken(qkv: Tensor, *rest: Any) -> Tensor:
        out = eager_window.attention(qkv, *rest)
        out[1:, :, -1, -1] *= 1.01
        return out

    model = swin(cls)
    with kernel("window_attention_eager", broken):
        assert checked(model, rows=1, stress=False).ok
        assert failing(checked(model, rows=1)) == {"layers.0.blocks.0": f"noise, {ROWS}"}


@pytest.mark.parametrize("cls", [SwinTransformer, SwinTransformerV2])
def test_padded_tokens_taken_for_zeros(cls: type[nn.Module]) -> None:
    """At its own size no window of a Swin is padded."""

    def broken(qkv: Tensor, bias: Any, index: Any, pad: Any, *rest: Any) -> Tensor:
        return eager_window.attention(qkv, bias, index, None, *rest)

    model = swin(cls)
    with kernel("window_attention_eager", broken):
        assert checked(model, stress=False).ok
        found = failing(checked(model))
    assert found == dict.fromkeys(("layers.0.blocks.0", "layers.0.blocks.1"), f"noise, {CROPPED}")


def test_a_shift_without_its_mask() -> None:
    def broken(qkv: Tensor, *rest: Any) -> Tensor:
        terms = list(rest)
        terms[8] = 0.0  # mask_value
        return eager_window.attention(qkv, *terms)

    model = swin()
    with kernel("window_attention_eager", broken):
        assert set(failing(checked(model))) == {"layers.0.blocks.1"}


def test_the_last_key_of_a_second_block_left_out() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        kept = k.shape[2] - (k.shape[2] > 1024)
        return eager.attention(q, k[:, :, :kept], v[:, :, :kept], *rest)

    model = vit()
    with kernel("attention_eager", broken):
        assert checked(model, stress=False).ok
        assert failing(checked(model)) == {"blocks.0.attn": f"noise, {LONG}"}


def test_a_logit_scale_that_is_wrong_at_its_limit() -> None:
    """Swin-V2 begins at a scale of 10; only training brings it to the limit of 100."""

    def broken(qkv: Tensor, bias: Any, index: Any, pad: Any, scale: Any, *rest: Any) -> Tensor:
        return eager_window.attention(
            qkv, bias, index, pad, torch.where(scale < 99.0, scale, 1.5 * scale), *rest
        )

    model = swin(SwinTransformerV2)
    with kernel("window_attention_eager", broken):
        assert checked(model, stress=False).ok
        found = failing(checked(model))
    assert found == dict.fromkeys(("layers.0.blocks.0", "layers.0.blocks.1"), f"noise, {CLAMPED}")


def test_few_rows_of_long_calls_are_sampled_from_all_images() -> None:
    """A long row of P leaves room for few: they are of the first and of the last image."""

    def broken(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = eager.attention(q, k, v, *rest)
        lse[-1, :, -1] += 1e-2
        return out, lse

    q, k, v = (torch.randn(5, 16, n, 4) for n in (40, 9000, 9000))
    with capture.OperatorCapture() as right, torch.no_grad():
        torch.ops.elsa.attention_eager(q, k, v, None, False, 0.3, "strict")
    with kernel("attention_eager", broken), capture.OperatorCapture() as wrong, torch.no_grad():
        torch.ops.elsa.attention_eager(q, k, v, None, False, 0.3, "strict")
    assert right.calls[0].reason() == "" and right.calls[0].rows == 2 * 16 * 8
    assert "weights P" in wrong.calls[0].reason()


@pytest.mark.parametrize("make", [vit, swin, partial(swin, SwinTransformerV2)])
def test_right_kernels_pass(make: Callable[[], nn.Module]) -> None:
    report = checked(make())
    assert report.ok, report.failures
    if make is vit:  # many keys, at the first site of its kind
        assert MANY_KEYS > 1024 and report.sites[0].calls == report.sites[1].calls + 1
