"""Blocks of every family: residual and LayerScale in the last product of what they add."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import routing
from elsa_core.patching.adapters import common, handing, host, residual, torch_layers

timm = pytest.importorskip("timm")


class Family(NamedTuple):
    """A model, and how many products take a residual, and of these a scale, in a forward.

    A residual that is not dense stays with PyTorch: CaiT's expanded class token, the tokens that
    XCiT has turned, the pooled shortcuts of MViTv2.
    """

    name: str
    options: dict[str, Any]
    side: int
    residuals: int
    scales: int


_SMALL = {"embed_dim": 32, "num_heads": 2}
FAMILIES = {
    family.name: family
    for family in (
        Family("deit3_small_patch16_224", {"img_size": 48, "depth": 2, **_SMALL}, 48, 4, 4),
        Family(
            "vit_giant_patch14_dinov2", {"img_size": 42, "depth": 1, "mlp_ratio": 2, **_SMALL},
            42, 2, 2,
        ),
        Family("eva02_tiny_patch14_224", {"img_size": 42, "depth": 2}, 42, 4, 0),
        Family(
            "vit_small_patch16_dinov3", {"img_size": 64, "depth": 1}, 64, 2, 2,
        ),
        Family("beit_base_patch16_224", {"img_size": 48, "depth": 2, **_SMALL}, 48, 4, 4),
        Family("cait_xxs24_224", {"img_size": 32, "depth": 1, **_SMALL}, 32, 5, 5),
        Family("xcit_nano_12_p16_224", {"img_size": 32, "depth": 1, **_SMALL}, 32, 1, 1),
        Family(
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 16, "depths": (2, 2),
             "num_heads": (2, 2)},
            32, 8, 0,
        ),
        Family(
            "swinv2_tiny_window8_256",
            {"img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 16, "depths": (1, 1),
             "num_heads": (2, 2)},
            32, 0, 0,  # it normalises after the last product
        ),
        Family("mvitv2_tiny", {"img_size": 64}, 64, 16, 0),
        Family("hiera_tiny_224", {}, 224, 24, 0),
        Family("vit_relpos_small_patch16_224", {"img_size": 48, "depth": 1, **_SMALL}, 48, 2, 2),
    )
}  # fmt: skip
BLOCKS = {
    "deit3_small_patch16_224": "blocks.0", "vit_giant_patch14_dinov2": "blocks.0",
    "eva02_tiny_patch14_224": "blocks.0", "beit_base_patch16_224": "blocks.0",
    "cait_xxs24_224": "blocks.0", "xcit_nano_12_p16_224": "blocks.0",
    "swin_tiny_patch4_window7_224": "layers.0.blocks.0",
}  # fmt: skip


def built(name: str, **more: Any) -> tuple[nn.Module, Tensor]:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **family.options, **more).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # a LayerScale of 1e-5 would hide what is wrong
            nn.init.normal_(parameter, 0.5, 0.2)
    return model, torch.randn(2, 3, family.side, family.side)


def torch_models() -> dict[str, tuple[nn.Module, Tensor, int, int]]:
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, Tensor, int, int]] = {}
    image = torch.randn(2, 3, 32, 32)
    try:
        from torchvision.models.swin_transformer import SwinTransformer
        from torchvision.models.vision_transformer import VisionTransformer

        vit = VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=5)
        nn.init.normal_(vit.heads[0].weight)  # zeros, as torchvision makes it
        found["vit"] = (vit, image, 4, 0)
        swin = SwinTransformer([2, 2], 16, [2, 2], [2, 4], [7, 7], num_classes=5)
        found["swin"] = (swin, image, 8, 0)
    except ImportError:
        pass
    try:
        from open_clip.transformer import VisionTransformer as Tower

        tower = Tower(32, 16, 32, 2, 2, 2.0, ls_init_value=0.5, output_dim=8)
        found["open_clip"] = (tower, image, 4, 4)
    except ImportError:
        pass
    return {name: (model.eval(), *rest) for name, (model, *rest) in found.items()}


class Seen(list[tuple[bool, bool]]):
    """Of each call of `served`, whether it was given a residual and a scale."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = common.served

        def called(x, w, b, activation="none", residual=None, scale=None, *rest, **named):
            self.append((residual is not None, scale is not None))
            return inner(x, w, b, activation, residual, scale, *rest, **named)

        for module in (common, torch_layers):
            monkeypatch.setattr(module, "served", called)

    @property
    def counts(self) -> tuple[int, int]:
        return sum(r for r, _ in self), sum(s for _, s in self)


