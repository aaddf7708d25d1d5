"""The kernels' own memory: an error of every operator where it cannot be had, and none is lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, python

from elsa_core.backends import native

# The kernels ask for whole pages; nothing else in the process does. The one that is numbered, from
# the call of `refuse` on, is not given.
REFUSES = """
#include <stdlib.h>
static int left = -1;
extern "C" void refuse(int number) { left = number; }
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  void* memory = nullptr;
  if (alignment == 4096 && left-- == 0) return nullptr;
  return posix_memalign(&memory, alignment, size) ? nullptr : memory;
}
"""
CALLS = """
import ctypes, os, threading
import torch
import elsa_core as elsa
from elsa_core.backends import native
assert native.load().ok
q = torch.randn(1, 2, 50, 16)
out, lse = torch.zeros_like(q), torch.zeros(1, 2, 50)
starts = torch.tensor([0, 20, 50], dtype=torch.int32)
image, table = torch.randn(1, 1, 14, 14, 96), torch.randn(169, 2)
index = torch.zeros(49, 49, dtype=torch.int64)
window = (None, None, 2, (1, 7, 7), (0, 3, 3), 0.25, -100.0, "qkv", False, "strict")
ops = torch.ops.elsa
calls = {
    "attention": lambda: ops.attention(q, q, q, None, False, 0.25, "strict"),
    "attention of long rows": lambda: ops.attention(
        q, *[torch.randn(1, 2, 3000, 16)] * 2, None, False, 0.25, "strict"),
    "gradient": lambda: ops.attention_backward(
        q, torch.zeros(0), q, q, q, None, out, lse, False, 0.25, "strict", [True] * 3 + [False]),
    "windows": lambda: ops.window_attention(image, None, None, *window),
    "windows with a table": lambda: ops.window_attention(image, table, index, *window),
    "windows with a turned bias": lambda: ops.window_attention(
        image, torch.randn(2, 49, 49).mT, None, *window),
    "gradient of windows": lambda: ops.window_attention_backward(
        torch.randn(1, 1, 14, 14, 32), image, None, None, *window, [True] + [False] * 3),
    "packed": lambda: elsa.varlen_attention(
        *[torch.randn(50, 2, 16)] * 3, starts, starts, 30, 30, backend="native"),
    "entmax": lambda: elsa.entmax_attention(q, q, q, backend="native"),
    "gradient of entmax": lambda: ops.entmax_attention_backward(
        q, q, q, q, None, None, q, torch.zeros(3, 1, 2, 50),
        torch.ones(1, 2, 1, 1, dtype=torch.uint8), 1.5, False, 0.25, "strict",
        [True] * 3 + [False] * 2),
}
torch.set_num_threads(1)
refuse = ctypes.CDLL(os.environ["LD_PRELOAD"]).refuse

def attempt(call, number, said):
    refuse(number)
    try:
        call()
    except Exception as error:
        said.append(str(error).splitlines()[0])
    finally:
        refuse(-1)

for name, call in calls.items():
    for number in range(9):
        said = []
        # memory is kept by thread: a new one has none
        thread = threading.Thread(target=attempt, args=(call, number, said))
        thread.start()
        thread.join()
        print(name, number, *said, sep="|")
        if not said:
            break
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_memory_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    """Each of a call's allocations is refused once; with all of them the call succeeds."""
    native.build()  # with a compiler that has memory
    (tmp_path / "refuses.cpp").write_text(REFUSES)
    library = tmp_path / "refuses.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", str(tmp_path / "refuses.cpp"), "-o", str(library)], check=True
    )
    env = environment(LD_PRELOAD=library.name, LD_LIBRARY_PATH=str(tmp_path))
    done = python("-c", CALLS, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.splitlines()]
    calls = dict.fromkeys(row[0] for row in rows)
    assert len(calls) == 10, done.stdout
    for call in calls:
        *refused, last = (row[2:] for row in rows if row[0] == call)
        assert refused and all("out of memory" in " ".join(row) for row in refused), done.stdout
        assert last == [], call


FORWARDS = """
import gc
import torch
import elsa_core as elsa
from pathlib import Path
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
torch.set_num_threads(1)
sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_classes": 3}
models = (
    VisionTransformer(**sizes, depth=1, num_heads=2),
    SwinTransformerV2(**sizes, depths=(2,), num_heads=(2,), window_size=2),
)
for model in models:
    assert elsa.patch(model.eval()).patched
x = torch.randn(2, 3, 16, 16)

def resident():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10

def run(count):
    for index in range(count):
        for model in models:
            with torch.no_grad():
                model(x)
            if index % 5 == 0:
                model(x).sum().backward()

run(150)  # until threads and allocators hold what they keep
before = resident()
run(600)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads from /proc what is held")
def test_nothing_is_lost_in_thousands_of_forwards() -> None:
    """Of 1200 forwards and 240 steps: less than a tensor of a hundred numbers each."""
    native.build()
    done = python("-c", FORWARDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 1200 * 400
