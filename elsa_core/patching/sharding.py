"""`shard`: a model whose tokens are split over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import nn

from elsa_core.distributed.groups import by_name, name_of
from elsa_core.distributed.plan import shard_lengths
from elsa_core.errors import ModelError
from elsa_core.patching import adapters
from elsa_core.patching.adapters.timm_sharded import (
    ShardedAttention,
    ShardedVisionTransformer,
    check_hooks,
)

# The classes of a block and of its parts.
_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "": (Block, ResPostBlock), "attn": (Attention,), "mlp": (Mlp, GluMlp, SwiGLU),
}  # fmt: skip


def shard(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Let a timm ViT run with its tokens split over ranks, in place.

    Class token, registers and patches are one sequence, cut into a run for each rank. Every rank
    calls the model with the same whole images and gets the same outputs as from one process;
    between embedding and pooling it holds its own tokens alone. Parameters stay whole and where
    they are; `elsa_core.unpatch` takes all of it back. A model that `elsa_core.patch` has patched
    keeps its precision and backend.

    Before each forward the ranks compare the images' shape, dtype and mode in one small message.

    Where each rank calls `backward`, the gradients that one process has are the mean over ranks:
    `torch.nn.parallel.DistributedDataParallel` gives it, or `reduce_gradients`. What is drawn at
    random (dropout, stochastic depth) must be off in training.

    Args:
        model: timm's `VisionTransformer`, in any mode and dtype.
        mesh: a one-dimensional DeviceMesh, a process group, or None for all ranks.

    Returns:
        The model.

    Raises:
        ModelError: it cannot be sharded; the message says which module and why.
        UnavailableError: there is no process group.
    """
    group = name_of(mesh)
    require_shardable(model)
    subject: Any = model
    tokens = subject.num_prefix_tokens + subject.patch_embed.num_patches
    lengths = shard_lengths(tokens, by_name(group).size())
    targets: list[tuple[Any, type[nn.Module]]] = [(model, ShardedVisionTransformer)]
    targets += [(block.attn, ShardedAttention) for block in subject.blocks]
    # every class is made before the first is swapped: a failure leaves the model as it was
    classes = [
        adapters.with_base(module, cls) if adapters.is_patched(module) else cls
        for module, cls in targets
    ]
    for (module, _), cls in zip(targets, classes, strict=True):
        module.__class__ = cls
        module.__dict__.setdefault("elsa_precision", "strict")
        module.__dict__.setdefault("elsa_backend", "auto")
        module.__dict__ |= {"elsa_group": group, "elsa_lengths": lengths}
    return model


def reduce_gradients(model: nn.Module, mesh: Any = None) -> None:
    """Make each parameter's gradient the mean over ranks, as DistributedDataParallel would.

    Args:
        model: a sharded model after `backward` on every rank.
        mesh: as in `shard`.

    Raises:
        UnavailableError: there is no process group.
    """
    group = by_name(name_of(mesh))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def require_shardable(model: nn.Module) -> None:
    """Refuse a model that `shard` does not know.

    Raises:
        ModelError: names the module and says why.
    """
    cls = adapters.base_class(model)
    if "elsa_offload" in vars(model):
        raise ModelError(f"{cls.__name__} was patched with offload, which excludes a mesh")
    if cls is not VisionTransformer:
        raise ModelError(f"{cls.__name__} cannot be sharded: only timm's VisionTransformer is")
    subject: Any = model
    embed = adapters.base_class(subject.patch_embed)
    if embed is not PatchEmbed or subject.patch_embed.dynamic_img_pad:
        raise ModelError(f"patch_embed cannot be sharded: {embed.__name__} reads beyond its patch")
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(f"{path} cannot be sharded: its statistics are over all tokens")
    if not isinstance(subject.patch_drop, nn.Identity):
        raise ModelError("patch_drop cannot be sharded: ranks would drop different tokens")
    for i, block in enumerate(subject.blocks):
        for name, classes in _PARTS.items():
            found = adapters.base_class(block.get_submodule(name))
            if found not in classes:
                where = f"blocks.{i}.{name}".rstrip(".")
                names = " or ".join(each.__name__ for each in classes)
                raise ModelError(f"{where} cannot be sharded: {found.__name__} is not {names}")
    check_hooks(model)
