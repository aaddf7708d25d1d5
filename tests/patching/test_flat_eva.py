"""EVA's blocks as functions in a row: the original's bits, and the original wherever a module is
seen.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm.layers import AttentionRope, GluMlp, Mlp, RmsNorm, SwiGLU  # noqa: E402
from timm.models.eva import EvaAttention, EvaBlock  # noqa: E402

import elsa_core as elsa  # noqa: E402
from elsa_core import short_calls  # noqa: E402
from elsa_core.operators.linear import plain  # noqa: E402
from elsa_core.patching.adapters import flat, flat_eva, host, timm_folded  # noqa: E402

PREFIX, TOKENS, HEADS = 2, 7, 3
GROUPED = {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1}
VARIANTS = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "bias apart": {"qkv_bias_separate": True},
    "unfused": {"qkv_fused": False},
    "half": {"rotate_half": True},
    "scaled": {"init_values": 0.5, "drop_path": 0.1, "proj_drop": 0.1, "attn_drop": 0.1},
    "attention scaled": {"init_values": 0.5, "attn_only_layer_scale": True},
    "normed": {"qk_norm": True, "scale_attn_inner": True, "scale_mlp": True},
    "gated": {"gated_attn": True},
    "swiglu": {"swiglu_mlp": True, "scale_mlp": True},
    "glu": {"swiglu_mlp": True},
    "rope": {"attn_type": "rope", "rotate_half": True, "gated_attn": True, "swiglu_mlp": True},
    "grouped": GROUPED,
    "rms": {"norm_layer": RmsNorm, "qk_norm": True, "swiglu_mlp": True, "swiglu_align_to": 8},
    "odd": {"dim": 18},  # of whose keys no second one begins at a multiple of 16 bytes
}
MODELS = {
    "vit_small_patch16_dinov3": {"img_size": 32},
    "eva_giant_patch14_224": {"img_size": 28},
    "eva02_tiny_patch14_224": {"img_size": 28},
    "eva02_base_patch14_448": {"img_size": 28},
    "vit_small_patch16_rope_mixed_224": {"img_size": 32},
    "vit_pe_core_tiny_patch16_384": {"img_size": 32},
}


def block(**options):
    torch.manual_seed(0)
    dim, apart = options.pop("dim", 24), options.pop("qkv_bias_separate", False)
    made = EvaBlock(dim, HEADS, num_prefix_tokens=PREFIX, **options).eval()
    if apart:
        made.attn.qkv_bias_separate = True
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(batch=2, dim=24):
    return drawn(batch, TOKENS, dim)


def embeddings(kind="shared", batch=2, dim=24):
    """Sines and cosines of all tokens behind the prefix."""
    last = (TOKENS - PREFIX, 2 * dim // HEADS)
    shapes = {"shared": last, "heads": (HEADS, *last), "images": (batch, 1, *last)}
    return None if kind == "none" else drawn(*shapes[kind], seed=2)


def model(name="vit_small_patch16_dinov3", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 3, **MODELS[name]}
    made = timm.create_model(name, **sizes, **options).eval()
    for parameter in made.blocks.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def image(name="vit_small_patch16_dinov3", dtype=torch.float32, batch=1):
    size = MODELS[name]["img_size"]
    return drawn(batch, 3, size, size).to(dtype)


def served(module, x, *rope):
    """By the blocks' functions, without gradients; None where the block must run itself."""
    run = flat.run_of(module, flat_eva.block)
    try:
        with torch.no_grad():
            return None if run is None else run(x, *rope)
    except KeyError:
        return None


@pytest.fixture
def in_a_row(monkeypatch):
    """The blocks that ran in a row."""
    found, read = [], flat.run_of

    def noted(module, reader):
        run = read(module, reader)
        if reader in (flat_eva.block, flat_eva.any_block) and run is not None:
            found.append(module)
        return run

    monkeypatch.setattr(flat, "run_of", noted)
    return found


