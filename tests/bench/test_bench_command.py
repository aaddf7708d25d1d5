"""`elsa bench attention` as a user runs it: tables, documents, exit codes, what stays unwritten."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command import Elsa, schema

from elsa_core import reference
from elsa_core.measuring import busy
from elsa_core.profiling.bench import attention

from .conftest import Offered

SHORT = ("--device", "cpu", "--rounds", "3", "--budget", "0.1")
TINY = (*SHORT, "--shape", "1,2,17,16", "--shape", "1,2,33,16")


pytestmark = pytest.mark.usefixtures("free_machine")


def test_dry_run_lists_and_measures_nothing(elsa: Elsa) -> None:
    line = ("bench", "attention", "--dry-run", "--device")
    answer = elsa(*line, "cuda", "--table", "decode")
    answer.shows("decode/1x32x1:262144x64-fp16", "12 cases on cuda")
    document = elsa(*line, "cpu", "--quick", "--json").document()
    assert answer.err == ""
    assert document["command"] == "bench attention" and document["results"]["dry_run"] is True
    assert "vit/8x12x197x64-fp32" in [case["name"] for case in document["results"]["cases"]]


def test_a_run_shows_a_table_and_writes_its_results(elsa: Elsa, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = elsa("bench", "attention", *TINY, "-o", "r.json", "--plot", "r.svg")
    assert code == 0
    assert "1x2x17x16" in out and "shape fp32" in out and "best peer" in out and err == ""
    document = json.loads((tmp_path / "r.json").read_text())
    assert len(document["results"]["cases"]) == 2 and document["results"]["settings"]["rounds"] == 3
    assert (tmp_path / "r.svg").stat().st_size > 1000
    elsa("bench", "attention", *TINY, "-o", "r.json").fails(2, "exists; use --force")


def test_json_is_one_document(elsa: Elsa) -> None:
    document = elsa("bench", "attention", *TINY, "--json").document()
    keys = {"schema_version", "elsa_version", "command", "environment", "results"}
    assert set(document) == keys
    assert document["results"]["cases"][0]["measurements"][0]["contender"] == "elsa-strict"
    del document["results"]["cases"][0]["wrong"]
    with pytest.raises(jsonschema.ValidationError):
        schema().validate(document)


def test_a_run_of_shapes_is_measured_again(
    elsa: Elsa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table had its cases, and a table's were measured in a precision of their own."""
    monkeypatch.setitem(attention._GEMM_SIZE, "cpu", 128)
    elsa("bench", "attention", *TINY, "--precision", "ieee", "-o", "r.json").shows()
    answer = elsa("bench", *SHORT, "--compare", "r.json", "-o", "again.json")
    assert "2 cases compared" in answer.out  # times may differ
    first, again = (json.loads(Path(name).read_text()) for name in ("r.json", "again.json"))
    cases = [[each["case"] for each in run["results"]["cases"]] for run in (first, again)]
    assert cases[0] == cases[1]
    case = first["results"]["cases"][0]
    case["case"]["name"] = "window/256x3x49x32-fp32-mask"
    first["results"]["cases"] = [case]
    Path("r.json").write_text(json.dumps(first))
    answer = elsa("bench", *SHORT, "--compare", "r.json", "--case", "window/256*-mask", "--json")
    (found,) = json.loads(answer.out)["results"]["cases"]
    assert found["case"]["precisions"] == ["ieee"] == case["case"]["precisions"]
    for hostile in ({"name": "shape/1x2x17x16-fp8"}, {"name": 5, "precisions": [["ieee"]]}):
        case["case"] |= hostile
        Path("r.json").write_text(json.dumps(first))
        elsa("bench", *SHORT, "--compare", "r.json").fails(2)


