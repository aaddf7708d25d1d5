"""`check(paths=...)` on a GPU: the model as a CUDA graph, compiled and both, by the same rule."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from elsa_core.errors import ModelError
from elsa_core.patching import shared_copy, unpatch
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.profiling.runs import variants
from elsa_core.proof.checking import check
from elsa_core.proof.paths import PATHS, runner

from .test_blind_spots import checked, vit
from .test_check import broken
from .test_paths import WrongCompiled

pytestmark = pytest.mark.gpu


# Right in eager mode, off by a thousandth in a CUDA graph.
WrongCaptured = broken(lambda out: out * 1.001 if torch.cuda.is_current_stream_capturing() else out)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_graph_and_compiled_code_are_judged_by_default_on_a_gpu() -> None:
    model = vit().cuda()
    images = torch.randn(7, 3, 32, 32)
    report = check(model, {"a": images, "b": images * 2}, batch_size=3)
    assert report.ok, report.failures
    assert report.paths == ("eager", "graph", "compile") and not report.left_out
    assert [case.path for case in report.cases] == ["eager", "graph", "compile"] * 2
    assert {case.inputs for case in report.cases} == {7}
    model.blocks[1].attn.__class__ = WrongCaptured
    report = check(model, images, batch_size=3, paths=("eager", "graph"))
    assert [case.ok for case in report.cases] == [True, False]
    assert report.failures[0].startswith("model on 'input' by graph: error")


def test_code_that_later_calls_take() -> None:
    """What a user runs is no first call: launches of a known layout are replayed.

    The site's own check and the model's are two calls; the fault begins after four.
    """

    class Later(ElsaAttention):
        elsa_base = Attention
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            Later.calls += 1
            out = super().forward(*args, **kwargs)
            return out * 1.01 if Later.calls > 4 else out

    model = vit().cuda()
    model.blocks[1].attn.__class__ = Later
    report = check(model, torch.randn(2, 3, 32, 32), stress=False, paths=("eager",))
    assert not report.ok


def test_a_model_that_no_graph_can_hold() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > -1e9 else -x  # waits for the GPU

    model = vit().cuda()
    model.blocks[0].drop_path1 = Looks()
    report = checked(model)
    assert report.ok, report.failures
    assert report.paths == ("eager", "compile")
    assert "the original does not run by it either" in report.left_out["graph"]
    with pytest.raises(ModelError, match="path graph"):
        checked(model, paths=("graph",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_paths_on_a_gpu(dtype: torch.dtype) -> None:
    report = checked(vit().to("cuda", dtype), paths=tuple(PATHS))
    assert report.ok, report.failures
    assert [case.path for case in report.cases] == ["eager", "graph", "compile", "compile+graph"]


def test_a_graph_of_the_compiled_model() -> None:
    """A graph for each shape, batches of 3, 3 and 1; a fault of compiled code shows in it."""
    model = vit().cuda()
    images = torch.randn(7, 3, 32, 32)
    report = check(model, images, batch_size=3, paths=("compile+graph",))
    assert report.ok, report.failures
    assert [(case.path, case.inputs) for case in report.cases] == [("compile+graph", 7)]
    model.blocks[1].attn.__class__ = WrongCompiled
    report = check(model, images, batch_size=3, paths=("eager", "graph", "compile+graph"))
    assert [case.ok for case in report.cases] == [True, True, False]
    assert report.failures[0].startswith("model on 'input' by compile+graph: error")


def test_a_compiled_graph_is_the_one_that_is_profiled() -> None:
    """`variants` and `check` replay the same program: their outputs are equal to the last bit."""
    model, images = vit().cuda(), torch.randn(2, 3, 32, 32, device="cuda")
    plain = shared_copy(model)
    unpatch(plain)
    names = ("eager", "patched", "patched+compile+graph")
    built = variants.build(plain, model, (images,), names)
    assert not built.left_out
    run = runner("compile+graph", model)
    assert torch.equal(run(((images,), {})), built.contenders[-1].output())
