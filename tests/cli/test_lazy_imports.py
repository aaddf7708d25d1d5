"""What inspecting does not need is not imported: the compiler, triton, the client of the hub."""

import json
from typing import Any

import pytest
import torch
from processes import python
from sampling import some
from timm.models._hub import has_hf_hub
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core import inspect, load

from .conftest import Elsa
from .test_start import watched

HEAVY = {
    *("torch._dynamo", "torch._inductor", "sympy", "triton", "onnx", "onnxscript", "onnxruntime"),
    *("huggingface_hub", "httpx", "httpx2", "requests", "open_clip", "transformers", "pandas"),
    *("scipy", "sklearn", "matplotlib", "IPython", "torch.utils.tensorboard"),
}


KEPT = """
import atexit
class Slow:
    def __del__(self): print("taken apart")
kept = Slow()
atexit.register(lambda: print("registered"))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    some([("test_vit", 0), ("swin_tiny_patch4_window7_224", 0),
          ("test_vit --model-kwargs nonsense=1", 4)], one_in=3),
)  # fmt: skip
def test_inspect_imports_little(words: str, code: int) -> None:
    """And ends without taking torch apart: what is registered for the end runs, what was printed is
    there, the exit code is its own; objects that only the interpreter's end deletes can wait."""
    done, modules = watched("inspect", *words.split(), first=KEPT)
    assert done.returncode == code, done.stderr
    assert "timm" in modules and not sorted(HEAVY & modules)
    assert done.stdout.endswith("registered\n") and "taken apart" not in done.stdout
    if code == 0:
        assert "sites can be patched" in done.stdout and "GFLOPs an image" in done.stdout


def test_random_weights_are_not_drawn_to_inspect(elsa: Elsa) -> None:
    """They are most of a small model's time, and nothing of them is shown."""
    drawn = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if "uniform_" in str(func) or "normal_" in str(func):
                drawn.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    threads = torch.get_num_threads()
    with Watch():
        said = elsa("inspect", "test_vit").out
    assert "weights: random (seed 0)" in said and not drawn
    assert f"({threads} thread" in said and torch.get_num_threads() == threads
    with Watch():
        assert elsa("patch", "test_vit").code == 0 and drawn
    found = inspect(load("test_vit"))
    document = json.loads(elsa("inspect", "test_vit", "--json").out)["results"]["inspection"]
    assert document == json.loads(json.dumps(found.to_dict()))


USED = """
import sys
from elsa_cli.lazy_imports import import_flop_counter, import_timm
import_timm(hub=False)
import_flop_counter()
assert not {"huggingface_hub", "triton"} & set(sys.modules)
assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules
import torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
out = torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [boxes], (1, 1))
assert out.item() == 1.0
assert torch.compiler.disable.__module__ == "torch.compiler"
import torch._dynamo.utils
assert hasattr(torch._dynamo.utils, "counters")
import huggingface_hub
assert huggingface_hub.HfApi
import timm
model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2).eval()
x = torch.zeros(1, 3, 32, 32)
compiled = torch.compile(model, backend="eager")
torch.testing.assert_close(compiled(x), model(x))
print("works")
"""


def test_who_asks_for_what_was_left_out_gets_it() -> None:
    done = python("-c", USED)
    assert done.stdout == "works\n", done.stderr


@pytest.mark.skipif(
    not has_hf_hub(), reason="this timm does not know the huggingface_hub that is installed"
)
def test_timm_can_download_where_weights_are_asked_for() -> None:
    code = "from elsa_cli.lazy_imports import import_timm\nimport_timm()\n"
    code += "from timm.models._hub import has_hf_hub\nprint(has_hf_hub())\n"
    done = python("-c", code)
    assert done.stdout == "True\n", done.stderr
