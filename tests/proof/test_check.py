"""The check: what passes, what must fail and name its site, and what it leaves behind."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import some
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.backends.support import Backend, Implementation, Support
from elsa_core.base.inputs import generated_inputs
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.patching.rewrite import patch, patched_sites
from elsa_core.proof.checking import CheckReport, check
from elsa_core.proof.run import depends
from elsa_core.proof.sides import exactly
from elsa_core.proof.site_cases import MANY_KEYS

SIZE = (3, 32, 32)


@pytest.fixture(autouse=True)
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELSA_FAULT_INJECTION", raising=False)


def vit(dtype: torch.dtype = torch.float32, **kwargs: Any) -> VisionTransformer:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3}
    return VisionTransformer(**(options | {"num_classes": 40} | kwargs)).to(dtype).eval()


def inputs(dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Any]:
    return generated_inputs(SIZE, batch, seed=0, dtype=dtype, device="cpu")


def noise(batch: int = 2) -> Tensor:
    return inputs(batch=batch)["noise"]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_model_passes(dtype: torch.dtype) -> None:
    model = vit(dtype)
    patch(model)
    report = check(model, inputs(dtype))
    assert report.ok and not report.failures
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert [site.path for site in report.sites] == [f"blocks.{i}.attn" for i in range(3)]
    for site in report.sites:
        # Four cases, three hard ones and one without zero biases, each through the operator; at the
        # first site of its kind also many keys.
        calls = 9 if site.path == "blocks.0.attn" else 8
        assert site.ok and site.calls == site.operator_calls == calls
        assert site.original_error > 0 and site.patched_error <= site.allowed
        assert site.drift is not None and site.drift.p_argmax_rate is not None
        assert site.excess <= 1.0
    assert [case.case for case in report.cases] == ["noise", "constant", "bright patch", "large"]
    assert all(case.ok and case.top1_rows == 2 and case.inputs == 2 for case in report.cases)
    assert report.seconds_original > 0 and report.seconds_patched > 0
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["sites"][0]["path"] == "blocks.0.attn"


def broken(change: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """A patched site that gives something else."""

    class Broken(ElsaAttention):
        elsa_base = Attention

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return change(super().forward(*args, **kwargs))

    return Broken


def first_infinite(out: Tensor) -> Tensor:
    out[0, 0, 0] = math.inf
    return out


def falls_over(out: Tensor) -> Tensor:
    raise ZeroDivisionError("kernel fell over\nsecond line")


def without_memory(out: Tensor) -> Tensor:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate")


Wrong = broken(lambda out: out * 1.001)


@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize("cls", [ElsaAttention, Wrong])
def test_weights_of_zero_hide_no_error(cls: type[nn.Module], stress: bool) -> None:
    """Many models begin with a last gain of zero: right and wrong sites give zeros there."""
    model = with_site(cls)
    with torch.no_grad():
        for parameter in model.blocks[1].attn.proj.parameters():
            parameter.zero_()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = check(model, inputs(), stress=stress)
    site = report.sites[1]
    assert site.ok is report.ok is (cls is ElsaAttention)
    assert site.worst_case == "noise, zero weights filled" and "zero" in site.notes[0]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("cls", [ElsaAttention, Wrong])
@pytest.mark.parametrize("hiding", ["head", "norm"])
def test_a_model_that_gives_zeros_is_judged_with_other_weights(
    cls: type[nn.Module], hiding: str
) -> None:
    """timm starts Hiera's head at zero: its errors were 0.0 whatever the sites computed."""
    model = with_site(cls)
    with torch.no_grad():
        for parameter in getattr(model, hiding).parameters():
            parameter.zero_()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = check(model, noise(), stress=False)
    for case in report.cases:
        assert case.case == "input, zero weights filled" and case.shown
        assert case.original_error > 0 and case.ok is (cls is ElsaAttention)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_whose_output_depends_on_no_site_shows_nothing() -> None:
    class Ignores(VisionTransformer):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            super().forward(x, *args, **kwargs)
            return x.mean((2, 3))

    model = vit()
    model.__class__ = Ignores
    patch(model)
    report = check(model, noise(), stress=False)
    case = report.cases[0]
    assert report.ok and not case.shown and "depends on no site" in case.notes[0]
    assert "shows nothing" in str(report) and "top-1" not in str(report)


