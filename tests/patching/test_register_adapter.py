"""An adapter of another package: registered in one call, it is inspected, patched and checked."""

import copy
import importlib
import io
import pickle
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import python
from torch import nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.patching.adapters import table
from elsa_core.patching.rewrite import patched_sites

PACKAGE = """
import torch
from torch import nn

import elsa_core as elsa


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads, self.dim = heads, dim
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.ModuleList(Attention(32, 2) for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class ElsaMadeUp(Attention):
    elsa_base = Attention

    def forward(self, x):
        asked = {"precision": self.elsa_precision, "backend": self.elsa_backend}
        out = elsa.attention(*self.split(x), **asked)
        return self.proj(out.transpose(1, 2).flatten(2))
"""
REGISTER = "\n\nelsa.register_adapter(ElsaMadeUp)\n"


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "made_up.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(table, "_REGISTERED", {})
    yield importlib.import_module("made_up")
    sys.modules.pop("made_up")


def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_class_of_another_package(made_up: Any, tmp_path: Path) -> None:
    model = made_up.Model().eval()
    assert elsa.inspect(model).sites[0].adapter == "recognised"
    elsa.register_adapter(made_up.ElsaMadeUp)
    sites = elsa.inspect(model, 32).sites
    assert [(s.path, s.kind, s.adapter, s.query_tokens) for s in sites] == [
        ("blocks.0", "global", "ElsaMadeUp", 16),
        ("blocks.1", "global", "ElsaMadeUp", 16),
    ]
    keys, x = list(model.state_dict()), images()
    expected = model(x)
    assert len(elsa.patch(model, scope="attention").patched) == 2
    assert elsa.check(model, x).ok
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(patched_sites(other)) == 2 and list(other.state_dict()) == keys
        torch.testing.assert_close(other(x), expected)
    assert elsa.unpatch(model) == 2
    assert type(model.blocks[0]) is made_up.Attention and torch.equal(model(x), expected)


def test_a_fresh_process_unpickles_it(
    made_up: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package registers as it is imported, which pickle does."""
    elsa.register_adapter(made_up.ElsaMadeUp)
    model = made_up.Model().eval()
    elsa.patch(model)
    (tmp_path / "made_up.py").write_text(PACKAGE + REGISTER)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    script = (
        "import pickle; import elsa_core as elsa; "
        "model = pickle.load(open('model.pickle', 'rb')); "
        "assert sum(site.patched for site in elsa.inspect(model, 32).sites) == 2; "
        "assert elsa.unpatch(model) == 2 and len(elsa.patch(model, scope='attention').patched) == 2"
    )
    monkeypatch.chdir(tmp_path)
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def test_a_reason_of_an_instance(made_up: Any) -> None:
    made_up.ElsaMadeUp.elsa_why_not = staticmethod(
        lambda module: "two heads only" if module.num_heads != 2 else ""
    )
    elsa.register_adapter(made_up.ElsaMadeUp, kind="cross")
    model = made_up.Model()
    model.blocks[1] = made_up.Attention(32, 4)
    report = elsa.patch(model)
    assert [site.kind for site in report.patched] == ["cross"]
    assert [site.reason for site in report.kept] == ["two heads only"]


def test_the_documented_adapter_takes_five_lines() -> None:
    """The tutorial, which other tests run, registers a made-up class."""
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "adapter.md"
    blocks = page.read_text(encoding="utf-8").split("```python\n")[1:]
    (adapter,) = (block for block in blocks if "register_adapter" in block)
    source = adapter.split("```")[0]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    assert source.startswith("@elsa.register_adapter\n")
    assert [token.type for token in tokens].count(tokenize.NEWLINE) == 5


class NoBase(nn.Linear):
    pass


class Constructed(nn.Linear):
    elsa_base = nn.Linear

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class Empty(nn.Linear):
    elsa_base = nn.Linear


def test_what_is_no_adapter() -> None:
    class Local(nn.Linear):
        elsa_base = nn.Linear

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    class OfAdapter(Empty):
        elsa_base = Empty

    cases = [
        (object(), "no subclass of torch.nn.Module"),
        (NoBase, "does not name the class"),
        (Constructed, "has a constructor"),
        (Empty, "has no forward"),
        (Local, "within a function"),
        (OfAdapter, "an adapter itself"),
    ]
    for adapter, words in cases:
        with pytest.raises(ArgumentError, match=words):
            elsa.register_adapter(adapter)  # type: ignore[type-var]
    with pytest.raises(ArgumentError, match="kind='windows' is unknown"):
        elsa.register_adapter(Empty, kind="windows")
    assert table.row_of(Local) is None and table.row_of(Empty) is None
