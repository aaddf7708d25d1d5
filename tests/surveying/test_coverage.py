"""`inspect --all`: records, resuming, the page, and a sample of the architectures.

The whole list takes hours (`elsa inspect --all --check --state FILE`); here every fourth family is
looked at, by its first architecture, and a few small ones are proved.
"""

from pathlib import Path

import pytest
import torch
from sampling import some

from benchmarks import model_counts
from elsa_core.errors import ModelError
from elsa_core.proof import coverage
from elsa_core.proof.coverage import AGREES, NOT_CHECKED, Coverage, Kept

pytest.importorskip("timm")

KEPT = (
    Kept("timm.models.cait.TalkingHeadAttn", "mixes heads", 3, softmax=False),
    Kept("a.b.Eager", "no adapter", 1, softmax=True),
)
RECORD = Coverage("timm:a", "some", 7, 6, 2, KEPT, AGREES, "", 1e-7, 2e-7)


@pytest.fixture(scope="module")
def names() -> list[str]:
    return coverage.architectures("timm:*")


def test_one_of_each_family_comes_first(names: list[str]) -> None:
    families = list(map(coverage.family, names))
    first = len(set(families))
    assert len(set(families[:first])) == first
    assert coverage.architectures("timm:vit_tiny_patch16_22?") == ["timm:vit_tiny_patch16_224"]
    assert coverage.architectures("nothing*") == []


def test_every_library_has_a_record() -> None:
    """torchvision's architectures were not gone through, although MODEL can name them."""
    torchvision = pytest.importorskip("torchvision")
    names = coverage.architectures("torchvision:*")
    known = torchvision.models.list_models(module=torchvision.models)
    assert {n.removeprefix("torchvision:") for n in names} == set(known)
    found = coverage.examine("torchvision:swin_t", checked=False)
    assert found.verdict == NOT_CHECKED and found.patchable == found.sites == 12


def test_a_sample_of_the_families(names: list[str]) -> None:
    """Nothing crashes, nothing is skipped, and softmax attention is patched wherever it is."""
    families = len({coverage.family(name) for name in names})
    seen = 0
    for name in names[:families:4]:
        found = coverage.examine(name, checked=False)
        assert found.verdict == NOT_CHECKED, found
        assert found.softmax_sites == found.patchable, found
        assert found.sites == found.patchable + sum(kept.sites for kept in found.kept)
        assert all(kept.reason for kept in found.kept)
        seen += found.sites > 0
    assert seen > 5


@pytest.mark.parametrize(
    "name",
    some(["timm:crossvit_9_240", "timm:efficientvit_m0", "open_clip:ViT-S-32-alt"], one_in=3),
)
def test_a_small_version_agrees(name: str) -> None:
    if name.startswith("open_clip"):
        pytest.importorskip("open_clip")
    random_state = torch.get_rng_state()
    found = coverage.examine(name)
    assert (found.verdict, found.reason) == (AGREES, "")
    assert coverage.summarise([found])["complete"] == 1
    assert found.error is not None and found.error < 1e-4
    assert torch.equal(torch.get_rng_state(), random_state)


def test_what_has_nothing_to_patch_says_so() -> None:
    assert coverage.examine("timm:resnet10t").reason == "no attention"
    assert coverage.examine("timm:edgenext_xx_small").reason == "nothing to patch"


def test_a_run_continues(tmp_path: Path) -> None:
    state, names = tmp_path / "state.jsonl", ["timm:resnet10t", "timm:test_vit", "timm:resnet18"]

    def lines() -> int:
        return len(state.read_text().splitlines())

    list(coverage.examine_all(names[:2], checked=False, state=state))
    assert lines() == 2
    list(coverage.examine_all(names, checked=False, state=state))
    assert lines() == 3
    done = list(coverage.examine_all(names[1:2], state=state))  # now with the check
    assert lines() == 4 and done[0].verdict == AGREES
    assert list(coverage.examine_all(names[1:2], state=state)) == done and lines() == 4
    state.write_text("{}\n")
    with pytest.raises(ModelError, match="coverage file"):
        coverage.read_state(state)


def test_numbers_and_page() -> None:
    assert RECORD.softmax_sites == 3
    whole = Coverage("timm:b", "some", 7, 4, 4, (), "differs", "error 1e-3")
    none = Coverage("timm:c", "other", 7, 0, 0, (), NOT_CHECKED, "no attention")
    total = coverage.summarise([RECORD, whole, none])
    assert (total["architectures"], total["attentive"], total["complete"]) == (3, 2, 1)
    assert total["share"] == 0.5 and total["verdicts"] == {AGREES: 1, "differs": 1}
    page = model_counts.page([RECORD, whole, none])
    assert "| some | 2 | 10 | 6 | 1/2 | 1.0e-07 (2.0e-07) |" in page
    assert "3 TalkingHeadAttn: mixes heads; 1 Eager: no adapter" in page
    assert "- `timm:b`: differs: error 1e-3" in page and "other" not in page
