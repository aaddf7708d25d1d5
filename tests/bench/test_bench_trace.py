"""The structural proof: partitions come from the backends, replays are exact, lies are caught."""

from dataclasses import replace

import pytest
import torch
from command import Elsa

from elsa_core import explain, monoid
from elsa_core.backends import native
from elsa_core.backends.partition import Partition, RoundTrip
from elsa_core.backends.support import Request
from elsa_core.errors import UnavailableError
from elsa_core.profiling.bench import trace
from elsa_core.profiling.bench.cases import Case, inputs

from .conftest import Offered

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NATIVE = native.support(Request("cpu", torch.float32, 64, 64, "strict")).ok
needs_native = pytest.mark.skipif(not NATIVE, reason="the native library does not build here")
HERE = RoundTrip("registers", "m, S, W in float32", 0, 0, 0, 0)


def made(
    keys: int, key_tile: int, splits: int, split_keys: int, chain_keys: int | None = None
) -> Partition:
    tiles = -(-keys // key_tile)
    return Partition(
        "triton", "words", "GPU", 5, keys, 64, 1, key_tile, tiles, splits, split_keys,
        chain_keys or split_keys, 1, 0, HERE,
    )  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@needs_native
@pytest.mark.parametrize(
    "case",
    [
        Case("t", 2, 3, 33, 33, 16),
        Case("t", 1, 2, 40, 1301, 64),
        Case("t", 1, 2, 9, 700, 80, "bf16", mask="additive"),
        Case("t", 1, 1, 1, 3000, 32, "fp16"),
        Case("t", 1, 1, 7, 1, 16),
        Case("t", 1, 2, 20, 2100, 24, "fp64"),
    ],
    ids=lambda case: case.name,
)
def test_every_claim_holds_on_the_cpu(case: Case) -> None:
    found = trace.trace(case, CPU, "strict")
    assert [c.name for c in found.claims] == ["cover", "exact", "stable", "theorem 1", "kernel"]
    assert all(claim.ok for claim in found.claims), found.claims
    part = found.partition
    assert part.backend == ("eager" if case.dtype == "fp64" else "native")
    assert part.schedule == explain(*inputs(case, "cpu")).schedule
    assert part.key_tiles == len(part.leaves()) and part.spans()[-1][1] == case.keys


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("precision", ["strict", "turbo", "lean", "ieee"])
def test_a_gpus_schedule_is_planned_and_replayed_without_one(precision: str) -> None:
    pytest.importorskip("triton")
    found = trace.trace(Case("t", 1, 2, 300, 2050, 64), CUDA, precision)
    part = found.partition
    assert found.to_dict()["ok"] and found.claims[-1].ok is None
    assert "no CUDA GPU" in found.claims[-1].note
    if precision == "lean":
        assert part.splits == 1 and part.states.states == part.ahead_bytes == 0


@pytest.mark.usefixtures("no_gpu")
def test_one_query_and_what_the_gpu_does_not_take() -> None:
    pytest.importorskip("triton")
    part = trace.trace(Case("t", 1, 2, 1, 4096, 64, "fp16"), CUDA, "strict").partition
    assert part.query_tile == part.query_tiles == 1 and "one query" in part.schedule
    with pytest.raises(UnavailableError, match="eager serves it there"):
        trace.trace(Case("t", 1, 1, 4, 4, 16, "fp64"), CUDA, "strict")
    with pytest.raises(UnavailableError, match="triton alone plans calls, not 'native'"):
        trace.trace(Case("t", 1, 1, 4, 4, 16), CUDA, "strict", backend="native")


def test_a_replay_follows_any_partition() -> None:
    scores = torch.randn(2, 5, 100, dtype=torch.float64)
    scores[:, 1] = -torch.inf  # a row that sees nothing
    scores[:, 2, 30:] = -torch.inf  # splits that see nothing
    value = torch.randn(2, 100, 8, dtype=torch.float64)
    expected, _ = monoid.finalize(monoid.lift(scores, value[:, None]))
    for cut in ((100, 1, 100), (16, 1, 112), (8, 5, 24), (7, 3, 35), (8, 2, 56, 16)):
        part = made(100, *cut)
        output = trace.replay(part, scores, value, torch.float64)
        torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-14)
        assert trace._cover(part).ok