def folded(model: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        seen = Seen(monkeypatch)
        out = model(x)
    return out, seen.counts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name):
    model, x = built(name)
    with torch.no_grad():
        wanted = model(x)
    elsa.patch(model, scope="model")
    out, counts = folded(model, x)
    torch.testing.assert_close(out, wanted)
    assert counts == (FAMILIES[name].residuals, FAMILIES[name].scales)


@pytest.mark.parametrize("name", ["vit", "swin", "open_clip"])
def test_other_libraries(name):
    models = torch_models()
    if name not in models:
        pytest.skip(f"{name}: its library is not installed")
    model, x, residuals, scales = models[name]
    with torch.no_grad():
        wanted = model(x)
    elsa.patch(model, scope="model")
    out, counts = folded(model, x)
    torch.testing.assert_close(out, wanted)
    assert counts == (residuals, scales)


def test_hiera_widens_by_maximum_and_mean():
    """Without a projection the shortcut is both, side by side in the channels."""
    torch.manual_seed(0)
    options = {"embed_dim": 16, "num_heads": 1, "stages": (1, 1), "q_pool": 1,
               "use_expand_proj": False}  # fmt: skip
    model = timm.create_model("hiera_tiny_224", img_size=64, num_classes=5, **options).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        assert type(model.blocks[1]).__name__ == "ElsaHieraBlock" and model.blocks[1].do_expand
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("given", ["none", "k_x", "both"])
def test_open_clip_attends_to_other_tokens(crosses, given):
    """CoCa's decoder: keys and values have a norm of their own; without it they are not read."""
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    block = transformer.ResidualAttentionBlock(32, 2, 2.0, is_cross_attention=crosses).eval()
    if crosses:
        nn.init.normal_(block.ln_1_kv.weight)
    model = nn.ModuleList([block])
    x, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    tokens = {"none": {}, "k_x": {"k_x": other}, "both": {"k_x": other, "v_x": other + 1}}[given]
    with torch.no_grad():
        wanted = block(x, **tokens)
        elsa.patch(model, scope="model")
        assert type(block).__name__ == "ElsaResidualAttentionBlock"
        torch.testing.assert_close(block(x, **tokens), wanted)


@pytest.mark.parametrize("name", BLOCKS)
def test_unpatch_copies_and_pickles(name):
    model, x = built(name)
    classes = [type(m) for m in model.modules()]
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        block = model.get_submodule(BLOCKS[name])
        assert type(block).__name__.startswith("Elsa")
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        torch.testing.assert_close(other(x), wanted)
        elsa.unpatch(model)
        assert [type(m) for m in model.modules()] == classes
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("name", BLOCKS)
def test_hooks_see_what_they_saw(name):
    model, x = built(name)
    block = model.get_submodule(BLOCKS[name])
    seen: list[Tensor] = []
    # one hook at a time: each hides what another may change
    drops = ("drop_path1", "drop_path2", "drop_path3", "drop_path")
    for path in ("attn.proj", "mlp.fc2", "mlp", *drops, "ls1"):
        if path not in dict(block.named_modules()):
            continue
        handle = block.get_submodule(path).register_forward_hook(
            lambda module, args, out: seen.append(out.clone())
        )
        with torch.no_grad():
            model(x)
            elsa.patch(model, scope="model")
            model(x)
        elsa.unpatch(model)
        handle.remove()
        assert len(seen) % 2 == 0 and seen
        half = len(seen) // 2
        for before, after in zip(seen[:half], seen[half:], strict=True):
            torch.testing.assert_close(after, before)
        seen.clear()


