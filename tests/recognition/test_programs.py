"""Random programs of what is done to scores: watched, they compute what they compute unwatched."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.patching.recognition import Watch

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
    attentions = 0

    class Seen:
        def place(self) -> None:
            return None

        def ran(self, begun: None) -> None:
            nonlocal attentions
            attentions += 1

    def outcome(seed: int, watched: bool) -> list[Tensor] | str:
        program = Program(seed)
        given = [program.normal(2, 3, n, 6).requires_grad_(grad) for n in (4, 5, 5)]
        watch = Watch("strict", "eager", Seen())
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
    assert attentions > 30
