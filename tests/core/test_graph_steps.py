"""Small training calls that a CUDA graph records: CPU tensors that say that they are on a GPU."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core as elsa
from elsa_core import calls, dense, graph_steps
from elsa_core.errors import UnavailableError
from elsa_core.routing import measured


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class OnCuda(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def test_small_calls_of_a_graph_train_by_our_kernels(monkeypatch) -> None:
    """The host's time does not count there. Calls that warm up are PyTorch's and load our kernels,
    without which no graph is recorded of them."""
    now = {"capturing": False, "own": False}
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(calls, "is_own_stream", lambda device: now["own"])
    monkeypatch.setattr(measured, "_capability", lambda device: (9, 0))
    load = graph_steps._load
    monkeypatch.setattr(graph_steps, "_load", lambda *of: loaded.append(load(*of)))
    elsa.attention(*[make(1, 2, 5, 64)] * 3)  # the native library is loaded by now
    calls.forget_kinds()

    def whole(is_causal=False, asked=False, shape=(1, 2, 130, 64), mask=None, turned=False):
        q = make(*shape).as_subclass(OnCuda).requires_grad_()
        q = q.transpose(1, 2).contiguous().transpose(1, 2) if turned else q
        kind = ("cuda", torch.float32, shape[3], shape[3], "strict")
        return dense._trains_whole(q, q, q, mask, kind, "auto", False, is_causal, 1.0, asked=asked)

    assert whole() == "sdpa"
    now.update(own=True)
    assert whole(asked=True) == "sdpa"
    now.update(capturing=True)
    assert whole() == "sdpa"  # a question has loaded nothing
    now.update(capturing=False)
    assert whole() == whole() == "sdpa" and len(loaded) == 1
    others = {"is_causal": True}, {"mask": make(130, 130)}, {"shape": (1, 2, 120, 64)}
    for other in (*others, {"shape": (1, 2, 130, 16)}):
        assert whole(**other) == "sdpa" and len(loaded) == 1
    now.update(capturing=True)
    assert whole() == whole(asked=True) == ""
    for other in (*others, {"turned": True}):  # in another layout nothing was loaded
        assert whole(**other) == "sdpa"
    monkeypatch.setattr(measured, "_capability", lambda device: (8, 0))
    assert whole() == "sdpa"  # not measured there
    monkeypatch.setattr(measured, "_capability", lambda device: (9, 0))
    now.update(capturing=False, own=False)
    assert whole() == "sdpa"


def test_a_warm_up_loads_the_gradients_of_the_output_as_it_lies(monkeypatch) -> None:
    slopes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.elsa.attention_backward.default:
                slopes.append((args[0].shape, args[0].stride(), args[-1]))
            return func(*args, **(kwargs or {}))

    q = make(1, 5, 2, 16).transpose(1, 2)
    elsa.attention(q, q, q)  # the native library is loaded by now
    with Watch():
        graph_steps._load(q, q, q, "strict", ("query", "value"))
    assert slopes == [(q.shape, (160, 16, 32, 1), [True, False, True, False])]


@pytest.mark.parametrize(
    "error",
    # of a C compiler without Python's headers, of a folder that cannot be written, of Triton's own
    [UnavailableError("no"), subprocess.CalledProcessError(1, "gcc"), OSError("no"), Exception()],
    ids=lambda error: type(error).__name__,
)
def test_a_warm_up_that_cannot_load_leaves_the_call_to_pytorch(monkeypatch, error) -> None:
    """No compiler, say; it is tried once."""
    tried = []

    def fail(*of):
        tried.append(of)
        raise error

    now = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(calls, "is_own_stream", lambda device: True)
    monkeypatch.setattr(measured, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(graph_steps, "_load", fail)
    calls.forget_kinds()
    q = make(1, 2, 130, 64).as_subclass(OnCuda).requires_grad_()
    call = (q, q, q, ("cuda", torch.float32, 64, 64, "strict"), ("query", "key", "value"))
    assert not graph_steps.serve(*call) and not graph_steps.serve(*call) and len(tried) == 1
    now["capturing"] = True
    assert not graph_steps.serve(*call)
    calls.forget_kinds()
