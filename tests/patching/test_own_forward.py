"""Classes without an adapter: their own forward runs, and attention in it is elsa's."""

import functools
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from judging import assert_recorded
from sampling import thinned
from seen import Calls
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from elsa_core.errors import NothingPatchedError
from elsa_core.patching import sites
from elsa_core.patching.adapters import watched
from elsa_core.patching.rewrite import patch, unpatch

timm = pytest.importorskip("timm")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)


class ByModule(Base):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))


class ByImportedName(Base):
    def forward(self, x):
        attend = sdpa
        return attend(*self.heads(x), scale=0.5)


class InAHelperMethod(Base):
    def _attend(self, q, k, v, *, causal=True):
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for _ in range(1)]
        return outs[0]

    def forward(self, x):
        return self._attend(*self.heads(x))


class WithSuper(ByModule):
    """`super()` needs the class cell of the original function."""

    def heads(self, x):
        return super().heads(x) * 2

    def forward(self, x, scale: float = 0.3):
        q, k, v = super().heads(x)
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


class Inherits(ByModule):
    pass


class CallsSuperForward(ByModule):
    def forward(self, x):
        return super().forward(x) + 1


class ImportsInside(Base):
    def forward(self, x):
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(*self.heads(x))


def traced(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Decorated(Base):
    @traced
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))


class OwnMethodOfThatName(Base):
    def scaled_dot_product_attention(self, q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    def forward(self, x):
        return self.scaled_dot_product_attention(*self.heads(x))


CLASSES = [
    ByModule, ByImportedName, InAHelperMethod, WithSuper, Inherits, CallsSuperForward, Decorated,
    ImportsInside, OwnMethodOfThatName,
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_every_spelling_is_recognised(cls: type) -> None:
    torch.manual_seed(0)
    module, x = cls(), torch.randn(2, 5, 16)
    expected, sdpa_before = module(x), F.scaled_dot_product_attention
    (site,) = patch(module, backend="eager").patched
    assert site.adapter == "recognised" and "example" in site.reason
    with Calls() as calls:
        found = module(x)
    assert len(calls.elsa) == 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), expected)
    assert F.scaled_dot_product_attention is sdpa_before
    with Calls() as calls:
        cls()(x)  # another instance of the class is not touched
        unpatch(module)
        assert torch.equal(module(x), expected)
    assert len(calls.elsa) == 0


@pytest.mark.parametrize("cls", [ByModule, WithSuper])
@torch.no_grad()
def test_compiled_calls_of_the_operator_are_elsas(cls: type) -> None:
    torch._dynamo.reset()
    module, x = cls(), torch.randn(2, 5, 16)
    expected, called = module(x), []
    patch(module)

    def backend(graph, example):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend=backend)(x), expected)
    assert any("elsa.attention" in name for name in called)
    assert not any("scaled_dot_product" in name for name in called)


def test_a_traced_graph_is_refused() -> None:
    """Its class is its instance's own: a copy of it called itself without end."""

    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    graph = torch.fx.symbolic_trace(Plain())
    with pytest.raises(NothingPatchedError, match="before it is traced"):
        patch(graph)
    graph(torch.randn(1, 3, 16))


def test_names_are_invertible() -> None:
    from timm.models.vision_transformer_sam import Attention

    cls = watched.watched(Attention)
    assert cls.__qualname__.isidentifier() and getattr(watched, cls.__qualname__) is cls
    for name in ("Watched", "anything"):
        with pytest.raises(AttributeError):
            getattr(watched, name)


FAMILIES = {
    # Hands 5-D tensors over.
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 32, "stages": (1, 1, 1, 1)},
    "beit_base_patch16_224": {"img_size": 48, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "samvit_base_patch16": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3,
                            "global_attn_indexes": (1,)},
}  # fmt: skip


def family(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A small model with no parameter at zero, and inputs for it."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=7, **FAMILIES[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std(correction=0) < 1e-3:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    side = FAMILIES[name]["img_size"]
    return model, torch.randn(2, 3, side, side)


@pytest.mark.parametrize(("name", "way"), thinned(tuple(FAMILIES), ("compile", "export")))
@torch.no_grad()
def test_families_compile_and_export(name: str, way: str) -> None:
    model, x = family(name)
    patch(model)
    assert_recorded(way, model, x, torch.cat([x, x, x]))


def test_open_clip_attention() -> None:
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    x = torch.randn(2, 7, 32)
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    module = open_clip.transformer.Attention(32, num_heads=4, qk_norm=True, scale_heads=True)
    with torch.no_grad():
        expected = module(x, attn_mask=mask)
        patch(module)
        torch.testing.assert_close(module(x, attn_mask=mask), expected)


def test_a_class_that_no_module_has_is_gone() -> None:
    """Classes made in a loop do not pile up."""

    def made() -> nn.Module:
        class Passing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        return Passing()

    gc.collect()
    before = len(watched._CLASSES)
    modules = [made() for _ in range(5)]
    for module in modules:
        patch(module)
    assert len(watched._CLASSES) == before + 5
    del module, modules
    sites.may_attend.cache_clear()
    gc.collect()
    assert len(watched._CLASSES) == before


@torch.no_grad()
def test_the_precision_reaches_the_operator() -> None:
    """One that is lost on the way is `strict`, which no result on a CPU shows."""
    model, x, recorded = ByModule().eval(), torch.randn(1, 3, 16), []
    patch(model, precision="ieee")
    with Calls() as calls:
        model(x)
    assert [args[-1] for args, _ in calls.elsa] == ["ieee"]

    def backend(graph, example):
        recorded.extend(n.args for n in graph.graph.nodes if "elsa.attention" in str(n.target))
        return graph.forward

    torch.compile(model, backend=backend)(x)
    assert [args[-1] for args in recorded] == ["ieee"]
