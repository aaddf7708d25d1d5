"""The portable kernels without a GPU: their source run on the CPU thread by thread against float64,
their code compiled for GPUs, and the way to both.
"""

import math
from pathlib import Path

import portable_code
import pytest
import torch
import torch.nn.functional as F
from conformance import portable_cpu
from conformance.portable_cpu import AT_START, AT_WAIT, PLAIN
from torch import Tensor

from elsa_core import reference
from elsa_core.backends.portable import attention, nvrtc, tiling
from elsa_core.errors import UnavailableError
from elsa_core.precision import theorem1_bound

EPS, ULPS = torch.finfo(torch.float32).eps, 4
TURING, AMPERE, HOPPER = (portable_code.LIMITS[arch] for arch in (75, 80, 90))
# What an instance is compiled for, and how that device copies.
DEVICES = ((TURING, PLAIN), (AMPERE, AT_START), (HOPPER, AT_WAIT))


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(q: Tensor, k: Tensor, v: Tensor, limit: int, copies: int) -> None:
    """Against float64 by twice PyTorch's error; the same bits whatever order threads run in."""
    found, other = (
        portable_cpu.attention(q, k, v, limit=limit, copies=copies, backwards=backwards)
        for backwards in (False, True)
    )
    assert all(map(torch.equal, found, other))
    exact, exact_lse = reference.attention(q, k, v)
    theirs = relative(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), exact)
    assert relative(found[0], exact) <= 2 * theirs + ULPS * EPS
    spread = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * q.shape[-1] ** -0.5
    assert (found[1].double() - exact_lse).abs().max() <= EPS * (ULPS + 4 * spread)


def operands(queries: int, keys: int, dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two batches, four heads of queries on two of keys."""
    return (
        make(2, 4, queries, dim), make(2, 2, keys, dim, seed=1), make(2, 2, keys, value_dim, seed=2)
    )  # fmt: skip


# The kernel, thread by thread


@pytest.mark.parametrize(("limit", "copies"), DEVICES)
def test_tiles_of_devices(limit: int, copies: int) -> None:
    """A whole tile, a tail of few keys, one of many, and rows beyond the last query."""
    for queries, keys in ((131, 145), (5, 63), (1, 1)):
        check(*operands(queries, keys, 64, 64), limit, copies)


def test_merges_stay_within_theorem_1() -> None:
    """Scores of zero are exact, so that the error is that of the sums alone: with one chain of
    additions over all keys it would be above the bound.
    """
    keys = 1 << 16
    v = torch.rand(1, 1, keys, 32, generator=torch.Generator().manual_seed(0))
    k = torch.zeros(1, 1, keys, 32)
    exact = v.double().mean(2)
    bound = theorem1_bound(keys, 64)
    chain = torch.zeros(32)
    for row in v[0, 0]:
        chain += row
    assert relative(chain / keys, exact[0, 0]) > bound
    out, lse = portable_cpu.attention(k[:, :, :1], k, v, limit=HOPPER)
    assert relative(out[:, :, 0], exact) <= bound
    assert lse.item() == pytest.approx(math.log(keys), rel=EPS)


def test_a_maximum_that_stays_changes_no_weight() -> None:
    """Of alike keys the first ones count for no more than the last, whatever their score is: a
    compiler that fuses the rounded reference's product would let each tile change the state.
    """
    keys = 1 << 13
    k, v = torch.full((1, 1, keys, 32), 1.0), torch.zeros(1, 1, keys, 32)
    v[:, :, : keys // 2] = 1.0
    q = torch.linspace(0.1, 9.0, 16).view(1, 1, 16, 1).expand(1, 1, 16, 32).contiguous()
    out, _ = portable_cpu.attention(q, k, v, limit=HOPPER)
    assert (out.double() - 0.5).abs().max() <= theorem1_bound(keys, 64)


# Tiles


@pytest.mark.parametrize("arch", portable_code.LIMITS)
def test_every_head_dim_has_a_tile(arch: int) -> None:
    limit = portable_code.LIMITS[arch]
    for dim in range(1, 257):
        for value_dim in (1, dim, 256):
            found = tiling.instance(dim, value_dim, 1, "additive", True, limit)
            assert found.shared_bytes <= limit and found.threads <= 1024
            assert dim <= found.head < dim + 4 and value_dim <= found.value < value_dim + 64
            # the state of a thread, and the sums of a tile beside it
            assert 2 * found.rows * found.value // found.lanes <= 160
    with pytest.raises(UnavailableError, match="shared memory"):
        tiling.instance(256, 256, 4, "none", False, 1 << 14)


# Compiled code


def _nvrtc_missing() -> str:
    try:
        nvrtc.library()
    except UnavailableError as error:
        return str(error)
    return ""


with_nvrtc = pytest.mark.skipif(bool(_nvrtc_missing()), reason=_nvrtc_missing() or "it is here")


@pytest.fixture(scope="module")
def codes() -> dict[str, bytes]:
    """Instances of every tile class on four architectures, with all masks and loads."""
    asked = ((75, (64, 64), 4, "none", True), (90, (64, 64), 4, "none", False),
             (80, (128, 128), 2, "bool", False), (120, (63, 20), 1, "additive", False),
             (75, (256, 256), 4, "bool", False))  # fmt: skip
    found = {}
    for arch, dims, load, mask, causal in asked:
        instance = tiling.instance(*dims, load, mask, causal, portable_code.LIMITS[arch])
        found[f"sm_{arch} {dims}"] = portable_code.compiled(instance, f"sm_{arch}")
    return found


@with_nvrtc
def test_machine_code_has_no_matrix_instruction(codes: dict[str, bytes]) -> None:
    tool = portable_code.disassembler()
    if tool is None:
        pytest.skip("the disassembler is in Triton's wheel, which is not here")
    for name, code in codes.items():
        found = portable_code.opcodes(code, tool)
        assert found.count("FFMA") > 500, name
        assert not portable_code.matrix_instructions(found), name
    # and the search finds one where there is one
    fragment = b"""extern "C" __global__ void product(unsigned* p) {
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},"
                   "{%0,%1,%2,%3}, {%0,%1}, {%0,%1,%2,%3};"
                   : "+r"(p[0]), "+r"(p[1]), "+r"(p[2]), "+r"(p[3]));
    }"""
    product = nvrtc.library().compile(fragment, {}, "sm_90")
    assert portable_code.matrix_instructions(portable_code.opcodes(product, tool))
    text = nvrtc.library().compile(fragment, {}, "compute_90")
    assert portable_code.matrix_lines(text)


@with_nvrtc
def test_ptx_has_no_matrix_instruction() -> None:
    """What a GPU newer than NVRTC gets, looked at without a disassembler."""
    instance = tiling.instance(64, 64, 4, "none", False, HOPPER)
    text = portable_code.compiled(instance, "compute_90")
    assert text.count(b"fma.rn.f32") > 500
    assert not portable_code.matrix_lines(text)


@with_nvrtc
def test_targets() -> None:
    archs = nvrtc.library().archs
    assert nvrtc.target(archs[0]) == f"sm_{archs[0]}"
    assert nvrtc.target(999) == f"compute_{archs[-1]}"
    with pytest.raises(UnavailableError, match="older than"):
        nvrtc.target(20)
    with pytest.raises(UnavailableError, match="NVRTC does not compile"):
        nvrtc.library().compile(b"nonsense", {}, "sm_90")


@with_nvrtc
def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of this user alone, under digests; one that was changed is compiled again."""
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    said: list[str] = []

    def compiled(_: nvrtc.Nvrtc, source: bytes, macros: dict[str, int], arch: str) -> bytes:
        said.append(arch)
        return b"code of " + arch.encode()

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compiled)
    instance = tiling.instance(64, 64, 4, "none", False, HOPPER)
    for _ in range(2):
        assert nvrtc.compiled(instance, 90) == b"code of sm_90"
    assert said == ["sm_90"]
    (path,) = tmp_path.rglob("*.cubin")
    path.write_bytes(b"another code")
    assert nvrtc.compiled(instance, 90) == b"code of sm_90"
    path.chmod(0o666)
    assert nvrtc.compiled(instance, 90) == b"code of sm_90"
    assert said == ["sm_90"] * 3
    assert nvrtc.compiled(instance._replace(mask=1), 90) and len(said) == 4


