"""`elsa bench attention` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from elsa_cli.main import run
from elsa_core.bench import attention, cases, peers
from elsa_core.bench.cases import Case
from elsa_core.measuring import busy

TINY = {"cpu": {"vit": (Case("vit", 1, 2, 17, 17, 16, goal=1e9), Case("vit", 1, 2, 33, 33, 16))}}
SHORT = ("--device", "cpu", "--rounds", "3", "--budget", "0.1")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "all_tables", lambda: TINY)


def test_dry_run_lists_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "attention", "--device", "cuda", "--dry-run", "--table", "decode"]) == 0
    out, err = capsys.readouterr()
    assert "decode/1x32x1:262144x64-fp16" in out and "12 cases on cuda" in out and err == ""
    assert run(["bench", "attention", "--device", "cpu", "--dry-run", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "bench attention" and document["results"]["dry_run"] is True
    assert "vit/8x12x197x64-fp32" in [case["name"] for case in document["results"]["cases"]]


@pytest.mark.usefixtures("tiny")
def test_a_run_shows_a_table_and_writes_its_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert run(["bench", "attention", *SHORT, "-o", "r.json", "--plot", "r.svg"]) == 0
    out, err = capsys.readouterr()
    assert "1x2x17x16" in out and "vit fp32" in out and "best peer" in out and err == ""
    assert "Under their goals: vit/1x2x17x16-fp32" in out
    document = json.loads((tmp_path / "r.json").read_text())
    assert len(document["results"]["cases"]) == 2 and document["results"]["settings"]["rounds"] == 3
    assert (tmp_path / "r.svg").stat().st_size > 1000
    assert run(["bench", "attention", *SHORT, "-o", "r.json"]) == 2
    assert "exists; use --force" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_json_is_one_document(
    capsys: pytest.CaptureFixture[str], schema: jsonschema.Draft202012Validator
) -> None:
    assert run(["bench", "attention", *SHORT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        "schema_version", "elsa_version", "command", "environment", "results"
    }  # fmt: skip
    assert document["results"]["cases"][0]["measurements"][0]["contender"] == "elsa-strict"
    schema.validate(document)
    assert run(["bench", "attention", *SHORT, "--quick", "--dry-run", "--json"]) == 2
    capsys.readouterr()
    del document["results"]["cases"][0]["wrong"]
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(document)


def test_documents_of_real_cases_keep_to_the_schema(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    schema: jsonschema.Draft202012Validator,
) -> None:
    # The quick selection itself takes a minute; its smallest cases make the same document.
    small = {
        table: tuple(replace(c, batch=1, heads=1) for c in members if c.quick and c.keys == 49)
        for table, members in cases.all_tables()["cpu"].items()
    }
    monkeypatch.setattr(cases, "all_tables", lambda: {"cpu": small})
    assert run(["bench", "attention", *SHORT, "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema.validate(document)
    assert {c["case"]["mask"] for c in document["results"]["cases"]} == {"none", "additive"}
    assert run(["bench", "attention", "--device", "cpu", "--dry-run", "--quick", "--json"]) == 0
    schema.validate(json.loads(capsys.readouterr().out))


def test_a_shape_of_ones_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention._GEMM_SIZE, "cpu", 128)  # slow in half precision
    own = ["--shape", "1,2,9:33,16", "--dtype", "bf16"]
    assert run(["bench", "attention", *SHORT, *own]) == 0
    assert "1x2x9:33x16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "attention"),
        (["attention", "--device", "cpu", "--table", "fp16"], 2, "no table 'fp16'"),
        (["attention", "--device", "cpu", "--case", "x*"], 2, "--dry-run lists them"),
        (["attention", "--device", "cpu", "--rounds", "1"], 2, "--rounds"),
        (["attention", "--device", "cpu", "-o", "none/r.json"], 2, "its folder does not exist"),
        (["attention", "--device", "cpu", "--plot", "r.pdf"], 2, ".png or .svg"),
        (["attention", "--device", "cpu", "--tune"], 2, "cpu has no tile table"),
        (["attention", "--trace", "--tune"], 2, "exclude each other"),
        (["attention", "--trace", "-o", "r.json"], 2, "--trace makes none of them"),
        (["attention", "--shape", "1,2,3,4", "--quick"], 2, "--shape and --quick"),
        (["attention", "--device", "cpu", "--shape", "1,2,3"], 2, "'1,2,3' is not B,H,N,D"),
        (["attention", "--device", "cpu", "--shape", "1,2,0,4"], 2, "positive numbers"),
        (
            [
                "attention",
                "--device",
                "cpu",
                "--shape",
                "1,2,3,4",
                "--dtype",
                "fp16",
                "--precision",
                "turbo",
            ],
            2,
            "turbo",
        ),
    ],
)
def test_wrong_arguments_end_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert run(["bench", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and words in err


@pytest.mark.usefixtures("tiny")
def test_a_busy_machine_publishes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "reason", lambda _: "other programs use 90% of the processors")
    assert run(["bench", "attention", *SHORT, "-o", "r.json"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "use --allow-busy" in err and list(tmp_path.iterdir()) == []
    assert run(["bench", "attention", *SHORT, "-o", "r.json", "--allow-busy"]) == 0
    assert "was not free" in capsys.readouterr().err
    assert json.loads((tmp_path / "r.json").read_text())["results"]["busy"]


@pytest.mark.usefixtures("tiny")
def test_a_backend_that_served_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "attention", *SHORT, "--backend", "triton", "-o", "r.json"]) == 3
    out, err = capsys.readouterr()
    assert "no: backend='triton'" in out
    assert err.startswith("error: --backend triton served no case: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tiny")
def test_a_wrong_kernel_fails_and_is_not_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = peers.attention

    def wrong(*args: Any, **named: Any) -> Any:
        return right(*args, **named) + 1e-3

    monkeypatch.setattr(peers, "attention", wrong)
    assert run(["bench", "attention", *SHORT, "-o", "r.json"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL" in out and "wrong results, nothing was written: vit/1x2x17x16-fp32" in err
    assert list(tmp_path.iterdir()) == []
