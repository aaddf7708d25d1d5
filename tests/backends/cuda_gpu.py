"""The CUDA library on a real GPU against Triton's launcher, bit by bit; `test_cuda_library_gpu.py`
runs these tests in a process that asks for the library."""

import copy
import itertools
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import elsa_core as elsa
from elsa_core.backends.cuda.library import load
from elsa_core.dispatch import table


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: an element never written shows."""
    torch.full((1 << 24,), math.nan, device="cuda")


def same(name: str, *arguments: Any) -> None:
    """Triton's launcher, the call that makes the plan and the one that runs it give equal bits."""
    operator = getattr(torch.ops.elsa, name).default
    before = load().counts()[1]
    with torch.no_grad():
        expected = pytree.tree_leaves(table.KERNELS_ON_CUDA[name](*arguments))
        for _ in range(3):
            poison()
            found = pytree.tree_leaves(operator(*arguments))
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
                assert torch.equal(ours, theirs), arguments[1:]
    assert load().counts()[1] >= before + 2, "Python computed a call of a known layout"


def operands(
    b: int, h: int, h_kv: int, n: int, m: int, d: int, dtype: torch.dtype, scale: float = 1.0
) -> list[Tensor]:
    q = torch.randn(b, n, h, d, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(b, h_kv, m, d, device="cuda", dtype=dtype)
    v = torch.randn(b, m, h_kv, d, device="cuda", dtype=dtype).transpose(1, 2)
    return [q * scale, k, v]


def test_attention() -> None:
    shapes = [
        (2, 3, 3, 77, 77, 64), (1, 12, 12, 197, 197, 64), (1, 4, 2, 33, 130, 40),
        (2, 6, 6, 1, 5000, 64), (1, 2, 2, 1025, 1025, 128), (1, 3, 3, 50, 50, 32),
    ]  # fmt: skip
    kinds = [(torch.float16, "strict"), (torch.bfloat16, "strict")]
    kinds += [(torch.float32, precision) for precision in ("strict", "ieee", "turbo", "lean")]
    for shape, (dtype, precision) in itertools.product(shapes, kinds):
        b, h, _, n, m, _ = shape
        q, k, v = operands(*shape, dtype)
        same("attention", q, k, v, None, False, 0.125, precision)
        same("attention", q, k, v, None, True, -0.3, precision)
        mask = torch.rand(b, 1, n, m, device="cuda") > 0.3
        mask[:, :, -1] = False  # a row that sees no key
        same("attention", q, k, v, mask, False, 0.125, precision)
        bias = torch.randn(1, h, n, m, device="cuda").masked_fill(~mask[:1], -math.inf)
        same("attention", q, k, v, bias, False, 0.125, precision)
        same("attention", q * 1e3, k, v, None, False, 0.125, precision)  # extreme logits
    # rows that are not aligned, and one tensor as all three
    flat = torch.randn(1 << 16, device="cuda", dtype=torch.float16)
    x = flat[1 : 1 + 2 * 65 * 64].view(1, 2, 65, 64)
    same("attention", x, x, x, None, False, 0.125, "strict")
    same("attention", x, x.clone()[:], x, None, False, 0.125, "strict")


def test_window() -> None:
    for dtype, side, shift in itertools.product((torch.float16, torch.float32), (14, 13), (0, 3)):
        qkv = torch.randn(2, 1, side, side, 3 * 96, device="cuda", dtype=dtype)
        bias = torch.randn(3, 49, 49, device="cuda", dtype=dtype)
        layout = 3, [1, 7, 7], [0, shift, shift], 32**-0.5, -100.0, "qkv", False, "strict"
        same("window_attention", qkv, bias, None, None, None, *layout)
        rows = torch.randn(169, 3, device="cuda", dtype=dtype)
        index = torch.randint(0, 169, (49, 49), device="cuda")
        same("window_attention", qkv, rows, index, None, None, *layout)


def test_linear() -> None:
    x = torch.randn(3, 197, 768, device="cuda")
    weight, bias = torch.randn(3072, 768, device="cuda"), torch.randn(3072, device="cuda")
    residual = torch.randn(3, 197, 3072, device="cuda")
    for precision, activation in itertools.product(("strict", "turbo"), ("none", "gelu")):
        same("linear", x, weight, bias, activation, None, None, precision)
        same("linear", x, weight, None, activation, residual, bias, precision)


def test_streams() -> None:
    """A call waits for what its own stream did before, and for nothing else."""
    q, k, v = operands(1, 4, 4, 300, 300, 64, torch.float32)
    call = torch.ops.elsa.attention.default
    terms = None, False, 0.125, "strict"
    with torch.no_grad():
        call(q, k, v, *terms)
        side = torch.cuda.Stream()
        for _ in range(20):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                late = q * 2
                out, _ = call(late, k, v, *terms)
            torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(out, call(q * 2, k, v, *terms)[0])


def test_graphs() -> None:
    """A graph replays what was planned; a layout that was not is recorded by Python."""
    for dtype, scale in itertools.product((torch.float16, torch.float32), (0.125, 0.25)):
        q, k, v = operands(1, 12, 12, 197, 197, 64, dtype)
        call, terms = torch.ops.elsa.attention.default, (None, False, scale, "strict")
        with torch.no_grad():
            if scale == 0.125:
                call(q, k, v, *terms)
            else:  # its kernels are loaded, its plan is not made
                table.KERNELS_ON_CUDA["attention"](q, k, v, *terms)
            before = load().counts()[1]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = call(q, k, v, *terms)
            assert load().counts()[1] == before + (scale == 0.125)
            for _ in range(3):
                q.normal_()
                graph.replay()
                expected = table.KERNELS_ON_CUDA["attention"](q, k, v, *terms)
                assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_threads() -> None:
    """Two threads, each on a stream of its own, over layouts that both meet first."""
    failed: list[str] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for n in range(65, 97):
                    q, k, v = operands(1, 2, 2, n, n, 64, torch.float16)
                    terms = q, k, v, None, False, 0.1, "strict"
                    expected = table.KERNELS_ON_CUDA["attention"](*terms)[0]
                    for _ in range(5):
                        assert torch.equal(torch.ops.elsa.attention.default(*terms)[0], expected)
        except Exception:
            failed.append(traceback.format_exc())

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed, failed[0]


def test_devices() -> None:
    """Tensors of a device that is not the current one."""
    last = torch.cuda.device_count() - 1
    q, k, v = (t.to(f"cuda:{last}") for t in operands(1, 2, 2, 80, 80, 64, torch.float16))
    with torch.no_grad():
        expected = table.KERNELS_ON_CUDA["attention"](q, k, v, None, False, 0.1, "strict")[0]
        for _ in range(3):
            out = torch.ops.elsa.attention.default(q, k, v, None, False, 0.1, "strict")[0]
            assert out.device == q.device and torch.equal(out, expected)
    assert torch.cuda.current_device() == 0


def test_memory() -> None:
    """Calls leave nothing behind; a lack of memory is PyTorch's own error."""
    inputs = operands(1, 4, 4, 16384, 16384, 64, torch.float32)
    call = partial(elsa.attention, *inputs, backend="triton")
    with torch.no_grad():
        for _ in range(3):
            call()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            call()
        assert torch.cuda.memory_allocated() == before
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4096) / total)
        try:
            call()
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("there was memory")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        call()


def test_models() -> None:
    """A patched model, its copy, compiled and exported: one answer."""
    x = torch.randn(2, 3, 224, 224, device="cuda")
    for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"):
        model: Any = elsa.load(name, device="cuda")
        with torch.inference_mode():
            expected = model(x)
        elsa.patch(model)
        with torch.no_grad():
            forms: Sequence[Callable[[Tensor], Tensor]] = (
                model, model, copy.deepcopy(model), torch.compile(model),
                torch.export.export(model, (x,)).module(),
            )  # fmt: skip
            for form in forms:
                torch.testing.assert_close(form(x), expected, rtol=1e-3, atol=1e-3)
