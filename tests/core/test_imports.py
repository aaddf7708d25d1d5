"""What importing costs, and that no optional package is needed for the rest to work."""

from processes import python, without

_ATTENTION = """
import torch, elsa_core as elsa
torch.manual_seed(0)
q = torch.randn(1, 2, 9, 8)
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(q.double(), q.double(), q.double())
error = lambda out: (out - exact).norm() / exact.norm()
assert error(elsa.attention(q, q, q)) <= 2 * error(sdpa(q, q, q)) + 2.4e-7  # two ulp
print("attention works")
"""

_PATCH = """
import torch, timm, elsa_core as elsa
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
assert len(elsa.patch(model, scope="attention").patched) == 1
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
print("patch works")
"""

_PATCH_OF_ONES_OWN = """
import torch, torch.nn.functional as F, elsa_core as elsa
class Attend(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)
model = torch.nn.Sequential(Attend())
assert elsa.inspect(model, (3, 7, 8)).sites[0].query_tokens == 7
elsa.patch(model, backend="eager")
x = torch.randn(2, 3, 7, 8)
assert torch.allclose(model(x), Attend()(x), atol=1e-6)
print("patch works")
"""


def run(program: str, blocked: set[str]) -> str:
    done = python("-c", without(*blocked) + program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_needs_torch_alone() -> None:
    blocked = {"timm", "torchvision", "open_clip", "onnx", "onnxruntime", "matplotlib", "triton"}
    assert "attention works" in run(_ATTENTION, blocked)


def test_patch_needs_none_of_the_optional_packages() -> None:
    blocked = {"triton", "open_clip", "onnx", "onnxruntime", "matplotlib"}
    assert "patch works" in run(_PATCH, blocked)
    blocked |= {"timm", "torchvision", "transformers"}
    assert "patch works" in run(_PATCH_OF_ONES_OWN, blocked)


def test_importing_elsa_imports_no_model_library_and_builds_nothing() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import elsa_core
heavy = {"timm", "open_clip", "torchvision", "triton", "onnx", "onnxruntime", "matplotlib", "rich",
         "torch.onnx", "torch.utils.flop_counter"}
print(sorted(heavy & set(sys.modules) - before))
print("elsa_core.backends.native" in sys.modules, "subprocess builds:", "filelock" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode  # is given the formulas all the same
q = torch.randn(1, 1, 8, 8)
with FlopCounterMode(display=False) as mode:
    elsa_core.attention(q, q, q)
print(mode.get_total_flops())
"""
    lines = run(program, set()).splitlines()
    assert lines[0] == "[]"
    assert lines[1].startswith("False")
    assert lines[2] == "2048"
