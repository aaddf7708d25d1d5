"""inspect, patch and check on a tiny model: results, documents, files."""

import json
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from command import schema
from PIL import Image

import elsa_core
from elsa_cli import pipeline
from elsa_cli.options import CHECKED_ROWS, PATHS
from elsa_core.patching.rewrite import patched_sites
from elsa_core.proof import paths
from elsa_core.proof.report import CheckReport, ModelCheck, SiteCheck

from .conftest import TINY, Elsa

# A check costs per site: two are enough wherever their number is not the point.
FEW = ("vit_tiny_patch16_224", "--img", "32", "--model-kwargs", "depth=2")


def test_the_schema_is_one_and_refuses_what_is_missing() -> None:
    jsonschema.Draft202012Validator.check_schema(schema().schema)
    broken = {"schema_version": 1, "elsa_version": "0", "command": "build", "environment": {}}
    with pytest.raises(jsonschema.ValidationError):
        schema().validate(broken | {"results": {}})


def test_inspect(elsa: Elsa) -> None:
    answer = elsa("inspect", "vit_tiny", *TINY[1:])
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == "vit_tiny → vit_tiny_patch16_224 · weights: random (seed 0)"
    assert "3x64x64 · fp32 · " in lines[1]
    assert any("blocks.0-11.attn" in line and "12x" in line for line in lines)
    assert any(line.startswith("12 of 12 sites can be patched") for line in lines)
    assert max(map(len, lines)) <= 80


def test_inspect_json(elsa: Elsa) -> None:
    found = elsa("inspect", *TINY, "--json").document()["results"]["inspection"]
    assert [site["path"] for site in found["sites"]] == [f"blocks.{i}.attn" for i in range(12)]
    assert {(site["query_tokens"], site["head_dim"]) for site in found["sites"]} == {(17, 64)}


def test_inspect_says_what_its_columns_mean(elsa: Elsa) -> None:
    out = elsa("inspect", "pvt_v2_b0", "--img", "64").out
    assert "FLOPs: only q k^T and the product with v" in out
    assert "256:4" in out and "tokens: queries:keys" in out
    assert "queries:keys" not in elsa("inspect", *TINY).out and "all their products" not in out


def test_inspect_says_what_the_flops_of_layers_are(elsa: Elsa) -> None:
    """`mlp.fc1 linear-layer ? ? 29.8%` stood above "FLOPs: ... without projections" alone."""
    arguments = ("pvt_v2_b0", "--img", "64", "--scope", "model")
    lines = elsa("inspect", *arguments, "--html", "sites.html").out.splitlines()
    layers = [line for line in lines if " linear-layer " in line]
    assert layers and not any("?" in line for line in layers)
    first = next(i for i, line in enumerate(lines) if line.startswith("FLOPs: only q k^T"))
    assert lines[first + 1].startswith("FLOPs of linear layers, MLPs and patch embeddings: of all")
    page = Path("sites.html").read_text(encoding="utf-8")
    assert "patch embeddings: of all their products" in page and "attention sites can" not in page


def test_inspect_writes_a_page(elsa: Elsa) -> None:
    answer = elsa("inspect", *TINY, "--html", "sites.html")
    assert (answer.code, answer.err) == (0, "") and "html: sites.html" in answer.out
    assert answer.out.splitlines()[-1] == "Next: elsa patch vit_tiny_patch16_224 --img 64 --check"
    page = Path("sites.html").read_text(encoding="utf-8")
    assert ">blocks.0-11.attn</span></td>" in page
    assert "12 of 12 attention sites can be patched" in page
    elsa("inspect", *TINY, "--html", "sites.html").fails(2, "sites.html exists", "--force")
    assert elsa("inspect", *TINY, "--html", "sites.html", "--force").code == 0
    elsa("inspect", "--all", "--html", "a.html").fails(2, "--html")


def test_patch(elsa: Elsa) -> None:
    lines = elsa("patch", *TINY).shows().splitlines()
    assert "12 of 12 sites patched" in lines
    assert lines[-1] == "Next: elsa patch vit_tiny_patch16_224 --img 64 --check"
    assert max(map(len, lines)) <= 80
    answer = elsa("patch", *TINY, "-q")
    assert (answer.out, answer.err) == ("12 of 12 sites patched\n", "")


