"""What each of two processes does with a GPU of its own."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import elsa_core as elsa

from . import models
from .cases import Case
from .ranks import call, equal

CASES = {
    "float32": Case((700, 613), batch=1, heads=2, kv_heads=2, head_dim=64, value_dim=64),
    "causal": Case((700, 613), batch=1, heads=2, kv_heads=2, head_dim=64, value_dim=64,
                   is_causal=True),
    "grouped": Case((333, 100), heads=4, kv_heads=2, head_dim=32, value_dim=32),
    "additive": Case((129, 100), heads=2, kv_heads=2, head_dim=64, value_dim=64, mask="additive"),
    "bool": Case((129, 100), heads=2, kv_heads=2, head_dim=64, value_dim=64, mask="bool"),
    "extreme": Case((333, 340), heads=2, kv_heads=2, head_dim=64, value_dim=64, factor=20.0),
    "huge": Case((333, 340), heads=2, kv_heads=2, head_dim=64, value_dim=64, factor=2000.0),
    "odd width": Case((100, 51), head_dim=40, value_dim=24),
    "empty rank": Case((0, 200), heads=2, kv_heads=2, head_dim=64, value_dim=64),
    "float16": Case((700, 613), batch=1, heads=2, kv_heads=2, head_dim=64, value_dim=64,
                    dtype=torch.float16),
    "bfloat16": Case((700, 613), batch=1, heads=2, kv_heads=2, head_dim=64, value_dim=64,
                     dtype=torch.bfloat16, is_causal=True),
    "float64": Case((65, 64), heads=2, kv_heads=2, head_dim=64, value_dim=64, dtype=torch.float64),
}  # fmt: skip


def methods(case: Case) -> tuple[str, ...]:
    return ("ring", "gather", "heads") if case.heads % 2 == 0 else ("ring", "gather")


def equal_again(case: Case, rank: int, method: str) -> bool:
    """Whether equal calls give equal bits where PyTorch's kernels are told to."""
    torch.use_deterministic_algorithms(True)
    try:
        return equal(
            call(case, rank, method, device="cuda"), call(case, rank, method, device="cuda")
        )
    finally:
        torch.use_deterministic_algorithms(False)


def everything(rank: int, port: int, folder: str) -> None:
    """One process over NCCL: all cases, and a model, into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS gives no equal bits
    torch.cuda.set_device(rank)
    torch.backends.cudnn.allow_tf32 = False  # the convolution that embeds patches
    dist.init_process_group("nccl", rank=rank, world_size=2)
    found: dict[Any, Any] = {}
    for name, case in CASES.items():
        for method in methods(case):
            found[name, method] = (
                call(case, rank, method, device="cuda"),
                equal_again(case, rank, method),
            )
    found["model"] = model()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def model() -> dict[str, Tensor]:
    """Outputs and gradients of a sharded ViT, patched as a whole."""
    subject = models.vit("registers").cuda()
    elsa.patch(subject, mesh=dist.group.WORLD, scope="model")
    out = subject(models.images("registers").cuda())
    torch.nn.functional.cross_entropy(out, torch.arange(8).cuda()).backward()
    elsa.distributed.reduce_gradients(subject)
    grads = {k: p.grad.cpu() for k, p in subject.named_parameters() if p.grad is not None}
    return {"output": out.detach().cpu(), **grads}
