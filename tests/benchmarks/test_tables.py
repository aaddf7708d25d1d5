"""From result documents to CSV and Markdown; the published tables are those of the results."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import publish, tables
from elsa_cli.commands import bench, profile
from elsa_core.errors import ArgumentError
from elsa_core.profiling.bench import published, summary


def measured(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    own = name.startswith("elsa")
    return {
        "contender": name, "precision": name[5:] if own else None, "seconds": seconds,
        "seconds_p10": 0.9 * seconds, "seconds_p90": 1.1 * seconds, "samples": [seconds],
        "flops_per_second": 1e11, "ceiling_share": 0.5, "bytes_per_second": None,
        "error": 3e-7, "workspace_bytes": 2_000_000, "host_seconds": None,
        "ratio": 0.002 / seconds if own else None, "ratio_p10": 1.0, "ratio_p90": 2.0, "notes": {},
    } | more  # fmt: skip


def result(
    table: str, tokens: int, seconds: float, goal: float | None, **more: Any
) -> dict[str, Any]:
    case = {
        "table": table, "batch": 1, "heads": 12, "queries": tokens, "keys": tokens,
        "head_dim": 64, "dtype": "fp32", "mask": "none", "precisions": ["strict"], "goal": goal,
    } | more  # fmt: skip
    size = f"{tokens}" if case["queries"] == tokens else f"{case['queries']}:{tokens}"
    case["name"] = f"{table}/1x12x{size}x{case['head_dim']}-{case['dtype']}"
    case["name"] += "-mask" if case["mask"] != "none" else ""
    found = [measured("elsa-strict", seconds), measured("sdpa-flash", 0.002)]
    return {
        "case": case, "measurements": found, "best_peer": "sdpa-flash", "left_out": {}, "wrong": [],
        "reached": None,
    }  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "elsa_version": "0",
        "command": "bench attention",
        "environment": {
            "cpu": "A CPU", "threads": 2, "isa": "AVX2", "date": "2026-01-02T03:04:05",
            "packages": {"torch": "2.15.0"},
        },
        "results": {
            "busy": "",
            "cases": [
                result("vit", 197, 0.001, 1.4),
                result("vit", 577, 0.004, 1.2),
                result("sweep", 16, 0.002, 0.97),
                result("sweep", 49, 0.001, 0.97, mask="additive"),
                result("sweep", 49, 0.001, 0.97, head_dim=32),
            ],
        },
    }  # fmt: skip


def test_the_summary_names_what_missed(document: dict[str, Any]) -> None:
    text = tables.summarised(document)
    assert text == (
        "Measured on A CPU, 2 threads, AVX2, torch 2.15.0, 2026-01-02. "
        "At least as fast as the best peer in 4 of 5 cases. "
        "Under their goals: vit/1x12x577x64-fp32 (0.50 of 1.2)."
    )
    document["results"]["cases"][0]["wrong"] = ["elsa-strict"]
    text = summary.of_attention(document)
    assert "in 3 of 4 cases" in text and "Wrong results: vit/1x12x197x64-fp32: elsa-s" in text
    assert "| wrong |" in tables.of_document(document, "vit")
    document["results"]["busy"] = "others"
    assert "not free: others" in summary.of_attention(document)


@pytest.mark.parametrize("table", ["vit", "sweep", "summary"])
def test_a_published_document_gives_the_same_tables(
    document: dict[str, Any], tmp_path: Path, table: str
) -> None:
    """From JSON to CSV and back; contenders that took no part stay, with the reason."""
    document["results"]["cases"][0]["left_out"] = {"flex": "it is not installed"}
    path = tmp_path / "cpu.csv"
    publish.save(path, publish.rows_of(document), publish.about(document, "elsa bench"))
    read = published.load(path)
    assert tables.of_document(read, table) == tables.of_document(document, table)
    assert read["results"]["cases"][0]["left_out"] == {"flex": "it is not installed"}
    assert read["lines"] == ["elsa bench"] and read["environment"]["cpu"] == "A CPU"
    assert "samples" not in path.read_text()


def test_profiles_become_points(tmp_path: Path) -> None:
    def run(name: str, seconds: float, memory: int | None) -> dict[str, Any]:
        gain = {"value": 2.0, "low": 1.9, "high": 2.1, "rounds": 9, "verdict": "faster"}
        return {
            "name": name, "patched": name == "patched", "seconds": seconds, "memory_bytes": memory,
            "seconds_p10": seconds, "seconds_p90": seconds, "samples": [seconds],
            "ratio_to_best": gain if name == "patched" else None,
        }  # fmt: skip

    found = {
        "image_size": [224, 192], "batch": 8, "dtype": "float16", "patched": 12, "kept": 0,
        "runs": [run("eager", 0.002, 3_000_000), run("patched", 0.001, None)], "left_out": {},
        "best_baseline": "eager", "best_patched": "patched", "gain": {"rounds": 9},
    }  # fmt: skip
    asked = {"image_size": [448, 448], "batch": 8, "dtype": "float16"}
    points = [
        {"status": "done", "configuration": asked, "profile": found},
        {"status": "failed", "configuration": asked, "reason": "out of memory"},
    ]
    document = {
        "command": "profile", "elsa_version": "0", "environment": {"cpu": "A CPU"},
        "results": {"model": {"name": "vit"}, "settings": {}, "points": points},
    }  # fmt: skip
    path = tmp_path / "profiles.csv"
    rows = [row for i in range(2) for row in publish.rows_of(document, i)]
    publish.save(path, rows, *(publish.about(document, f"elsa profile {i}") for i in "ab"))
    read = published.read(path)
    line = "| vit | 224x192 | 8 | float16 | **2** | **1** | 2.00 (1.90 to 2.10) | 3 / - |"
    assert tables.of_document(read, "points").splitlines()[2:] == [line, line]
    assert "elsa profile a\nelsa profile b\n" in tables.of_document(read, "command")


ENVIRONMENTS = json.loads((published.RESULTS / published.ENVIRONMENTS).read_text("utf-8"))
FILES = sorted(published.RESULTS.glob("*.csv"))


@pytest.mark.parametrize("name", [k for k, v in ENVIRONMENTS.items() if "command" in v])
def test_a_command_has_the_settings_of_its_results(name: str) -> None:
    """The line that a table names, as the command line reads it."""
    held = ENVIRONMENTS[name]
    _, word, *words = shlex.split(held["line"])
    command = {"bench": bench, "profile": profile}[word].command
    given = command.make_context(word, words).params
    settings = held["settings"]
    assert (given["rounds"], given["budget"]) == (settings["rounds"], settings["budget_seconds"])
    assert list(given["baselines"] or ()) == settings.get("baselines", [])
    assert given["device"] == held["device"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_are_whole(path: Path) -> None:
    """Every row names its environment and has a figure or the reason why not; no case of elsa's is
    wrong; commands ran on a free machine, and every table is shown."""
    rows = tables.rows_of(path.stem)
    assert tuple(rows[0])[:8] == published.FIRST
    for row in rows:
        assert row["environment"] in ENVIRONMENTS
        figures = ("median", "error", "ratio", "accuracy")
        assert any(row.get(name) for name in figures) or row["note"], row
        assert not (row.get("best") == "wrong" and row["contender"].startswith(("elsa", "patched")))
    held = ENVIRONMENTS[rows[0]["environment"]]
    assert "line" in held and not held.get("busy")
    if held.get("command") in ("bench attention", "bench models"):
        page = tables.PAGE.read_text(encoding="utf-8")
        for table in {row["case"].partition("/")[0] for row in rows}:
            assert f"<!-- begin:bench:{path.stem}:{table} -->\n" in page


@pytest.mark.parametrize("page", [tables.PAGE, tables.GAINS], ids=lambda page: page.stem)
def test_a_page_holds_what_the_results_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rendered(text) == text, "run: python -m benchmarks.tables"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- begin:bench:cpu:vit -->\n", "1 bench markers, but 0"),
        ("<!-- begin:bench:cpu:vit -->\n<!-- end:bench:cpu:sweep -->", "2 bench markers, but 0"),
        ("<!-- begin:bench:gone:vit -->\n<!-- end:bench:gone:vit -->", "not a published result"),
        (
            "<!-- begin:bench:attention_cpu:no -->\n<!-- end:bench:attention_cpu:no -->",
            "the results have no 'no'",
        ),
    ],
)
def test_wrong_markers_are_errors(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        tables.rendered(text)