def test_patch_check(elsa: Elsa) -> None:
    answer = elsa("patch", "test_vit", "--check")
    assert answer.code == 0
    verdict = next(line for line in answer.out.splitlines() if " sites patched" in line)
    assert verdict.startswith("6 of 6 sites patched · outputs agree (error ")
    assert answer.out.splitlines()[-1] == "Next: elsa patch test_vit -o DIR"
    Path("DIR").mkdir()  # a word that the next step adds
    Image.new("RGB", (40, 40)).save("DIR/a.png")
    checked = elsa("check", "test_vit", "--images", "DIR")
    assert checked.out.splitlines()[-1] == "Next: elsa patch test_vit --images DIR -o DIR"
    assert " ms" not in verdict  # of a few runs no time can be told: `profile` measures


@pytest.mark.parametrize(("dtype", "rows"), [("fp32", CHECKED_ROWS), ("bf16", 2)])
def test_check_json(elsa: Elsa, dtype: str, rows: int) -> None:
    batch = () if rows == CHECKED_ROWS else ("--batch-size", rows)
    results = elsa("check", *FEW, "--json", "--dtype", dtype, *batch).document()["results"]
    assert results["check"]["ok"] and results["model"]["dtype"] == dtype
    assert len(results["check"]["sites"]) == len(results["patch"]["patched"]) == 2
    cases = results["check"]["cases"]
    assert {(case["inputs"], case["path"]) for case in cases} == {(rows, "eager")}
    assert set(PATHS) == set(paths.PATHS)


