"""`elsa profile --sequence-parallel`: one forward with its tokens sharded over torchrun's ranks."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names, pipeline
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError, describe
from elsa_cli.options import Options, resolve_device

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.runs.scaling import Scaling

# What concerns one process alone.
_OTHERS = (
    "train", "baselines", "policy", "output", "resume", "html", "plot", "include", "exclude",
    "inputs", "input_size", "sites", "no_errors",
)  # fmt: skip
_ONE_OF = {
    "img_size": "--img", "batch_size": "--batch-size", "dtype": "--dtype",
    "precision": "--precision",
}  # fmt: skip


def profile(session: Session, model: str, options: Options) -> None:
    """Measure, and let rank 0 show it."""
    rank = int(os.environ.get("RANK") or 0)
    session.quiet |= rank > 0  # rank 0 alone writes
    try:
        for name in _OTHERS:
            if getattr(options, name):
                raise click.UsageError(f"--{name.replace('_', '-')} is not for --sequence-parallel")
        for name, flag in _ONE_OF.items():
            if len(getattr(options, name) or ()) > 1:
                raise click.UsageError(f"--sequence-parallel takes one {flag}")
        if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
            raise PlaceError("--sequence-parallel needs ranks: "
                             "torchrun --nproc-per-node 2 -m elsa_cli profile ...")  # fmt: skip
        names.check(model)
        with session.stage("importing torch", imports=True):
            from elsa_core.measuring import environment
        import torch
        import torch.distributed as dist

        # PyTorch 2.10's Gloo prints where ranks meet, on a stdout that results have alone.
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            device = torch.device(resolve_device(options.device))
            if device.type == "cuda":
                device = torch.device(resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}"))
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            try:
                found, about = _measured(session, model, options, device)
            finally:
                dist.destroy_process_group()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        if rank == 0:
            results = {**about, "scaling": found.to_dict()}
            place = environment.describe(device)
            session.document("profile --sequence-parallel", results, place)
            _show(session, about, found)
    except Exception as error:
        code, _ = describe(error)
        if rank and code in (2, 4):  # usage, a model: all ranks have it, and one says it
            raise click.exceptions.Exit(code) from None
        raise


def _measured(
    session: Session, model: str, options: Options, device: torch.device
) -> tuple[Scaling, dict[str, Any]]:
    import torch

    from elsa_core.loading import parse
    from elsa_core.patching import patch, require_shardable
    from elsa_core.precision import DTYPES
    from elsa_core.profiling.runs.scaling import scaling

    dtype, size = options.dtype[0], options.img_size[0] if options.img_size else None
    with session.stage("profiling") as update:
        loaded = pipeline.load(session, parse(model), options, device, size, dtype)
        subject = loaded.model.eval()
        require_shardable(subject)
        patch(subject, precision=options.precision[0], backend=options.backend, scope=options.scope)
        generator = torch.Generator().manual_seed(options.seed)
        shape = (options.batch_size[0], *loaded.input_size)
        images = torch.randn(shape, generator=generator).to(device=device, dtype=DTYPES[dtype])
        found = scaling(
            subject, images, rounds=options.rounds, budget_seconds=options.budget, progress=update
        )
    return found, {
        "model": loaded.name, "image_size": list(shape[2:]), "batch_size": shape[0],
        "dtype": dtype, "device": device.type,
    }  # fmt: skip


def _show(session: Session, about: dict[str, Any], found: Scaling) -> None:
    height, width = about["image_size"]
    session.line(f"{about['model']} · {height} x {width} px · batch {about['batch_size']} · "
                 f"{about['dtype']} · {about['device']}", "bold")  # fmt: skip
    counts = (found.memory_one, found.bytes_sent, found.memory)
    alone, sent, each = ("" if n is None else f"{n / 2**20:.1f} MiB" for n in counts)
    one = found.seconds_one
    rows = [
        ["one rank", "does not fit" if one is None else f"{1e3 * one:.2f} ms", "1.00x", "", "",
         alone],
        [f"{found.ranks} ranks", f"{1e3 * found.seconds:.2f} ms",
         "" if found.speedup is None else f"{found.speedup:.2f}x",
         "" if found.efficiency is None else f"{100 * found.efficiency:.0f} %",
         sent, each],
    ]  # fmt: skip
    session.table(
        ["", ">time", ">speed-up", ">efficiency", ">sent by a rank", ">memory of a rank"], rows
    )
    tokens = f"{min(found.tokens)} to {max(found.tokens)} tokens a rank"
    session.line(f"attention: {found.method} ({found.why}) · {tokens}")
    if found.difference is not None:
        session.line(f"outputs differ by {found.difference:.1e}, relative to one rank's")
