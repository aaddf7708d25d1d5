"""From a result document to Markdown and plots; the published tables are those of its documents."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from elsa_cli.commands import bench, profile
from elsa_core.bench import plots, tables
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.measuring import plots as drawing

ROOT = Path(__file__).parents[2]


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
        "name": f"{table}/1x12x{tokens}x64-fp32", "table": table, "batch": 1, "heads": 12,
        "queries": tokens, "keys": tokens, "head_dim": 64, "dtype": "fp32", "mask": "none",
        "precisions": ["strict"], "goal": goal, "quick": False,
    } | more  # fmt: skip
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


def test_a_table_shows_everyone_and_marks_the_best_peer(document: dict[str, Any]) -> None:
    lines = tables.render(document, "vit").splitlines()
    assert lines[0].startswith("| B,H,N,D | elsa, ms | sdpa-flash, ms | ratio (10 to 90%) |")
    assert lines[1].startswith("|---|---:|")
    assert lines[2].startswith(
        "| 1,12,197,64 | 1 | **2** | 2.00 (1.00 to 2.00) | 100 (50% of GEMM)"
    )
    assert "| 3.0e-07 / 3.0e-07 | 2.0 / 2.0 |" in lines[2]
    assert lines[3].startswith("| 1,12,577,64 | 4 | **2** | 0.50 ")
    assert len({line.count("|") for line in lines}) == 1


def test_rows_of_several_dtypes_name_theirs(document: dict[str, Any]) -> None:
    found = [result("gradients", 197, 0.001, None, dtype=dtype) for dtype in ("fp16", "bf16")]
    document["results"]["cases"] = found
    lines = tables.render(document, "gradients").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| 1,12,197,64 fp16", "| 1,12,197,64 bf16"
    ]  # fmt: skip


def test_a_peer_of_a_package_has_a_column_and_its_version_is_named(
    document: dict[str, Any],
) -> None:
    of_package = {"notes": {"package": "flash-attn-4 4.0.0"}}
    for case in document["results"]["cases"][:2]:
        case["measurements"].append(measured("flash-attn-4", 0.0015, **of_package))
    lines = tables.render(document, "vit").splitlines()
    assert "| sdpa-flash, ms | flash-attn-4, ms |" in lines[0] and "| 1.5 |" in lines[2]
    assert "best peer in 4 of 5 cases. Under" in tables.summary(document)
    assert tables.summary(document).endswith(" With flash-attn-4 4.0.0.")


def test_a_sweep_shows_ratios(document: dict[str, Any]) -> None:
    assert tables.render(document, "sweep").splitlines() == [
        "| N | D 32 | D 64 | D 64, mask |",
        "|---|---:|---:|---:|",
        "| 16 | - | 1.00 | - |",
        "| 49 | 2.00 | - | 2.00 |",
    ]


def test_decode_shows_bandwidth(document: dict[str, Any]) -> None:
    case = result("decode", 4096, 0.001, None, queries=1, dtype="fp16")
    case["measurements"][0]["bytes_per_second"] = 3e12
    case["measurements"][0]["host_seconds"] = 2e-5
    document["results"]["cases"] = [case]
    lines = tables.render(document, "decode").splitlines()
    assert "TB/s" in lines[0] and "host us elsa / peer" in lines[0]
    assert lines[2].startswith("| 1,12,1:4096,64 fp16 | 1 |") and "| 3.00 |" in lines[2]
    assert "| 20 / - |" in lines[2]


def test_the_summary_names_what_missed(document: dict[str, Any]) -> None:
    text = tables.summary(document)
    assert text == (
        "Measured on A CPU, 2 threads, AVX2, torch 2.15.0, 2026-01-02. "
        "At least as fast as the best peer in 4 of 5 cases. "
        "Under their goals: vit/1x12x577x64-fp32 (0.50 of 1.2)."
    )
    document["results"]["cases"][0]["wrong"] = ["elsa-strict"]
    text = tables.summary(document)
    assert "in 3 of 4 cases" in text and "Wrong results: vit/1x12x197x64-fp32: elsa-s" in text
    assert "| wrong |" in tables.render(document, "vit")
    document["results"]["busy"] = "others"
    assert "not free: others" in tables.summary(document)


def test_the_summary_says_what_the_threads_add(document: dict[str, Any]) -> None:
    limits = document["results"].setdefault("ceilings", {})
    limits.update({"gemm_fp32": 120e9, "gemm_fp32_one_thread": 118e9})
    text = tables.summary(document)
    assert "Its 2 threads reach 1.0x the matrix products of one (120 GFLOP/s). At least" in text


def test_markers_are_filled_and_the_rest_is_kept(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps(document))
    readme = tmp_path / "README.md"
    begin, end = "<!-- begin:bench:cpu:vit -->\n", "<!-- end:bench:cpu:vit -->"
    readme.write_text(f"before\n{begin}old\n{end}\nafter\n")
    assert tables.update(readme, tmp_path) is True
    assert readme.read_text() == f"before\n{begin}{tables.render(document, 'vit')}{end}\nafter\n"
    assert tables.update(readme, tmp_path) is False


def profiled() -> dict[str, Any]:
    """What `elsa profile` writes, as far as a table reads it."""
    runs = [
        {"name": "eager", "patched": False, "seconds": 0.002, "memory_bytes": 3_000_000},
        {"name": "patched", "patched": True, "seconds": 0.001, "memory_bytes": None},
    ]
    profile = {
        "image_size": [224, 192], "batch": 8, "dtype": "float16", "runs": runs,
        "best_baseline": "eager", "best_patched": "patched",
        "gain": {"value": 2.0, "low": 1.9, "high": 2.1, "rounds": 9, "verdict": "faster"},
    }  # fmt: skip
    points = [{"status": "done", "profile": profile}, {"status": "out of memory"}]
    return {"command": "profile", "results": {"model": {"name": "vit"}, "points": points}}


def test_a_folder_of_profiles_is_one_table(document: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(profiled()))
    text = "<!-- begin:bench:gpu:points -->\n<!-- end:bench:gpu:points -->"
    row = "| vit | 224x192 | 8 | float16 | **2** | **1** | 2.00 (1.90 to 2.10) | 3 / - |"
    assert row in tables.rendered(text, tmp_path).splitlines()
    with pytest.raises(ArgumentError, match="has points, command, not 'vit'"):
        tables.rendered(text.replace("points", "vit"), tmp_path)
    (folder / "two.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="has points"):
        tables.rendered(text, tmp_path)


@pytest.mark.parametrize("path", sorted(tables.RESULTS.rglob("*.json")), ids=lambda p: p.stem)
def test_a_command_has_the_settings_of_its_document(path: Path) -> None:
    """The options of a document's command, as the command line reads them."""
    found = tables.load(path)
    settings = found["results"]["settings"]
    _, name, *words = shlex.split(tables.command_line(found))
    command = {"bench": bench, "profile": profile}[name].command
    given = command.make_context(name, words).params
    assert (given["rounds"], given["budget"]) == (settings["rounds"], settings["budget_seconds"])
    assert list(given["baselines"] or ()) == settings.get("baselines", [])
    assert given["device"] == found["environment"]["device"]
    if name == "profile":
        # Without a flag a GPU times them; None is said by none.
        flag, wanted = given["sites"], settings["sites"]
        assert flag is None if wanted is None else (flag is not False) is wanted
        assert given["scope"] == settings.get("scope", "auto")
        held = {(c["batch"], c["dtype"]) for c in points_of(found)}
        assert {batch for batch, _ in held} == set(given["batch_size"])
        assert {dtype for _, dtype in held} == set(given["dtype"])
        sizes = {tuple(c["image_size"]) for c in points_of(found) if c["image_size"]}
        assert sizes == set(given["img_size"] or ())
    else:
        assert given["kind"] == found["command"].partition(" ")[2]
        held_tables = {case["case"]["table"] for case in found["results"]["cases"]}
        assert set(given["tables"]) in (set(), held_tables)
        assert given["flex"] is settings.get("flex", False)


