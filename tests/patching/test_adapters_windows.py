"""Windows without shift on elsa: timm's Twins, DaViT and TinyViT, padded on both axes, and MaxViT's
windows and grids with every kind of relative positions."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from judging import assert_recorded, assert_same_gradients
from sampling import thinned
from seen import Calls
from torch import Tensor, nn

from elsa_core.patching.rewrite import patch, unpatch
from elsa_core.patching.sites import inspect
from elsa_core.proof.checking import check

SIDES = (104, 136)  # 26 x 34 tokens in the first stage, windows of 7 x 7 or 4 x 4
SQUARE = (96, 96)  # of MaxViT: 24 x 24 tokens in the first stage, windows and grids of 3 x 3
_MAXVIT = {
    "img_size": SQUARE, "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 16,
    "drop_path_rate": 0.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "twins": (
        "twins_svt_small",
        {"img_size": SIDES, "embed_dims": (16, 32), "num_heads": (2, 4), "depths": (1, 1),
         "wss": (4, 3), "mlp_ratios": (2, 2), "sr_ratios": (8, 4)},
    ),
    "davit": (
        "davit_tiny",
        {"embed_dims": (16, 32), "num_heads": (2, 4), "depths": (1, 1), "window_size": 7},
    ),
    "tiny-vit": (
        "tiny_vit_5m_224",
        {"embed_dims": (8, 32, 32), "num_heads": (1, 2, 4), "depths": (1, 1, 1),
         "window_sizes": (7, 7, 5)},
    ),
    # Heads first in the projection; a table of biases, or a network that gives them.
    "maxvit": ("maxvit_pico_rw_256", _MAXVIT),
    "maxvit-mlp": ("maxvit_rmlp_pico_rw_256", _MAXVIT),
    # The projection as in other models; biases as TensorFlow keeps them.
    "maxvit-tf": ("maxvit_tiny_tf_224", _MAXVIT),
}  # fmt: skip
MAXVIT = [kind for kind in MODELS if "maxvit" in kind]
PADDED = [kind for kind in MODELS if "maxvit" not in kind]
ADAPTERS = {
    "twins": "ElsaLocallyGroupedAttn",
    "davit": "ElsaSpatialBlock",
    "tiny-vit": "ElsaTinyVitBlock",
}


def make(kind: str) -> nn.Module:
    """A small model in which no bias is zero."""
    name, options = MODELS[kind]
    model = timm.create_model(name, num_classes=6, **options).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("bias", "attention_biases")) or "rel" in path:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def images(kind: str, batch: int = 2) -> Tensor:
    sides = SQUARE if kind in MAXVIT else SIDES
    return torch.randn(batch, 3, *sides, generator=torch.Generator().manual_seed(batch))


def of_windows(kind: str, sites: Any) -> list[Any]:
    return [site for site in sites if kind in MAXVIT or site.adapter == ADAPTERS[kind]]


@pytest.mark.parametrize("sides", [(112, 136), (104, 112)])
@pytest.mark.parametrize("kind", ["davit", "tiny-vit"])
@torch.no_grad()
def test_windows_padded_on_one_axis(kind: str, sides: tuple[int, int]) -> None:
    """What a padded token is counts already there: norms and projections have biases."""
    model = make(kind)
    patch(model)
    found = check(model, torch.randn(2, 3, *sides))
    assert found.ok, found.failures


@pytest.mark.parametrize(
    ("kind", "dtype"), thinned(MODELS, (torch.float32, torch.bfloat16)), ids=str
)
@torch.no_grad()
def test_windows(kind: str, dtype: torch.dtype) -> None:
    """Every site and the model, against float64, in batches of 1 and 3."""
    model = make(kind).to(dtype)
    report = patch(model)
    windows = len(of_windows(kind, report.patched))
    assert windows == (4 if kind in MAXVIT else 2)
    with Calls() as calls:
        model(images(kind, 1).to(dtype))
    assert calls.windows == windows
    assert kind in PADDED or not (report.kept or calls.others("softmax"))
    found = check(model, {"one": images(kind, 1), "three": images(kind, 3)})
    assert found.ok, found.failures
    assert all(site.operator_calls == site.calls > 0 for site in found.sites)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_compiled_and_inspected(kind: str) -> None:
    torch._dynamo.reset()
    plain, x = make(kind).double(), images(kind).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    with torch.no_grad():
        patched(x)
    for model in (plain, patched):
        model(x).square().sum().backward()
    assert_same_gradients(plain, patched)
    sites = of_windows(kind, inspect(patched, tuple(x.shape[1:])).sites)
    assert {(s.kind, s.patched, s.patchable) for s in sites} == {("window", True, True)}
    if kind in PADDED:
        with torch.no_grad():
            compiled = torch.compile(patched, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(x), plain(x))
        return
    assert all(s.query_tokens == 9 and "relative bias" in s.extra and s.flops for s in sites)
    seen: list[Any] = []
    attn = next(m for p, m in patched.named_modules() if p.endswith(".attn"))
    attn.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad(), Calls() as calls:
        patched(x)
    assert len(seen) == 1 and calls.windows == 3


@pytest.mark.parametrize(
    ("kind", "way"), thinned(("maxvit-mlp", "maxvit-tf"), ("compile", "export"))
)
@torch.no_grad()
def test_one_graph_a_dynamic_batch_and_copies(kind: str, way: str) -> None:
    model, x = make(kind), images(kind)
    expected = model(x)
    patch(model)
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), found)
        unpatch(twin)
        assert torch.equal(twin(x), expected)
    called = assert_recorded(way, model, x, images(kind, 3))
    windows = sum(name.startswith("elsa.window_attention") for name in called)
    assert windows == 4 * (way == "export")


@pytest.mark.parametrize("kind", MAXVIT)
@torch.no_grad()
def test_another_size_and_other_weights_after_patching(kind: str) -> None:
    plain, other, x = make(kind), make(kind), images(kind)
    patched = copy.deepcopy(plain)
    patch(patched)
    patched(x)
    for model in (plain, patched):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(patched(x), plain(x), rtol=1e-4, atol=1e-5)
    if hasattr(plain, "set_input_size"):
        for model in (plain, patched):
            model.set_input_size(img_size=(64, 96), window_size=(2, 3))
        x = x[:, :, :64]
        torch.testing.assert_close(patched(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", PADDED)
@torch.no_grad()
def test_a_scale_of_ones_own_is_read(kind: str, fused: bool) -> None:
    """Where timm reads it: its fused branch leaves the scale to PyTorch, which knows the usual one.

    A scale that is left out shows at another than the usual one alone.
    """
    model = make(kind)
    scaled = [module for module in model.modules() if isinstance(vars(module).get("scale"), float)]
    assert scaled
    for module in scaled:
        module.scale *= 3.0
        module.fused_attn = fused
    patch(model)
    found = check(model, images(kind))
    assert found.ok, found.failures