def test_a_wrong_kernel_fails_and_is_named(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.1.attn:1e-3")
    answer = elsa("patch", *FEW, "--check", "-o", "kept")
    assert answer.code == 1 and "outputs do NOT agree" in answer.out
    lines = [line for line in answer.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: check failed: blocks.1.attn: ")
    assert lines[0].endswith("nothing was written")
    assert list(Path().iterdir()) == []


def test_check_of_gradients(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    found = elsa("check", *FEW, "--grad", "--json").document()["results"]["check"]
    paths = ["blocks.0.attn", "blocks.1.attn", "model"]
    assert [(one["path"], one["ok"]) for one in found["gradients"]] == [(p, True) for p in paths]
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.1.attn:1e-3")
    lines = elsa("check", *FEW, "--grad").shows(code=1).splitlines()
    for start in ("✓ gradients: blocks.0.attn", "✗ gradients: blocks.1.attn", "✗ gradients: model"):
        assert any(line.startswith(start) for line in lines), start


def test_check_with_sparsity(elsa: Elsa) -> None:
    found = elsa("check", *FEW, "--json", "--sparsity", "0.3", "--sparsity-bound", "0.5").document()
    results = found["results"]
    assert results["patch"]["sparsity"] == 0.3 and results["check"]["ok"]
    assert all(site["skip_rate"] is not None for site in results["check"]["sites"])
    shown = elsa("check", *FEW, "--sparsity", "exact")
    assert shown.code == 0 and "tiles left out: " in shown.out
    assert "sparsity" not in shown.out.splitlines()[-1]  # of the step after it
    elsa("check", *FEW, "--sparsity", "1.5").fails(2, "neither exact nor a number in (0, 1)")


def test_patch_with_offload(elsa: Elsa, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    lines = elsa("patch", *FEW, "--offload", "host", "-o", str(saved)).shows().splitlines()
    assert "offload host: what a backward needs stays in host memory" in lines
    assert json.loads((saved / "elsa_plan.json").read_text())["offload"] == "host"
    again = elsa("patch", str(saved), "--json").document()["results"]["patch"]
    assert again["offload"] == "host" and len(again["patched"]) == 2
    elsa("patch", *FEW, "--offload", "disk").fails(2, "'disk' is not 'host'")


def test_check_by_paths(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    answer = elsa("check", *FEW, "--path", "eager,compile")
    last = answer.shows("model: noise ", "model: noise, compile ").splitlines()[-1]
    assert last.startswith("Next: elsa patch vit_tiny_patch16_224") and "--path" not in last
    torch._dynamo.reset()
    elsa("check", *FEW, "--path", "fast").fails(2, "--path", "'fast'")
    if not torch.cuda.is_available():
        Path("broken.pth").write_bytes(b"no weights")  # which would be said of it if it were read
        elsa("check", "broken.pth", "--path", "graph").fails(3, "graph", "CUDA")


def filled(cls: Any, **known: Any) -> Any:
    """A report with these values, and zeros for whatever else it has no default for."""
    needed = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]
    return cls(**dict.fromkeys(needed, 0) | known)


def test_a_failed_check_prints_its_document(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is a result also when it is bad: the document on stdout, the line on stderr."""
    nan = float("nan")
    bad = {"max_abs": nan, "patched_error": nan, "original_error": 1e-7, "excess": nan, "ok": False}
    site = filled(SiteCheck, path="blocks.1.attn", worst_case="large", drift=None, reason="no",
                  **bad)  # fmt: skip
    case = filled(ModelCheck, case="large", path="eager", output="output", reason="no",
                  top1_rows=1, **bad)  # fmt: skip
    failures = ("blocks.1.attn: large: not finite", "another")
    report = filled(CheckReport, sites=(site,), cases=(case,), ok=False, dtype="float32",
                    device="cpu", stress=True, failures=failures)  # fmt: skip
    monkeypatch.setattr(pipeline, "check_model", lambda *given: report)
    answer = elsa("check", *FEW, "--json")
    found = answer.document(code=1)["results"]["check"]
    assert found["sites"][0]["max_abs"] is None
    line = "error: check failed: blocks.1.attn: large: not finite (and 1 more)\n"
    assert answer.err == line
    answer = elsa("check", *FEW)
    assert "✗ blocks.1.attn" in answer.out
    assert "outputs do NOT agree (error nan, original 1.0e-07)" in answer.out
    assert (answer.code, answer.err) == (1, line)
    # where no output is wrong, what is wrong is named, and what it takes to allow it
    report = replace(report, cases=(replace(case, ok=True, reason="", excess=0.5),))
    answer = elsa("check", *FEW, "--sparsity", "0.3")
    assert "outputs do NOT agree (blocks.1.attn: error nan" in answer.out
    assert "--sparsity-bound allows" in answer.err


def test_include_and_exclude(elsa: Elsa) -> None:
    globs = ("--include", "blocks.[0-5].*", "--exclude", "blocks.2.*")
    report = elsa("patch", *TINY, *globs, "--json").document()["results"]["patch"]
    paths = [f"blocks.{i}.attn" for i in (0, 1, 3, 4, 5)]
    assert [site["path"] for site in report["patched"]] == paths and len(report["kept"]) == 7


def test_all_sites_refuses_a_remainder(elsa: Elsa) -> None:
    assert elsa("patch", *TINY, "--all-sites", "--dry-run").code == 0
    # Its 12 blocks attend over channels, its two last layers over tokens.
    elsa("patch", "xcit_nano_12_p16_224", "--all-sites").fails(1, "12 of 14 sites cannot be")


def test_dry_run_writes_nothing(elsa: Elsa) -> None:
    said = ("12 of 12 sites would be patched", "Nothing was written")
    elsa("patch", *TINY, "--dry-run", "-o", "out").shows(*said)
    assert list(Path().iterdir()) == []
    assert elsa("patch", *TINY, "--dry-run", "--json").document()["results"]["dry_run"] is True


def test_a_saved_model_loads_again(elsa: Elsa) -> None:
    arguments = ("--include", "blocks.[0-3].*", "--seed", "3", "-o", "out")
    elsa("patch", *TINY, *arguments).shows("Written: out.")
    assert [path.name for path in Path().iterdir()] == ["out"]
    model = elsa_core.load("out")
    assert len(patched_sites(model)) == 4
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert elsa("patch", "out", "-q").out == "4 of 12 sites patched\n"
    assert elsa("patch", "out", "-q", "--include", "blocks.7.*").out == "1 of 12 sites patched\n"
    # It exists now; replacing it has to be asked for.
    elsa("patch", *TINY, "-o", "out").fails(2, "out exists", "--force")
    assert elsa("patch", *TINY, "-o", "out", "--force").code == 0
    assert len(patched_sites(elsa_core.load("out"))) == 12


def test_what_comes_next_loads_what_was_saved(elsa: Elsa) -> None:
    answer = elsa("patch", "test_vit", "--img", "32", "--dtype", "fp16", "-o", "a b")
    assert answer.out.splitlines()[-1] == (
        "Written: a b. Next: elsa check 'a b' --dtype fp16, "
        "or elsa_core.load('a b', dtype=torch.float16)"
    )
    checked = elsa("check", "a b", "--dtype", "fp16", "--path", "eager", "-b", "1")
    assert checked.out.splitlines()[-1] == "Next: elsa profile 'a b' --dtype fp16 -b 1"


def test_a_plan_stands_above_defaults(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and config files speak of every model, the plan of one of them."""
    small = ("test_vit", "--img", "32")
    sites = ("--include", "blocks.1.*", "--precision", "ieee")
    assert elsa("patch", *small, *sites, "-o", "out").code == 0
    monkeypatch.setenv("ELSA_BACKEND", "eager")
    Path("elsa.toml").write_text('precision = "strict"\nexclude = "nothing.*"\nall-sites = true\n')
    for arguments in (("out",), (*small, "--plan", "out/elsa_plan.json")):
        patch = elsa("patch", *arguments, "--json").document()["results"]["patch"]
        assert [site["path"] for site in patch["patched"]] == ["blocks.1.attn"]
        assert patch["precision"] == "ieee" and patch["backend"] == "auto"


def test_images_are_checked_too(elsa: Elsa) -> None:
    image = pytest.importorskip("PIL.Image")
    Path("pictures").mkdir()
    for index in range(3):
        image.new("RGB", (80, 70), (index * 80, 40, 200)).save(f"pictures/{index}.png")
    answer = elsa("patch", *FEW, "--images", "pictures", "--json", "-b", "2")
    cases = answer.document()["results"]["check"]["cases"]
    assert [case["inputs"] for case in cases if case["case"] == "images"] == [3]


def test_two_towers(elsa: Elsa) -> None:
    pytest.importorskip("open_clip")
    found = elsa("inspect", "open_clip:ViT-S-32-alt", "--json").document()["results"]
    assert found["model"]["source"] == "open_clip"


def test_verbose_logs_the_steps_on_stderr(elsa: Elsa) -> None:
    answer = elsa("inspect", *TINY, "--verbose")
    assert answer.code == 0 and "loading vit_tiny_patch16_224: " in answer.err


def test_stdout_is_one_document_in_a_process_of_its_own(process: Elsa) -> None:
    """With every library's own output in play, and stderr clean without a terminal."""
    answer = process("patch", *FEW, "--check", "--json")
    answer.document()
    assert answer.err == ""


def test_the_scope_reaches_every_command(elsa: Elsa) -> None:
    """inspect lists the layers, patch writes them into the plan, and check judges each one."""
    small = ("vit_tiny_patch16_224", "--img", "32", "--model-kwargs", "depth=1")
    attention, found = (
        elsa("inspect", *small, *scope, "--json").document()["results"]["inspection"]
        for scope in ((), ("--scope", "model"))
    )
    kinds = [site["kind"] for site in found["sites"]]
    assert found["scope"] == "model" and kinds.count("mlp") == 1 and "patch-embedding" in kinds
    assert attention["scope"] == "attention"
    done = elsa("patch", *small, "--scope", "model", "-o", "kept", "--check", "--json").document()
    assert done["results"]["patch"]["scope"] == "model"
    assert len(done["results"]["check"]["sites"]) == len(kinds)
    plan = json.loads(Path("kept/elsa_plan.json").read_text())
    assert plan["scope"] == "model" and "blocks.0.mlp" in plan["sites"]
    again = elsa("check", "kept", "--json").document()["results"]
    assert again["patch"]["scope"] == "model" and again["check"]["ok"]
    alone = ("--include", "*.mlp", "--scope", "model")
    assert elsa("check", *small, *alone, "--json").document()["results"]["routes"] == {}
    assert "1 of 6 sites patched" in elsa("check", *small, *alone).out


@pytest.mark.parametrize("arguments", [("inspect",), ("patch", "-o", "saved")])
def test_a_tag_without_pretrained_says_that_weights_are_random(
    elsa: Elsa, arguments: tuple[str, ...]
) -> None:
    """Under --quiet too: the tag names published weights, and none were loaded."""
    command, *rest = arguments
    answer = elsa(command, "test_vit.r160_in1k", "-q", *rest)
    assert answer.code == 0
    assert "the weights of test_vit.r160_in1k are RANDOM: add --pretrained" in answer.err
    answer = elsa(command, "test_vit", "-q", *rest, *["--force"] * bool(rest))
    assert answer.code == 0 and "RANDOM" not in answer.err
