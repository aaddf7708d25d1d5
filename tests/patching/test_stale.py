"""What is derived from weights follows every write to them, also those that PyTorch does not count
(fused optimizers, `.data`, numpy views), unless the caller has frozen them."""

import copy
import gc
import pickle
import weakref
from operator import is_
from typing import Any

import pytest
import timm
import torch
from originals import torchvision_swin
from processes import at_once
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError, NothingPatchedError
from elsa_core.patching.adapters import derived
from elsa_core.patching.rewrite import patch, patched_sites, unpatch

SWIN = {
    "img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2,),
    "num_heads": (2,), "num_classes": 6,
}  # fmt: skip
MAXVIT = {
    "img_size": 64, "embed_dim": (32,), "depths": (1,), "stem_width": 8, "num_classes": 6,
    "drop_path_rate": 0.0,
}  # fmt: skip
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swin-v2": ("swinv2_tiny_window8_256", SWIN),
    "swin-v2-cr": ("swinv2_cr_tiny_224", SWIN),
    "maxvit": ("maxvit_pico_rw_256", MAXVIT),
    "maxvit-mlp": ("maxvit_rmlp_pico_rw_256", MAXVIT),
    "maxvit-tf": ("maxvit_tiny_tf_224", MAXVIT),
    "tiny-vit": (
        "tiny_vit_5m_224",
        {"embed_dims": (8, 32), "num_heads": (1, 2), "depths": (1, 1), "window_sizes": (7, 4),
         "num_classes": 6},
    ),
}  # fmt: skip
TORCHVISION = ("torchvision-swin", "torchvision-swin-v2")
KINDS = (*TIMM, *TORCHVISION)


def make(kind: str) -> Any:
    """A small model in eval mode whose biases matter."""
    if kind in TIMM:
        name, options = TIMM[kind]
        model = timm.create_model(name, **options)
    else:
        sizes = {"embed_dim": 16, "depths": [2], "num_heads": [2], "num_classes": 6}
        model = torchvision_swin(1 + kind.endswith("v2"), **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # SwinV2's norms start at zero and hide the attention; batch norms would explode.
            if parameter.dim() < 2 or "bias" in name or "rel" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def images(kind: str, batch: int = 2) -> Tensor:
    side = SWIN["img_size"] if kind.replace("torchvision-", "").startswith("swin") else 64
    return torch.randn(batch, 3, side, side)


def frozen() -> tuple[Any, Tensor]:
    """A patched and frozen Swin V2, and images for it."""
    model = make("swin-v2")
    patch(model)
    elsa.freeze(model)
    return model, images("swin-v2")


@torch.no_grad()
def assert_follows(model: nn.Module, x: Tensor) -> None:
    """Patched, the model errs at most twice as much as unpatched with the same weights."""
    plain = copy.deepcopy(model).eval()
    for module in plain.modules():  # LeViT's own cache of biases is copied with the model
        if isinstance(getattr(module, "attention_bias_cache", None), dict):
            module.attention_bias_cache = {}
    unpatch(plain)
    own, found = plain(x), model(x)
    expected = plain.double()(x.double())
    eps = torch.finfo(x.dtype).eps
    own_error, error = (float((out.double() - expected).norm()) for out in (own, found))
    assert error <= 2 * own_error + 4 * eps * float(expected.norm())


def ema_writes(model: Any, x: Tensor) -> None:
    """The averaged copy of a model, written through `.data`."""
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data.mul_(0.9).add_(torch.randn_like(parameter) * 0.05)
        with torch.no_grad():
            model(x)


@pytest.mark.parametrize("kind", KINDS)
def test_writes_that_pytorch_does_not_count(kind: str) -> None:
    model, x = make(kind), images(kind)
    patch(model)
    assert_follows(model, x)
    ema_writes(model, x)
    assert_follows(model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_models_keep_what_they_derive(kind: str) -> None:
    model, x = make(kind), images(kind)
    patch(model)
    report = elsa.freeze(model)
    assert report.sites == len(patched_sites(model)) and report.tensors >= report.sites
    kept = [derived.KEPT[site].value for site in patched_sites(model).values()]
    assert_follows(model, x)
    now = [derived.KEPT[site].value for site in patched_sites(model).values()]
    assert all(map(is_, now, kept))
    assert f"{report.sites} sites" in str(report) and report.nbytes > 0
    assert elsa.unfreeze(model) == report.sites
    ema_writes(model, x)
    assert_follows(model, x)


@pytest.mark.parametrize("kind", ["swin", "torchvision-swin-v2"])
@pytest.mark.parametrize(
    "thaw",
    ["train", "training forward", "gradients", "load", "refresh", "unfreeze", "unpatch", "write"],
)
def test_what_ends_a_freeze(kind: str, thaw: str) -> None:
    model, x = make(kind), images(kind)
    patch(model)
    elsa.freeze(model)
    with torch.no_grad():
        model(x)
    if thaw == "train":
        model.train().eval()
    elif thaw == "training forward":  # of a loop that sets the modes by itself
        for training in (True, False):
            for module in model.modules():
                module.training = training
            if training:
                with torch.no_grad():
                    model(x)
    elif thaw == "gradients":
        model(x)
    elif thaw == "load":
        model.load_state_dict({}, strict=False)
    elif thaw == "refresh":
        elsa.refresh(model)
    elif thaw == "unfreeze":
        elsa.unfreeze(model)
    elif thaw == "unpatch":
        unpatch(model)
        patch(model)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model(x)
    ema_writes(model, x)
    assert_follows(model, x)


def test_a_frozen_model_computes_with_what_was_kept() -> None:
    """The promise that the caller gives, shown by breaking it."""
    model, x = frozen()
    attention = model.layers[0].blocks[0].attn
    with torch.no_grad():
        before = model(x)
        attention.cpb_mlp[2].weight.data.mul_(-5.0)
        assert torch.equal(model(x), before)
        elsa.refresh(model)
        assert not torch.equal(model(x), before)


def test_freezing_what_cannot_be_frozen() -> None:
    model = make("swin")
    with pytest.raises(NothingPatchedError, match="call patch first"):
        elsa.freeze(model)
    patch(model)
    model.train()
    with pytest.raises(ArgumentError, match="training mode"):
        elsa.freeze(model)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=16, depth=1, num_heads=1
    ).eval()
    patch(vit)
    assert "nothing to keep" in str(elsa.freeze(vit))
    for function in (elsa.freeze, elsa.unfreeze, elsa.refresh):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
            function("swin")  # type: ignore[arg-type]


@torch.no_grad()
def test_a_frozen_model_under_autocast() -> None:
    model, x = make("swin-v2"), images("swin-v2")
    patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    elsa.freeze(model)
    model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)


