"""`profile`: a model against itself, the rows' sum, what the report says."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError, UnavailableError
from elsa_core.measuring.timing import Contender
from elsa_core.patching import find_sites
from elsa_core.profiling.profile import ProfileReport, profile
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import run_errors
from elsa_core.profiling.runs.training import profile_training
from elsa_core.profiling.sites import served

from .conftest import small_vit

CPU = torch.device("cpu")


CONTROL = """
import json, sys
import torch
from elsa_core.profiling.profile import profile
from tests.profiling.conftest import small_vit

model, images, right = small_vit(), torch.randn(1, 3, 96, 96), 0
for seed in range(3):
    report = profile(
        model, images, baselines=["control"], sites=False, budget_seconds=3,
        seed=3 * int(sys.argv[1]) + seed,
    )
    ratio = report.run("control").ratio.to_dict()
    print(json.dumps(ratio))
    right += abs(ratio["value"] - 1) < 0.03 and ratio["low"] <= 1 <= ratio["high"]
    if right == 2:
        break  # whatever the third one said
"""


def controls(turn: int) -> list[dict[str, Any]]:
    """Three ratios of a model against itself, in a process of their own, as the command is; two
    where both are as all should be, since two of three decide."""
    done = subprocess.run(
        [sys.executable, "-c", CONTROL, str(turn)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2], timeout=300,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.alone
def test_a_model_against_itself_is_a_ratio_of_one() -> None:
    """The command's own overhead and bias: within 3% of 1, and the interval holds 1.

    An interval of 95% misses the truth once in 20 times by construction, so two of three
    independent runs have to hold 1. On a machine that is busy all through one run, that run says
    so in its interval; the middle one of the three ratios has to be within 3%. What another process
    did in the meantime does not come again in a second series. Where the objects of a model lie in
    memory can cost 2%: a process that ran thousands of tests has places of every kind, and its
    first copy of a model takes the worst; the command's process has none.
    """
    seen = []
    for turn in range(2):
        found = controls(turn)
        seen.append(found)
        middle = sorted(each["value"] for each in found)[1]  # of two good ones either is
        if abs(middle - 1) < 0.03 and sum(each["low"] <= 1 <= each["high"] for each in found) >= 2:
            return
    raise AssertionError(seen)


@pytest.mark.alone
def test_a_slower_model_is_seen() -> None:
    """The same machinery must not call everything equal: 15% more work shows."""
    base, more = small_vit(6), small_vit(7)
    images = torch.randn(1, 3, 96, 96)

    class Either(nn.Module):
        """Has one block more where its switch for fused attention is on."""

        def __init__(self) -> None:
            super().__init__()
            self.base, self.more, self.fused_attn = base, more, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.more(x) if self.fused_attn else self.base(x)  # type: ignore[no-any-return]

    found = profile(Either(), images, baselines=["sdpa"], sites=False, budget_seconds=6)
    slower = found.run("sdpa").ratio
    assert slower is not None and slower.verdict == "slower" and 0.7 < slower.value < 0.95


@pytest.mark.alone
def test_the_rows_add_up_to_the_whole(report: ProfileReport) -> None:
    """Sites and the rest are all of a run; that watching them costs more than a tenth is said.

    How much it costs is the machine's: 6% of so small a model where its copy lies badly in memory.
    """
    assert set(report.cover) == {"eager", "patched"}
    for name, part in report.cover.items():
        assert 0.85 < part < 1.25, name
        if part <= 1.1:
            assert not [line for line in report.warnings if f"its sites slowed {name} " in line]
    for name, key in (("eager", "seconds_before"), ("patched", "seconds_after")):
        total = sum(getattr(site, key) for site in report.sites)
        assert total == pytest.approx(report.run(name).seconds, rel=1e-4), name
    assert sum(site.share for site in report.sites) == pytest.approx(1.0, abs=1e-4)


def test_what_serves_a_window() -> None:
    """Its schedule was the operator's name."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_heads=(1, 2), embed_dim=32
    ).eval()
    elsa.patch(model, scope="attention")
    paths = [site.path for site in find_sites(model, "attention")]
    found = served(model, (torch.randn(1, 3, 56, 56),), paths)
    assert set(found) == set(paths)
    for each in found.values():
        assert each.backend in ("native", "eager") and each.precision == "strict"
        assert "window_attention" not in each.schedule and " " in each.schedule


@pytest.mark.alone
def test_what_a_report_says_of_sites(report: ProfileReport) -> None:
    *sites, rest = report.sites
    assert sorted(site.path for site in sites) == ["blocks.0.attn", "blocks.1.attn"]
    before = [site.seconds_before for site in sites]
    assert before == sorted(before, reverse=True)
    for site in sites:
        facts = (site.kind, site.num_heads, site.head_dim, site.query_tokens)
        assert facts == ("global", 3, 64, 37)
        assert site.patched and site.precision == "strict"
        assert site.backend in ("native", "eager") and site.schedule
        assert site.error is not None and site.original_error is not None
        assert 0 < site.error <= 2 * site.original_error + 5e-7
    assert (rest.path, rest.backend, rest.error) == ("rest of the model", "", None)
    assert 0.5 < rest.share < 0.98


