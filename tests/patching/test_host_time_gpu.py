"""Small eager calls on a GPU wait for the host: a patched model takes it no longer."""

import math
import time
from statistics import median

import pytest
import torch

import elsa_core as elsa

timm = pytest.importorskip("timm")

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

FAMILIES = (
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "vit_relpos_small_patch16_224",
    "cait_xxs24_224",
    "xcit_tiny_12_p16_224",
    "mvitv2_tiny",
    "hiera_tiny_224",
    "pvt_v2_b1",
    "davit_tiny",
    "levit_256",
    "maxvit_tiny_tf_224",
    "twins_svt_small",
    "volo_d1_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
)
LEAST = 0.97  # of the original's speed; what is wanted is 0.99, and machines are not quiet


def _times(models, x):
    """The median time of each model's forward, in turns; a call of the same model went before, as
    in a loop over batches: the host's caches hold what it needs."""
    times = [[] for _ in models]
    for _ in range(25):
        for forward, found in zip(models, times, strict=True):
            forward(x)
            torch.cuda.synchronize()
            start = time.perf_counter()
            forward(x)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return [median(found) for found in times]


def _ratio(models, scope, x):
    """The original's time over the patched one's; where a model lies in the host's memory, which
    can cost 5%, falls out: each of the two is patched once.
    """
    ratios = []
    for original, patched in (models, models[::-1]):
        elsa.patch(patched, scope=scope)
        for _ in range(5):
            expected, found = original(x), patched(x)
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * scale)
        before, after = _times((original, patched), x)
        ratios.append(before / after)
        elsa.unpatch(patched)
    return math.sqrt(math.prod(ratios))


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_call_is_as_fast_as_the_original(name, scope):
    torch.manual_seed(0)
    models = [timm.create_model(name).cuda().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    size = models[0].default_cfg["input_size"][-1]
    x = torch.randn(1, 3, size, size, device="cuda")
    with torch.inference_mode():
        ratio = _ratio(models, scope, x)
        if ratio < LEAST:  # a busy host: once more
            ratio = max(ratio, _ratio(models, scope, x))
    print(f"{name} {scope} {ratio:.3f}")
    assert ratio >= LEAST, f"{ratio:.3f} of the original's speed"


# The cases that lost most in the table of all families (docs/benchmarks.md): since then what they
# make the host do was counted (test_host_calls.py), and not timed.
LOST = (
    ("qwen3_vit_88m", torch.float16, 768, 1),
    ("deepseek_vit_412m", torch.float16, 546, 1),
    ("convit_small", torch.float32, 224, 8),
    ("eva02_small_patch14_336", torch.float32, 336, 8),
)


@pytest.mark.parametrize(("name", "dtype", "size", "batch"), LOST)
def test_a_call_that_lost_is_as_fast_as_the_original(name, dtype, size, batch):
    torch.manual_seed(0)
    models = [timm.create_model(name, img_size=size).cuda().eval().to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(batch, 3, size, size, device="cuda", dtype=dtype)
    with torch.inference_mode():
        ratio = _ratio(models, "auto", x)
        if ratio < LEAST:
            ratio = max(ratio, _ratio(models, "auto", x))
    assert ratio >= LEAST, f"{ratio:.3f} of the original's speed"


def test_a_graph_of_a_settled_model_runs_elsas_kernels():
    """The calls that warm up run the originals, and load the kernels that the graph records."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2).cuda().eval()
    elsa.patch(model, scope="model")
    x = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        for _ in range(3):
            expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
