"""PyTorch's compiler, which takes as long to import as PyTorch, is not imported to inspect."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import environment
from .test_start import WATCH


def _modules(code: str) -> tuple[str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True,
        env=environment(),
    )  # fmt: skip
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224"])
def test_inspect_imports_no_compiler(name: str) -> None:
    out, modules = _modules(WATCH.format(arguments=["inspect", name]))
    assert "sites can be patched" in out and "timm" in modules
    assert not {"torch._dynamo", "sympy", "torch._inductor"} & modules


USED = """
import json, sys
from elsa_cli.lazy_compiler import import_timm
import_timm()
assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules
import torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
out = torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [boxes], (1, 1))
assert out.item() == 1.0
assert torch.compiler.disable.__module__ == "torch.compiler"
import torch._dynamo.utils
assert hasattr(torch._dynamo.utils, "counters")
import timm
model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2).eval()
x = torch.zeros(1, 3, 32, 32)
compiled = torch.compile(model, backend="eager")
torch.testing.assert_close(compiled(x), model(x))
print("works")
print(json.dumps([]), file=sys.stderr)
"""


def test_who_asks_for_the_compiler_gets_it() -> None:
    out, _ = _modules(USED)
    assert out.strip() == "works"
