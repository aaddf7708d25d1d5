"""Kernel packs on a real GPU: what they compute is what the JIT's kernels compute, bit by bit."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

pytest.importorskip("triton")

from elsa_core.backends.triton.pack import cases, specialize, store
from elsa_core.backends.triton.pack.build import build

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
ONLY = "*/vit_base_patch16_224/*/b8-*"

# Prints what it computed (as digests), and how packs served; argument: "training" or "inference".
SCRIPT = """
import hashlib, json, sys, torch
import elsa_core as elsa
from elsa_core.backends.triton.pack import lookup
def digest(t):
    return hashlib.sha256(t.detach().contiguous().view(torch.uint8).cpu().numpy()).hexdigest()
found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(8, 197, 3, 12, 64, device="cuda", dtype=dtype, generator=g)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    wanted = sys.argv[1] == "training" and dtype == torch.float32
    q, k, v = (t.detach().requires_grad_(wanted) for t in (q, k, v))
    for _ in range(2):
        out, lse = elsa.attention(q, k, v, backend="triton", return_lse=True)
    found[str(dtype)] = [digest(out), digest(lse)]
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    found[str(dtype) + " error"] = float((out.double() - exact).abs().max())
    if wanted:
        grads = torch.autograd.grad(out.sum() + (out * out).sum(), (q, k, v))
        found["gradients"] = [digest(t) for t in grads]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    again = elsa.attention(q, k, v, backend="triton")
graph.replay()
torch.cuda.synchronize()
found["graph"] = digest(again) == digest(out)
found["counts"] = dict(lookup.COUNTS)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    found = 10 * major + minor
    if found not in cases.ARCHITECTURES or not specialize.known():
        pytest.skip(f"no packs for sm_{found} with this Triton")
    return found


@pytest.fixture(scope="module")
def packs(arch: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of one ViT for this GPU."""
    out = tmp_path_factory.mktemp("packs")
    assert not build(arch, out, only=ONLY).left_out
    return out


def fresh(pack: Path | str, cache: Path, what: str = "training") -> tuple[dict[str, Any], str]:
    """What a process of its own computes, and its warnings."""
    environ = {
        **os.environ, "PYTHONPATH": PATHS, "ELSA_PACK": str(pack),
        "TRITON_CACHE_DIR": str(cache),
    }  # fmt: skip
    done = python("-c", SCRIPT, what, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def compiled(cache: Path) -> list[Path]:
    """Kernels that Triton compiled into its cache."""
    return list(cache.rglob("*.cubin"))


def test_a_pack_computes_what_the_jit_computes(packs: Path, tmp_path: Path) -> None:
    ours, _ = fresh(packs, tmp_path / "ours")
    theirs, _ = fresh("0", tmp_path / "theirs")
    served = ours.pop("counts")
    assert served["hits"] > 0 and "misses" not in served
    assert theirs.pop("counts") == {}
    assert ours == theirs and ours["graph"] is True
    assert ours["torch.float32 error"] < 1e-5
    assert not compiled(tmp_path / "ours") and compiled(tmp_path / "theirs")


def test_what_a_pack_lacks_is_compiled(packs: Path, arch: int, tmp_path: Path) -> None:
    """One kernel fewer: its launch misses, all others hit, results are the same."""
    whole, _ = fresh(packs, tmp_path / "whole")
    out = tmp_path / "fewer"
    pack = store.read(packs / f"sm_{arch}")
    kernels = {key: (entry.metadata, pack.cubin(entry)) for key, entry in pack.entries.items()}
    kernels.pop(next(iter(kernels)))
    header = {"arch": arch, "triton": pack.triton, "elsa": "0", "sources": pack.sources}
    out.mkdir()
    store.write(out / f"sm_{arch}", header, kernels)
    fewer, _ = fresh(out, tmp_path / "cache")
    assert {**whole, "counts": 0} == {**fewer, "counts": 0}
    assert fewer["counts"].get("misses", 0) == len(compiled(tmp_path / "cache"))


def test_a_flipped_byte_is_never_run(packs: Path, arch: int, tmp_path: Path) -> None:
    shutil.copytree(packs, tmp_path / "packs")
    data = tmp_path / "packs" / f"sm_{arch}" / store.NAME
    content = bytearray(data.read_bytes())
    code = store.read(data.parent).bytes
    for position in range(len(content) - code, len(content), 4096):
        content[position] ^= 1
    data.write_bytes(content)
    whole, _ = fresh(packs, tmp_path / "whole", "inference")
    flipped, said = fresh(tmp_path / "packs", tmp_path / "cache", "inference")
    served = flipped.pop("counts")
    assert "hits" not in served and served["misses"] > 0
    whole.pop("counts")
    assert flipped == whole and "is damaged" in said


@pytest.mark.alone
def test_the_first_call_compiles_nothing(packs: Path) -> None:
    done = python("-m", "benchmarks.first_call", "--pack", packs, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {row["contender"]: row for row in csv.DictReader(done.stdout.splitlines())}
    kept = found["pack, cache kept"]
    assert int(kept["hits"]) > 0 and int(kept["misses"]) == 0
    assert int(found["jit, cache kept"]["hits"]) == 0
    assert float(kept["median"]) < float(found["jit, cache empty"]["median"]) / 4