def points_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [point["configuration"] for point in document["results"]["points"]]


def test_a_command_follows_its_document(document: dict[str, Any]) -> None:
    document["environment"]["device"] = "cpu"
    document["results"]["settings"] = {
        "rounds": 7, "budget_seconds": 2.5, "seed": 3, "backend": "native", "flex": False,
    }  # fmt: skip
    assert tables.render(document, "command") == (
        "Written by `elsa bench attention --device cpu --table vit --table sweep --rounds 7 "
        "--budget 2.5 --seed 3 --backend native`.\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- begin:bench:cpu:vit -->\n", "1 bench markers, but 0"),
        ("<!-- begin:bench:cpu:vit -->\n<!-- end:bench:cpu:sweep -->", "2 bench markers, but 0"),
        ("<!-- begin:bench:gone:vit -->\n<!-- end:bench:gone:vit -->", "no such result"),
        (
            "<!-- begin:bench:cpu:no -->\n<!-- end:bench:cpu:no -->",
            "it has vit, sweep, summary, command",
        ),
        ("<!-- begin:bench:bad:vit -->\n<!-- end:bench:bad:vit -->", "not a result document"),
    ],
)
def test_wrong_markers_are_errors(
    document: dict[str, Any], tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps(document))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ArgumentError, match=words):
        tables.rendered(text, tmp_path)


def test_the_docs_hold_what_the_documents_give() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert tables.rendered(text) == text, "run: python -m elsa_core.bench.tables docs/benchmarks.md"


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_every_published_table_is_shown(path: Path) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    held = {case["case"]["table"] for case in tables.load(path)["results"]["cases"]}
    hidden = [t for t in sorted(held) if f"<!-- begin:bench:{path.stem}:{t} -->\n" not in text]
    assert hidden == [], f"docs/benchmarks.md has no markers bench:{path.stem}: of these tables"


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_published_results_are_whole(path: Path) -> None:
    """Every published document renders, was measured on a free machine, and hides no case."""
    document = tables.load(path)
    assert document["results"]["busy"] == ""
    names = {case["case"]["table"] for case in document["results"]["cases"]}
    for name in names:
        assert tables.render(document, name)
    for case in document["results"]["cases"]:
        assert case["measurements"] or case["left_out"]
        assert not [name for name in case["wrong"] if name.startswith("elsa")]


def test_the_longest_family_is_drawn(document: dict[str, Any]) -> None:
    title, times, memory = plots.family(document)
    assert title == "fp32 attention, batch 1, 12 heads, head_dim 64"
    assert [tokens for tokens, _ in times["elsa-strict"]] == [16, 197, 577]
    assert memory["sdpa-flash"][0] == (16, 2_000_000)
    document["results"]["cases"] = document["results"]["cases"][:1]
    with pytest.raises(ArgumentError, match="no two of these cases differ"):
        plots.family(document)


@pytest.mark.parametrize("suffix", drawing.FORMATS)
def test_plots_are_written_whole(document: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = plots.plot(document, tmp_path / f"plot{suffix}")
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ArgumentError, match="use --force"):
        plots.plot(document, path)


def test_plots_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"\.png or \.svg"):
        drawing.check(tmp_path / "plot.pdf")
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match=r"elsa-attention\[plot\]"):
        drawing.check(tmp_path / "plot.png")