def test_rows_that_are_not_numbers_do_not_make_an_output_depend_on_a_site() -> None:
    class First(nn.Module):
        """Keeps the first image alone, and its head is of zeros."""

        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = Attention(32, num_heads=2), nn.Linear(32, 3)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.attn(torch.cat((x, x * torch.nan)))[: len(x)])

    model = First().eval()
    patch(model)
    assert not depends(model, patched_sites(model), ((torch.randn(1, 8, 32),), {}))


def test_a_site_that_gives_zeros_whatever_its_weights_is_not_proven() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.0

    model = vit()
    patch(model)
    model.blocks[1].attn.proj_drop = Silent()
    report = check(model, inputs())
    assert failing_sites(report) == ["blocks.1.attn"] and not report.ok
    assert "its output is zero" in report.sites[1].reason


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)


def test_a_site_that_writes_to_its_input_is_judged_on_one_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Original, patched and float64 were each given what the one before had left: the original's
    error was that of another input, and allowed the patched site as much."""

    class Writes(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.sub_(0.5)).unsqueeze(1).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)

    model, x = Writes().eval(), torch.randn(2, 12, 16)
    patch(model, x)
    report = check(model, x)
    assert report.ok and all(site.original_error < 1e-5 for site in report.sites)
    monkeypatch.setenv("ELSA_FAULT_INJECTION", ":1e-3")
    wrong = check(model, x, stress=False)
    assert failing_sites(wrong) == [""]


def test_a_site_may_add_to_a_list_that_it_is_given() -> None:
    class Block(Projected):
        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            kept.append(q)
            return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)

    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x, [])

    model, x = Whole(Block()).eval(), torch.randn(2, 12, 16)
    patch(model, x)
    assert check(model, x).ok


def test_a_model_that_never_runs_the_operator_is_not_proven() -> None:
    """Patched, it asks for the weights each time, which is PyTorch's own attention."""

    class Weights(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x, x, x)[0]

    model = Weights(nn.MultiheadAttention(16, 2, batch_first=True)).eval()
    patch(model)
    report = check(model, torch.randn(2, 5, 16))
    assert not report.ok and "no site ran elsa's operator" in report.failures[0]
    assert str(report).startswith("nothing was tested")


def test_pytorchs_own_attention_that_was_asked_for_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no operator of elsa: what the sites give and what the model gives is compared."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", img_size=32).eval()
    patch(model, backend="sdpa", scope="attention")
    report = check(model, torch.randn(2, 3, 32, 32))
    assert report.ok and report.tested and all(site.calls for site in report.sites)
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.1.attn:1e-3")
    wrong = check(model, torch.randn(2, 3, 32, 32))
    assert failing_sites(wrong) == ["blocks.1.attn"] and wrong.tested


def test_sites_that_a_registered_backend_serves() -> None:
    """Its kernels are no operator of elsa: outputs are judged, and a wrong one fails."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32).eval()
    off = 0.0

    def run(query: Tensor, key: Tensor, value: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
        weights = (query @ key.mT) * terms[2]
        return torch.softmax(weights, -1) @ value + off, torch.logsumexp(weights, -1)

    offered = Implementation(
        lambda request: Support(True), run, lambda *_: "", lambda request: "", asked=True
    )
    dispatch.register(Backend("mine", "cpu", {"attention": offered}))
    try:
        patch(model, backend="mine", scope="attention")
        good = check(model, torch.randn(2, 3, 32, 32))
        off = 1e-3
        bad = check(model, torch.randn(2, 3, 32, 32))
        assert dispatch.RUNS["attention", "mine"] is run
    finally:
        dispatch.unregister("mine")
    assert good.ok, good.failures
    for site in good.sites:
        assert site.calls and not site.operator_calls
        assert any("registered backend mine" in note for note in site.notes)
    assert not bad.ok and all("error" in site.reason for site in bad.sites)


def test_a_site_that_draws_at_random_is_not_proven() -> None:
    """Two draws differ by as much as the original from the oracle, and twice that was allowed."""

    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    model = nn.Sequential(nn.Linear(8, 8), Dropping()).eval()
    patch(model)
    report = check(model, torch.randn(2, 3, 9, 8))
    assert not report.ok and "the original's own error is" in report.sites[0].reason
    assert any("hides any other" in note for note in report.cases[0].notes)


class Casts(nn.Module):
    """Attention in bfloat16 inside a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        q, k, v = (each.bfloat16() for each in qkv)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.to(x.dtype).transpose(1, 2).flatten(2)).float()


