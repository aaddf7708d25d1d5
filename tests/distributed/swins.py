"""Small Swins that are sharded over ranks, by name, and what a rank finds of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import PatchEmbed
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.distributed import groups


@dataclass(frozen=True)
class Case:
    """A model. size: of the images, the model's own unless given; rows of patches in `ROWS`.

    frozen: neither the images nor the layer that embeds them want a gradient.
    """

    img_size: tuple[int, int]
    size: tuple[int, int] = (0, 0)
    window_size: Any = 4
    depths: tuple[int, ...] = (2, 2)
    version: int = 1
    patched: str = ""
    checkpoints: bool = False
    frozen: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_ANY = {"strict_img_size": False}
_PADDED = partial(PatchEmbed, dynamic_img_pad=True)
SWINS = {
    # 4 and 2 rows of windows
    "even": Case((64, 32)),
    # 5 rows of windows, the last of them of one row of tokens; 3 in odd images; 2; 1
    "uneven": Case((68, 44), depths=(2, 2, 3, 2), patched="model"),
    "one row of windows": Case((32, 16), depths=(2, 2, 2), patched="attention"),
    "not shifted last": Case((48, 16), depths=(1, 3, 1)),
    "any size": Case((32, 32), size=(56, 24), options=_ANY, patched="attention"),
    "any size, not patched": Case((32, 32), size=(72, 40), options=_ANY),
    "padded patches": Case((32, 32), size=(53, 27), options={**_ANY, "embed_layer": _PADDED}),
    "always partition": Case((20, 12), options={"always_partition": True}, window_size=8),
    "windows of 3 x 5": Case((52, 44), window_size=(3, 5), patched="attention"),
    "maximum": Case((48, 16), options={"global_pool": "max"}),
    "both": Case((32, 16), depths=(2, 2, 2), options={"global_pool": "avgmax"}),
    "rows": Case((40, 16), options={"global_pool": "", "num_classes": 0}),
    "checkpoints": Case((48, 32), options=_ANY, checkpoints=True, patched="attention"),
    "checkpoints, frozen patches": Case((48, 32), options=_ANY, checkpoints=True, frozen=True),
    "version 2": Case((68, 44), depths=(2, 2, 2), version=2),
    "version 2, patched": Case((56, 24), depths=(2, 2, 2), version=2, patched="attention"),
}


# of three ranks those in which some of them hold no rows or the last one is odd
OF = {2: tuple(SWINS), 3: ("uneven", "one row of windows", "any size", "both", "rows",
                           "checkpoints", "version 2")}  # fmt: skip

# rows move before blocks that shift, before patches are merged, and where a stage has fewer windows
SENT = ("uneven", "any size", "version 2")


def swin(name: str) -> nn.Module:
    """A model in eval mode, with weights such that no attention is a mean."""
    torch.manual_seed(0)
    case = SWINS[name]
    heads = tuple(2**i for i in range(len(case.depths)))
    cls = SwinTransformerV2 if case.version == 2 else SwinTransformer
    model = cls(
        img_size=case.img_size, patch_size=4, embed_dim=8, depths=case.depths, num_heads=heads,
        window_size=case.window_size,
        **{"num_classes": 16, "drop_path_rate": 0.0, **case.options},
    )  # fmt: skip
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "logit_scale" not in path:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.set_grad_checkpointing(case.checkpoints)
    model.patch_embed.requires_grad_(not case.frozen)
    return model.eval()


def batches(name: str) -> list[Tensor]:
    """Images; of two sizes where blocks are computed again in the backward."""
    case = SWINS[name]
    generator = torch.Generator().manual_seed(1)
    sizes = [case.size if any(case.size) else case.img_size]
    if case.checkpoints:
        sizes.append((sizes[0][0] + 16, sizes[0][1] - 8))
    return [torch.randn((2, 3, *size), generator=generator) for size in sizes]


def step(model: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Outputs, and the gradients of one loss over all batches, of the images too."""
    device = next(model.parameters()).device
    learnt = not SWINS[name].frozen
    images = [batch.to(device, dtype).requires_grad_(learnt) for batch in batches(name)]
    outputs = [model(batch) for batch in images]
    # signs by channel: a loss of logits that no norm makes constant
    weight = torch.linspace(-1.0, 1.0, outputs[0].shape[-1], dtype=dtype, device=device)
    loss = sum(((out * weight).sin() * weight).sum() for out in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    of_images = {f"images {i}": batch.grad for i, batch in enumerate(images)}
    grads = {path: p.grad for path, p in model.named_parameters()} | of_images
    return found | {path: grad for path, grad in grads.items() if grad is not None}


def sharded(name: str, device: str = "cpu", group: Any = None) -> dict[str, Tensor]:
    """A rank's outputs, and the gradients after their mean over ranks."""
    model, group = swin(name).to(device), group or dist.group.WORLD
    if SWINS[name].patched:
        elsa.patch(model, mesh=group, scope=SWINS[name].patched)
    else:
        elsa.distributed.shard(model, group)
    found = step(model, name)
    elsa.distributed.reduce_gradients(model, group)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[path] = parameter.grad
    for path in [path for path in found if path.startswith("images")]:
        dist.all_reduce(found[path], group=group)
        found[path] /= group.size()
    return found


def twice(name: str) -> dict[str, Any]:
    """What a rank finds, and whether it finds the same bits again, asked of some."""
    one = sharded(name)
    two = sharded(name) if name in ("uneven", "checkpoints") else one
    return {"terms": one, "again": all(torch.equal(two[path], t) for path, t in one.items())}


def by_ddp(name: str) -> dict[str, Tensor]:
    """The same by DistributedDataParallel, which waits for a gradient of every parameter."""
    model = elsa.distributed.shard(swin(name))
    found = step(nn.parallel.DistributedDataParallel(model), name)
    images = [path for path in found if path.startswith("images")]
    return {path.removeprefix("module."): found[path] for path in found if path not in images}


def undone(name: str) -> bool:
    """Whether unpatching gives back the classes and attributes that were there."""
    model = swin(name)

    def state() -> list[Any]:
        return [(path, type(m), sorted(vars(m))) for path, m in model.named_modules()]

    before = state()
    elsa.distributed.shard(model)(batches(name)[0])
    shifts = [block.shift_size for stage in model.layers for block in stage.blocks]  # type: ignore[union-attr]
    elsa.unpatch(model)
    plain = swin(name)
    kept = [block.shift_size for stage in plain.layers for block in stage.blocks]  # type: ignore[union-attr]
    return state() == before and shifts == kept


def bytes_sent(name: str) -> tuple[int, int]:
    """What a forward hands to other ranks, pooling left out: as the plan says, and as it is."""
    model: Any = elsa.distributed.shard(swin(name))
    images, handed = batches(name)[0], []
    before = groups.exchange

    def counted(group: Any, parts: list[Tensor], shapes: Any) -> list[Tensor]:
        handed.extend(part.nbytes for part in parts)
        return before(group, parts, shapes)

    groups.exchange = counted
    try:
        with torch.no_grad():
            model.forward_features(images)
    finally:
        groups.exchange = before
    return model.elsa_plan(images).bytes_sent, sum(handed)


def own_rows(name: str) -> list[int]:
    """The shape of this rank's part of the last stage."""
    with torch.no_grad():
        model: Any = elsa.distributed.shard(swin(name))
        return list(model.forward_features(batches(name)[0]).shape)


def under_autocast(name: str) -> Tensor:
    """What a rank gives, of which some hold no rows, where layers round to bfloat16."""
    model = elsa.distributed.shard(swin(name))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(batches(name)[0])
    return out