# Launches


class Fake:
    """A driver that notes its calls; `failing` gives an error."""

    def __init__(self, failing: str = ""):
        self.said: list[tuple[str, tuple[object, ...]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.said.append((name, arguments))
            return 700 if name == self.failing else 0

        return call


@pytest.mark.parametrize("failing", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"])
def test_errors_of_the_driver_are_one_line(failing: str) -> None:
    fake = Fake(failing)
    cuda = attention.Driver(fake)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=f"^{failing} failed: unknown$"):
        cuda.launch(0, cuda.function(0, b"", b"", 0), 1, 32, 0, 0, attention.Arguments())
    names = [name for name, _ in fake.said]
    assert names.count("cuCtxPushCurrent_v2") == names.count("cuCtxPopCurrent_v2")
    assert ("cuModuleUnload" in names) is (failing == "cuModuleGetFunction")


def test_sizes_that_no_launch_has() -> None:
    q = torch.empty(1, 1, 1, 4)
    many = q.expand(1, 1, (1 << 31) - 1, 4)
    with pytest.raises(UnavailableError, match="fewer than"):
        attention.arguments_of(many, q, q, None, 1.0, q, q)
    instance = tiling.instance(4, 4, 4, "none", False, HOPPER)
    with pytest.raises(UnavailableError, match="grid"):
        attention.blocks_of(instance, attention.Arguments(queries=1 << 30, batch_heads=1 << 10))


# Routes


def test_wide_loads_need_aligned_rows_of_one_token_too() -> None:
    """A tile's other rows are not read, but their addresses are formed."""
    wide = torch.randn(2, 3, 4, 64)
    odd, apart = torch.randn(2, 3, 4, 65)[:, :, :1, :64], wide.transpose(2, 3)[..., :4, :4]
    one = wide[:1].as_strided((1, 3, 4, 64), (7, 256, 64, 1))

    def load(*operands: torch.Tensor) -> int:
        return attention.instance_of(*operands, None, False, limit=HOPPER).load

    assert load(wide, wide, wide) == max(tiling.LOADS)
    assert load(wide, odd, wide) == load(wide, wide, odd) == load(odd, wide, wide) == 1
    assert load(apart, apart, apart) == 1
    assert load(one, one, one) > 1