def test_a_model_that_casts_to_bfloat16_itself() -> None:
    """The oracle computed the rest in bfloat16 too, and condemned what was nearer to float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Casts(), nn.Linear(64, 10)).eval()
    patch(model)
    report = check(model, 2 * torch.randn(2, 197, 64), grad=True)
    assert report.ok, report.failures
    q = torch.randn(8, 8, dtype=torch.float64)
    rounded = q.bfloat16().double()
    found = exactly(lambda: (q.bfloat16() @ q.bfloat16()).float().softmax(-1).half(), model.half())
    assert torch.equal(found, (rounded @ rounded).softmax(-1))
    found = exactly(lambda: q.bfloat16() @ q.bfloat16().mT, model.bfloat16())
    assert torch.equal(found, q @ q.mT)


def with_site(cls: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = vit(dtype)
    patch(model, backend="eager")
    model.blocks[1].attn.__class__ = cls
    return model


def failing_sites(report: CheckReport) -> list[str]:
    return [site.path for site in report.sites if not site.ok]


def test_a_site_off_by_a_thousandth_fails_and_is_named() -> None:
    report = check(with_site(Wrong), inputs())
    assert not report.ok and failing_sites(report) == ["blocks.1.attn"]
    assert report.failures[0].startswith("blocks.1.attn: ")
    site = report.sites[1]
    assert site.patched_error == pytest.approx(1e-3, rel=0.05) and site.excess > 100
    assert not all(case.ok for case in report.cases)


def test_the_switch_for_deliberate_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    patch(model)
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.2.attn:1e-3")
    report = check(model, noise())
    assert failing_sites(report) == ["blocks.2.attn"] and not report.cases[0].ok
    assert report.fault_injection == "blocks.2.attn:0.001"
    assert hooks(model) == 0
    for wrong in ("blocks.9.attn:1e-3", "blocks.2.attn", "blocks.2.attn:much", ":"):
        monkeypatch.setenv("ELSA_FAULT_INJECTION", wrong)
        with pytest.raises(ArgumentError, match="ELSA_FAULT_INJECTION"):
            check(model, noise())
    monkeypatch.delenv("ELSA_FAULT_INJECTION")
    report = check(model, noise())
    assert report.ok and report.fault_injection is None


@pytest.mark.parametrize("where", ["patched", "original", "oracle", "more keys"])
def test_memory_that_runs_out_is_no_finding(where: str) -> None:
    """It was one on a CPU: the patched code "raises", or the model "does not run in float64"."""
    model = with_site(broken(without_memory) if where == "patched" else ElsaAttention)

    def fill(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        wide, long = out.dtype == torch.float64, out.shape[1] >= MANY_KEYS
        if where == "original" or (wide and where == "oracle") or (long and where == "more keys"):
            without_memory(out)

    if where != "patched":
        model.blocks[0].attn.proj.register_forward_hook(fill)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        check(model, noise(), stress=where == "more keys")


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (broken(first_infinite), "not finite where the oracle is"),
        (broken(falls_over), "raises ZeroDivisionError: kernel fell over"),
        (broken(Tensor.double), "the patched output is float64"),
    ],
)
def test_other_wrong_kernels(cls: type[nn.Module], words: str) -> None:
    model = with_site(cls)
    report = check(model, noise())
    assert failing_sites(report) == ["blocks.1.attn"]
    assert words in report.failures[0] and "\n" not in "".join(report.failures)
    assert type(model.blocks[1].attn) is cls
    json.dumps(report.to_dict(), allow_nan=False)


def test_nan_weights_and_buffers_are_reported() -> None:
    """Those that the inputs do not reach, too; -inf may be a mask."""
    model = vit()
    patch(model)
    model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    assert check(model, noise()).ok
    model.register_buffer("spare", torch.tensor([math.nan, 0.0]))
    report = check(model, noise())
    assert report.failures == ("weights: NaN or infinite values in spare",)
    del model.spare
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[5, 5] = math.nan
    report = check(model, noise())
    assert not report.ok
    assert report.failures[0] == "weights: NaN or infinite values in blocks.1.attn.qkv.weight"
    assert failing_sites(report) == ["blocks.1.attn", "blocks.2.attn"]
    assert "NaN in the float64 oracle" in report.sites[1].reason


class Draws(nn.Module):
    """Takes from the global random numbers, as a model may in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return x