@pytest.mark.parametrize("kind", ["none", "shared", "heads", "images"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_original_bit_by_bit(options, dtype, kind):
    if options is GROUPED and kind == "heads":
        pytest.skip("embeddings of each head are for as many keys")
    dim = options.get("dim", 24)
    module, x, rope = (
        block(**options).to(dtype),
        tokens(dim=dim).to(dtype),
        embeddings(kind, dim=dim),
    )
    half = None if rope is None else rope.to(dtype)
    with torch.no_grad():
        for given in (rope, half):
            assert torch.equal(served(module, x, given), module(x, given))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_autocast_is_the_originals(options):
    dim = options.get("dim", 24)
    module, x, rope = block(**options), tokens(dim=dim), embeddings(dim=dim)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(served(module, x, rope), module(x, rope))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model", None])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_small_calls_is_the_original(name, scope, dtype, on_gpu, in_a_row):
    """From the first call on, patched in another scope before."""
    made, x = model(name).to(dtype), image(name, dtype)
    with torch.no_grad():
        before = made(x)
        elsa.patch(made, scope="model" if scope == "attention" else "attention")
        elsa.unpatch(made)
        elsa.patch(made, **({} if scope is None else {"scope": scope}))
        for _ in range(4):
            in_a_row.clear()
            assert torch.equal(made(x), before)
            assert len(in_a_row) == 2
        on_gpu.clear()
        made(x)
        assert not on_gpu
    assert torch.equal(host.all_original(made, x), before)


def test_a_call_on_a_cpu_is_the_blocks_own(monkeypatch):
    made, x = model(), image()
    elsa.patch(made, scope="attention")
    assert type(made.blocks[0]) is timm_folded.ElsaEvaBlock
    monkeypatch.setattr(timm_folded, "added", None)
    monkeypatch.setattr(flat, "run_of", None)
    called, own = [], EvaBlock.forward
    monkeypatch.setattr(EvaBlock, "forward", lambda *g, **k: called.append(1) or own(*g, **k))
    with torch.no_grad():
        made(x)
    assert len(called) == 2


@pytest.mark.parametrize("options", [{}, {"attn_type": "rope"}], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
def test_masks_pass_through_blocks(scope, options, on_gpu, in_a_row):
    module, x, rope = nn.Sequential(block(**options))[0], tokens(), embeddings()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    with torch.no_grad():
        expected, free = module(x, rope, mask), module(x, rope)
        elsa.patch(module, scope=scope)
        for _ in range(2):
            for given in ((rope, mask), (rope, None, True)):
                torch.testing.assert_close(module(x, *given), expected)
            torch.testing.assert_close(module(x, rope=rope, attn_mask=mask), expected)
        assert not in_a_row
        assert torch.equal(module(x, rope=rope, attn_mask=None, is_causal=False), free)
        assert torch.equal(module(x=x, rope=rope), free)
        assert in_a_row


NAMES = ["norm1", "attn", "attn.qkv", "attn.proj", "attn.q_norm", "mlp.fc1", "mlp.act", "mlp"]


@pytest.mark.parametrize("name", [*NAMES, "drop_path1"])
def test_hooks_are_called(name):
    module, x, rope = block(), tokens(), embeddings()
    elsa.patch(nn.Sequential(module), scope="model")
    assert served(module, x, rope) is not None
    hooked, seen = module.get_submodule(name), []
    for register in (hooked.register_forward_hook, hooked.register_forward_pre_hook):
        handle = register(lambda *_: seen.append(1))
        assert served(module, x, rope) is None
        host.all_original(module, x, rope)
        handle.remove()
    # timm's attention reads the weight of this layer alone
    assert len(seen) == (0 if name == "attn.qkv" else 2)
    hooked.forward = hooked.forward
    assert served(module, x, rope) is None
    del hooked.forward
    assert served(module, x, rope) is not None


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **named):
        return 2 * self.layer(x, **named)


@pytest.mark.parametrize("name", ["attn.proj", "attn.norm", "attn", "mlp", "mlp.fc2", "norm2"])
def test_replaced_parts_are_called(name):
    module, x, rope = block(scale_attn_inner=True), tokens(), embeddings()
    before = served(module, x, rope)
    own = module.get_submodule(name)
    module.set_submodule(name, Doubled(own))
    assert served(module, x, rope) is None
    assert not torch.equal(module(x, rope), before)
    module.set_submodule(name, own)
    assert torch.equal(served(module, x, rope), before)


@pytest.mark.parametrize("name", ["gate", "q_bias", "qkv"])
def test_parts_given_and_taken_later(name):
    """What is a module or a parameter in one call is None in another."""
    module, x, rope = block(qkv_fused=name != "qkv"), tokens(), embeddings()
    before = served(module, x, rope)
    if name == "q_bias":
        module.attn.q_bias = None
    else:
        layer = nn.Linear(24, 24 if name == "gate" else 72, bias=False)
        setattr(module.attn, name, nn.init.normal_(layer.weight) is None or layer)
    after = served(module, x, rope)
    assert torch.equal(after, module(x, rope)) and not torch.equal(after, before)


@pytest.mark.parametrize(
    "name", ["gamma_1", "gamma_2", "attn.q_bias", "attn.k_bias", "mlp.fc1.weight"]
)
def test_a_weight_that_is_no_parameter_any_more(name):
    """The original computes with whatever Python finds."""
    module, x, rope = block(init_values=0.5), tokens(), embeddings()
    assert served(module, x, rope) is not None
    path, _, term = name.rpartition(".")
    owner = module.get_submodule(path)
    value = 2 * getattr(owner, term).detach() + 1
    delattr(owner, term)
    object.__setattr__(owner, term, value)
    expected = module(x, rope)
    assert served(module, x, rope) is None
    elsa.patch(nn.Sequential(module), scope="attention")
    assert torch.equal(host.all_original(module, x, rope), expected)


@pytest.mark.parametrize("options", [{}, {"qkv_fused": False}], ids=str)
def test_sizes_that_the_original_takes_and_refuses(options):
    module, x = block(attn_type="rope", **options), tokens(0)
    with torch.no_grad():
        assert served(module, x, embeddings()).shape == module(x, embeddings()).shape == x.shape
        module, x = block(attn_type="rope", attn_head_dim=4, **options), tokens()
        assert torch.equal(served(module, x), module(x))
        module = block(attn_head_dim=4, **options)
        for forward in (module, lambda x: served(module, x)):
            with pytest.raises(RuntimeError, match="shape"):
                forward(x)


def test_what_drops_runs_itself():
    x, rope = tokens(), embeddings()
    for name in ("drop_path", "attn_drop", "proj_drop"):
        assert served(block(**{name: 0.2}).train(), x, rope) is None
    for part in ("attn.proj_drop", "mlp.drop1", "mlp.drop2"):
        module = block(swiglu_mlp=True, proj_drop=0.2)
        module.get_submodule(part).train()
        assert served(module, x, rope) is None
        module.eval()
        assert served(module, x, rope) is not None


@pytest.mark.parametrize("attn_type", ["eva", "rope"])
@pytest.mark.parametrize("patched", [False, True])
def test_the_unfused_branch_is_the_modules_own(patched, attn_type):
    module, x, rope = block(attn_type=attn_type), tokens(), embeddings()
    module.attn.fused_attn = False
    expected = module(x, rope)
    if patched:
        elsa.patch(nn.Sequential(module), scope="attention")
    assert torch.equal(host.all_original(served, module, x, rope), expected)


@pytest.mark.parametrize("cls", [EvaBlock, EvaAttention, AttentionRope, Mlp, GluMlp, SwiGLU])
def test_a_forward_put_in_a_class_later(cls, on_gpu, monkeypatch):
    options = {AttentionRope: {"attn_type": "rope"}, GluMlp: VARIANTS["glu"],
               SwiGLU: VARIANTS["swiglu"]}.get(cls, {})  # fmt: skip
    module, x = nn.Sequential(block(**options)), tokens()
    elsa.patch(module, scope="attention")
    with torch.no_grad():
        before, own = module(x), cls.forward
        monkeypatch.setattr(cls, "forward", lambda *g, **k: 2 * own(*g, **k))
        assert served(module[0], x) is None or cls is EvaBlock
        assert not torch.equal(module(x), before)
        monkeypatch.setattr(cls, "forward", own)
        assert torch.equal(served(module[0], x), before)


def test_other_classes_and_names_are_called():
    module, x = block(), tokens()
    elsa.patch(nn.Sequential(module), scope="attention")
    assert served(module, x) is not None
    cls = type(module.attn)
    module.attn.__class__ = type("Other", (cls,), {"elsa_base": EvaAttention})
    assert served(module, x) is None
    module.attn.__class__ = cls
    module.attn.elsa_precision = "ieee"
    assert served(module, x) is None
    module = block(swiglu_mlp=True)
    module.mlp.act = nn.Sigmoid()
    assert served(module, x) is None
    assert served(block(norm_layer=nn.BatchNorm1d), x) is None


WAYS = {"plain": 4, "bias apart": 4, "unfused": 6, "glu": 4, "swiglu": 5, "gated": 5, "rope": 5}


@pytest.mark.parametrize("name", WAYS)
def test_linear_layers_go_the_short_way(name, monkeypatch):
    """With residual, LayerScale, activation and the packed bias."""
    given = []

    def way(x, weight, *terms):
        given.append(terms)
        return plain(x, weight, *terms[:4])

    monkeypatch.setattr(flat_eva, "small_way", lambda x: way)
    module, x, rope = block(init_values=0.5, **VARIANTS[name]), tokens(), embeddings()
    with torch.inference_mode():
        expected = module(x, rope)
        assert torch.equal(served(module, x, rope), expected) and not given
        run = flat.run_of(module, flat_eva.any_block)
        torch.testing.assert_close(run(x, rope), expected, rtol=1e-5, atol=1e-5)
        assert len(given) == WAYS[name]
        elsa.patch(nn.Sequential(module), scope="model")
        given.clear()
        found = served(module, x, rope)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(given) == WAYS[name] and all(terms[4] == "strict" for terms in given)
    assert sum(terms[2] is not None for terms in given) == 2
    activations = [terms[1] for terms in given if terms[1] != "none"]
    assert activations == {"glu": [], "rope": [], "swiglu": ["silu"]}.get(name, ["gelu"])


def test_a_way_that_serves_nothing_leaves_it_to_pytorch(monkeypatch):
    monkeypatch.setattr(flat_eva, "small_way", lambda x: lambda *given: None)
    module, x, rope = block(init_values=0.5, swiglu_mlp=True), tokens(), embeddings()
    with torch.inference_mode():
        assert torch.equal(flat.run_of(module, flat_eva.any_block)(x, rope), module(x, rope))


@pytest.mark.parametrize("options", [{}, {"qkv_fused": False}, {"qk_norm": True}], ids=str)
def test_attention_goes_the_short_way(options, monkeypatch):
    """Rotated together, operands lie as they would by themselves."""
    found = []

    def serve(q, k, v, *rest):
        found.append([(t.shape, t.stride()) for t in (q, k, v)])
        return nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(short_calls.ATTENTION, "serve", serve)
    module, x, rope = block(**options).bfloat16(), tokens().bfloat16(), embeddings()
    with torch.inference_mode():
        expected = module(x, rope)
        assert torch.equal(served(module, x, rope), expected)
        monkeypatch.setattr(flat_eva, "_may_join", lambda *_: False)
        assert torch.equal(served(module, x, rope), expected)
    assert len(found) == 2 and found[0] == found[1]


def test_queries_and_keys_are_rotated_at_once(monkeypatch):
    calls, own = [], flat_eva.apply_rot_embed_cat
    noted = lambda x, *given, **named: calls.append(x.dim()) or own(x, *given, **named)  # noqa: E731
    monkeypatch.setattr(flat_eva, "apply_rot_embed_cat", noted)
    module, x, rope = block(), tokens(), embeddings()
    with torch.no_grad():
        served(module, x, rope)
        served(block(qkv_fused=False), x, rope)
        served(block(**VARIANTS["normed"]), x, rope)
        assert calls == [5] * 3
        served(block(dim=18), tokens(1, dim=18), embeddings(dim=18))
        served(block(**GROUPED), x, rope)
        wide = embeddings()[None, None, None].expand(2, -1, -1, -1, -1)
        with pytest.raises(RuntimeError, match="dimensions"):
            served(module, x, wide)  # one for queries, one for keys
    assert calls[3:-1] == [4] * 4


@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_with_checkpoints_is_the_originals(hooked, on_gpu, in_a_row):
    """What a backward runs again, outside of the model's call, is what ran before: no row, which
    saves tensors in another order.
    """
    grads, x = [], image()
    for patched in (False, True):
        made = model().train(not hooked)
        made.set_grad_checkpointing()
        if hooked:  # in evaluation, where the first call of a kind loads kernels
            made.blocks[0].attn.register_forward_hook(lambda *_: None)
        if patched:
            elsa.patch(made, scope="attention")
        for _ in range(3):
            made.zero_grad()
            made(x).square().sum().backward()
        grads.append([p.grad for p in made.parameters()])
    assert all(map(torch.equal, *grads)) and not in_a_row


@pytest.mark.parametrize("name", MODELS)
def test_copies_pickles_and_what_is_kept(name, on_gpu):
    made, x = model(name), image(name)
    elsa.patch(made, scope="attention")
    with torch.no_grad():
        expected = made(x)
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(other(x), expected)
    seen = weakref.ref(made.blocks[0])
    del made, other
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("scope", ["model", "attention"])
def test_a_compiler_reads_no_table_and_no_length(scope, compiled_once):
    compiled_once(
        lambda: timm.create_model("eva02_tiny_patch14_224", depth=1, img_size=28, num_classes=3),
        scope,
        28,
    )
