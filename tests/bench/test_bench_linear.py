"""`elsa bench linear --tune`: what it lists and refuses, what it concludes, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path

import json_schema
import jsonschema
import pytest
import torch

from elsa_cli.main import run
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.profiling.bench import linear
from elsa_core.profiling.bench.linear import Product

pytest.importorskip("triton")
from elsa_core.backends.support import Request
from elsa_core.backends.triton.linear import gate, usertable
from elsa_core.backends.triton.shared import usertable as tiles

GPU = "NVIDIA A100-SXM4-40GB"
SCHEMA = json_schema.document()


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ELSA_TUNING", raising=False)
    monkeypatch.chdir(tmp_path)
    gate.forget()
    yield
    gate.forget()


def product(work: int, gain: float | None) -> Product:
    return Product(work, 1, 1, gain=gain)


@pytest.mark.parametrize(
    ("gains", "least"),
    [
        ({1: 1.2, 2: 1.3, 4: 2.0}, 1),
        ({1: 1.2, 2: 0.9, 4: 2.0, 8: 1.1}, 4),
        ({1: 1.2, 2: None, 4: 2.0}, 4),
        ({1: 2.0, 2: 2.0, 4: 1.04}, None),
        ({1: 0.5}, None),
    ],
)
def test_from_how_many_multiply_adds_on(gains, least):
    assert linear.least_work([product(w, g) for w, g in gains.items()]) == least
    assert linear.least_work([product(w, g) for w, g in reversed(gains.items())]) == least


def test_products_of_one_size_must_all_gain():
    assert linear.least_work([product(2, 2.0), product(2, 0.5), product(4, 2.0)]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.delenv("ELSA_CACHE_DIR")  # the native library, whose name is listed, lies there
    assert run(["bench", "linear", "--tune"]) == 3
    assert "no CUDA GPU" in capsys.readouterr().err
    assert run(["bench", "linear", "--tune", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    assert len(document["results"]["products"]) == len(linear.SHAPES)
    with pytest.raises(UnavailableError):
        linear.tune(torch.device("cuda"))
    with pytest.raises(ArgumentError):
        linear.tune(torch.device("cpu"))


def written(text: str) -> Path:
    file = usertable.path(GPU)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_table_beside_that_of_tiles():
    assert usertable.path(GPU) != tiles.path(GPU)
    assert usertable.path(GPU).parent == tiles.path(GPU).parent
    assert usertable.least_work(GPU) is None
    written(usertable.document(1 << 28, [product(1, 2.0).to_dict()], {"gpu": GPU}))
    assert usertable.least_work(GPU) == 1 << 28
    written(usertable.document(None, [], {}))
    assert usertable.least_work(GPU) is None


@pytest.mark.parametrize(
    "change",
    [{"schema": 9}, {"elsa_version": "0"}, {"least_work": "x"}, {"least_work": -1}, None],
)
def test_a_faulty_table_is_left_aside_with_a_warning(caplog, change):
    text = (
        "[1" if change is None else json.dumps(json.loads(usertable.document(1, [], {})) | change)
    )
    written(text)
    with caplog.at_level("WARNING", "elsa"):
        assert usertable.least_work(GPU) is None
    assert "left aside" in caplog.text


def test_a_gpu_serves_only_after_its_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    request = Request("cuda", torch.float32, 768, 768, "strict", "linear")
    assert not gate.support(request).ok
    written(usertable.document(1000, [], {}))
    gate.forget()
    assert gate.support(request).ok
    # not half precision, which was not measured
    assert not gate.support(Request("cuda", torch.float16, 96, 96, "strict", "linear")).ok

    monkeypatch.setenv("ELSA_TUNING", "0")
    gate.forget()
    assert not gate.support(request).ok
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gate.forget()
    assert gate.support(request).ok
