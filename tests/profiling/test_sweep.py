"""What a sweep measures of a document that holds points already, and when it is complete."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elsa_core.errors import ModelError
from elsa_core.loading import Loaded
from elsa_core.loading.loader import load_model
from elsa_core.loading.spec import ModelSpec
from elsa_core.profiling import sweep


@pytest.fixture
def plan() -> sweep.Plan:
    """A small ViT in three rounds."""

    def load(size: tuple[int, int] | None, dtype: str) -> Loaded:
        assert size is not None
        return load_model("test_vit", image_size=size[0], model_kwargs={"depth": 1})

    options = {"rounds": 3, "budget_seconds": 0.01, "sites": False, "errors": False}
    return sweep.Plan(load, {"given": "w.safetensors"}, {}, options, torch.device("cpu"), 0)


def points(*sides: int, precision: str = "strict") -> tuple[sweep.Configuration, ...]:
    return tuple(sweep.Configuration((side, side), precision=precision) for side in sides)


def test_points_of_an_earlier_sweep_complete_nothing(plan: sweep.Plan) -> None:
    """A file that held 16 was called complete when 32 of 32 and 48 was done."""
    document = sweep.started(plan, {})
    sweep.run(plan, points(16), document, keep=lambda _: None)
    assert document["results"]["complete"]
    seen = []

    def keep(document: dict[str, Any]) -> None:
        seen.append(document["results"]["complete"])

    def stop(what: str, *_: Any) -> None:
        if what.startswith("48"):
            raise KeyboardInterrupt

    asked = points(32, 48)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(plan, asked, document, keep=keep, progress=stop)
    assert not document["results"]["complete"]  # as it is shown after Ctrl-C
    sweep.run(plan, asked, document, keep=keep)
    assert seen == [False, True, True]
    assert len(document["results"]["points"]) == 3


def test_only_its_own_points_are_judged(plan: sweep.Plan) -> None:
    document = sweep.started(plan, {})
    sweep.run(plan, points(32, precision="turbo"), document, keep=lambda _: None)
    sweep.run(plan, points(32), document, keep=lambda _: None)
    own = sweep.only(points(32), document)["results"]["points"]
    assert [row["configuration"]["precision"] for row in own] == ["strict"]
    assert len(document["results"]["points"]) == 2


def test_the_document_says_what_was_loaded(plan: sweep.Plan) -> None:
    document = sweep.started(plan, {})
    sweep.run(plan, points(32), document, keep=lambda _: None)
    model = document["results"]["model"]
    assert (model["architecture"], model["weights"]) == ("test_vit", "random (seed 0)")
    assert plan.model == {"given": "w.safetensors"}  # what a resumed file is held against


def test_a_hash_covers_whatever_a_model_is_built_from(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    file = ModelSpec("safetensors", str(weights), "w", None, weights)
    directory = ModelSpec("directory", str(tmp_path), "d", None, tmp_path)
    seen = {sweep.weights_sha256(file)}
    assert sweep.weights_sha256(directory) in seen
    for name, content in (
        ("model.safetensors", b"two"), ("config.json", b"{}"), ("elsa_plan.json", b"{}"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        found = sweep.weights_sha256(file)
        assert found not in seen and found == sweep.weights_sha256(directory)
        seen.add(found)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    sharded = ModelSpec("safetensors", str(index), "s", None, index)
    before = sweep.weights_sha256(sharded)
    weights.write_bytes(b"three")  # a shard
    assert sweep.weights_sha256(sharded) != before
    assert sweep.weights_sha256(ModelSpec("timm", "vit", "vit")) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.touch(mode=0)
    with pytest.raises(ModelError, match="cannot be read"):
        sweep.weights_sha256(ModelSpec("safetensors", str(path), "w", None, path))
