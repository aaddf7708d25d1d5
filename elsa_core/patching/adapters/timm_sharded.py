"""`shard`: timm's VisionTransformer with its tokens split over the ranks of a process group.

Class token, registers and patches are cut into one run of tokens for each rank. Every rank is given
the whole image and embeds the rows of patches that its tokens lie in. Attention goes through
`elsa_core.distributed.attention`; pooling gathers, and the head runs on every rank.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import resample_abs_pos_embed
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elsa_core.base import calls
from elsa_core.base.version import __version__
from elsa_core.distributed import agreement
from elsa_core.distributed.attention import attention, explain
from elsa_core.distributed.groups import by_name, name_of, place
from elsa_core.distributed.plan import Plan, shard_lengths
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.monoid import state_dtype
from elsa_core.patching import adapters
from elsa_core.patching.adapters.hooks import has_hooks
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.precision import dtype_name

# The classes of a block and of its parts.
_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "": (Block, ResPostBlock), "attn": (Attention,), "mlp": (Mlp, GluMlp, SwiGLU),
}  # fmt: skip


class ShardedAttention(ElsaAttention):
    """timm's ViT attention over all ranks' tokens: [B, n, C] -> [B, n, C] of this rank."""

    elsa_base = Attention
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
        return self.elsa_added(x, None, None, attn_mask, is_causal)

    def _elsa_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool) -> Any:
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        return attention(
            q, k, v, mask, group=self.elsa_group, is_causal=is_causal, scale=self.scale,
            lengths=self.elsa_lengths, precision=self.elsa_precision, backend=self.elsa_backend,
        )  # fmt: skip


class ShardedVisionTransformer(VisionTransformer):  # type: ignore[misc]  # timm is untyped
    """A ViT of which each rank holds a run of tokens: `forward_features` gives these [B, n, C];
    `forward` and `forward_head` of them what the model gives in one process."""

    elsa_base = VisionTransformer
    elsa_companion = True
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Any:
        _compare_calls(self, x, attn_mask, is_causal)
        grid, lengths = _grid_and_lengths(self, x)
        self.elsa_lengths = lengths
        rank, _ = place(self.elsa_group)
        start = sum(lengths[:rank])
        stop = start + lengths[rank]
        x = self.norm_pre(_embedded(self, x, grid, start, stop))
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask[..., start:stop, :]
        terms: dict[str, Any] = {} if attn_mask is None else {"attn_mask": attn_mask}
        if is_causal:
            terms["is_causal"] = True  # which timm has from 1.0.21 on
        again = self.grad_checkpointing and torch.is_grad_enabled() and not terms
        for block in self.blocks:
            run = partial(_called, block, lengths)
            x = checkpoint(run, x, use_reentrant=False) if again else run(x, **terms)
        return self.norm(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Any:
        pool_type = self.global_pool if pool_type is None else pool_type
        lengths = self.elsa_lengths
        rank, world = place(self.elsa_group)
        # [B, n, C] of each rank -> [B, sum of n, C] on every rank; differentiable
        gather: Any = torch.ops.elsa.gather_shards
        whole = self.attn_pool is not None or not pool_type
        skipped = 0 if self.pool_include_prefix else self.num_prefix_tokens
        counted = whole or (skipped and pool_type != "token")
        if counted and x.shape[1] != lengths[rank]:
            raise ArgumentError(
                f"features of {x.shape[1]} tokens on rank {rank}, where the last forward_features "
                f"gave {lengths[rank]}: call forward_head before a forward of images of another "
                "size"
            )
        if whole:
            return super().pool(gather(x, [*lengths], self.elsa_group), pool_type)
        if pool_type == "token":
            first = [int(not other) for other in range(world)]
            return gather(x[:, : first[rank]], first, self.elsa_group)[:, 0]
        own = x[:, max(skipped - sum(lengths[:rank]), 0) :]
        results = []
        if pool_type in ("max", "avgmax"):
            # a rank without tokens to pool stays in the graph, for the gradients' sake
            none = own.shape[1] == 0
            top = own.sum(1, keepdim=True) - torch.inf if none else own.amax(1, keepdim=True)
            results.append(gather(top, [1] * world, self.elsa_group).amax(1))
        if pool_type in ("avg", "avgmax"):
            # in float32 as PyTorch's mean has it, rounded once
            total = own.sum(1, keepdim=True, dtype=state_dtype(own.dtype))
            # each sum comes with its count: a model knows those of its last forward alone
            count = torch.full_like(total[..., :1], own.shape[1])
            sums = gather(torch.cat([total, count], 2), [1] * world, self.elsa_group).sum(1)
            results.append((sums[:, :-1] / sums[:, -1:]).to(own.dtype))
        return results[0] if len(results) == 1 else 0.5 * (results[0] + results[1])

    def forward_intermediates(self, *arguments: Any, **options: Any) -> Any:
        raise ModelError(
            "forward_intermediates of a sharded model: a rank holds a part of the tokens; take "
            "forward_features, which gives them"
        )

    def elsa_plan(self, images: Tensor) -> Plan:
        """How the attention of a batch [B, C, H, W] is served, and what all blocks of it send."""
        _, lengths = _grid_and_lengths(self, images)
        attention = self.blocks[0].attn
        own = lengths[place(self.elsa_group)[0]]
        shape = (images.shape[0], attention.num_heads, own, attention.head_dim)
        x = images.detach().flatten()[:1].view(1, 1, 1, 1).expand(shape)  # without memory
        found = explain(x, x, x, group=self.elsa_group, lengths=lengths)
        depth = len(self.blocks)
        sent, back = depth * found.bytes_sent, depth * found.bytes_sent_backward
        return replace(found, bytes_sent=sent, bytes_sent_backward=back)


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
        adapters.with_base(module, cls) if adapters.patched_class(module) else cls
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
    _check_hooks(model)


def _check_hooks(model: Any) -> None:
    """Refuse hooks on modules that timm's forward calls and this one does not call as a whole."""
    passed_over = {name: getattr(model, name) for name in ("patch_embed", "patch_drop", "blocks")}
    for i, block in enumerate(model.blocks):
        if not block.attn.fused_attn:  # attention weights pass through it
            passed_over[f"blocks.{i}.attn.attn_drop"] = block.attn.attn_drop
    for path, module in passed_over.items():
        if has_hooks(module):
            raise ModelError(
                f"{path} cannot be sharded: its hooks would not be called as in one process"
            )


