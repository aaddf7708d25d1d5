"""Forty ways to write attention and twenty modules that only look like it, watched: outputs and
gradients by the rule of checks, one operator in what is exported and traced."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from elsa_core.patching.adapters.watched import watched
from elsa_core.patching.recognition import Watch

from .variants import DIM, HEADS, LOOK_ALIKES, TOKENS, WAYS, Site

ROUNDING = 4  # ulp of the largest value, beside twice the original's error


class Seen:
    """Counts attentions."""

    count = 0

    def place(self) -> None:
        return None

    def ran(self, begun: Any) -> None:
        self.count += 1


def judged(got: Tensor, plain: Tensor, oracle: Tensor, what: str) -> None:
    """The error may be twice that of PyTorch's own."""
    assert got.dtype == plain.dtype and got.shape == plain.shape, what
    band = ROUNDING * torch.finfo(got.dtype).eps * oracle.abs().max()
    allowed = 2 * (plain.double() - oracle).abs().max() + band
    assert (got.double() - oracle).abs().max() <= allowed, what


def model(name: str, precision: str) -> tuple[Site, Site, Tensor]:
    """A site, a watched copy of it, and an input."""
    torch.manual_seed(len(name))
    site = Site(name).eval()
    twin = copy.deepcopy(site)
    twin.__class__ = watched(Site)
    twin.__dict__.update(elsa_precision=precision, elsa_backend="auto")
    return site, twin, torch.randn(3, TOKENS, HEADS * DIM)


def gradients(site: Site, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = site(x)
    wanted = [x, *(p for p in site.parameters() if p.requires_grad)]
    found = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return [g for g in found if g is not None]


def kernels(graph: Any) -> tuple[int, int]:
    """Nodes of elsa's operator and of softmax in a graph."""
    names = [str(getattr(node, "target", "")) or node.kind() for node in graph]
    return sum("elsa" in n for n in names), sum("softmax" in n for n in names)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_way_to_write_attention(name: str) -> None:
    # a precision other than the default one: small calls on a CPU are recognised too
    site, twin, x = model(name, "lean")
    fused = name not in LOOK_ALIKES
    oracle = copy.deepcopy(site).double()

    seen = Seen()
    watch = Watch("strict", "auto", seen)
    with torch.no_grad(), watch:
        watch.close(site(x))
    assert bool(seen.count) == fused
    with torch.no_grad():
        judged(twin(x), site(x), oracle(x.double()), "eval")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            judged(twin(x), site(x), oracle(x.double()), "autocast")
    for part in (site, twin, oracle):
        part.train()
    triples = zip(
        gradients(twin, x), gradients(site, x), gradients(oracle, x.double()), strict=True
    )
    for got, plain, exact in triples:
        judged(got, plain, exact, "gradient")
    for part in (site, twin):
        part.eval()

    program = torch.export.export(twin, (x,))
    with torch.no_grad():
        judged(program.module()(x), site(x), oracle(x.double()), "exported")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(twin, (x,), check_trace=False)
        judged(traced(x), site(x), oracle(x.double()), "traced")
    if fused:
        assert kernels(program.graph.nodes)[0] and not kernels(program.graph.nodes)[1]
        inlined = traced.inlined_graph
        assert "elsa::" in str(inlined) and "aten::softmax" not in str(inlined)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_write_attention_in_a_graph(name: str) -> None:
    """A plain capture holds what recognition made of the forward."""
    site, twin, x = (one.cuda() for one in model(name, "strict"))
    oracle, other, seen = copy.deepcopy(site).double(), torch.randn_like(x), Seen()
    with torch.no_grad():
        for _ in range(2):
            twin(x)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), Watch("strict", "auto", seen) as watch:
            watch.close(site(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = twin(x)
        x.copy_(other)
        graph.replay()
        judged(held, site(other), oracle(other.double()), "graph")
    assert bool(seen.count) == (name not in LOOK_ALIKES)
