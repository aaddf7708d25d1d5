"""Steps of training: mixed precision, accumulation, checkpoints, frozen and changed parts."""

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from elsa_core.patching.rewrite import patch, patched_sites, unpatch

from .conftest import (
    Subject,
    assert_as_exact,
    assert_step_as_exact,
    gradients,
    loss_of,
    step,
    subject,
)


class Operators(TorchDispatchMode):
    """Counts elsa's operators, and keeps which gradients they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.needs: list[tuple[bool, ...]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(operator)
        if name.startswith("elsa."):
            self.calls[name.split(".")[1]] += 1
            self.needs.append(tuple(args[-1]))
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(small: Subject, dtype: torch.dtype) -> None:
    """Gradients under autocast; in fp16 by a scaled loss, as a training loop takes them."""

    def scaled(model: nn.Module) -> dict[str, Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, small.images, small.labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**10 if dtype == torch.float16 else 1.0)  # no overflow
        return gradients(model)

    oracle = step(small.exact(), small.images.double(), small.labels)
    assert_as_exact(scaled(small.patched), scaled(small.plain), oracle)


@pytest.mark.parametrize("how", ["timm", "reentrant", "not reentrant"])
def test_checkpointing(small: Subject, how: str) -> None:
    """The gradients are those without it, and the backward runs each site's forward once more.

    The gradients of attention read what was saved twice, which a checkpoint that is not reentrant
    refuses. Bit for bit, except by reentrant checkpoints: their first forward is one without
    gradients, which other kernels may serve.
    """
    expected = copy.deepcopy(step(small.patched, small.images, small.labels))
    small.patched.zero_grad()
    if how == "timm":
        small.patched.set_grad_checkpointing()
        loss = loss_of(small.patched, small.images, small.labels)
    else:
        images = small.images.clone().requires_grad_()  # what reentrant checkpoints go by
        out = checkpoint(small.patched, images, use_reentrant=how == "reentrant")
        loss = nn.functional.cross_entropy(out, small.labels)
    calls: Counter[str] = Counter()
    for path, site in patched_sites(small.patched).items():
        site.register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
    loss.backward()
    assert len(calls) == 2 and set(calls.values()) == {1}
    found = gradients(small.patched)
    if how != "reentrant":
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    oracle = step(small.exact(), small.images.double(), small.labels)
    assert_as_exact(found, step(small.plain, small.images, small.labels), oracle)


@pytest.mark.parametrize(
    ("kind", "operator"), [("vit", "attention_backward"), ("swin", "window_attention_backward")]
)
def test_frozen_parts_are_not_computed(kind: str, operator: str) -> None:
    """What wants no gradient costs none: blocks below the first trained one have no backward."""
    found = subject(kind, "native")
    model = found.patched
    blocks = model.blocks if kind == "vit" else model.layers[0].blocks

    def counted(trained: nn.Module) -> Operators:
        model.zero_grad()
        model.requires_grad_(False)
        trained.requires_grad_(True)
        loss = loss_of(model, found.images, found.labels)
        with Operators() as seen:
            loss.backward()
        grads = gradients(model)
        own = {id(p) for p in trained.parameters()}
        assert all((grads[n] is not None) == (id(p) in own) for n, p in model.named_parameters())
        return seen

    assert counted(model.head).calls[operator] == 0
    assert counted(blocks[1]).calls[operator] == 1
    assert counted(blocks[0].attn.proj).calls[operator] == 1  # of the block above alone
    assert counted(blocks[0].attn).calls[operator] == 2


def test_a_frozen_bias_of_windows_is_not_summed() -> None:
    found = subject("swin", "native")
    for name, parameter in found.patched.named_parameters():
        parameter.requires_grad_("relative_position_bias_table" not in name)
    loss = loss_of(found.patched, found.images, found.labels)
    with Operators() as seen:
        loss.backward()
    own = [needs for needs in seen.needs if len(needs) == 4]
    assert own and all(needs[0] and not needs[1] for needs in own)


class LowRank(nn.Module):
    """A linear layer with a trained update of rank 2, as adapters of large models have them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("how", ["plain", "bf16", "not reentrant"])
