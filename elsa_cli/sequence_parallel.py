"""`elsa profile --sequence-parallel`: one forward with its tokens sharded over torchrun's ranks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names
from elsa_cli.console import Session
from elsa_cli.errors import describe
from elsa_cli.options import Options, resolve_device

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.runs.scaling import Scaling

# What concerns one process alone.
_OTHERS = (
    *("train", "baselines", "policy", "output", "resume", "html", "plot", "include", "exclude"),
    *("inputs", "input_size"),
)


def profile(session: Session, model: str, options: Options) -> None:
    """Measure, and let rank 0 show it."""
    rank = int(os.environ.get("RANK") or 0)
    if rank:
        session.quiet = True  # rank 0 alone writes
    with _rank_0_speaks(rank):
        _check(options)
        names.check(model)
        with session.stage("importing torch", imports=True):
            from elsa_core.measuring import environment
        import torch.distributed as dist

        with _results_alone_on_stdout():
            device = _joined(options.device)
            try:
                with session.stage("profiling") as update:
                    found, about = _measured(model, options, device, lambda on: update(on, 0, 0))
            finally:
                dist.destroy_process_group()
        if rank == 0:
            results = {**about, "scaling": found.to_dict()}
            place = environment.describe(device)
            session.document("profile --sequence-parallel", results, place)
            _show(session, about, found)


@contextmanager
def _results_alone_on_stdout() -> Iterator[None]:
    """Send to stderr what Gloo prints where ranks meet, as PyTorch 2.10 has it."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _rank_0_speaks(rank: int) -> Iterator[None]:
    """On the other ranks an error that all have ends without a line."""
    try:
        yield
    except Exception as error:
        code, _ = describe(error)
        if rank and code in (2, 4):  # usage, a model: the same everywhere
            raise click.exceptions.Exit(code) from None
        raise


def _check(options: Options) -> None:
    from elsa_core.errors import UnavailableError

    for name in _OTHERS:
        if getattr(options, name):
            raise click.UsageError(f"--{name.replace('_', '-')} is not for --sequence-parallel")
    for name, flag in (("img_size", "--img"), ("batch_size", "--batch-size"),
                       ("dtype", "--dtype"), ("precision", "--precision")):  # fmt: skip
        if len(getattr(options, name) or ()) > 1:
            raise click.UsageError(f"--sequence-parallel takes one {flag}")
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        raise UnavailableError(
            "--sequence-parallel needs ranks: torchrun --nproc-per-node 2 -m elsa_cli profile ..."
        )


def _joined(name: str) -> torch.device:
    """This rank's device, as a member of torchrun's group."""
    import torch
    import torch.distributed as dist

    device = torch.device(resolve_device(name))
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(resolve_device(f"cuda:{local}"))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _measured(
    model: str, options: Options, device: torch.device, tell: Any
) -> tuple[Scaling, dict[str, Any]]:
    import torch

    from elsa_core.loading import load_model, parse
    from elsa_core.patching import patch, require_shardable
    from elsa_core.profiling.runs.scaling import scaling

    dtype = options.but(dtype=options.dtype[0]).torch_dtype()
    loaded = load_model(
        parse(model), image_size=options.img_size[0] if options.img_size else None,
        pretrained=options.pretrained, device=device, dtype=dtype, seed=options.seed,
        **options.source(),
    )  # fmt: skip
    subject = loaded.model.eval()
    require_shardable(subject)
    patch(subject, precision=options.precision[0], backend=options.backend, scope=options.scope)
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.batch_size[0], *loaded.input_size)
    images = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
    found = scaling(
        subject, images, rounds=options.rounds, budget_seconds=options.budget, progress=tell
    )
    about = {
        "model": loaded.name, "image_size": list(shape[2:]), "batch_size": shape[0],
        "dtype": options.dtype[0], "device": device.type,
    }  # fmt: skip
    return found, about


def _show(session: Session, about: dict[str, Any], found: Scaling) -> None:
    height, width = about["image_size"]
    session.line(
        f"{about['model']} · {height} x {width} px · batch {about['batch_size']} · "
        f"{about['dtype']} · {about['device']}",
        "bold",
    )
    one = found.seconds_one
    rows = [
        ["one rank", "does not fit" if one is None else f"{1e3 * one:.2f} ms", "1.00x", "", "",
         _bytes(found.memory_one)],
        [f"{found.ranks} ranks", f"{1e3 * found.seconds:.2f} ms",
         "" if found.speedup is None else f"{found.speedup:.2f}x",
         "" if found.efficiency is None else f"{100 * found.efficiency:.0f} %",
         _bytes(found.bytes_sent), _bytes(found.memory)],
    ]  # fmt: skip
    session.table(
        ["", ">time", ">speed-up", ">efficiency", ">sent by a rank", ">memory of a rank"], rows
    )
    tokens = f"{min(found.tokens)} to {max(found.tokens)} tokens a rank"
    session.line(f"attention: {found.method} ({found.why}) · {tokens}")
    if found.difference is not None:
        session.line(f"outputs differ by {found.difference:.1e}, relative to one rank's")


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f} MiB"