@pytest.mark.parametrize("name", BLOCKS)
def test_training_drops_and_learns_as_before(name):
    drops = {"drop_path_rate": 0.5}
    if "swin" not in name:  # its dropout is drawn over images instead of windows
        drops["proj_drop_rate"] = 0.3
    model, x = built(name, **drops)
    model.train()

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    loss, grads = step()
    elsa.patch(model, scope="model")
    again, own = step()
    torch.testing.assert_close(again, loss, rtol=1e-4, atol=1e-6)
    for key, grad in grads.items():
        bound = 2e-4 * grad.abs().max().item() + 1e-7
        assert (own[key] - grad).abs().max() <= bound, key


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_where_nothing_is_dropped(name):
    """In eval mode the residual is folded, and gradients are those of the original."""
    model, x = built(name)

    def grads() -> dict[str, Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    wanted = grads()
    elsa.patch(model, scope="model")
    for key, grad in grads().items():
        bound = 2e-4 * wanted[key].abs().max().item() + 1e-7
        assert (grad - wanted[key]).abs().max() <= bound, key


@pytest.mark.parametrize("name", ["vit_giant_patch14_dinov2", "swin_tiny_patch4_window7_224"])
def test_recorded_programs(name):
    model, x = built(name)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), wanted)


def test_a_subclass_and_a_replaced_forward_are_left_alone(monkeypatch):
    from timm.layers.mlp import GluMlp
    from timm.models.beit import Attention

    class Doubled(Attention):
        def forward(self, x, shared_rel_pos_bias=None):
            return 2 * super().forward(x, shared_rel_pos_bias)

    model, x = built("beit_base_patch16_224")
    model.blocks[0].attn.__class__ = Doubled
    with torch.no_grad():
        wanted = model(x)
    elsa.patch(model, scope="model")
    out, counts = folded(model, x)
    torch.testing.assert_close(out, wanted)
    assert counts == (3, 3)  # not that of the subclass

    model, x = built("vit_giant_patch14_dinov2")
    inner = GluMlp.forward
    monkeypatch.setattr(GluMlp, "forward", lambda self, x: 2 * inner(self, x))
    with torch.no_grad():
        wanted = model(x)
    elsa.patch(model, scope="model")
    out, counts = folded(model, x)
    torch.testing.assert_close(out, wanted)
    assert counts == (1, 1)


def test_a_layer_that_is_not_patched_takes_nothing():
    model, x = built("beit_base_patch16_224")
    with torch.no_grad():
        wanted = model(x)
    elsa.patch(model, scope="model", exclude=["*.proj", "*.mlp"])
    out, counts = folded(model, x)
    torch.testing.assert_close(out, wanted)
    assert counts == (0, 0)


def test_a_part_that_raises_leaves_nothing_behind():
    model, x = built("beit_base_patch16_224")
    elsa.patch(model, scope="model")
    mlp = model.blocks[0].mlp
    fc1, mlp.fc1 = mlp.fc1, nn.Linear(5, 5)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(x)
    mlp.fc1 = fc1
    proj = model.blocks[0].attn.proj
    x = torch.randn(2, 10, 32)
    with torch.no_grad():
        torch.testing.assert_close(proj(x), nn.functional.linear(x, proj.weight, proj.bias))


def test_the_check_judges_folded_blocks():
    model, x = built("cait_xxs24_224")
    elsa.patch(model, scope="model")
    verdict = elsa.check(model, x, stress=False)
    assert verdict.ok and all(site.calls for site in verdict.sites)


def normed(name: str, count: int) -> tuple[str, dict[str, Any], int, int]:
    return name, FAMILIES[name].options, FAMILIES[name].side, count


# Models, and how many products take a norm in a forward.
NORMS = (
    ("vit_tiny_patch16_224", {"img_size": 48, "depth": 2, **_SMALL}, 48, 4),
    normed("swin_tiny_patch4_window7_224", 8),
    normed("cait_xxs24_224", 4),  # class attention reads its input three times
    normed("vit_giant_patch14_dinov2", 1),  # its MLP has a gate
    normed("eva02_tiny_patch14_224", 0),  # biases of their own, and a gate
    normed("vit_small_patch16_dinov3", 2),
    normed("beit_base_patch16_224", 2),  # biases of their own
    normed("xcit_nano_12_p16_224", 2),
    normed("mvitv2_tiny", 17),
    normed("hiera_tiny_224", 21),
    normed("vit_relpos_small_patch16_224", 2),
)


