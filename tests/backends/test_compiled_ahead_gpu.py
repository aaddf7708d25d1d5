"""A model patched with an example has its kernels before its first call, which is right."""

from pathlib import Path

import pytest
from processes import environment, python

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys
from pathlib import Path
import timm, torch
import elsa_core as elsa

cache = Path(sys.argv[1])
torch.manual_seed(0)
model = timm.create_model(sys.argv[2], num_classes=10).eval().cuda()
x = torch.randn(1, 3, 224, 224, device="cuda")
with torch.inference_mode():
    peer, exact = model(x), model.double()(x.double())
model.float()
elsa.patch(model, x)
ahead = sorted(cache.rglob("*.cubin"))
with torch.inference_mode():
    outs = [model(x) for _ in range(3)]
assert len(ahead) > 3 and sorted(cache.rglob("*.cubin")) == ahead
for out in outs:
    assert (out - exact).norm() <= 2 * (peer - exact).norm() + 5e-7 * exact.norm()
"""


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_the_first_call_compiles_nothing(name: str, tmp_path: Path) -> None:
    env = environment(TRITON_CACHE_DIR=str(tmp_path), ELSA_PACK="0")
    done = python("-c", PROGRAM, tmp_path, name, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