def _check(model: Any, images: Tensor) -> None:
    """A site that was patched or unpatched since attends within its rank's tokens alone, and hooks
    may have been registered."""
    for i, block in enumerate(model.blocks):
        if not isinstance(block.attn, ShardedAttention):
            raise ModelError(
                f"blocks.{i}.attn was patched after the model was sharded: shard again"
            )
    _check_hooks(model)
    for path, module in model.named_modules() if model.training else ():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else 0.0
        if rate or getattr(module, "drop_prob", 0.0):
            raise ModelError(
                f"{path} drops in training, which ranks would do differently: set its rate to 0"
            )
    _grid_and_lengths(model, images)


def _compare_calls(model: Any, images: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    """Let the ranks compare a forward before its first byte of data, by one message for which the
    host waits: not in a recorded program, nor under the capture of a CUDA graph."""
    captured = images.is_cuda and torch.cuda.is_current_stream_capturing()
    if calls.traced() or captured or place(model.elsa_group)[1] == 1:
        _check(model, images)
        return
    group = by_name(model.elsa_group)
    try:
        _check(model, images)
    except (ArgumentError, ModelError) as error:
        with suppress(ArgumentError):
            wrong = {"error": str(error)[: agreement.LONGEST]}
            agreement.compare(group, wrong, images.device)
        raise
    kind = images.device.type
    autocast = torch.is_autocast_enabled(kind) and dtype_name(torch.get_autocast_dtype(kind))
    learnt = any(p.requires_grad for p in model.parameters())
    said = {
        "the version of elsa": __version__,
        "the model": f"{model.elsa_base.__name__} of {model.num_features} channels",
        "the device": kind,
        "the dtype": dtype_name(images.dtype),
        "the shape of images": list(images.shape),
        "autocast": autocast or "off",
        "whether gradients are wanted": torch.is_grad_enabled()
        and (learnt or images.requires_grad),
        "is_causal": is_causal,
        "attn_mask": "none" if mask is None else [dtype_name(mask.dtype), *mask.shape],
    }
    agreement.compare(group, said, images.device)


def _grid_and_lengths(model: Any, images: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    embed = model.patch_embed
    if images.dim() != 4:
        raise ArgumentError(f"images of shape {list(images.shape)} are not [B, C, H, W]")
    height, width = images.shape[-2:]
    if embed.strict_img_size and (height, width) != tuple(embed.img_size):
        raise ArgumentError(
            f"images of {height} x {width} pixels: the model takes {embed.img_size[0]} x "
            f"{embed.img_size[1]}"
        )
    rows, columns = embed.patch_size
    if height % rows or width % columns:
        raise ArgumentError(
            f"images of {height} x {width} pixels are not made of patches of {rows} x {columns}"
        )
    grid = height // rows, width // columns
    tokens = model.num_prefix_tokens + grid[0] * grid[1]
    return grid, shard_lengths(tokens, place(model.elsa_group)[1])


def _called(block: Any, lengths: tuple[int, ...], x: Tensor, **terms: Any) -> Any:
    """A block on tokens of these lengths: a checkpoint runs it again after others."""
    if block.attn.elsa_lengths != lengths:
        block.attn.elsa_lengths = lengths
    return block(x, **terms)


def _embedded(model: Any, images: Tensor, grid: tuple[int, int], start: int, stop: int) -> Any:
    """This rank's tokens [B, stop - start, C] with their positions. A rank without patches, or
    without prefix tokens, takes none of some: their parameters have a gradient, of zeros."""
    embed, prefix = model.patch_embed, model.num_prefix_tokens
    first, last = max(start - prefix, 0), max(stop - prefix, 0)
    top = min(first // grid[1], grid[0] - 1)
    bottom = max(-(-last // grid[1]), top + 1)
    height = embed.patch_size[0]
    rows = embed.proj(images[..., top * height : bottom * height, :])
    skipped = top * grid[1]
    x = embed.norm(rows.flatten(2).transpose(1, 2))[:, first - skipped : last - skipped]
    positions = model.pos_embed
    if positions is not None and model.dynamic_img_size:
        positions = resample_abs_pos_embed(
            positions,
            new_size=grid,
            old_size=embed.grid_size,
            num_prefix_tokens=0 if model.no_embed_class else prefix,
        )
    if positions is not None and model.no_embed_class:
        x = x + positions[:, first:last]
    parts = [token for token in (model.cls_token, model.reg_token) if token is not None]
    if parts:
        heads = torch.cat(parts, 1)[:, start : min(stop, prefix)]
        x = torch.cat([heads.expand(x.shape[0], -1, -1), x], 1)
    if positions is not None and not model.no_embed_class:
        x = x + positions[:, start:stop]
    return model.pos_drop(x)
