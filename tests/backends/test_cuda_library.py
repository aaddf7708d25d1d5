"""The CUDA library without a GPU: what it launches, over a driver that writes down its calls."""

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import environment, forked, python

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.compiler

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
CUDA_HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"

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
NAMED(device_count, cuDeviceGetCount)
NAMED(device_get, cuDeviceGet)
NAMED(device_attribute, cuDeviceGetAttribute)
SAME(75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(76, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
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


def test_over_a_stub_driver(stub: Path, tmp_path: Path) -> None:
    """`cuda_calls`: planned calls make the launches that Triton would, of every second operator;
    `cuda_plans`: plans, keys, threads, contexts, errors and hostile bytes; `cuda_planfile`: plans
    in a file; `cuda_short`: functions that pass by the dispatcher; `cuda_first`: a first call.
    """
    modules = [f"cuda_{name}" for name in ("first", "calls", "plans", "planfile", "short")]
    env = environment(STUB_LOG=str(tmp_path / "log"), ELSA_NATIVE="0")
    done = python(HERE / "cuda_checks.py", stub, *modules, timeout=900, env=env)
    assert done.stdout == "27 done\n", done.stdout + done.stderr


def test_declarations_are_those_of_cuda(tmp_path: Path) -> None:
    """Layouts and values that csrc/cuda/driver.h repeats, against the cuda.h that Triton brings."""
    if not (CUDA_HEADERS / "cuda.h").exists():
        pytest.skip("this Triton comes without cuda.h")
    program = tmp_path / "declarations.cpp"
    program.write_text(DECLARATIONS)
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{CUDA_HEADERS}", f"-I{SOURCES}"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ASKED = """
import torch, elsa_core as elsa
from elsa_core.backends import cuda
from elsa_core.dispatch import table
has = torch._C._dispatch_has_kernel_for_dispatch_key
for name in table.KERNELS_ON_CUDA:
    key = "CompositeExplicitAutograd" if name in table.BY_LIBRARY else "CUDA"
    assert has(f"elsa::{name}", key), name
    assert has(f"elsa::{name}", "CUDA") == (name not in table.BY_LIBRARY or cuda.status().ok)
x = torch.randn(1, 2, 5, 8)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
torch.testing.assert_close(elsa.attention(x, x, x), expected)
if cuda.status().ok:
    compiled = torch.compile(elsa.attention, backend="eager")
    torch.testing.assert_close(compiled(x, x, x), expected)
print(cuda.status().ok, cuda.status().reason)
"""

GPU = """
import torch, elsa_core as elsa
from elsa_core.backends import cuda
torch.cuda.is_available = lambda: True
import sys
from elsa_core.ops.factory import _ON_CUDA
assert not cuda._SERVED
has = torch._C._dispatch_has_kernel_for_dispatch_key
# what the dispatcher and an eager call come to: each of them loads the library
first = {"operator": lambda: _ON_CUDA["linear"](torch.ones(2, 3), torch.ones(4, 3)),
         "direct": lambda: cuda.direct(torch.ops.elsa.linear.default, lambda *given: None)(None)}
try:
    first[sys.argv[1]]()
except Exception:
    pass  # there is no GPU: the call itself cannot be served
print(cuda._DECIDED.is_set(), bool(cuda._SERVED))
print(cuda.serves("attention"), cuda.status().reason)
print(*(has(f"elsa::{name}", "CUDA") for name in ("attention", "linear", "linear_backward")))
"""

INTERRUPTED = """
import torch, elsa_core as elsa
from elsa_core.backends import cuda
from elsa_core.backends.cuda.library import Library
torch.cuda.is_available = lambda: True
real, calls = Library.register, []
def register(self, operator, key):
    calls.append(operator)
    if len(calls) == 2:
        raise KeyboardInterrupt
    real(self, operator, key)
Library.register = register
try:
    cuda.ready()
except KeyboardInterrupt:
    print(len(cuda._SERVED))
print(cuda.ready(), len(cuda._SERVED) == len(cuda.OFFERED), cuda._FAILED)
"""

BUNDLE_FIRST = """
import torch
library = torch.library.Library("elsa", "FRAGMENT")
library.define("linear(Tensor input, Tensor weight, Tensor? bias=None, str activation='none', "
               "Tensor? residual=None, Tensor? scale=None, str precision='strict') "
               "-> Tensor")
def refuses(*given):
    raise RuntimeError("not in this bundle")
library.impl("linear", refuses, "CUDA")
import elsa_core
from elsa_core.dispatch import table
kernel = torch.library.get_kernel("elsa::linear", "CUDA")
terms = (None, "none", None, None, "ieee")
on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
print(kernel.call_boxed(on_cuda, torch.ones(2, 3), torch.ones(4, 3), *terms))
"""
# program, arguments and the value of ELSA_CUDA_LIBRARY, and other variables
PROGRAMS: dict[str, tuple[str, list[str], str, dict[str, str]]] = {
    "asked for": (ASKED, [], "1", {}),
    "no GPU": (ASKED, [], "", {"CUDA_VISIBLE_DEVICES": ""}),
    "no GPU, off": (ASKED, [], "0", {"CUDA_VISIBLE_DEVICES": ""}),
    "asked for, broken": (ASKED, [], "1", {"CXX": "no-such-compiler"}),
    "operator": (GPU, ["operator"], "", {}),
    "direct": (GPU, ["direct"], "", {}),
    "off": (GPU, ["operator"], "0", {}),
    "broken": (GPU, ["direct"], "", {"CXX": "no-such-compiler"}),
    "interrupted": (INTERRUPTED, [], "", {}),
    "meaningless": ("import elsa_core", [], "off", {}),
    "a bundle first": (BUNDLE_FIRST, [], "0", {}),
}
Answers = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def answers(once: Callable[[str, Callable[[Path], None]], Path]) -> Answers:
    """What each program says; a broken compiler finds an empty cache."""

    def fill(folder: Path) -> None:
        rows = []
        for program, arguments, asked, more in PROGRAMS.values():
            own = {"ELSA_NATIVE": "0", "ELSA_CUDA_LIBRARY": asked} | more
            rows.append((program, arguments, own))
            if "CXX" in more:
                own["ELSA_CACHE_DIR"] = str(folder / "cache")
        found = dict(zip(PROGRAMS, forked(folder, *rows), strict=True))
        (folder / "answers").write_bytes(pickle.dumps(found))

    found = pickle.loads((once("cuda programs", fill) / "answers").read_bytes())

    def answer(name: str) -> subprocess.CompletedProcess[str]:
        assert found[name].returncode == 0, found[name].stderr
        return found[name]

    return answer


with_cuda = pytest.mark.skipif(
    torch.version.cuda is None, reason="this PyTorch is built without CUDA"
)


@with_cuda
def test_asked_for(answers: Answers) -> None:
    """The library takes its operators over at import; calls on the CPU are as they were."""
    served = "True serves attention, attention_backward, linear, linear_backward, "
    served += "window_attention, window_attention_backward\n"
    assert answers("asked for").stdout == served
    assert "is off" not in answers("asked for").stderr


def test_nothing_is_built_without_a_gpu(answers: Answers) -> None:
    for name in ("no GPU", "no GPU, off"):
        assert answers(name).stdout == "False off: there is no GPU\n"


@with_cuda
def test_the_first_call_on_a_gpu_loads_it(answers: Answers) -> None:
    """Not the import; and where it is switched off, or cannot be built, Triton serves unsaid."""
    for first in ("operator", "direct"):
        loaded, served, registered = answers(first).stdout.splitlines()
        assert served.startswith("True serves attention, ") and registered == "True True True"
        assert loaded == "True True", first
    lines = ["True False", "False off: ELSA_CUDA_LIBRARY is 0", "False False False"]
    assert answers("off").stdout.splitlines() == lines
    assert "False False False" in answers("broken").stdout
    assert "is off" not in answers("broken").stderr


@with_cuda
def test_an_interrupt_while_it_loads(answers: Answers) -> None:
    """Ctrl-C left the library with the operators that it had by then."""
    assert answers("interrupted").stdout == "1\nTrue True []\n"


def test_a_value_that_means_nothing_is_said(answers: Answers) -> None:
    said = "ELSA_CUDA_LIBRARY='off' is neither 0 nor 1: ignored"
    assert answers("meaningless").stderr.count(said) == 1


def test_a_bundle_that_was_loaded_before_the_package(answers: Answers) -> None:
    """It took the key of CUDA tensors for the layouts of its file; the package serves others."""
    assert answers("a bundle first").stdout.startswith("tensor([[3., 3., 3., 3.]")


def test_what_cannot_be_built_is_one_line(answers: Answers) -> None:
    """Triton's kernels are registered as ever."""
    done = answers("asked for, broken")
    assert done.stdout.startswith("False ")
    said = [line for line in done.stderr.splitlines() if "the CUDA library is off" in line]
    reason = "no-such-compiler" if torch.version.cuda else "without CUDA"
    assert len(said) == 1 and reason in said[0], done.stderr


def test_mutations_touch_no_other_memory(stub: Path, tmp_path: Path) -> None:
    """Plans and files of plans with a few bytes changed, read and run under address and undefined
    sanitizers."""
    from elsa_core.backends.cuda import planfile
    from elsa_core.backends.cuda.plan import Kernel, Launch, Output, Plan, Pointer, write

    launch = Launch(0, (3, 2, 1), (Pointer(0), Pointer(2, 4), b"\1\0\0\0", Pointer(4, 512)))
    outputs = (Output(6, (1, 2, 4, 8), (64, 32, 8, 1)), Output(5, (3,), (1,)))
    plan, plans = tmp_path / "plan", tmp_path / "plans"
    plan.write_bytes(write(Plan(2, outputs, 1024, (launch, launch))))
    other = Launch(0, (3, 2, 1), (Pointer(0), Pointer(4, 4), Pointer(6, 512)))
    four = write(Plan(4, outputs, 1024, (other,)))
    layouts = (("elsa::attention", b"\1" * 16, four), ("elsa::attention", b"\2" * 24, four))
    found = planfile.Recorded(layouts, {0: Kernel("scale", b"scale;8\0", 128)})
    plans.write_bytes(planfile.write({80: found, 90: found}, "it serves nothing"))
    fuzz = tmp_path / "fuzz"
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["g++", "-std=c++20", *flags, f"-I{SOURCES}", str(HERE / "cuda_fuzz.cpp")]
    subprocess.run([*command, "-ldl", "-o", str(fuzz)], check=True)
    for words in ((str(plan), str(stub), "5000"), (str(plans), str(stub), "5000", "file")):
        done = subprocess.run(
            [str(fuzz), *words], capture_output=True, text=True, check=False,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )  # fmt: skip
        assert done.returncode == 0 and 250 < int(done.stdout) < 4500, done.stdout + done.stderr