@pytest.mark.alone
def test_what_a_report_says_of_runs(report: ProfileReport) -> None:
    assert [run.name for run in report.runs] == ["eager", "control", "patched"]
    assert report.left_out == {"sdpa": "fused attention is on already: the same as eager"}
    eager, patched = report.run("eager"), report.run("patched")
    assert eager.ratio is None and eager.ratio_to_best is None
    assert patched.ratio is not None and patched.ratio_to_best == report.gain
    assert report.best_baseline == "eager"  # never "control", whichever was faster
    assert eager.images_per_second == pytest.approx(1 / eager.seconds, rel=1e-4)
    assert eager.samples and len(eager.samples) <= 100
    assert report.weight_bytes > 2_000_000
    assert (report.image_size, report.batch, report.dtype) == ((96, 96), 1, "float32")
    with pytest.raises(KeyError):
        report.run("compile")


def test_the_model_is_not_changed() -> None:
    model = small_vit()
    before = copy.deepcopy(model)
    images = torch.randn(1, 3, 96, 96)
    elsa.profile(model, images, sites=True, errors=False, budget_seconds=0.5)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_patched_model_keeps_its_patches() -> None:
    model = small_vit()
    elsa.patch(model, include="blocks.1.*", backend="eager")
    images = torch.randn(1, 3, 96, 96)
    found = elsa.profile(model, images, sites=True, errors=False, budget_seconds=0.5)
    assert (found.patched, found.backend) == (1, "eager")
    by_path = {site.path: site for site in found.sites}
    assert by_path["blocks.1.attn"].backend == "eager"
    assert not by_path["blocks.0.attn"].patched and by_path["blocks.0.attn"].backend == ""


def test_which_runs_stand_beside_which() -> None:
    cuda = torch.device("cuda")
    assert variants.chosen(None, CPU) == ("eager",)
    assert variants.chosen(["all"], CPU) == ("eager", "control", "sdpa", "compile")
    names = variants.chosen(["all"], cuda)
    assert names == variants.BASELINES
    assert variants.ours(names) == (
        "patched", "patched+compile", "patched+graph", "patched+compile+graph",
    )  # fmt: skip
    assert variants.ours(["eager", "sdpa"]) == ("patched",)
    with pytest.raises(ArgumentError, match=r"'tensorrt' is unknown; choose from eager, control"):
        variants.chosen(["tensorrt"], CPU)
    with pytest.raises(ArgumentError, match="cpu and cuda can be profiled, not mps"):
        variants.chosen(None, torch.device("mps"))
    with pytest.raises(UnavailableError, match=r"compile\+graph needs a CUDA GPU"):
        variants.chosen(["compile+graph"], CPU)


@pytest.mark.parametrize("error", [ImportError, UnavailableError])
def test_a_baseline_that_fails_is_left_out(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", broken)
    found = profile(
        small_vit(), torch.randn(1, 3, 96, 96), baselines=["compile"], sites=False,
        budget_seconds=0.5,
    )  # fmt: skip
    assert found.left_out == {"compile": "no compiler", "patched+compile": "no compiler"}


def test_arguments_that_are_wrong() -> None:
    model, images = small_vit(), torch.randn(1, 3, 96, 96)
    with pytest.raises(ModelError, match="eager does not run on these inputs"):
        profile(model, torch.randn(1, 3, 50, 50))
    with pytest.raises(ArgumentError, match="rounds"):
        profile(model, images, rounds=0)
    with pytest.raises(ArgumentError, match="seed"):  # before anything is measured
        profile(model, images, seed=-1)
    with pytest.raises(ArgumentError, match="'half' is none of fp32, fp16, bf16"):
        profile_training(model, images, dtype="half")
    with pytest.raises(ArgumentError, match="precision"):
        profile(model, images, precision="exact")
    with pytest.raises(NothingPatchedError):
        profile(nn.Conv2d(3, 3, 1), images)


def test_the_verdict_comes_before_the_sites() -> None:
    """Where the budget is spent on rounds, sites are left out with a note, unless asked for."""
    model, images = small_vit(), torch.randn(1, 3, 96, 96)
    timed: list[str] = []
    found = profile(model, images, rounds=3, budget_seconds=1e-3)
    assert found.sites == () and found.rounds >= 3
    assert any("sites=True (--sites)" in note for note in found.notes)
    asked = profile(
        model, images, rounds=3, budget_seconds=1e-3, sites=True, errors=False,
        progress=lambda what, done, total: timed.append(what),
    )  # fmt: skip
    assert len(asked.sites) == 3
    assert not any("budget" in note for note in asked.notes)
    assert timed.index("rounds") < timed.index("sites")
    assert {run.name for run in asked.runs} == {"eager", "patched"}  # watched copies are no runs


@pytest.mark.alone
def test_every_ratio_is_the_quotient_of_the_times_beside_it(report: ProfileReport) -> None:
    times = {run.name: run.seconds for run in report.runs}
    for run in report.runs:
        if run.ratio is not None:
            assert run.ratio.value == pytest.approx(times["eager"] / run.seconds, rel=1e-4)
            assert run.ratio.low <= run.ratio.value <= run.ratio.high
    quotient = times[report.best_baseline] / times[report.best_patched]
    assert report.gain.value == pytest.approx(quotient, rel=1e-4)
    for site in report.sites:
        quotient = site.seconds_before / site.seconds_after
        assert site.ratio.value == pytest.approx(quotient, rel=1e-4)


def test_errors_that_cannot_be_compared_end_nothing() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    ways = [Contender("eager", lambda: model(x)), Contender("sdpa", tuple)]  # without an output
    found = run_errors(model, ways, (x,))
    assert found.errors == {} and "not known" in found.warnings[0]
