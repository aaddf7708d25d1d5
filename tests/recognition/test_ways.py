"""Forty ways to write attention and twenty modules that only look like it, watched: outputs and
gradients by the rule of checks, one operator in what is exported and traced. Random programs of
what is done to scores: watched, they compute what they compute unwatched."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


SHAPE = 2, 3, 4, 5  # batch, heads, queries and keys


class Program:
    """What one seed does; tensors that it keeps are looked at when it has ended."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.values = torch.Generator().manual_seed(seed)
        self.kept: list[Tensor] = []
        self.shapes: list[tuple[int, ...]] = []

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.values)

    def like(self, t: Tensor) -> Tensor:
        """What broadcasts to t."""
        sizes = [n if self.choose.random() < 0.6 else 1 for n in t.shape]
        return self.normal(*sizes[self.choose.randrange(t.dim()) :])

    def dim(self, t: Tensor) -> int:
        return self.choose.randrange(-t.dim(), t.dim())

    def written(self, t: Tensor) -> Tensor:
        if self.kept:
            self.kept[-1].add_(0.25)
        return t

    def keep(self, t: Tensor) -> Tensor:
        self.kept.append(t.view(-1) if self.choose.random() < 0.5 and t.is_contiguous() else t)
        return t

    def step(self, t: Tensor) -> Tensor:
        r, wide = self.choose, 1.0 + self.normal(1).abs().item()
        steps: list[Callable[[], Tensor]] = [
            lambda: t * wide, lambda: t / wide, lambda: t + wide, lambda: t - wide,
            lambda: t + self.like(t), lambda: t - self.like(t), lambda: t * self.like(t).exp(),
            lambda: t.masked_fill(self.like(t) > 0.8, r.choice((-1e9, -1e4, -5.0))),
            lambda: torch.where(self.like(t) > -1, t, -1e9),
            lambda: t - t.amax(-1, keepdim=True), lambda: t - t.max(-1, keepdim=True)[0],
            lambda: t.softmax(self.dim(t)), lambda: F.dropout(t, 0.3, False),
            lambda: t.transpose(self.dim(t), self.dim(t)), lambda: t.mT,
            lambda: t.transpose(self.dim(t), dim1=self.dim(t)),
            lambda: t.permute(r.sample(range(t.dim()), t.dim())),
            lambda: t.flatten(r.randrange(2), -r.randrange(1, 3)), lambda: t.view(t.shape),
            lambda: t.reshape(-1, *t.shape[2:]), lambda: t.unflatten(self.dim(t), (1, -1)),
            lambda: t.unsqueeze(self.dim(t)), lambda: t.squeeze(self.dim(t)),
            t.clone, t.contiguous, t.detach, t.float,
            lambda: t.double().float(), lambda: self.normal(1).type_as(t) * t,
            lambda: t.mul_(0.5), lambda: (t * 1).add_(self.normal(t.shape[-1])),
            lambda: t.mean(self.dim(t), keepdim=True) + t, lambda: t[..., :],
            lambda: torch.mul(t, 0.5, out=self.normal(*t.shape)),
            lambda: self.keep(t), lambda: self.written(t),
        ]  # fmt: skip
        return r.choice(steps)()

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        q, k, v = (leaf * 1.0 for leaf in leaves)
        t = q @ k.mT if self.choose.random() < 0.7 else torch.einsum("bhid,bhjd->bhij", q, k)
        for _ in range(self.choose.randrange(7)):
            t = self.step(t)
            self.shapes.append(tuple(t.shape))
        if t.numel() == 120 and t.shape[-1] == 5:
            t = t.softmax(-1).reshape(SHAPE) @ v
        return [t, *(one.clone() for one in self.kept)]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
def test_programs_compute_what_they_do_unwatched(grad: bool) -> None:
    seen = Seen()

    def outcome(seed: int, watched: bool) -> list[Tensor] | str:
        program = Program(seed)
        given = [program.normal(2, 3, n, 6).requires_grad_(grad) for n in (4, 5, 5)]
        watch = Watch("strict", "eager", seen)
        try:
            if watched:
                with watch:
                    found = program.run(given)
                found = watch.close(found)
            else:
                found = program.run(given)
            out = found[0]
            if out.requires_grad:
                loss = out[out.isfinite()].square().sum()
                found += [
                    g for g in torch.autograd.grad(loss, given, allow_unused=True) if g is not None
                ]
        except (IndexError, RuntimeError, ValueError) as error:
            watch.abandon()
            return type(error).__name__
        return [*found, torch.tensor([len(program.shapes), *map(hash, program.shapes)])]

    for seed in range(600):
        plain, got = outcome(seed, False), outcome(seed, True)
        if isinstance(plain, str) or plain[0].isnan().any():
            assert isinstance(plain, str) == isinstance(got, str), seed
            continue
        assert not isinstance(got, str), (seed, got)
        for one, other in zip(got, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, msg=f"seed {seed}")
    assert seen.count > 30