class Norms(list[bool]):
    """Of each call of `served`, whether it was given a norm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = common.served

        def called(*given):
            self.append(len(given) > 10 and given[10] is not None)
            return inner(*given)

        for module in (common, torch_layers):
            monkeypatch.setattr(module, "served", called)


@pytest.mark.parametrize(("name", "options", "side", "count"), NORMS, ids=[n[0] for n in NORMS])
def test_a_norm_within_the_product(monkeypatch, name, options, side, count):
    """Only within `unmeasured`, and where nobody else reads what is normalised."""
    torch.manual_seed(0)
    model, x = (
        timm.create_model(name, num_classes=5, **options).eval(),
        torch.randn(2, 3, side, side),
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        seen = Norms(monkeypatch)
        model(x)
        assert not any(seen)
        with routing.unmeasured(routing.NORM):
            torch.testing.assert_close(model(x), wanted)
            assert sum(seen) == count
            seen.clear()
            called: list[Tensor] = []
            block = next(m for m in model.modules() if hasattr(m, "norm2"))
            for norm in (block.norm1, block.norm2):
                norm.register_forward_hook(lambda module, args, out: called.append(out))
            torch.testing.assert_close(model(x), wanted)
            assert len(called) == 2 and count >= sum(seen) >= count - 2


@pytest.mark.parametrize(("name", "count"), [("vit", 4), ("swin", 6), ("open_clip", 4)])
def test_a_norm_within_the_product_of_other_libraries(monkeypatch, name, count):
    """Two of the Swin attentions pad their input, and so normalise before."""
    models = torch_models()
    if name not in models:
        pytest.skip(f"{name}: its library is not installed")
    model, x, *_ = models[name]
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        seen = Norms(monkeypatch)
        with routing.unmeasured(routing.NORM):
            torch.testing.assert_close(model(x), wanted)
    assert sum(seen) == count


def test_a_part_that_does_not_take_the_norm_is_called_again():
    """And takes the residual in the call that counts."""
    model, x = built("vit_relpos_small_patch16_224")
    elsa.patch(model, scope="model")
    block = model.blocks[0]
    inner = block.attn.qkv.forward
    with torch.no_grad():
        wanted = model(x)
        block.attn.qkv.forward = lambda x: inner(x.clone())  # not what was handed on
        is_hooked = host.is_shown
        with pytest.MonkeyPatch.context() as patch, routing.unmeasured(routing.NORM):
            for module in (common, residual):
                patch.setattr(
                    module, "is_shown", lambda m: m is not block.attn.qkv and is_hooked(m)
                )
            out, _ = folded(model, x)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("fold", [handing.ACTIVATION, handing.RESIDUAL])
def test_what_is_left_out_is_computed_by_pytorch(monkeypatch, fold):
    """To measure what a fold gives: the same results, with a norm in the product too."""
    _, options, side, _ = NORMS[0]
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        norms = Norms(monkeypatch)
        with handing.left_out(fold), routing.unmeasured(routing.NORM):
            out, (residuals, _) = folded(model, x)
        torch.testing.assert_close(out, wanted)
        # without residuals in the products, blocks call their norms themselves
        assert any(norms) == (residuals > 0) == (fold == handing.ACTIVATION)
        assert folded(model, x)[1][0] == 4


def test_a_norm_that_is_no_layer_norm_stays(monkeypatch):
    class Shifted(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    torch.manual_seed(0)
    _, options, side, count = NORMS[0]
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()
    model.blocks[0].norm1.__class__ = Shifted
    x = torch.randn(2, 3, side, side)
    with torch.no_grad(), routing.unmeasured(routing.NORM):
        wanted = model(x)
        elsa.patch(model, scope="model")
        seen = Norms(monkeypatch)
        torch.testing.assert_close(model(x), wanted)
        assert sum(seen) == count - 1
