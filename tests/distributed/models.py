"""Small ViTs that are sharded over ranks, by name, and what a rank finds of each, of their heads
and of hooks."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import SwiGLU
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

import elsa_core as elsa

VITS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"reg_tokens": 4, "qk_norm": True, "init_values": 0.1},
    "mean": {"global_pool": "avg", "class_token": False},
    "mean of patches": {"global_pool": "avg", "no_embed_class": True, "reg_tokens": 2},
    "maximum": {"global_pool": "max", "block_fn": ResPostBlock, "init_values": 1.0},
    "both": {"global_pool": "avgmax", "pre_norm": True, "fc_norm": True},
    "attention pooling": {"global_pool": "map", "class_token": False, "mlp_layer": SwiGLU},
    "tokens": {"global_pool": ""},
    "any size": {"dynamic_img_size": True},
    "mask": {},
    "bias of keys": {"reg_tokens": 1},
    "causal": {},
    "checkpoints": {"dynamic_img_size": True},
    "checkpoints, frozen tokens": {"dynamic_img_size": True},
}
if "is_causal" not in inspect.signature(VisionTransformer.forward).parameters:
    del VITS["causal"]  # of an older timm


def vit(name: str) -> VisionTransformer:
    """5 x 4 patches; weights such that attention is no mean of all tokens."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=(20, 16), patch_size=4, num_classes=40, embed_dim=24, depth=2, num_heads=3,
        **VITS[name],
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.set_grad_checkpointing(name.startswith("checkpoints"))
    if name.endswith("frozen tokens"):  # the blocks learn, and their input wants no gradient
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(path.partition(".")[0] in ("blocks", "norm", "head"))
    return model.eval()


def images(name: str) -> Tensor:
    """Eight images; of another size than the model's where it takes any."""
    generator = torch.Generator().manual_seed(1)
    height = 12 if name == "any size" else 20
    return torch.randn((8, 3, height, 16), generator=generator)


def terms(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What else a call is given."""
    generator = torch.Generator().manual_seed(2)
    if name == "mask":
        return {"attn_mask": torch.rand((8, 1, 21, 21), generator=generator) > 0.4}
    if name == "bias of keys":
        return {"attn_mask": torch.randn((8, 1, 1, 22), generator=generator).to(dtype)}
    return {"is_causal": True} if name == "causal" else {}


def step(model: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Outputs and the gradients of one step."""
    out = model(images(name).to(dtype), **terms(name, dtype))
    labels = torch.arange(8)
    logits = out if out.dim() == 2 else out.mean(1)
    loss = nn.functional.cross_entropy(logits, labels)
    if name.startswith("checkpoints"):  # computed again after images of another size
        loss = loss + model(images(name)[..., :12, :12].to(dtype)).square().mean()
    loss.backward()
    grads = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


def sharded(name: str, group: Any = None) -> dict[str, Tensor]:
    """A rank's outputs, and gradients after their mean over ranks."""
    model, group = vit(name), group or torch.distributed.group.WORLD
    if name == "registers":
        elsa.patch(model, mesh=group, scope="model")
    else:
        elsa.distributed.shard(model, group)
    step(model, name)
    elsa.distributed.reduce_gradients(model, group)
    grads = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return {"output": model(images(name), **terms(name)), **grads}


def by_ddp(name: str) -> dict[str, Tensor]:
    """The same by DistributedDataParallel."""
    model = vit(name)
    elsa.distributed.shard(model)
    found = step(nn.parallel.DistributedDataParallel(model), name)
    return {path.removeprefix("module."): tensor for path, tensor in found.items()}


def undone(name: str) -> bool:
    """Whether unpatching gives back what was there, and a copy of a sharded model works."""
    model = vit(name)
    before = [type(module) for module in model.modules()]
    state = {key: set(vars(module)) for key, module in model.named_modules()}
    one = elsa.distributed.shard(model)(images(name))
    two = copy.deepcopy(model)(images(name))
    elsa.unpatch(model)
    same = before == [type(module) for module in model.modules()]
    same = same and state == {key: set(vars(module)) for key, module in model.named_modules()}
    return same and torch.equal(one, two)


def refused() -> dict[str, str]:
    """What a sharded model says of calls that it cannot serve, on every rank alike."""
    model = vit("class token")
    elsa.distributed.shard(model)
    batch = images("class token")
    calls: dict[str, Callable[[], Any]] = {
        "size": lambda: model(batch[:, :, :16]),
        "intermediates": lambda: model.forward_intermediates(batch),
    }
    found = {name: said(call) for name, call in calls.items()}
    model.blocks[1].attn.proj_drop.p = 0.5
    found["dropout"] = said(lambda: model.train()(batch))
    model.eval().blocks[1].attn.proj_drop.p = 0.0
    elsa.patch(model)
    found["patched since"] = said(lambda: model(batch))
    found["sharded again"] = said(lambda: elsa.distributed.shard(model)(batch))
    return found


def said(call: Callable[[], Any]) -> str:
    """The class and text of what a call raises; "" where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Of heads on features of an earlier forward: ViTs by their pooling and class token.
RIGHT: dict[str, dict[str, Any]] = {
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "token": {"global_pool": "token"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "mean of patches": {"global_pool": "avg"},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "tokens": {"global_pool": ""},
}
HOOKED = ("patch_embed", "patch_drop", "blocks", "blocks.1.attn.attn_drop")


def headed(name: str) -> Any:
    """A model that takes images of any size, and whose attention weights pass modules."""
    torch.manual_seed(0)
    options = (RIGHT | REFUSED).get(name, {})
    model = VisionTransformer(
        img_size=32, patch_size=4, num_classes=5, embed_dim=16, depth=2, num_heads=2,
        dynamic_img_size=True, **options,
    )  # fmt: skip
    for block in model.blocks:
        block.attn.fused_attn = False
    return model.eval()


@torch.no_grad()
def of_earlier_features(world: int) -> dict[str, Any]:
    """How far a head of features is from one process's after a forward of larger images, or what it
    says."""
    short, tall = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 64, 32)
    found: dict[str, Any] = {}
    for name in RIGHT:
        plain, model = headed(name), elsa.distributed.shard(headed(name))
        features = model.forward_features(short)  # type: ignore[operator]
        model.forward_features(tall)  # type: ignore[operator]
        out = model.forward_head(features)  # type: ignore[operator]
        found[name] = (out - plain(short)).abs().max().item()
    for name in REFUSED if world == 2 else ():
        short = torch.randn(2, 3, 64, 32)
        tall = torch.randn(2, 3, 128, 32)
        model = elsa.distributed.shard(headed(name))
        features = model.forward_features(short)  # type: ignore[operator]
        model.forward_features(tall)  # type: ignore[operator]
        found[name] = said(lambda m=model, x=features: m.forward_head(x))
        model.forward_features(short)  # type: ignore[operator]
        found[f"{name}, again"] = said(lambda m=model, x=features: m.forward_head(x))
    return found


@torch.no_grad()
def of_later_hooks() -> dict[str, str]:
    """What a forward says by module that has a hook since the model was sharded."""
    batch, model = torch.randn(1, 3, 32, 32), headed("")
    elsa.distributed.shard(model)(batch)
    found = {}
    for path in HOOKED:
        hook = model.get_submodule(path).register_forward_hook(lambda *given: None)
        found[path] = said(lambda: model(batch))
        hook.remove()
    return found | {"": said(lambda: model(batch))}
