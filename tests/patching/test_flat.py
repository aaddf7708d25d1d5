"""Blocks as functions in a row: the original's bits, and the original wherever a module is seen."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

timm = pytest.importorskip("timm")

from timm.layers import LayerNorm, Mlp  # noqa: E402
from timm.models.swin_transformer import SwinTransformerBlock  # noqa: E402
from timm.models.vision_transformer import Attention, Block  # noqa: E402

import elsa_core as elsa  # noqa: E402
from elsa_core import calls, routing, short_calls  # noqa: E402
from elsa_core.patching.adapters import common, flat, host, redirect, timm_blocks  # noqa: E402

VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "scaled": {"init_values": 0.5, "qkv_bias": False},
    "normed": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
    "relu": {"act_layer": nn.ReLU, "drop_path": 0.1, "proj_drop": 0.1, "attn_drop": 0.1},
}


def block(**options):
    torch.manual_seed(0)
    made = Block(24, 3, **{"qkv_bias": True, **options}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens():
    return torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors that say they are on a GPU; nothing there is computed by a GPU's kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(calls, "is_own_stream", lambda device: False)
    monkeypatch.setattr(host, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    calls.forget_kinds()
    yield
    calls.forget_kinds()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_original_bit_by_bit(options, dtype):
    module, x = block(**options).to(dtype), tokens().to(dtype)
    assert torch.equal(flat.served(module, flat.block, x), module(x))
    attended = flat.served(module.attn, flat.attention, x)
    assert torch.equal(attended, module.attn(x))
    assert torch.equal(flat.served(module.mlp, flat.mlp, x), module.mlp(x))


def test_attention_goes_the_short_way(monkeypatch):
    """Of a block as functions, of a site, and of a class whose call is redirected."""
    found = []

    def serve(q, *rest):
        found.append(rest[2:])
        return F.scaled_dot_product_attention(q, *rest[:2])

    monkeypatch.setattr(short_calls.ATTENTION, "serve", serve)
    monkeypatch.setattr(common, "by_sdpa", lambda *given: True)
    monkeypatch.setattr(redirect, "is_original", lambda *given: True)
    module, x = block().bfloat16(), tokens().bfloat16()
    heads = [t.unflatten(2, (3, 8)).transpose(1, 2) for t in (x, x, x)]
    with torch.inference_mode():
        assert torch.equal(flat.served(module, flat.block, x), module(x))
        assert len(found) == 1
        flat.served(block().double(), flat.block, tokens().double())
        assert len(found) == 1, "float64 is PyTorch's"
        redirect._attention(*heads, precision="strict", backend="auto")
        assert found == [(None, False, None, "strict")] * 2
        redirect._attention(*heads, scale=0.5, precision="strict", backend="auto")
        redirect._attention(*heads, None, 0.0, precision="strict", backend="auto")
        assert len(found) == 2
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
        site = SimpleNamespace(elsa_backend="auto", elsa_precision="strict")
        common.attend(site, *heads)
        assert len(found) == 3
        for terms in ({"scale": 0.5}, {"is_causal": True}, {"dropout_p": 0.5}):
            common.attend(site, *heads, **terms)
        assert len(found) == 3


@pytest.mark.parametrize("named", [{}, {"scale": 0.5}])
def test_redirected_calls_of_any_shape_are_pytorchs(named, monkeypatch):
    """Operands are the model's own: of two or three dimensions, or broadcast over heads."""
    monkeypatch.setattr(redirect, "is_original", lambda *given: True)
    terms = {"precision": "strict", "backend": "auto", **named}
    for of_query, of_key in (
        ((5, 8), (7, 8)),
        ((1, 5, 8), (4, 7, 8)),
        ((2, 1, 5, 8), (2, 4, 7, 8)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8)),
    ):
        q, k, v = torch.randn(of_query), torch.randn(of_key), torch.randn(of_key)
        expected = F.scaled_dot_product_attention(q, k, v, **named)
        assert torch.equal(redirect._attention(q, k, v, **terms), expected)
    with pytest.raises(RuntimeError):
        redirect._attention(torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2, 7, 8), **terms)