def test_a_step_with_every_layer_patched(whole: Subject, how: str) -> None:
    """Gradients as exact as the original's, and with checkpoints those without them."""

    def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        images = whole.images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
            again = how == "not reentrant"
            out = checkpoint(model, images, use_reentrant=False) if again else model(images)
            loss = nn.functional.cross_entropy(out, whole.labels)
        loss.backward()
        return gradients(model)

    expected = copy.deepcopy(step(whole.patched, whole.images, whole.labels))
    found = gradients_of(whole.patched)
    if how != "bf16":
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    oracle = step(whole.exact(), whole.images.double(), whole.labels)
    assert_as_exact(found, gradients_of(whole.plain), oracle)


@pytest.mark.parametrize(
    ("kind", "scope", "order"),
    [
        ("vit", "attention", "wrapped first"), ("swin", "attention", "patched first"),
        ("vit", "model", "patched first"), ("swin", "model", "wrapped first"),
    ],
)  # fmt: skip
def test_wrapped_projections(kind: str, scope: str, order: str) -> None:
    """Of the attention, and with every layer patched those of the MLP too."""
    found = subject(kind, "native" if scope == "attention" else "auto", scope)
    if order == "wrapped first":
        unpatch(found.patched)
    for model in (found.plain, found.patched):
        torch.manual_seed(1)
        model.requires_grad_(False)
        for block in model.blocks if kind == "vit" else model.layers[0].blocks:
            block.attn.qkv = LowRank(block.attn.qkv)
            block.attn.proj = LowRank(block.attn.proj)
            if scope == "model":
                block.mlp.fc1 = LowRank(block.mlp.fc1)
                block.mlp.fc2 = LowRank(block.mlp.fc2)
    if order == "wrapped first":
        backend = "native" if scope == "attention" else "auto"
        assert len(patch(found.patched, backend=backend, scope=scope).patched) >= 2
    assert_step_as_exact(found)
    trained = [name for name, grad in gradients(found.patched).items() if grad is not None]
    assert len(trained) == (8 if scope == "attention" else 16)
    assert all("down" in name or "up" in name for name in trained)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_a_model_patched_in_part(kind: str) -> None:
    found = subject(kind, "native")
    unpatch(found.patched)
    chosen = "blocks.1.attn" if kind == "vit" else "layers.0.blocks.1"
    assert [s.path for s in patch(found.patched, include=chosen).patched] == [chosen]
    assert_step_as_exact(found)


def test_another_classifier(small: Subject) -> None:
    """`reset_classifier` after patching: sites stay patched and the new head learns."""
    for model in (small.plain, small.patched):
        torch.manual_seed(2)
        model.reset_classifier(3)
    assert len(patched_sites(small.patched)) == 2
    assert_step_as_exact(small, small.labels % 3)
    found = gradients(small.patched)
    assert found["head.weight" if "head.weight" in found else "head.fc.weight"].shape[0] == 3


def test_an_average_of_weights(small: Subject) -> None:
    """timm's ModelEmaV3 of a patched model: a patched copy with the average of the weights."""
    from timm.utils import ModelEmaV3

    averages = []
    for model in (small.plain, small.patched):
        ema = ModelEmaV3(model, decay=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, small.images, small.labels)
            optimizer.step()
            ema.update(model)
        averages.append(ema.module)
    assert len(patched_sites(averages[1])) == 2
    assert list(averages[0].state_dict()) == list(averages[1].state_dict())
    moved = dict(small.patched.named_parameters())
    for (name, a), b in zip(averages[0].named_parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(b, moved[name]), name
    with torch.no_grad():
        twin = copy.deepcopy(averages[1])
        unpatch(twin)
        torch.testing.assert_close(
            averages[1].eval()(small.images), twin.eval()(small.images), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *itertools.product(["swin-auto", "swin-native"], ["attn_drop_rate"]),
        *itertools.product(["vit-auto", "vit-native", "swin-native"], ["drop_path_rate"]),
    ],
)
def test_equal_seeds_drop_alike(kind: str, option: str) -> None:
    """A patched model in training drops what the original drops after the same seed. Of a ViT's
    attention weights see test_dropout.py.
    """
    name, backend = kind.split("-")
    found = subject(name, backend, **{option: 0.4})
    results = []
    for model in (found.plain, found.patched):
        torch.manual_seed(3)
        loss = loss_of(model, found.images, found.labels)
        model.zero_grad()
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (loss, expected), (own, grads) = results
    torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-3, atol=1e-5, msg=key)
    torch.manual_seed(4)
    other = loss_of(found.patched, found.images, found.labels)
    assert (other - own).abs() > 1e-4  # something is dropped
