"""The errors beside times are of the very calls that are timed: their batch, graph or compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.profiling.profile import ProfileReport, profile

from .test_blind_spots import kernel, vit
from .test_paths import WrongCompiled

SHORT: dict[str, Any] = {"rounds": 3, "budget_seconds": 0.5, "sites": False}
pytestmark = pytest.mark.usefixtures("quick")


def errors(found: ProfileReport) -> dict[str, Any]:
    return {run.name: run.error for run in found.runs}


def test_every_run_has_its_error() -> None:
    images = torch.randn(3, 3, 32, 32)
    found = profile(vit(), images, **SHORT, baselines=("eager", "sdpa", "compile"))
    own = errors(found)
    names = {"eager", "sdpa", "compile", "patched", "patched+compile"}
    assert set(own) == names - found.left_out.keys()
    assert all(0 < error < 1e-5 for error in own.values())
    assert found.wrong == () and found.to_dict()["wrong"] == []
    assert [run["error"] for run in found.to_dict()["runs"]] == list(own.values())


def test_what_is_wrong_only_compiled() -> None:
    model = vit()
    model.blocks[1].attn.__class__ = WrongCompiled
    images = torch.randn(3, 3, 32, 32)
    found = profile(model, images, **SHORT, baselines=("eager", "compile"))
    own = errors(found)
    assert own["patched"] < 1e-5 < 1e-4 < own["patched+compile"]
    assert found.wrong == ("patched+compile",)
    assert any(line.startswith("patched+compile: error") for line in found.warnings)


def test_what_is_wrong_from_the_second_image_on() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = eager.attention(q, k, v, *rest)
        out[1:] = eager.attention(q[1:], k[1:, :, :-1], v[1:, :, :-1], *rest)[0]
        return out, lse

    model, images = vit(), torch.randn(3, 3, 32, 32)
    with kernel("attention_eager", broken):
        one = profile(model, images[:1], **SHORT)
        three = profile(model, images, rounds=3, budget_seconds=1.0, sites=True)
        unknown = profile(model, images, rounds=3, budget_seconds=1.0, sites=False, errors=False)
    assert one.wrong == () and three.wrong == ("patched",)
    assert all(site.error > 1e-4 for site in three.sites[:-1])
    assert set(errors(unknown).values()) == {None} and unknown.wrong == ()
