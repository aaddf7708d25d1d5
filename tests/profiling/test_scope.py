"""Of models that are patched as a whole, every layer has one row that says what serves it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching import find_sites, shared_copy
from elsa_core.profiling import policy
from elsa_core.profiling.runs.training import profile_training
from elsa_core.profiling.sites import around, outermost, served, site_clock

timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, patch_size=2, embed_dim=16,
        depths=(1, 1), num_heads=(2, 2), num_classes=5,
    ).eval()  # fmt: skip
    return elsa.profile(
        model, torch.randn(1, 3, 32, 32), baselines=["eager"], scope="model", sites=True,
        rounds=3, budget_seconds=1.0, errors=False,
    )  # fmt: skip


def test_every_layer_has_a_row_but_those_within_a_timed_attention(report):
    """A Swin block is timed in its attention alone: its MLP has a row, its projections have not."""
    rows = {site.path: site for site in report.sites}
    assert rows.keys() == {
        "patch_embed.proj", "layers.0.blocks.0", "layers.0.blocks.0.mlp",
        "layers.1.downsample.reduction", "layers.1.blocks.0", "layers.1.blocks.0.mlp", "head.fc",
        "rest of the model",
    }  # fmt: skip
    assert rows["layers.0.blocks.0.mlp"].kind == "mlp" and rows["head.fc"].patched
    assert all(site.seconds_before > 0 for site in report.sites)
    assert sum(site.share for site in report.sites) == pytest.approx(1.0, abs=0.01)
    block = "layers.0.blocks.0"
    assert rows[block].within == (f"{block}.attn.qkv", f"{block}.attn.proj")
    assert not rows[f"{block}.mlp"].within
    assert len(rows) - 1 + sum(len(row.within) for row in rows.values()) == report.patched
    assert [note for note in report.notes if note.startswith("4 linear layers inside 2 attention")]


def test_every_row_says_what_serves_it(report):
    """Attention that holds patched projections was served by nothing."""
    for site in report.sites[:-1]:
        assert site.backend in (("native", "eager") if site.kind == "window" else ("eager",))
        assert bool(site.schedule) == (site.kind == "window")


def test_a_layer_that_is_called_by_keyword():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)

        def forward(self, x):
            pooled = self.tower.forward_head(self.tower.forward_features(x), pre_logits=True)
            return self.tower.head(input=pooled)

    model = Named().eval()
    elsa.patch(model, scope="model")
    found = served(model, (torch.randn(1, 3, 32, 32),), ["tower.head"])
    assert found.keys() == {"tower.head"}


def test_the_policy_writes_the_scope(report):
    point = {"status": "done", "profile": report.to_dict()}
    document = {"results": {"points": [point], "settings": {}}}
    plan = policy.faster(document)
    assert plan.scope == "model"
    for site in document["results"]["points"][0]["profile"]["sites"]:
        site["patched"] = site["patched"] and site["kind"] == "window"
    assert policy.faster(document).scope == "attention"


@pytest.mark.parametrize("patched", [False, True])
def test_a_block_timed_in_its_forward_leaves_its_mlp_a_row(patched):
    """DaViT's block has no method for its attention: its MLP was in no row, and in a plan of
    --policy in none either."""
    import time

    torch.manual_seed(0)
    model = timm.create_model("davit_tiny", depths=(1,), embed_dims=(32,), num_heads=(2,)).eval()
    sites = find_sites(model, "model")
    block = "stages.0.blocks.0.0"
    within = outermost(model, sites)
    places = list(within)
    assert {block, f"{block}.mlp"} <= set(places) and f"{block}.attn.qkv" not in places
    assert within[block] == (f"{block}.attn.qkv", f"{block}.attn.proj")
    if patched:
        elsa.patch(model, scope="model")
    model.get_submodule(f"{block}.mlp.fc1").register_forward_pre_hook(lambda *_: time.sleep(0.2))
    inner: list[str] = []
    for order in (places, places[::-1]):
        copied = shared_copy(model)
        clock = site_clock(copied, order, torch.device("cpu"))
        for path in order:  # as markers in a graph: no site begins within another one
            around(
                copied.get_submodule(path), lambda path=path: inner.append(path),
                lambda path=path: inner.remove(path) if inner == [path] else pytest.fail(path),
            )  # fmt: skip
        with torch.inference_mode():
            copied(torch.randn(1, 3, 64, 64))
        taken = clock()
        assert taken[f"{block}.mlp"] > 0.19 > 0.15 > taken[block] > 0 and inner == []


def test_a_scalar_that_comes_first_is_no_batch() -> None:
    """Its missing first dimension ended a profile with an IndexError."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = timm.create_model("test_vit", img_size=32)

        def forward(self, scale: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(images * scale)
            return out

    given = (torch.tensor(0.5), torch.randn(2, 3, 32, 32))
    report = elsa.profile(
        Scaled().eval(), given, baselines="control", rounds=1, budget_seconds=0.2, sites=True
    )
    assert (report.batch, report.image_size, report.wrong) == (2, (32, 32), ())
    assert [run.name for run in report.runs] == ["eager", "control", "patched"]  # one name is one


def test_a_model_of_token_ids() -> None:
    """Its profile had no dtype, and a class as output gave words of Python's `max`."""

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 64)
            self.block = timm.models.vision_transformer.Block(64, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block(self.embedding(ids)).mean(1).argmax(-1)
            return out

    ids = torch.randint(50, (3, 17))
    report = elsa.profile(Text().eval(), ids, rounds=1, budget_seconds=0.2, sites=False)
    assert (report.batch, report.dtype, report.image_size) == (3, "float32", None)
    assert "the errors of the runs are not known: the model's output has no floating tensor" in (
        report.warnings
    )


@pytest.mark.parametrize("measure", [elsa.profile, profile_training])
def test_a_model_that_writes_to_its_input(measure: Callable[..., elsa.ProfileReport]) -> None:
    """Each run had another input than the oracle, and the caller's was another one afterwards."""

    class Normalising(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = timm.create_model("test_vit", img_size=32)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(images.sub_(0.5).div_(1.25))
            return out

    images = torch.randn(2, 3, 32, 32)
    given = images.clone()
    report = measure(Normalising().eval(), given, rounds=2, budget_seconds=0.2)
    assert torch.equal(given, images)
    assert all(run.error is None or run.error < 1e-5 for run in report.runs)
