"""`elsa bench linear`: products beside PyTorch's own; what --tune lists, refuses and concludes, and
who reads its table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Elsa, schema
from torch import Tensor
from torch.nn import functional

from elsa_core.dispatch import measured
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.profiling.bench import linear
from elsa_core.profiling.bench.linear import ProductCase

from .conftest import Offered

pytest.importorskip("triton")
from elsa_core.backends.support import Request
from elsa_core.backends.triton.linear import gate
from elsa_core.backends.triton.shared import usertable

GPU = "NVIDIA A100-SXM4-40GB"
LINE = ["bench", "linear", "--device", "cpu", "--rounds", "6", "--budget", "0.3"]
TINY = {
    "products": (ProductCase("products", 12, 16, 24, quick=True), ProductCase("products", 8, 8, 8)),
    "swin": (ProductCase("swin", 9, 16, 16),),
}


pytestmark = pytest.mark.usefixtures("free_machine")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear.TABLES, "cpu", TINY)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the user's tables, empty and allowed."""
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ELSA_TUNING", raising=False)
    gate.forget()
    yield
    gate.forget()


def test_the_products_that_goals_are_set_for() -> None:
    shapes = [(c.rows, c.channels, c.columns) for c in linear.RUNNER.select("cuda")]
    assert shapes == [(1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072)]
    small = linear.RUNNER.select("cuda", tables=["swin"])
    assert len({case.name for case in small}) == len(small) == 24
    rows = [row for row in measured._table() if row["operator"] == "linear"]
    for row in (row for row in rows if row["mode"] == "infer"):  # left to PyTorch: measured again
        of = row["ranges"]
        assert any(
            of["rows"][0] <= case.rows and [case.channels] * 2 == of["channels"]
            and [case.columns] * 2 == of["columns"] for case in small
        )  # fmt: skip


@pytest.mark.usefixtures("tiny")
def test_products_are_kept_resumed_and_shown(elsa: Elsa) -> None:
    document = elsa(*LINE, "--quick", "-o", "p.json", "--json").document()
    [first] = document["results"]["cases"]
    assert document["command"] == "bench linear" and first["case"]["columns"] == 24
    assert {m["contender"] for m in first["measurements"]} == {"pytorch", "elsa"}
    assert set(first["left_out"]) == {"tf32"} and first["wrong"] == []
    own, peer = first["errors"]
    assert own <= 2 * peer + 2.0**-24 and first["gain"]["rounds"] >= 3
    elsa(*LINE, "-o", "p.json").fails(2, "--resume")
    out = elsa(*LINE, "-o", "p.json", "--resume").shows()
    assert "products/12x16x24" in out and "products/8x8x8" in out and "swin" not in out
    assert "of 2 products" in out
    kept = json.loads(Path("p.json").read_text())
    schema().validate(kept)
    assert kept["results"]["complete"] and kept["results"]["cases"][0] == first
    elsa(*LINE, "--dry-run", "--table", "swin", "--json").document()


def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return functional.linear(x, weight, bias)


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_run_shows_and_keeps_what_it_has(elsa: Elsa, offered: Offered) -> None:
    def interrupted(x: Tensor, *rest: Any) -> Tensor:
        if len(x) == 8:
            raise KeyboardInterrupt
        return by_pytorch(x, *rest)

    with offered(by_pytorch, "linear", direct=interrupted):
        elsa(*LINE, "-o", "p.json").shows("products/12x16x24", code=130)
    results = json.loads(Path("p.json").read_text())["results"]
    assert len(results["cases"]) == 1 and not results["complete"]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_product_ends_with_exit_code_1(elsa: Elsa, offered: Offered) -> None:
    with offered(by_pytorch, "linear", direct=lambda *given: by_pytorch(*given) + 1):
        code, out, err = elsa(*LINE, "--quick")
    assert code == 1 and "wrong" in out and "wrong results: products/12x16x24" in err


@pytest.mark.usefixtures("tiny")
def test_what_fails_is_a_row(elsa: Elsa) -> None:
    code, out, _ = elsa(*LINE, "--quick", "--backend", "triton")
    assert code in (0, 3) and "products/12x16x24" in out


# --tune


def product(work: int, gain: float | None) -> dict[str, Any]:
    return linear.product((work, 1, 1), gain=gain)


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
def test_without_a_gpu(elsa: Elsa) -> None:
    elsa("bench", "linear", "--tune").fails(3, "no CUDA GPU")
    document = elsa("bench", "linear", "--tune", "--dry-run", "--json").document()
    assert len(document["results"]["products"]) == len(linear.SHAPES)
    with pytest.raises(UnavailableError):
        linear.tune(torch.device("cuda"))
    with pytest.raises(ArgumentError):
        linear.tune(torch.device("cpu"))


def written(text: str) -> Path:
    file = usertable.path(GPU, ".linear")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.usefixtures("tables")
def test_a_table_beside_that_of_tiles():
    assert usertable.least_work(GPU) is None
    written(usertable.linear_document(1 << 28, [product(1, 2.0)], {"gpu": GPU}))
    assert usertable.least_work(GPU) == 1 << 28
    written(usertable.linear_document(None, [], {}))
    assert usertable.least_work(GPU) is None


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    "change",
    [{"schema": 9}, {"elsa_version": "0"}, {"least_work": "x"}, {"least_work": -1}, "[1",
     "[" * 100_000],
    ids=lambda change: str(change)[:20],
)  # fmt: skip
def test_a_faulty_table_is_left_aside_with_a_warning(caplog, change):
    if isinstance(change, dict):
        change = json.dumps(json.loads(usertable.linear_document(1, [], {})) | change)
    written(change)
    with caplog.at_level("WARNING", "elsa"):
        assert usertable.least_work(GPU) is None
    assert "left aside" in caplog.text


@pytest.mark.usefixtures("tables")
def test_a_gpu_serves_only_after_its_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    request = Request("cuda", torch.float32, 768, 768, "strict", "linear")
    assert not gate.support(request).ok
    written(usertable.linear_document(1000, [], {}))
    gate.forget()
    assert gate.support(request).ok
    assert not gate.support(Request("cuda", torch.float16, 96, 96, "strict", "linear")).ok
    monkeypatch.setenv("ELSA_TUNING", "0")
    gate.forget()
    assert not gate.support(request).ok
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gate.forget()
    assert gate.support(request).ok
