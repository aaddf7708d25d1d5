"""`check(paths=...)`: the model through torch.compile, by the same rule; graphs need a GPU.

Where a test says so, what is captured is called again in place of a CUDA graph.
"""

from typing import Any

import pytest
import torch
from graphs.tape import taped
from timm.layers.attention import Attention
from torch import Tensor, nn

from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.proof import paths

from .test_blind_spots import checked, vit
from .test_check import broken

# Right in eager mode, off by a thousandth in compiled code.
WrongCompiled = broken(lambda out: out * 1.001 if torch.compiler.is_compiling() else out)


def test_each_verdict_names_its_path(quick: None) -> None:
    report = checked(vit(), paths=("compile", "eager"))
    assert report.ok, report.failures
    assert report.paths == ("eager", "compile")
    assert [case.path for case in report.cases] == ["eager", "compile"]
    assert {(case.case, case.inputs) for case in report.cases} == {("noise", 3)}


@pytest.mark.usefixtures("inductor")
def test_compiled_by_inductor() -> None:
    model = vit()
    model.blocks = model.blocks[:1]
    report = checked(model, paths=["compile"])
    assert report.ok, report.failures
    assert [case.path for case in report.cases] == ["compile"]
    assert report.cases[0].patched_error > 0
    torch._dynamo.reset()


def test_what_is_wrong_only_compiled(quick: None) -> None:
    model = vit()
    model.blocks[1].attn.__class__ = WrongCompiled
    assert checked(model).ok
    steps: list[str] = []
    told = lambda what, *_: steps.append(what)  # noqa: E731
    report = checked(model, paths=("eager", "compile"), progress=told)
    assert steps.index("noise, compile") < steps.index("noise")
    assert [case.ok for case in report.cases] == [True, False]
    assert report.failures[0].startswith("model on 'noise' by compile: error")


def test_the_compiler_that_was_turned_off_for_eager_runs(quick: None) -> None:
    """A model that is compiled in place runs eagerly by path eager, compiled by path compile."""
    model = vit()
    model.compile(backend="eager")
    model(torch.randn(1, 3, 32, 32))
    assert checked(model, paths=("eager", "compile")).ok


def test_what_cannot_be_chosen() -> None:
    model = vit()
    with pytest.raises(ArgumentError, match="'fast' is unknown; choose from eager, graph"):
        checked(model, paths=("fast",))
    with pytest.raises(ArgumentError, match="none is given"):
        checked(model, paths=())
    with pytest.raises(UnavailableError, match="path graph needs a CUDA GPU"):
        checked(model, paths=("eager", "graph"))
    with pytest.raises(UnavailableError, match=r"path compile\+graph needs a CUDA GPU"):
        checked(model, paths=("compile+graph",))


def test_which_paths_a_device_has() -> None:
    assert paths.chosen(None, torch.device("cpu")) == ("eager",)
    cuda = torch.device("cuda")
    assert paths.chosen(None, cuda) == ("eager", "graph", "compile")
    named = ("compile+graph", "eager")
    assert paths.chosen(named, cuda) == ("eager", "compile+graph")
    assert tuple(paths.PATHS) == ("eager", "graph", "compile", "compile+graph")


def _refused(*args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no such operator")

    return run


def _no_compiler(model: nn.Module, **how: Any) -> Any:
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


def _only_the_original(model: nn.Module, **how: Any) -> Any:
    return model if type(model.blocks[0].attn) is Attention else _refused()


@pytest.mark.parametrize(
    ("compile_", "error", "said", "left_out"),
    [
        (_refused, ModelError, r"path compile: the original .* no such operator",
         "the original does not run by it either: NotImplementedError"),
        (_no_compiler, UnavailableError, "path compile",
         "this machine lacks its compiler: No working C"),
    ],
)  # fmt: skip
def test_a_path_that_this_machine_cannot_take(
    compile_: Any, error: Any, said: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error where it was asked for; a note where it is one of the device's own paths."""
    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(error, match=said):
        checked(vit(), paths=("compile",))
    monkeypatch.setitem(paths._DEFAULTS, "cpu", ("eager", "compile"))
    report = checked(vit())
    assert report.ok, report.failures
    assert report.paths == ("eager",) and [case.path for case in report.cases] == ["eager"]
    assert report.left_out["compile"].startswith(left_out)


def test_what_the_original_can_take_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", _only_the_original)
    report = checked(vit(), paths=("eager", "compile"))
    assert [case.ok for case in report.cases] == [True, False]
    assert "by compile: the patched code raises NotImplementedError" in report.failures[0]


def test_a_graph_is_what_graphed_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paths._DEFAULTS, "cpu", ("eager", "graph"))
    model = vit()
    with taped() as tape:
        report = checked(model, grad=True)
        assert report.ok and not report.left_out, report.failures
        assert tape.captures >= 2 and tape.replays
        assert [one.path for one in report.gradients][-2:] == ["model", "model by graph"]
        wrong = broken(lambda out: out * 1.001 if tape.recording else out)
        model.blocks[1].attn.__class__ = wrong
        report = checked(model, grad=True)
    assert [case.ok for case in report.cases] == [True, False]
    failed = [line.partition(": ")[0] for line in report.failures]
    assert failed == ["model on 'noise' by graph", "model by graph"]


class Listed(nn.Module):
    """Reads its parameter from a list, where a capture does not replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.held = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held[0]


def test_a_model_whose_backward_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paths._DEFAULTS, "cpu", ("eager", "graph"))
    model = vit()
    model.blocks[0].drop_path1 = Listed()
    with taped():
        report = checked(model, grad=True)
    assert report.ok, report.failures
    assert [case.path for case in report.cases] == ["eager", "graph"]
    assert "wants a gradient" in report.left_out["graph (gradients)"]


def test_every_shape_has_its_program(quick: None) -> None:
    """torch.compile gives up at nine shapes of one model, which is no finding about elsa."""
    run = paths.runner("compile", nn.Conv2d(3, 8, 8, 8))
    for rows in range(1, 11):
        run(((torch.zeros(rows, 3, 32, 32),), {}))
