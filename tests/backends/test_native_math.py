"""The kernels' own exp2, log and 16-bit conversions, compiled alone and compared with float64."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from elsa_core.backends import compiler, native

PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include "elsa/simd.h"

using namespace elsa;

template <class F>
void each(const float* in, float* out, size_t count, F f) {
  for (size_t i = 0; i < count; i += kLanes) store(out + i, f(load(in + i)));
}

// in: `count` words; out: as many. The count is a multiple of every register's lanes.
extern "C" void run(int what, const void* in, void* out, size_t count) {
  const float* x = static_cast<const float*>(in);
  float* y = static_cast<float*>(out);
  if (what == 0) each(x, y, count, [](Floats v) { return exp2_nonpositive(v); });
  if (what == 1) each(x, y, count, [](Floats v) { return log_positive(v); });
  const uint16_t* h = static_cast<const uint16_t*>(in);
  for (size_t i = 0; i < count; i += kLanes) {
    if (what == 2 || what == 3) {
      const Halves v = *reinterpret_cast<const HalvesUnaligned*>(h + i);
      store(y + i, what == 2 ? from_half(v) : from_bfloat(v));
    }
  }
  uint16_t* z = static_cast<uint16_t*>(out);
  for (size_t i = 0; i < count; ++i) {
    if (what == 4) z[i] = to_half(x[i]);
    if (what == 5) z[i] = to_bfloat(x[i]);
  }
  for (size_t i = 0; i < count; i += kLanes) {
    if (what == 6 || what == 7) {
      const Floats v = load(x + i);
      *reinterpret_cast<HalvesUnaligned*>(z + i) = what == 6 ? to_half(v) : to_bfloat(v);
    }
  }
}
"""
SANITIZED = r"""
#include <cstdio>
#include <cstring>
#include "elsa/simd.h"

using namespace elsa;

int main() {
  float log = 0, power = 0, half = 0;
  for (uint64_t first = 0; first < (1ull << 32); first += 65537 * kLanes) {
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t bits = static_cast<uint32_t>(first + i * 65537);
      memcpy(x + i, &bits, 4);
    }
    const Floats v = load(x);
    log += log_positive(v)[0];
    power += exp2_nonpositive(v)[0];
    half += from_half(to_half(v))[0] + from_bfloat(to_bfloat(v))[0];
  }
  printf("%g %g %g\n", log, power, half);
}
"""
EXP2, LOG, FROM_HALF, FROM_BFLOAT, TO_HALF, TO_BFLOAT, TO_HALVES, TO_BFLOATS = range(8)


class Math:
    """One instruction set's functions."""

    def __init__(self, library: Path) -> None:
        import ctypes

        self._run = ctypes.CDLL(str(library)).run
        self._run.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
        ]  # fmt: skip

    def __call__(self, what: int, x: np.ndarray, dtype: type) -> np.ndarray:
        padded = np.concatenate([x, np.full(-len(x) % 64, x[-1], x.dtype)])
        out = np.empty(len(padded), dtype)
        self._run(what, padded.ctypes.data, out.ctypes.data, len(padded))
        return out[: len(x)]


def names() -> list[str]:
    return list(compiler.kernels())


def skip_what_does_not_run(kernels: str) -> None:
    order = names()
    best = next(i for i, n in enumerate(order) if n.lower() == native.isa())
    if order.index(kernels) > best:
        pytest.skip(f"this process runs {native.isa()} kernels at most")


@pytest.fixture(scope="module", params=names())
def math(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Math:
    """Compiled with the flags of the library; skipped where this CPU cannot run them."""
    skip_what_does_not_run(request.param)
    directory = tmp_path_factory.mktemp("math")
    (directory / "math.cpp").write_text(PROGRAM)
    library = directory / f"{request.param}.so"
    subprocess.run(
        [
            *compiler.compiler(), *compiler.FLAGS, "-fvisibility=default",
            *compiler.kernels()[request.param], f"-I{compiler.source_directory()}",
            "-shared", str(directory / "math.cpp"), "-o", str(library),
        ],
        check=True,
    )  # fmt: skip
    return Math(library)


def floats(low: float, high: float, step: int) -> np.ndarray:
    """Every `step`-th float between two of the same sign."""
    first, last = np.array([low, high], np.float32).view(np.int32)
    return np.arange(min(first, last), max(first, last), step, np.int32).view(np.float32)


def ulps(x: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(x - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_exp2_is_near_one_ulp(math: Math) -> None:
    x = np.concatenate([floats(-126.0, -1e-20, 211), np.linspace(-4, 0, 1 << 21, dtype=np.float32)])
    exact = np.exp2(x.astype(np.float64))
    assert ulps(math(EXP2, x, np.float32), exact) <= 1.25  # 1.0 where multiply-add is fused


def test_exp2_at_its_ends(math: Math) -> None:
    x = np.array([0.0, -0.0, -127.0, -1e30, -np.inf, np.nan, -1.0, -126.0], np.float32)
    assert np.array_equal(
        math(EXP2, x, np.float32),
        np.array([1, 1, 0, 0, 0, np.nan, 0.5, 2.0**-126], np.float32),
        equal_nan=True,
    )
    payloads = np.arange(0x7F800001, 0x80000000, 9973, np.int64).astype(np.int32).view(np.float32)
    assert np.isnan(math(EXP2, payloads, np.float32)).all()
    assert np.isnan(math(EXP2, -payloads, np.float32)).all()


def test_log_is_within_two_ulps(math: Math) -> None:
    x = np.concatenate([floats(2.0**-126, 3e38, 997), floats(0.5, 2.0, 7)])
    x = x[x != 1.0]
    assert ulps(math(LOG, x, np.float32), np.log(x.astype(np.float64))) <= 2.0
    assert math(LOG, np.ones(1, np.float32), np.float32)[0] == 0.0
    assert np.isnan(math(LOG, np.full(1, np.nan, np.float32), np.float32)[0])


def test_half_and_bfloat_to_float(math: Math) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    half = math(FROM_HALF, every, np.float32)
    assert np.array_equal(half, every.view(np.float16).astype(np.float32), equal_nan=True)
    bfloat = math(FROM_BFLOAT, every, np.float32)
    assert np.array_equal(bfloat.view(np.uint32), every.astype(np.uint32) << 16)


@pytest.mark.parametrize(("to_half", "to_bfloat"), [(TO_HALF, TO_BFLOAT), (TO_HALVES, TO_BFLOATS)])
def test_float_to_half_and_bfloat(math: Math, to_half: int, to_bfloat: int) -> None:
    import torch

    bits = np.arange(0, 1 << 32, 4099, np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 13) + 0x1000 + 0x38000000
    x = np.concatenate([bits, ties, ties | 0x80000000, ties ^ 0x8000]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        half = x.astype(np.float16)
    assert np.array_equal(math(to_half, x, np.uint16).view(np.float16), half, equal_nan=True)
    found = torch.from_numpy(math(to_bfloat, x, np.uint16).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("kernels", names())
def test_no_undefined_behaviour_for_any_float(kernels: str, tmp_path: Path) -> None:
    """The logarithm of a NaN with a sign once overflowed a signed subtraction."""
    skip_what_does_not_run(kernels)
    (tmp_path / "every.cpp").write_text(SANITIZED)
    command = [
        *compiler.compiler(), "-std=c++20", "-O1", "-w", "-fsanitize=undefined",
        "-fno-sanitize-recover=all", *compiler.kernels()[kernels],
        f"-I{compiler.source_directory()}", str(tmp_path / "every.cpp"),
        "-o", str(tmp_path / "every"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([tmp_path / "every"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