def test_gradients_and_autocast_are_the_originals():
    module, x = block(init_values=0.5), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flat.served(module, flat.block, x), module(x))
    module.train()  # nothing in it drops
    grads = []
    for forward in (module, lambda y: flat.served(module, flat.block, y)):
        module.zero_grad()
        forward(x).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("name", ["norm1", "attn.qkv", "attn.proj_drop", "mlp", "mlp.act", "ls1"])
def test_hooks_are_called(name):
    module, x = block(), tokens()
    assert flat.served(module, flat.block, x) is not None
    hooked = module.get_submodule(name)
    for register in (hooked.register_forward_hook, hooked.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert flat.served(module, flat.block, x) is None
        handle.remove()
    hooked.forward = hooked.forward
    assert flat.served(module, flat.block, x) is None
    del hooked.forward
    assert flat.served(module, flat.block, x) is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert flat.served(module, flat.block, x) is None
    finally:
        handle.remove()


def test_what_drops_runs_itself():
    module, x = block(attn_drop=0.2), tokens()
    module.train()
    assert flat.served(module, flat.block, x) is None
    module.attn.attn_drop.p = 0.0
    assert flat.served(module, flat.block, x) is not None
    for name in ("attn.proj_drop", "mlp.drop1", "mlp.drop2"):
        module = block(proj_drop=0.2)
        module.get_submodule(name).train()  # Monte Carlo dropout
        assert flat.served(module, flat.block, x) is None
    module = block(drop_path=0.2)
    module.drop_path2.train()
    assert flat.served(module, flat.block, x) is None


def test_the_unfused_branch_is_the_modules_own():
    module, x = block(), tokens()
    fused = flat.served(module, flat.block, x)
    module.attn.fused_attn = False
    own = flat.served(module, flat.block, x)
    assert torch.equal(own, module(x)) and not torch.equal(own, fused)


class Wider(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + 1.0


def test_changes_of_the_module_are_seen():
    module, x = block(), tokens()
    before = flat.served(module, flat.block, x)
    module.load_state_dict({k: 2 * v for k, v in module.state_dict().items()}, assign=True)
    after = flat.served(module, flat.block, x)
    assert torch.equal(after, module(x)) and not torch.equal(after, before)
    module.attn.proj = Wider(module.attn.proj)
    assert flat.served(module, flat.block, x) is None
    module.attn.proj = module.attn.proj.layer
    assert torch.equal(flat.served(module, flat.block, x), after)
    module.norm1.eps = 0.5
    assert torch.equal(flat.served(module, flat.block, x), module(x))
    nn.utils.parametrizations.weight_norm(module.mlp.fc1)
    assert flat.served(module, flat.block, x) is None


def test_readings_end_with_their_module():
    module = block()
    flat.served(module, flat.block, tokens())
    key = (id(module), flat.block)
    assert key in flat._READINGS
    del module
    gc.collect()
    assert key not in flat._READINGS


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_a_vit_in_eager_calls_is_the_original(scope, on_gpu):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        elsa.patch(model, scope=scope)
        assert torch.equal(model(x), before)
        seen = []
        # a mask goes the ordinary way
        handle = model.blocks[3].attn.proj.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(model(x), before) and seen == [1]
        handle.remove()
        mask = torch.zeros(5, 5, dtype=torch.bool).fill_diagonal_(True)
        masked = model.forward_features(x, attn_mask=mask)
        elsa.unpatch(model)
        torch.testing.assert_close(masked, model.forward_features(x, attn_mask=mask))


@pytest.fixture
def in_a_row(monkeypatch):
    """The results of blocks whose functions were called one after another."""
    found, served = [], flat.served

    def noted(module, read, x):
        out = served(module, read, x)
        if read is flat.block and out is not None:
            found.append(out)
        return out

    monkeypatch.setattr(flat, "served", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
def test_small_blocks_in_half_precision(scope, dtype, on_gpu, in_a_row):
    """Bit by bit the original, the first call included, and so after another scope."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=3).eval()
    model, x = model.to(dtype), torch.randn(2, 3, 32, 32, dtype=dtype)
    with torch.no_grad():
        before = model(x)
        elsa.patch(model, scope="model" if scope == "attention" else "attention")
        elsa.unpatch(model)
        elsa.patch(model, scope=scope)
        for _ in range(2):
            assert torch.equal(model(x), before)
            assert len(in_a_row) == 3
            in_a_row.clear()


@pytest.mark.parametrize("options", [{}, {"drop_path_rate": 0.5, "proj_drop_rate": 0.2}], ids=str)
def test_a_step_under_autocast_is_the_originals(options, on_gpu, in_a_row, monkeypatch):
    """Whose attention PyTorch trains at any size: no call here counts as small."""
    monkeypatch.setattr(routing, "eager_least", lambda *_: 0)
    grads = []
    for scope in ("", "attention", "model"):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, **options
        ).train()
        if scope:
            elsa.patch(model, scope=scope)
        x = torch.randn(2, 5, 24)
        torch.set_autocast_enabled("cuda", True)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                out = model.blocks(x)
        finally:
            torch.set_autocast_enabled("cuda", False)
        out.square().sum().backward()
        grads.append([out.detach(), *(p.grad for p in model.blocks.parameters())])
    assert all(map(torch.equal, grads[0], grads[1]))
    assert all(map(torch.equal, grads[0], grads[2]))
    assert len(in_a_row) == (0 if options else 4)


def test_a_call_on_a_cpu_is_the_blocks_own(monkeypatch):
    """With attention alone patched nothing is asked there, and what runs is timm's forward."""
    module, x = nn.Sequential(block()), tokens()
    elsa.patch(module, scope="attention")
    assert type(module[0]) is timm_blocks.ElsaBlock
    for name in ("is_host_bound", "trains_by_pytorch", "added", "all_original"):
        monkeypatch.setattr(timm_blocks, name, None)
    monkeypatch.setattr(flat, "served", None)
    own, calls = Block.forward, []
    monkeypatch.setattr(Block, "forward", lambda *g, **k: calls.append(1) or own(*g, **k))
    with torch.no_grad():
        found = module(x)
        assert calls == [1]
        module[0].__class__ = Block  # as where it is not swapped
        assert torch.equal(found, module(x))


def test_a_block_that_waits_for_the_host_loads_for_graphs_of_steps_alone(monkeypatch):
    """Without gradients it does not even look for its attention."""
    module, x, loaded = nn.Sequential(block()), tokens(), []
    elsa.patch(module, scope="attention")
    monkeypatch.setattr(timm_blocks, "is_host_bound", lambda *_: True)
    monkeypatch.setattr(timm_blocks, "load_for_graph", lambda *given: loaded.append(given[0]))
    with torch.no_grad():
        assert module[0]._keeps_original("attention", x, 1, None) and not loaded
    assert module[0]._keeps_original("attention", x, 1, None) and loaded == [module[0].attn]


def test_masks_pass_through_blocks(on_gpu):
    module, x = block(), tokens()
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = module(x, attn_mask=mask)
    elsa.patch(module, scope="attention")
    for _ in range(2):
        assert torch.equal(module(x, attn_mask=mask), module(x, mask))
        torch.testing.assert_close(module(x, mask), expected)
        torch.testing.assert_close(module(x, is_causal=True), expected)


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_tracers_that_call_with_no_tensors(scope):
    module, x = block(), tokens()
    elsa.patch(module, scope=scope)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return hasattr(type(module), "elsa_base") or super().is_leaf_module(module, name)

    graph = torch.fx.GraphModule(module, Tracer().trace(module))
    torch.testing.assert_close(graph(x), module(x))


class NoTimm(nn.Module):
    """Attention that says it is fused, without timm's other attributes."""

    fused_attn = True

    def __init__(self, dim, num_heads, **_):
        super().__init__()
        self.num_heads, self.inner = num_heads, nn.Linear(dim, 3 * dim)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.inner(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("cls", [Block, Attention, Mlp, LayerNorm, nn.Linear])
def test_a_forward_put_in_a_class_later(cls, called, on_gpu, monkeypatch):
    """As recipes do it, after the model was patched: before or after its first call."""
    module, x = nn.Sequential(block()), tokens()
    elsa.patch(module, scope="attention")
    with torch.no_grad():
        before = module(x) if called else None
        own = cls.forward
        monkeypatch.setattr(cls, "forward", lambda *g, **k: 2 * own(*g, **k))
        assert flat.served(module[0], flat.block, x) is None
        changed = module(x)
        monkeypatch.setattr(cls, "forward", own)
        after = module(x)
        assert flat.served(module[0], flat.block, x) is not None
    assert before is None or torch.equal(before, after)
    assert not torch.equal(changed, after)


@pytest.mark.parametrize("made", [NoTimm, Attention])
@pytest.mark.parametrize("least", [0, 1 << 30])
def test_other_attention_under_autocast(made, least, on_gpu, monkeypatch):
    """A class that is redirected, and timm's with another forward and no qkv any more."""
    monkeypatch.setattr(routing, "eager_least", lambda *_: least)
    module = nn.Sequential(Block(24, 3, attn_layer=made)).train()
    elsa.patch(module, scope="attention")
    if made is Attention:
        module[0].attn.forward = lambda x, **_: x
        del module[0].attn.qkv
    x = tokens().requires_grad_()
    torch.set_autocast_enabled("cuda", True)
    try:
        module(x).sum().backward()
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert x.grad is not None


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_other_blocks_in_eager_calls_are_the_original(name, on_gpu):
    torch.manual_seed(0)
    options = {"embed_dim": 24, "num_heads": 3, "depth": 2} if "beit" in name else {"depth": 2}
    size = 32 if "beit" in name else 28
    model = timm.create_model(name, img_size=size, **options).eval()
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        before = model(x)
        elsa.patch(model, scope="model")
        assert torch.equal(model(x), before)


def test_redirected_calls_that_are_small_are_sdpas(on_gpu, monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    names = {"backend": "auto", "precision": "strict"}
    counts = []
    plain = redirect.scaled_dot_product_attention

    def counted(*given, **named):
        counts.append(1)
        return plain(*given, **named)

    monkeypatch.setattr(redirect, "scaled_dot_product_attention", counted)
    out = redirect._attention(q, k, v, scale=0.3, **names)
    assert torch.equal(out, plain(q, k, v, scale=0.3)) and counts == [1]
    redirect._attention(q, k, v, backend="eager", precision="strict")
    redirect._attention(*(t.bfloat16() for t in (q, k, v)), torch.zeros(5, 5), **names)
    assert counts == [1]  # PyTorch refuses a mask of another dtype
    mask = torch.randn(5, 5)
    assert torch.equal(redirect._attention(q, k, v, mask, **names), plain(q, k, v, mask))
    assert counts == [1, 1]


@pytest.mark.parametrize("shift", [0, 2])
def test_swin_blocks(shift, on_gpu):
    torch.manual_seed(0)
    original = SwinTransformerBlock(24, (8, 8), 3, window_size=4, shift_size=shift).eval()
    x = torch.randn(2, 8, 8, 24)
    model = nn.Sequential(original)
    with torch.no_grad():
        before = model(x)
        elsa.patch(model, scope="attention")
        site, seen = model[0], []
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
        assert any(key[0] == id(site) and r.run for key, r in flat._READINGS.items())
        site.attn.softmax.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
        assert seen


@pytest.mark.parametrize("is_causal", [False, True])
def test_small_attention_is_pytorchs_own(on_gpu, monkeypatch, is_causal):
    """Grouped heads, the scale and the causal limit included."""
    site = SimpleNamespace(elsa_precision="strict", elsa_backend="auto")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    wide = [q.double(), *(t.double().repeat_interleave(2, 1) for t in (k, v))]
    expected = F.scaled_dot_product_attention(*wide, is_causal=is_causal, scale=0.3)
    common.attend(site, q, k, v, scale=0.3, is_causal=is_causal)  # loads what a graph will need
    monkeypatch.setattr(common, "attention", None)
    found = common.attend(site, q, k, v, scale=0.3, is_causal=is_causal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_mask_is_not_left_out(on_gpu):
    """A masked attention that would wait for the host is the original's, with its mask."""
    module, x = block().attn, tokens()
    mask = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = module(x, mask)
        elsa.patch(module)
        for _ in range(3):
            assert torch.equal(module(x, mask), expected)


@pytest.mark.parametrize("kind", ["attention", "block", "swin"])
def test_a_reading_keeps_no_module(on_gpu, kind):
    """What was read goes with the module."""
    if kind == "swin":
        module = SwinTransformerBlock(32, (7, 7), num_heads=1, window_size=7).eval()
        elsa.patch(module, scope="model")
        x = torch.randn(1, 7, 7, 32)
    else:
        module, x = block(), tokens()
        module = module.attn if kind == "attention" else module
        elsa.patch(module, scope="model")
    with torch.inference_mode():
        for _ in range(3):
            module(x)
    assert any(reading.owner() is module for reading in flat._READINGS.values())
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None


def test_a_site_with_names_of_its_own_is_called(on_gpu, monkeypatch):
    """Of a block whose parts were patched apart, and after a part was patched again."""
    module, x = block(), tokens()
    elsa.patch(module, scope="model")
    with torch.inference_mode():
        assert flat.served(module, flat.block, x) is not None
        for changed in ({"elsa_backend": "eager"}, {"elsa_precision": "ieee"},
                        {"elsa_sparsity": "exact"}):  # fmt: skip
            for part in (module.attn, module.mlp):
                for name, value in changed.items():
                    monkeypatch.setattr(part, name, value, raising=False)
                assert flat.served(module, flat.block, x) is None
                monkeypatch.undo()
        assert flat.served(module, flat.block, x) is not None


def test_another_adapter_is_called(on_gpu):
    """A class that stands for timm's Attention may compute something else, as sharded ones do."""

    class Other(type(block().attn)):
        elsa_base = type(block().attn)

    module, x = block(), tokens()
    module.attn.__class__ = Other
    assert flat.served(module, flat.block, x) is None


def test_a_weight_that_is_no_parameter_any_more():
    module, x = block(), tokens()
    assert flat.served(module, flat.block, x) is not None
    weight = module.mlp.fc1.weight.detach()
    del module.mlp.fc1.weight
    module.mlp.fc1.weight = weight
    assert flat.served(module, flat.block, x) is None


@pytest.mark.parametrize("scope", ["model", "attention"])
def test_a_compiler_reads_no_table_and_no_length(scope, compiled_once):
    compiled_once(
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3),
        scope,
        64,
        any_batch=True,
    )


def test_a_compiler_takes_a_training_step_in_half_precision():
    """Where a tensor begins is nothing that it can read."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3)
    elsa.patch(model.half().train())
    with mode:
        model = model.to_empty(device="cuda")
        x = torch.empty(2, 3, 64, 64, device="cuda", dtype=torch.float16)
    torch._dynamo.reset()
    with mode:
        out = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert out.shape == (2, 3) and out.requires_grad


def test_a_small_linear_layer_is_pytorchs_own(on_gpu):
    layer, x = nn.Linear(8, 6), torch.randn(3, 8)
    with torch.inference_mode():
        expected = layer(x)
        elsa.patch(nn.Sequential(layer), scope="model")
        for _ in range(2):
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "mvitv2_tiny"])
def test_a_first_call_loses_no_residual(on_gpu, monkeypatch, name):
    """Attention that waits for the host within a block that does not."""
    options = {"depth": 2, "embed_dim": 24, "num_heads": 2} if "beit" in name else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, img_size=64, **options).eval()
    x = torch.randn(1, 3, 64, 64)
    own, none = routing.eager_least, {"linear": 0}
    monkeypatch.setattr(
        routing, "eager_least", lambda kind, dtype: none.get(kind, own("attention", dtype))
    )
    with torch.inference_mode():
        expected = model(x)
        elsa.patch(model, scope="model")
        for _ in range(2):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
