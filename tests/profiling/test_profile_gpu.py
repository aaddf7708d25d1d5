"""`profile` on a real GPU: sites inside CUDA graphs, and what the rows add up to."""

import pytest
import torch
from torch import nn

from elsa_core.loading.loader import load
from elsa_core.profiling.profile import profile

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_sites_add_up_where_the_host_binds(name: str, dtype: torch.dtype) -> None:
    """In CUDA graphs the kernels of even the smallest models are told apart undisturbed."""
    model = load(f"timm:{name}", seed=0).eval().to("cuda", dtype)
    images = torch.randn(4, 3, 224, 224, device="cuda", dtype=dtype)
    report = profile(model, images, baselines=["eager", "eager+graph"], budget_seconds=2.5)
    assert set(report.cover) == {"eager+graph", "patched+graph"}
    assert any("in CUDA graphs" in note for note in report.notes), report.notes
    for run, cover in report.cover.items():
        # all kernels are found; what the profiler adds to each, half of its time at batch 1 and
        # a third of Swin's here, is not in the rows
        assert 0.97 < cover < 1.5, run
    for run, key in (("eager+graph", "seconds_before"), ("patched+graph", "seconds_after")):
        own, total = (sum(getattr(site, key) for site in part) for part in (
            report.sites[:-1], report.sites
        ))  # fmt: skip
        assert total == pytest.approx(report.run(run).seconds, rel=0.05), run
        busy = report.run(run).device_seconds
        # a site of Swin is a whole block, and in float32 the linear layers are sites too
        most = 0.75 if name.startswith("vit") and dtype == torch.float16 else 1.0
        assert busy is not None and 0.1 * busy < own < most * busy, run


class Uncapturable(nn.Module):
    """Waits for the GPU in its forward, which no CUDA graph can hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * float(x.abs().sum().clamp(1, 1).item())  # type: ignore[no-any-return]


def test_sites_of_a_model_that_no_graph_holds() -> None:
    model = load("timm:vit_tiny_patch16_224", seed=0).eval().cuda()
    images = torch.randn(8, 3, 224, 224, device="cuda")
    torch.manual_seed(0)
    torch.randn(3, device="cuda")
    stream = torch.cuda.current_stream()
    report = profile(
        Uncapturable(model), images, baselines=["eager", "eager+graph"], budget_seconds=2.5
    )
    # the failed capture has left neither the random numbers nor the stream elsewhere
    drawn = torch.randn(3, device="cuda")
    torch.manual_seed(0)
    torch.randn(3, device="cuda")
    assert torch.equal(drawn, torch.randn(3, device="cuda"))
    assert torch.cuda.current_stream() == stream
    assert set(report.cover) == {"eager", "patched"} and "eager+graph" in report.left_out
    assert sum(site.kind == "global" for site in report.sites) == 12


def test_a_model_against_itself() -> None:
    model = load("timm:vit_small_patch16_224", seed=0).eval().to("cuda", torch.float16)
    images = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.float16)
    report = profile(model, images, baselines=["control"], sites=False, budget_seconds=6)
    found = report.run("control").ratio
    assert found is not None and abs(found.value - 1) < 0.03