def test_a_shape_of_ones_own(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._GEMM_SIZE, "cpu", 128)  # slow in half precision
    own = ["--shape", "1,2,9:33,16", "--dtype", "bf16"]
    elsa("bench", "attention", *SHORT, *own).shows("1x2x9:33x16")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nothing", "attention"),
        ("attention --device cpu --table fp16", "no table 'fp16'"),
        ("attention --device cpu --case x*", "--dry-run lists them"),
        ("attention --device cpu --rounds 1", "--rounds"),
        ("attention --device cpu -o none/r.json", "its folder does not exist"),
        ("attention --device cpu --plot r.pdf", ".png or .svg"),
        ("attention --device cpu --plot r.png -o r.png", "the same file"),
        ("attention --device cpu --tune", "cpu has no tile table"),
        ("attention --trace --tune", "exclude each other"),
        ("attention --trace -o r.json", "--trace makes none of them"),
        ("attention --shape 1,2,3,4 --quick", "--shape and --quick"),
        ("attention --device cpu --shape 1,2,3", "'1,2,3' is not B,H,N,D"),
        ("attention --device cpu --shape 1,2,0,4", "positive numbers"),
        (f"attention --device cpu --shape 1,2,3,{10**18}", "positive numbers"),
        ("attention --device cpu --shape 1,2,3,4 --dtype fp16 --precision turbo", "turbo"),
        ("models --trace", "--trace is not for models"),
        ("attention --limit 5", "--limit is not for attention"),
        ("attention --budget nan", "'nan' is not a number"),
        ("models --device cpu --baselines x", "'x' is unknown"),
        ("models --device cpu -o none/m.json", "folder does not exist"),
        ("", "Missing argument"),
        ("models --compare attention_cpu", "holds attention, not models"),
        ("models --from m.json", "--from goes with --compare"),
        ("--compare nothing.json", "no such result"),
        ("models --resume", "--resume goes on with what --output holds"),
        ("--compare attention_cpu --from m.json -o x", "--output is about a new"),
        ("--compare attention_cpu --from m.json --quick", "--quick is about a new"),
        ("--compare attention_cpu --trace", "--compare needs measurements"),
        ("training --device cpu --baselines x", "'x' is unknown"),
        ("training --device cpu --shape 1,2,3,4", "--shape is not for training"),
        ("training --device cpu --table batch8", "no table 'batch8'"),
        ("linear --tune --device cpu", "keeps PyTorch's products"),
        ("linear --tune --quick", "--quick is not for linear --tune"),
        ("linear --tune --shape 1,2,3,4", "--shape is not for linear --tune"),
        ("linear --shape 1,2,3,4", "--shape is not for linear"),
        ("linear --compare models_cpu", "holds models, not linear"),
        ("linear --resume", "--resume goes on"),
        ("linear --table batch8 --device cpu", "use one of products, swin"),
    ],
    ids=str,
)
def test_wrong_arguments_end_before_anything_is_measured(elsa: Elsa, line: str, words: str) -> None:
    answer = elsa("bench", *line.split())
    answer.fails(2, words)
    assert not answer.out


def test_a_busy_machine_publishes_nothing(
    elsa: Elsa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "reason", lambda _: "other programs use 90% of the processors")
    code, out, err = elsa("bench", "attention", *TINY, "-o", "r.json")
    assert code == 3
    assert out == "" and "use --allow-busy" in err and list(tmp_path.iterdir()) == []
    answer = elsa("bench", "attention", *TINY, "-o", "r.json", "--allow-busy")
    assert answer.code == 0 and "was not free" in answer.err
    assert json.loads((tmp_path / "r.json").read_text())["results"]["busy"]


def test_a_machine_that_became_busy_publishes_nothing(
    elsa: Elsa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["", "", "other programs use 50% of the processors"])
    monkeypatch.setattr(busy, "reason", lambda _: next(answers))
    answer = elsa("bench", "attention", *TINY, "-o", "r.json")
    assert answer.code == 3 and "not written: other programs use 50%" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_served_nothing(elsa: Elsa, tmp_path: Path) -> None:
    code, out, err = elsa("bench", "attention", *TINY, "--backend", "triton", "-o", "r.json")
    assert code == 3 and "no: backend='triton'" in out
    assert err.startswith("error: --backend triton served no case: ")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_kernel_fails_and_is_not_published(
    elsa: Elsa, tmp_path: Path, offered: Offered
) -> None:
    def wrong(*given: Any) -> Any:
        out, lse = reference.attention(*given[:6])
        return out + 1e-3, lse

    with offered(wrong):
        code, out, err = elsa("bench", "attention", *TINY, "-o", "r.json")
    assert code == 1
    assert "FAIL" in out and "wrong results, nothing was written: shape/1x2x17x16-fp32" in err
    assert list(tmp_path.iterdir()) == []