def test_a_lie_is_caught() -> None:
    lost = made(100, 16, 2, 48)  # four keys in no leaf
    claim = trace._cover(lost)
    assert claim.ok is False and claim.found == 4 + 1  # and one leaf fewer than there should be
    assert trace._cover(replace(made(100, 16, 1, 112), key_tiles=6)).ok is False
    case = Case("t", 1, 2, 9, 100, 16)
    tensors = inputs(case, "cpu")
    sample = trace.sample_of(case, tensors)
    wrong = sample.pick(torch.nn.functional.scaled_dot_product_attention(*tensors[:3])) + 1e-4
    claims = {c.name: c for c in trace._replayed(lost, sample, "strict", wrong)}
    assert claims["exact"].ok is claims["stable"].ok is claims["kernel"].ok is False
    assert not trace.Trace(case, "strict", lost, (0,), (0,), (claim,)).to_dict()["ok"]
    honest = {c.name: c for c in trace._replayed(made(100, 16, 1, 112), sample, "strict", wrong)}
    assert honest["exact"].ok and honest["kernel"].ok is False


def test_the_command_shows_and_proves(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["bench", "attention", "--trace", "--device", "cpu", "--shape", "1,2,40:1301,32"]
    code, out, err = elsa(*arguments)
    assert code == 0
    assert err == "" and "merge depth" in out and "round trip" in out and "✓" in out
    assert "1 call traced: every tried claim holds" in out and max(map(len, out.split("\n"))) <= 90
    document = elsa(*arguments, "--json").document()
    found = document["results"]["traces"][0]
    assert found["ok"] and found["case"]["name"] == "shape/1x2x40:1301x32-fp32"
    assert found["partition"]["tree"]["scan_depth"] >= 11


def test_a_backend_of_another_package_is_proved(elsa: Elsa, offered: Offered) -> None:
    """What its record tells is replayed; of a record that tells nothing one line says so."""

    def attend(q, k, v, mask, is_causal, scale, precision):
        scores = q @ k.mT * scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def wrong(*given):
        out, lse = attend(*given)
        return out + 1e-3, lse

    def tell(q, k, v, mask, is_causal, precision):
        return replace(made(k.shape[2], 16, 2, 48), backend="toy", schedule="in two halves")

    arguments = ["bench", "attention", "--trace", "--device", "cpu", "--shape", "1,2,9:90,16"]
    for serve, told, status in ((attend, tell, 0), (attend, None, 3), (wrong, tell, 1)):
        with offered(serve, partition=told):
            code, out, err = elsa(*arguments)
        assert code == status
        assert ("toy" in out and "in two halves" in out) is (told is not None)
        assert err.count("\n") == (status > 0)
        assert {0: "", 1: "a structural claim does not hold: shape/1x2x9:90x16-fp32",
                3: "error: backend='toy' tells no partition"}[status] in err  # fmt: skip
        assert ("✗ no" in out) is (status == 1)
    assert elsa(*arguments, "--backend", "sdpa").code == 3  # PyTorch's kernels tell nothing


def test_entmax_is_not_traced_as_softmax(elsa: Elsa) -> None:
    """The traces named cases of entmax, and were of softmax attention on the same shapes."""
    arguments = ["bench", "attention", "--trace", "--device", "cpu", "--case"]
    code, out, _ = elsa(*arguments, "vit/1x12x197*", "--case", "entmax/8x12x197*")
    assert code == 0 and "1 call traced" in out and "entmax" not in out
    elsa(*arguments, "entmax/8x12x197*").fails(2, "none of these calls is of softmax attention")