def test_leaves_no_trace() -> None:
    model = vit(proj_drop_rate=0.5)
    model.blocks[0].drop_path1 = Draws()
    patch(model, exclude="blocks.1.*")
    model.train()
    model.blocks[2].eval()
    modes = [module.training for module in model.modules()]
    classes = [type(module) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    report = check(model, noise())
    assert report.ok and len(report.sites) == 2
    assert [module.training for module in model.modules()] == modes
    assert [type(module) for module in model.modules()] == classes
    assert hooks(model) == 0 and torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("when", some(range(1, 9), one_in=3))
def test_restored_after_an_interrupt(when: int) -> None:
    model = vit(depth=2)
    patch(model)
    model.train()
    classes = [type(module) for module in model.modules()]

    def progress(what: str, done: int, total: int) -> None:
        nonlocal when
        when -= 1
        if when == 0:
            raise KeyboardInterrupt

    two = {"one": noise(), "two": noise()}
    # Two cases of two sites and the model, and the timing: seven steps.
    if when > 7:
        assert check(model, two, progress=progress).ok
    else:
        with pytest.raises(KeyboardInterrupt):
            check(model, two, progress=progress)
    assert [type(module) for module in model.modules()] == classes
    assert hooks(model) == 0 and all(module.training for module in model.modules())


@pytest.mark.parametrize("run", ["check", "profile", "export"])
def test_the_environment_is_left_as_it_was(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's compiler sets TRITON_PTXAS_PATH on the way, after which no kernel was compiled for
    another GPU."""
    monkeypatch.setenv("ELSA_TEST_CHANGED", "before")
    monkeypatch.setenv("ELSA_TEST_REMOVED", "before")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    before = dict(os.environ)

    def progress(*_: object) -> None:
        os.environ["TRITON_PTXAS_PATH"] = "/elsewhere/ptxas"
        os.environ["ELSA_TEST_CHANGED"] = "after"
        os.environ.pop("ELSA_TEST_REMOVED", None)
        raise KeyboardInterrupt

    model = vit(depth=1)
    if run != "profile":
        patch(model)
    given = {"check": (noise(),), "profile": (noise(),), "export": (tmp_path / "bundle",)}[run]
    with pytest.raises(KeyboardInterrupt):
        getattr(elsa, run)(model, *given, progress=progress)
    assert dict(os.environ) == before


def test_what_cannot_be_checked() -> None:
    model = vit()
    with pytest.raises(NothingPatchedError):
        check(model, noise())
    patch(model)
    for bad in ({"factor": 0.5}, {"factor": math.nan}, {"batch_size": 0}):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            check(model, noise(), **bad)
    point = torch.tensor(1.0)
    for nothing in ({}, torch.empty(0, 3, 32, 32), {"a": ()}, noise() * math.nan, point):
        with pytest.raises(ArgumentError, match="inputs"):
            check(model, nothing)
    with pytest.raises(ModelError, match=r"'input'.*does not run"):
        check(model, torch.zeros(1, 3, 48, 48))
    with pytest.raises(ArgumentError, match="float64"):
        check(model.double(), noise())
    with pytest.raises(ModelError, match="meta"):
        check(model.to("meta"), noise())
    assert hooks(model) == 0


def test_a_model_that_refuses_copies_is_named() -> None:
    """As `fully_shard` makes them."""

    class Sharded(VisionTransformer):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("no copies")

    model = vit()
    model.__class__ = Sharded
    patch(model)
    with pytest.raises(ModelError, match=r"cannot be copied .*no copies"):
        check(model, noise())
    assert list(patched_sites(model)) and hooks(model) == 0


def test_long_inputs_come_in_batches() -> None:
    model = vit(num_classes=2)
    patch(model)
    report = check(model, noise(batch=7), batch_size=3, stress=False)
    assert report.ok and report.cases[0].inputs == 7 and report.cases[0].top1_rows == 7
    assert report.sites[0].calls == 1 and not report.stress
    # Two values of output say little: nearby inputs join in, top-1 counts the real one alone.
    report = check(model, noise(batch=1))
    assert report.ok and report.cases[0].top1_rows == 1


def test_turbo_is_judged_by_its_own_rounding() -> None:
    class Rounded(ElsaAttention):
        elsa_base = Attention

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            asked, self.elsa_precision = self.elsa_precision, "strict"  # runs on any machine
            out = super().forward(*args, **kwargs) * (1 + 2.0**-11)
            self.elsa_precision = asked
            return out

    model = with_site(Rounded)
    assert not check(model, noise()).ok
    model.blocks[1].attn.elsa_precision = "turbo"
    assert check(model, noise()).ok


def _compile_block(model: Any, backend: Any) -> None:
    model.blocks[0] = torch.compile(model.blocks[0], backend=backend)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, backend: model.compile(backend=backend),
        lambda model, backend: model.blocks[0].attn.compile(backend=backend),
        _compile_block,
    ],
    ids=["model", "site", "block"],
)
def test_what_is_compiled_in_place_is_judged_eagerly(change: Any) -> None:
    """Compiled code leaves out hooks, and so sites were not reached."""
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        return lambda *args: (runs.append(1), graph.forward(*args))[1]

    torch._dynamo.reset()
    model = vit(depth=2)
    patch(model)
    change(model, backend)
    with torch.no_grad():
        model(noise())
        assert runs
        runs.clear()
        report = check(model, noise())
        assert report.ok and not runs and all(site.operator_calls for site in report.sites)
        model(noise())
    assert runs
    torch._dynamo.reset()


class Twice(nn.Module):
    """One site at two call sites, one that no input reaches, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(32, num_heads=2)
        self.spare = Attention(32, num_heads=2)

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Any]:
        once = x + self.attn(x)
        return {"tokens": self.attn(once + other), "pair": (once.mean(1), torch.arange(3)), "n": 1}


def test_called_twice_not_reached_and_nested_outputs() -> None:
    torch.manual_seed(0)
    model = Twice()
    patch(model)
    given = (torch.randn(2, 9, 32), torch.randn(2, 9, 32))
    report = check(model, {"pair": given})
    site, spare = report.sites
    assert site.ok and site.calls == 6  # two calls, three hard cases of the first and many keys
    assert not spare.ok and "not reached" in spare.reason and math.isnan(spare.max_abs)
    assert report.cases[0].ok and report.cases[0].top1_rows == 0
    assert report.failures == (f"spare: {spare.reason}",)
    assert report.to_dict()["sites"][1]["max_abs"] is None
    model.attn.__class__ = Wrong
    report = check(model, given)
    assert not report.sites[0].ok and not report.cases[0].ok
    assert report.cases[0].output in ("output['tokens']", "output['pair'][0]")
