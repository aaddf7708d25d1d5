"""A ViT that drops attention weights: the original's distribution, and exact for equal masks."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from elsa_core.backends import philox

from .conftest import Gradients, Subject, assert_as_exact, gradients, loss_of, step, subject

RATE = 0.4


class Dropped(nn.Module):
    """The operator's dropout of weights [B, H, Nq, Nk], for the original's written-out branch."""

    def forward(self, weights: Tensor) -> Tensor:
        batch, heads, queries, keys = weights.shape
        drawn = philox.Dropout(RATE, philox.draw(weights.device))
        rows, columns = slice(0, queries), slice(0, keys)
        return weights * philox.factors(drawn, batch, heads, rows, columns, weights.dtype)


def written_out(model: nn.Module) -> nn.Module:
    """The original with the operator's masks instead of its own."""
    copied = copy.deepcopy(model)
    for block in copied.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop = Dropped()
    return copied


def seeded(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    torch.manual_seed(3)
    return step(model, images, labels)


def kept(model: nn.Module) -> Gradients:
    """The gradients, which another step leaves as they are."""
    return {k: None if grad is None else grad.clone() for k, grad in gradients(model).items()}


@pytest.fixture(params=["auto", "native", "eager"])
def dropping(request: pytest.FixtureRequest) -> Subject:
    return subject("vit", request.param, attn_drop_rate=RATE)


def test_gradients_with_equal_masks(dropping: Subject) -> None:
    """Each parameter's, within twice the error of the original with the same masks."""
    plain = written_out(dropping.plain)
    found = seeded(dropping.patched, dropping.images, dropping.labels)
    oracle = seeded(written_out(dropping.exact()), dropping.images.double(), dropping.labels)
    assert_as_exact(found, seeded(plain, dropping.images, dropping.labels), oracle)
    again = seeded(dropping.patched, dropping.images, dropping.labels)
    for name, grad in again.items():
        assert grad is not None and torch.equal(grad, found[name]), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_meet_the_same_masks(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    dropping, found = subject("vit", "auto", attn_drop_rate=RATE), []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        x = dropping.images.clone().requires_grad_()
        dropping.patched.zero_grad()
        if checkpointed:
            out = checkpoint(dropping.patched, x, use_reentrant=reentrant)
        else:
            out = dropping.patched(x)
        nn.functional.cross_entropy(out, dropping.labels).backward()
        found.append(kept(dropping.patched) | {"images": x.grad})
    for name, grad in found[0].items():
        assert grad is not None and torch.equal(grad, found[1][name]), name


def test_the_distribution_is_the_originals() -> None:
    """Mean and variance of each logit over seeds, against those of the original's own dropout."""
    both = subject("vit", "auto", attn_drop_rate=RATE)
    image, count = both.images[:1], 600
    moments = []
    with torch.no_grad():
        for offset, model in enumerate((both.plain, both.patched)):
            torch.manual_seed(offset)
            # entries of a batch drop by themselves
            logits = torch.cat([model(image.expand(60, -1, -1, -1)) for _ in range(count // 60)])
            logits = logits.double()
            fourth = (logits - logits.mean(0)).pow(4).mean(0)
            moments.append((logits.mean(0), logits.var(0), fourth))
    (mean, variance, fourth), (own, own_variance, own_fourth) = moments
    z = (mean - own) / ((variance + own_variance) / count).sqrt()
    assert z.abs().max() < 4.5
    spread = ((fourth - variance**2 + own_fourth - own_variance**2) / count).sqrt()
    assert ((variance - own_variance) / spread).abs().max() < 4.5 and variance.min() > 0


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_step() -> None:
    """One graph; equal seeds give what the eager step gives."""
    dropping = subject("vit", "auto", attn_drop_rate=RATE)
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dropping.patched, fullgraph=True, backend=compiler)
    torch.manual_seed(3)
    dropping.patched.zero_grad()
    loss_of(compiled, dropping.images, dropping.labels).backward()
    found = kept(dropping.patched)
    assert compiler.frame_count == 1
    expected = seeded(dropping.patched, dropping.images, dropping.labels)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    torch._dynamo.reset()


def test_eval_drops_nothing() -> None:
    dropping = subject("vit", "auto", attn_drop_rate=RATE)
    model = dropping.patched.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(model(dropping.images), model(dropping.images))
    assert torch.equal(state, torch.get_rng_state())
