"""What models have in common whose tokens are sharded over ranks: the comparison before a forward,
the images they take, and pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base import calls
from elsa_core.base.version import __version__
from elsa_core.distributed import agreement
from elsa_core.distributed.groups import by_name, place
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.monoid import state_dtype
from elsa_core.patching.adapters.hooks import has_hooks
from elsa_core.precision import dtype_name

_LOWEST = float("-inf")


def compare_calls(model: Any, images: Tensor, check: Callable[[], None], **terms: Any) -> None:
    """Let the ranks compare a forward before its first byte of data; `check` is this rank's own.

    One message of two kilobytes, for which the host waits. Not in a recorded program, nor under the
    capture of a CUDA graph, where it cannot.
    """
    captured = images.is_cuda and torch.cuda.is_current_stream_capturing()
    if calls.traced() or captured or place(model.elsa_group)[1] == 1:
        check()
        return
    group = by_name(model.elsa_group)
    try:
        check()
    except (ArgumentError, ModelError) as error:
        with suppress(ArgumentError):
            agreement.refuse(group, error, images.device)
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
        **terms,
    }
    agreement.compare(group, said, images.device)


def check_hooks(passed_over: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse hooks on modules, by path, that a sharded forward does not call as a whole."""
    for path, module in passed_over:
        if has_hooks(module):
            raise ModelError(
                f"{path} cannot be sharded: its hooks would not be called as in one process"
            )


def check_drops(model: nn.Module) -> None:
    """Refuse a model in training that draws at random what ranks would draw differently."""
    if not model.training:
        return
    for path, module in model.named_modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else 0.0
        if rate or getattr(module, "drop_prob", 0.0):
            raise ModelError(
                f"{path} drops in training, which ranks would do differently: set its rate to 0"
            )


def grid_of(embed: Any, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches that timm's PatchEmbed makes of a batch [B, C, H, W]."""
    if images.dim() != 4:
        raise ArgumentError(f"images of shape {list(images.shape)} are not [B, C, H, W]")
    height, width = images.shape[-2:]
    if embed.strict_img_size and (height, width) != tuple(embed.img_size):
        raise ArgumentError(
            f"images of {height} x {width} pixels: the model takes {embed.img_size[0]} x "
            f"{embed.img_size[1]}"
        )
    rows, columns = embed.patch_size
    if (height % rows or width % columns) and not embed.dynamic_img_pad:
        raise ArgumentError(
            f"images of {height} x {width} pixels are not made of patches of {rows} x {columns}"
        )
    return -(-height // rows), -(-width // columns)


def check_length(tokens: int, lengths: Sequence[int], group: str) -> None:
    """Refuse features that are not of the last forward, whose `lengths` a model keeps."""
    rank, _ = place(group)
    if tokens != lengths[rank]:
        raise ArgumentError(
            f"features of {tokens} tokens on rank {rank}, where the last forward_features gave "
            f"{lengths[rank]}: call forward_head before a forward of images of another size"
        )


def gathered(tokens: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    """[B, n, C] of each rank -> [B, sum(lengths), C] on every rank. Differentiable."""
    check_length(tokens.shape[1], lengths, group)
    whole: Tensor = torch.ops.elsa.gather_shards(tokens, list(lengths), group)
    return whole


def pooled(own: Tensor, pool_type: str, group: str) -> Tensor:
    """[B, C]: mean ("avg"), maximum ("max") or half their sum ("avgmax") over all ranks' tokens.

    Args:
        own: [B, n, C], the tokens of this rank that take part; n may be 0.
    """
    one_each = [1] * place(group)[1]
    results = []
    if pool_type in ("max", "avgmax"):
        # a rank without tokens to pool stays in the graph, for the gradients' sake
        none = own.shape[1] == 0
        top = own.sum(1, keepdim=True) + _LOWEST if none else own.amax(1, keepdim=True)
        results.append(gathered(top, one_each, group).amax(1))
    if pool_type in ("avg", "avgmax"):
        # in float32 as PyTorch's mean has it, rounded once
        total = own.sum(1, keepdim=True, dtype=state_dtype(own.dtype))
        # each sum comes with its count: a model knows those of its last forward alone
        count = torch.full_like(total[..., :1], own.shape[1])
        sums = gathered(torch.cat([total, count], 2), one_each, group).sum(1)
        results.append((sums[:, :-1] / sums[:, -1:]).to(own.dtype))
    return results[0] if len(results) == 1 else 0.5 * (results[0] + results[1])
