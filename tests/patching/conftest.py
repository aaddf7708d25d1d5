"""What tests of patched models share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import elsa_core as elsa


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors that say they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def compiled_once():
    """Patches and compiles a model on a GPU, which fake tensors stand for: no table and no length
    is read, so that there is one graph, and an exported program, of any batch if asked for.

    make: gives the model; its weights are never there. size: of the images.
    """

    def check(make, scope, size, *, any_batch=False):
        mode, graphs = FakeTensorMode(allow_non_fake_inputs=True), []
        with torch.device("meta"):
            model = make().eval()
        elsa.patch(model, scope=scope)
        with mode:
            model, x = model.to_empty(device="cuda"), torch.empty(2, 3, size, size, device="cuda")

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        with torch.no_grad(), mode:
            torch.compile(model, backend=backend, fullgraph=True)(x)
        assert len(graphs) == 1
        batch = ({0: torch.export.Dim("batch")},) if any_batch else None
        with torch.no_grad():
            torch.export.export(model, (x,), dynamic_shapes=batch, strict=False)

    return check


@pytest.fixture
def replays():
    """Patches a copy of a model, records its CUDA graph, after calls on another stream, for one
    image, and replays it for another: with at most twice the original's error against float64.
    """

    def check(original, x, other):
        patched, exact = copy.deepcopy(original), copy.deepcopy(original).double()
        elsa.patch(patched)
        with torch.inference_mode():
            right, theirs = exact(other.double()), original(other)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    patched(x)
            torch.cuda.current_stream().wait_stream(side)
            patched(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = patched(x)
            x.copy_(other)
            graph.replay()
            for found in (out, patched(other)):
                assert (found - right).norm() <= 2 * (theirs - right).norm()

    return check
