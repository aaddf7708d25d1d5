"""`python:PACKAGE.MODULE:FACTORY`: models of the user's own code, and inputs of their own."""

import shlex
from pathlib import Path

import pytest
import torch
from sampling import some

from .conftest import Elsa

CODE = """
import torch
from torch import nn
print("a line of the module's own")

class Volume(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.qkv = nn.Conv3d(1, dim, 8, 8), nn.Linear(dim, 3 * dim)

    def forward(self, image, scale=0.25):
        tokens = self.embed(image).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        return ((q @ k.transpose(1, 2) * scale).softmax(-1) @ v).mean(1)

class Bare(nn.Module):
    def forward(self, x):
        q = x.flatten(2).transpose(1, 2)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q).mean((1, 2))

class Counted(Volume):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

class Named(Volume):
    def forward(self, image, *, scale=0.25): return super().forward(image, scale)

def volume(dim=16): return Volume(dim)
def named(): return Named()
def counted(): return Counted()
def bare(): return Bare()
def broken(): raise ValueError("no such weights")
def exits(): raise SystemExit(3)
def number(): return 3

def images():
    import timm
    return timm.create_model("test_vit", dynamic_img_size=True)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_volume.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_volume_is_inspected_patched_and_checked(own: Path, elsa: Elsa) -> None:
    torch.save({"image": torch.randn(2, 1, 16, 16, 16)}, own / "inputs.pt")
    spec, given = "python:own_volume:volume", ("--inputs", "inputs.pt")
    noise = ("--input-size", "1x16x16x16", "--model-kwargs", "dim=24")
    found = elsa("patch", spec, *noise, "--check", "--json").document()["results"]
    assert [site["path"] for site in found["patch"]["patched"]] == [""]
    assert "own code" in " ".join(found["model"]["notes"])
    elsa("patch", spec, *given, "-o", "saved").shows("--plan saved/elsa_plan.json --check")
    result = elsa("patch", spec, *given, "--plan", "saved/elsa_plan.json", "--check")
    result.shows("1 of 1 sites patched")
    # a site without a name
    elsa("inspect", spec, *given).shows("1 of 1 sites can be patched", "✓ the model")


def test_the_next_step_after_saving_own_code_runs(own: Path, elsa: Elsa) -> None:
    """It named sites beside the plan, or two plans: a usage error."""
    step = ["patch", "python:own_volume:volume", "--input-size", "1x16x16x16"]
    for output, more in (("DIR", ("--all-sites", "--scope", "attention")), ("other", ())):
        plan = ("--plan", "DIR/elsa_plan.json") if output == "other" else ()
        result = elsa(*step[:4], *more, *plan, "-o", output)
        assert result.code == 0, result.err
        _, command, *step = shlex.split(result.out.splitlines()[-1].partition("Next: ")[2])
        step = [command, *step]
        assert step[-3:] == ["--plan", f"{output}/elsa_plan.json", "--check"]
        result = elsa(*step)
        assert result.code == 0, result.err


def test_a_model_whose_first_parameter_is_of_integers(own: Path, elsa: Elsa) -> None:
    elsa("check", "python:own_volume:counted", "--input-size", "1x16x16x16").shows("outputs agree")


def test_a_model_without_weights(own: Path, elsa: Elsa) -> None:
    given = ("python:own_volume:bare", "--input-size", "3x16x16")
    for command in ("inspect", "patch"):
        elsa(command, *given).shows("1 of 1 sites")
    result = elsa("check", *given)
    assert result.code == 4 and "no floating weights; nothing can be compared" in result.err


GIVEN = [("torchscript", "--input-size", "1x16x16x16", "-b", 2), ("pt2", "--inputs", "inputs.pt")]


@pytest.mark.parametrize("given", some(GIVEN))
def test_a_volume_is_profiled_and_exported(own: Path, elsa: Elsa, given: tuple[str, ...]) -> None:
    form, *given = given
    torch.save({"image": torch.randn(2, 1, 16, 16, 16)}, own / "inputs.pt")
    spec = "python:own_volume:volume"
    quick = ("--rounds", 3, "--budget", 0.1, "--no-sites", "--json")
    (row,) = elsa("profile", spec, *given, *quick).document()["results"]["points"]
    assert (row["profile"]["patched"], row["profile"]["batch"]) == (1, 2)
    result = elsa("export", spec, *given, "--formats", form, "-o", "out", "--json")
    found = result.document()["results"]["manifest"]
    assert found["inputs"][0]["shape"] == ["batch", 1, 16, 16, 16]
    assert found["preprocess"] is None and not found["model"]["reloads_in_elsa"]
    elsa("profile", spec, "--inputs", "inputs.pt", "-b", 2).fails(2, "--batch-size")


def test_an_argument_that_has_to_be_named(own: Path, elsa: Elsa) -> None:
    """Its default takes no place among the inputs of a file; a value of its own has none there."""
    image = torch.randn(2, 1, 16, 16, 16)
    torch.save({"image": image}, own / "inputs.pt")
    line = ("inspect", "python:own_volume:named", "--inputs", "inputs.pt")
    elsa(*line).shows("1 of 1 sites can be patched")
    torch.save({"image": image, "scale": 0.5}, own / "inputs.pt")
    result = elsa(*line)
    assert result.code == 2 and "scale cannot be given by place" in result.err


def test_a_model_of_images_is_profiled_at_several_sizes(own: Path, elsa: Elsa) -> None:
    quick = ("--rounds", 3, "--budget", 0.1, "--no-sites", "--json")
    result = elsa("profile", "python:own_volume:images", "--img-size", "96,160", *quick)
    points = result.document()["results"]["points"]
    assert [point["configuration"]["image_size"] for point in points] == [[96, 96], [160, 160]]


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("own_volume:broken", "broken raised ValueError: no such weights"),
        ("own_volume:exits", "exits raised SystemExit: 3"),
        ("own_volume:number", "gives a int, no torch.nn.Module"),
        ("own_volume:absent", "has no absent"),
        ("own_absent:volume", "cannot import own_absent"),
        ("own_volume", "give python:PACKAGE.MODULE:FACTORY"),
    ],
)
def test_a_factory_that_gives_no_model_is_one_line(
    own: Path, elsa: Elsa, factory: str, words: str
) -> None:
    result = elsa("inspect", f"python:{factory}")
    assert result.code == 4 and words in result.err and result.out == ""
    assert result.err.splitlines()[-1].startswith("error: ")


def test_inputs_that_do_not_fit_are_one_line(own: Path, elsa: Elsa) -> None:
    torch.save({"picture": torch.randn(2, 1, 16, 16, 16)}, own / "inputs.pt")
    for given, words in (
        (("--inputs", "inputs.pt"), "missing a required argument: 'image'"),
        (("--inputs", "absent.pt"), "absent.pt"),
        (("--input-size", "2x16x16x16"), "does not run on it"),
        (("--input-size", "1x"), "is no shape"),
    ):
        result = elsa("inspect", "python:own_volume:volume", *given)
        assert result.code != 0 and words in result.err, (given, result.err)
