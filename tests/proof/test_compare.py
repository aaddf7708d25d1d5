"""The parts of the check: the criterion's arithmetic, generated and hard cases, the capture."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa_core import reference
from elsa_core.backends import eager, eager_varlen, eager_window
from elsa_core.base.inputs import as_cases, chunks, generated_inputs
from elsa_core.errors import ArgumentError
from elsa_core.proof.capture import OperatorCapture
from elsa_core.proof.compare import Comparison, Judgement, Top1
from elsa_core.proof.report import SiteRecord, gradient_check, model_check
from elsa_core.proof.samples import nearby
from elsa_core.proof.site_cases import Seen, site_cases

EPS = torch.finfo(torch.float32).eps


def compared(
    original: float, patched: float, factor: float = 2.0, dtype: torch.dtype = torch.float32
) -> Comparison:
    """A comparison whose relative errors are those given, in every element."""
    oracle = torch.ones(8, 16, dtype=torch.float64)
    comparison = Comparison(factor)
    comparison.add(oracle, (oracle * (1 + original)).to(dtype), (oracle * (1 - patched)).to(dtype))
    return comparison


def test_criterion_is_twice_the_original_plus_two_ulp() -> None:
    assert compared(2.0**-10, 2.0**-9).reason() == ""
    assert compared(2.0**-10, 2.0**-9 + EPS).reason() == ""
    failing = compared(2.0**-10, 2.0**-9 + 4 * EPS)
    assert failing.excess > 1
    assert "allowed 1.95e-03 (2 x the original's 9.77e-04" in failing.reason()
    assert compared(2.0**-10, 2.0**-9, factor=1.5).reason() != ""
    exact = compared(0.0, EPS)
    assert exact.reason() == "" and exact.excess == pytest.approx(0.5)
    assert compared(0.0, 3 * EPS).reason() != ""
    bfloat16 = compared(0.0, 2.0**-7, dtype=torch.bfloat16)
    assert bfloat16.band == 2.0**-6 and bfloat16.reason() == ""


def test_one_wrong_element_fails_by_the_largest_error() -> None:
    oracle = torch.ones(100_000, dtype=torch.float64)
    original = (oracle * (1 + 1e-5)).float()
    patched = original.clone()
    patched[7] += 3e-5
    comparison = Comparison(2.0)
    comparison.add(oracle, original, patched)
    assert comparison.patched_error < comparison.allowed
    assert comparison.reason().startswith("largest error 4.0")


def test_values_that_are_not_finite() -> None:
    oracle = torch.tensor([1.0, math.inf, -math.inf, 2.0], dtype=torch.float64)
    good = oracle.float()
    comparison = Comparison(2.0)
    comparison.add(oracle, good, good)
    assert comparison.reason() == "" and comparison.excess == 0
    for bad in (math.nan, math.inf):
        patched = good.clone()
        patched[0] = bad
        comparison = Comparison(2.0)
        comparison.add(oracle, good, patched)
        assert "1 of 4" in comparison.reason() and comparison.patched_error == math.inf
        comparison.add(oracle, patched, good)
        assert comparison.original_error == math.inf and "original is not" in comparison.reason()
    patched = good.clone()
    patched[1] = -math.inf
    comparison = Comparison(2.0)
    comparison.add(oracle, good, patched)
    assert "not finite where the oracle is" in comparison.reason()
    comparison = Comparison(2.0)
    comparison.add(oracle * math.nan, good, good)
    assert "NaN in the float64 oracle" in comparison.reason()


def test_shape_and_dtype_must_agree() -> None:
    for patched in (torch.ones(3), torch.ones(2, dtype=torch.float16)):
        comparison = Comparison(2.0)
        comparison.add(torch.ones(2).double(), torch.ones(2), patched)
        assert "the patched output is float" in comparison.reason()
        assert comparison.excess == math.inf


def test_top1_counts_ties_apart() -> None:
    oracle = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0009, 0.0], [0.0, 2.0, 1.0]]).double()
    original = (oracle + 0.0005).float()
    top1 = Top1()
    top1.add(oracle, original, oracle.float())
    assert (top1.rows, top1.ties, top1.tie_flips, top1.flips) == (3, 1, 0, 0)
    patched = oracle[:, [1, 0, 2]].float()
    top1.add(oracle, original, patched)
    assert (top1.rows, top1.ties, top1.tie_flips, top1.flips) == (6, 2, 1, 2)
    judgement = Judgement(2.0, top1=top1)
    judgement.add_tensors(*[{"output": torch.ones(1)}] * 3)
    assert "2 of 6 rows" in model_check("", "eager", 6, judgement).reason


def test_a_tie_is_what_twice_the_originals_error_can_turn() -> None:
    for gap, ties in ((1.5, 1), (2.5, 0)):
        oracle = torch.tensor([[1.0 + gap * 2.0**-10, 1.0, 0.0]], dtype=torch.float64)
        original = oracle.float()
        original[0, 2] += 2.0**-10
        top1 = Top1()
        top1.add(oracle, original, oracle[:, [1, 0, 2]].float())
        assert (top1.ties, top1.tie_flips, top1.flips) == (ties, ties, 1 - ties)


def test_generated_inputs() -> None:
    state = torch.get_rng_state()
    made = generated_inputs((3, 20, 24), 3, seed=4, dtype=torch.bfloat16, device="cpu")
    again = generated_inputs((3, 20, 24), 3, seed=4, dtype=torch.bfloat16, device="cpu")
    other = generated_inputs((3, 20, 24), 3, seed=5, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert list(made) == ["noise", "constant", "bright patch", "large"]
    for name, image in made.items():
        assert isinstance(image, Tensor) and isinstance(again[name], Tensor)
        assert image.shape == (3, 3, 20, 24) and image.dtype == torch.bfloat16
        assert torch.equal(image, again[name]) and bool(image.isfinite().all())
    assert not torch.equal(made["noise"], other["noise"])
    assert made["constant"][1].float().std() == 0
    tiny = generated_inputs((1, 1, 1), 1, seed=0, dtype=torch.float32, device="cpu")
    assert all(bool(image.isfinite().all()) for image in tiny.values())
    image, tokens = generated_inputs(
        (3, 8, 8), 4, seed=0, dtype=torch.float32, device="cpu", text=(10, 50)
    )["noise"]
    assert image.shape == (4, 3, 8, 8) and tokens.shape == (4, 10)
    assert tokens.dtype == torch.int64 and int(tokens.min()) >= 0 and int(tokens.max()) == 49
    assert bool((tokens.amax(1) == 49).all()) and bool((tokens[:, 0] >= 48).all())
    for size, batch in (((3, 0, 8), 1), ((3, 8), 1), ((3, 8, 8), 0)):
        with pytest.raises(ArgumentError, match="input_size"):
            generated_inputs(size, batch, seed=0, dtype=torch.float32, device="cpu")


def test_cases_and_batches() -> None:
    images, ids, scale = torch.randn(5, 3, 8, 8), torch.arange(5), torch.tensor(2.0)
    cases = as_cases({"a": images, "b": (images, ids, scale, "word")})
    assert list(cases) == ["a", "b"] and len(cases["a"]) == 1
    cut = list(chunks(cases["b"], 2))
    assert [len(part[0]) for part in cut] == [2, 2, 1] == [len(part[1]) for part in cut]
    assert cut[2][2] is scale and cut[1][3] == "word"
    assert torch.equal(torch.cat([part[1] for part in cut]), ids)
    moved = nearby(cases["b"], 1)
    assert torch.equal(moved[1], ids) and moved[3] == "word"
    assert 1e-3 < float((moved[0] - images).norm() / images.norm()) < 5e-2
    assert not torch.equal(nearby(cases["b"], 2)[0], moved[0])
    assert not torch.equal(nearby((torch.zeros(4),), 0)[0], torch.zeros(4))


class Site(nn.Module):
    """The smallest site: one head, and the logits it saw."""

    def __init__(self, channels: int, nchw: bool) -> None:
        super().__init__()
        self.nchw = nchw
        self.q, self.k = (
            nn.Conv2d(channels, 8, 1) if nchw else nn.Linear(channels, 8) for _ in range(2)
        )

    def forward(self, x: Tensor, rope: Any = None, key: Any = None, attn_mask: Any = None) -> Any:
        q, k = self.q(x), self.k(x if key is None else key)
        if self.nchw:
            q, k = (t.flatten(2).mT for t in (q, k))
        self.logits = (q @ k.mT).detach() * 8**-0.5
        return self.logits


@pytest.mark.parametrize("nchw", [False, True])
def test_hard_cases(nchw: bool) -> None:
    torch.manual_seed(0)
    site = Site(12, nchw)
    x = torch.randn(2, 12, 4, 5) if nchw else torch.randn(2, 20, 12)
    before = x.clone()
    mask, rope = torch.randn(2, 1, 20, 20), torch.randn(1, 20, 8)
    largest = float(site(x).abs().max())
    given, seen = ((x, rope), {"attn_mask": mask}), Seen(largest)
    cases = site_cases(site, given, "forward", seen, is_first=False)
    made = {case.name: case.given for case in cases}
    assert list(made) == ["large logits", "constant rows", "dominant token"]
    for args, kwargs in made.values():
        assert args[0].shape == x.shape and args[1] is rope and kwargs["attn_mask"] is mask
    assert torch.equal(x, before)
    site(*made["large logits"][0])
    assert 50 < float(site.logits.abs().max()) < 200
    site(*made["constant rows"][0])
    assert torch.allclose(site.logits, site.logits[..., :1], atol=1e-5)
    site(*made["dominant token"][0])
    rest = site.logits[..., 1:, 1:].abs().max()
    assert float(site.logits[..., 1:, 0].abs().max()) > 4 * float(rest)


def operands(dtype: torch.dtype, tokens: int = 65) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, tokens, 16, generator=generator)
    k, v = (torch.randn(2, 2, tokens + 3, 16, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), (v + 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "bool", "additive", "causal", "both"])
def test_capture_sees_what_the_operator_did(dtype: torch.dtype, kind: str) -> None:
    q, k, v = operands(dtype)
    generator = torch.Generator().manual_seed(1)
    mask = None
    if kind in ("bool", "both"):
        mask = torch.rand(2, 1, 65, 68, generator=generator) > 0.4
        mask[:, :, 3] = False  # a row without any key: zeros, and no NaN in the metrics
    if kind == "additive":
        mask = torch.randn(1, 4, 1, 68, generator=generator)
    causal = kind in ("causal", "both")
    with OperatorCapture() as capture:
        F.linear(q, q[0, 0])
        out, _ = torch.ops.elsa.attention_eager(q, k, v, mask, causal, 0.25, "strict")
    (call,) = capture.calls
    expected, _ = reference.attention(q, k, v, mask, causal, 0.25)
    assert call.reason() == "" and call.rows == 2 * 4 * 65
    assert call.y_error == pytest.approx(reference.relative_l2(out, expected))
    assert call.drift.p_argmax_rate is not None and call.drift.p_argmax_rate.value == 0
    assert call.drift.p_max_abs is not None and call.drift.p_max_abs.value < 1e-5
    assert SiteRecord(drifts=[call.drift]).result("").drift is call.drift
    assert SiteRecord().result("").drift is None


def test_capture_sees_one_missing_key_in_bfloat16() -> None:
    """The output moves by less than an ulp of bfloat16; lse, and so P, are float32."""
    q, k, v = operands(torch.bfloat16, tokens=700)

    def short(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return eager.attention(q, k[:, :, :-1], v[:, :, :-1], *rest)

    with torch.library._scoped_library("elsa", "IMPL") as library, OperatorCapture() as capture:
        library.impl("attention_eager", short, "CPU")
        torch.ops.elsa.attention_eager(0.1 * q, k, v, None, False, 0.25, "strict")
    (call,) = capture.calls
    assert call.y_error <= call.y_allowed and "the operator's weights P" in call.reason()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fault", [0.0, 1e-3])
def test_capture_judges_the_last_of_the_longest_packed_sequences(
    fault: float, is_causal: bool
) -> None:
    """Queries that have no keys at all are not judged."""
    starts = torch.tensor([0, 9, 709, 709, 1409, 1412], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1412, h, 16, generator=generator).bfloat16() for h in (4, 2, 2))

    def faulty(*given: Any) -> tuple[Tensor, Tensor]:
        out, lse = eager_varlen.attention(*given)
        longest = [a for a, b in pairwise(given[3].tolist()) if b - a == 700]
        lse[:, longest[-1] : longest[-1] + 700] += fault
        return out, lse

    terms = (is_causal, 0.25, "strict")
    with torch.library._scoped_library("elsa", "IMPL") as library, OperatorCapture() as capture:
        library.impl("varlen_attention_eager", faulty, "CPU")
        torch.ops.elsa.varlen_attention_eager(0.1 * q, k, v, starts, starts, *terms)
        none = torch.zeros_like(starts)
        torch.ops.elsa.varlen_attention_eager(q, k[:0], v[:0], starts, none, *terms)
    (call,) = capture.calls
    assert call.keys == 700 and call.y_error <= call.y_allowed
    assert ("the operator's weights P" in call.reason()) is (fault > 0.0)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_capture_sees_what_the_window_operator_returned(factor: float) -> None:
    def off(*given: Any) -> Tensor:
        return factor * eager_window.attention(*given)

    qkv = torch.randn(1, 1, 4, 4, 24, generator=torch.Generator().manual_seed(0))
    rest = (2, (1, 2, 2), (0, 0, 0), 0.5, -100.0, "qkv", False, "strict")
    with torch.library._scoped_library("elsa", "IMPL") as library, OperatorCapture() as capture:
        library.impl("window_attention_eager", off, "CPU")
        torch.ops.elsa.window_attention_eager(qkv, None, None, None, None, *rest)
    (call,) = capture.calls
    assert bool(call.reason()) is (factor != 1.0)
    if factor != 1.0:
        assert call.y_error == pytest.approx(1e-3, rel=0.01)


def test_a_gradient_of_rounding_alone_is_not_the_worst_shown() -> None:
    """Of a bias of keys every gradient is noise, equal to none; it is judged all the same."""
    judgement = Judgement(2.0)
    noise, exact = torch.full((64,), 1e-9), torch.zeros(64, dtype=torch.float64)
    judgement.add_tensors({"k.bias": exact}, {"k.bias": noise}, {"k.bias": noise})
    slope = torch.ones(64, dtype=torch.float64)
    judgement.add_tensors({"q": slope}, {"q": slope.float()}, {"q": slope.float()})
    found = gradient_check("attn", [("noise", judgement)])
    assert (found.worst, found.gradients, found.ok) == ("q", 2, True)
    judgement.comparisons["k.bias"].patched.add(noise.double() * 9)
    found = gradient_check("attn", [("noise", judgement)])
    assert (found.worst, found.wrong, found.ok) == ("k.bias", ("k.bias",), False)
