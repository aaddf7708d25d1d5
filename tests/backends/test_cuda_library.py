"""The CUDA library without a GPU: what it launches, over a driver that writes down its calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"

DECLARATIONS = r"""
#include <cuda.h>
#include "driver.h"
namespace e = elsa_cuda;
#define SAME(a, b) static_assert(static_cast<long long>(a) == static_cast<long long>(b))
#define PLACE(ours, theirs) SAME(offsetof(e::Config, ours), offsetof(CUlaunchConfig, theirs))
SAME(sizeof(e::Config), sizeof(CUlaunchConfig));
PLACE(grid, gridDimX);
PLACE(block, blockDimX);
PLACE(shared_bytes, sharedMemBytes);
PLACE(stream, hStream);
PLACE(attributes, attrs);
PLACE(attribute_count, numAttrs);
SAME(sizeof(e::Attribute), sizeof(CUlaunchAttribute));
SAME(offsetof(e::Attribute, value), offsetof(CUlaunchAttribute, value));
SAME(sizeof(e::Address), sizeof(CUdeviceptr));
SAME(sizeof(e::Device), sizeof(CUdevice));
SAME(e::kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(e::kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(e::kClusterSchedulingPolicy, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
SAME(e::kProgrammaticStreamSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(e::kClusterSpread, CU_CLUSTER_SCHEDULING_POLICY_SPREAD);
SAME(e::kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(e::kNonPortableClusterAllowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(e::kPreferShared, CU_FUNC_CACHE_PREFER_SHARED);
// A function declared by cuda.h and the pointer that the driver is called by take the same.
template <typename... Ours, typename... Theirs>
constexpr bool same(int (*)(Ours...), CUresult (*)(Theirs...)) {
  return sizeof...(Ours) == sizeof...(Theirs) && ((sizeof(Ours) == sizeof(Theirs)) && ...);
}
#define NAMED(field, theirs) static_assert(same(decltype(e::Driver::field)(nullptr), \
                                                decltype(&theirs)(nullptr)));
NAMED(init, cuInit)
NAMED(device_get, cuDeviceGet)
NAMED(primary_context, cuDevicePrimaryCtxRetain)
NAMED(current_context, cuCtxGetCurrent)
NAMED(current_device, cuCtxGetDevice)
NAMED(push_context, cuCtxPushCurrent_v2)
NAMED(pop_context, cuCtxPopCurrent_v2)
NAMED(load_module, cuModuleLoadData)
NAMED(get_function, cuModuleGetFunction)
NAMED(unload_module, cuModuleUnload)
NAMED(set_attribute, cuFuncSetAttribute)
NAMED(set_cache, cuFuncSetCacheConfig)
NAMED(launch, cuLaunchKernelEx)
NAMED(fill, cuMemsetD8Async)
NAMED(error_name, cuGetErrorName)
NAMED(error_text, cuGetErrorString)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that gives out handles and runs nothing."""
    path = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{SOURCES}"]
    subprocess.run([*command, str(HERE / "cuda_stub.cpp"), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize(("program", "checks"), [("cuda_calls.py", 4), ("cuda_plans.py", 9)])
def test_over_a_stub_driver(program: str, checks: int, stub: Path, tmp_path: Path) -> None:
    """`cuda_calls.py`: planned calls make the launches that Triton would; `cuda_plans.py`: plans,
    keys, threads, contexts, errors and hostile bytes."""
    environment = {**os.environ, "STUB_LOG": str(tmp_path / "log"), "ELSA_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(stub)],
        capture_output=True, text=True, check=False, env=environment, timeout=600,
    )  # fmt: skip
    assert done.stdout == f"{checks} done\n", done.stdout + done.stderr


def test_declarations_are_those_of_cuda(tmp_path: Path) -> None:
    """Layouts and values that csrc/cuda/driver.h repeats, against the cuda.h that Triton brings."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if not (headers / "cuda.h").exists():
        pytest.skip("this Triton comes without cuda.h")
    program = tmp_path / "declarations.cpp"
    program.write_text(DECLARATIONS)
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{headers}", f"-I{SOURCES}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