@torch.no_grad()
def test_copies_and_pickles_are_not_frozen() -> None:
    model, x = frozen()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(site in derived.KEPT for site in patched_sites(other).values())
        ema_writes(other, x)
        assert_follows(other, x)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@torch.no_grad()
def test_what_is_kept_ends_with_its_model() -> None:
    model, _ = frozen()
    kept = weakref.ref(derived.KEPT[model.layers[0].blocks[0]].value.bias.bias)
    del model
    gc.collect()
    assert kept() is None


@torch.no_grad()
def test_hooks_and_modes_of_a_position_network_count() -> None:
    """Its result is not kept where a part of it must run: for a hook, or because it drops."""
    model, x = frozen()
    attention = model.layers[0].blocks[0].attn
    attention.cpb_mlp[2].register_forward_hook(lambda module, given, out: out * 3)
    assert_follows(model, x)
    other = make("swin-v2-cr")
    patch(other)
    elsa.freeze(other)
    next(iter(patched_sites(other).values())).attn.meta_mlp.train()  # its dropout alone
    assert not torch.equal(other(x), other(x))


@torch.no_grad()
def test_compiled_and_exported_programs_read_the_weights() -> None:
    """The derivation is a part of the program, and no constant of it."""
    model, x = make("swin-v2"), images("swin-v2")
    patch(model)
    model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    exported = torch.export.export(model, (x,)).module()
    traced = torch.jit.trace(model, (x,), check_trace=False)
    compiled(x)
    for target in (model, exported, traced):
        for name, parameter in target.named_parameters():
            if "cpb_mlp" in name:
                changed = parameter * -2.0 if target is model else model.get_parameter(name)
                parameter.data.copy_(changed)
    expected = model(x)
    for program in (compiled, exported, traced):
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_threads_share_a_model() -> None:
    """One thread keeps a value while others read it: nothing fails, and all results are right."""
    model, x = make("swin-v2"), images("swin-v2")
    patch(model)
    expected = model(x)

    def work(_: int) -> None:
        for _ in range(10):
            elsa.freeze(model)
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)

    at_once(work, range(4))


@torch.inference_mode()
def test_weights_that_count_no_writes_are_not_kept() -> None:
    """Tensors of inference mode have no version."""
    model = make("swin")
    patch(model)
    assert elsa.freeze(model).tensors == 0
    assert_follows(model, images("swin"))
