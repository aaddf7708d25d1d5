"""What the stream-K schedule gives on a GPU, against the schedules in use and PyTorch's kernels.

    python -m elsa_core.bench.stream [--seconds 85] [-o stream.json]

Vision shapes of a wave and a bit, single queries against long contexts, and batches of single
queries whose contexts differ in length. Times are medians under CUDA graphs, all contenders of a
case in turns; errors are relative, against float64. One JSON document on stdout. Kernels are
compiled ahead by processes of their own; cases for which no time is left are named and left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elsa_core import packing, reference
from elsa_core.attention import attention, explain
from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.stream import stream_k
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.files import write_json
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, time_cuda
from elsa_core.messages import first_line
from elsa_core.varlen import varlen_attention

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16}
_SDPA: Final = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
# what elsa has of such calls: of packed sequences, of padded ones, of others
_OURS: Final = ("packed", "fixed split, padded", "today")
_WORKERS: Final = 14
_COMPILING: Final = 40.0  # seconds after which workers that still compile are left behind


class Case(NamedTuple):
    """A call of [batch, heads, queries, dim], keys [batch, kv_heads, keys, dim].

    ragged: the contexts' lengths lie between keys // 64 and keys, evenly in their logarithm.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    dtype: str
    ragged: bool = False

    @property
    def name(self) -> str:
        """As the tables have it."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        keys = f"{self.keys // 64}..{self.keys}" if self.ragged else f"{self.keys}"
        return f"{self.batch}x{heads}x{self.queries}:{keys}x{self.dim}-{self.dtype}"


CASES: Final = (
    *(Case(32, 8, 8, 1, 65536, 128, dtype, ragged=True) for dtype in _DTYPES),
    *(Case(4, 16, 16, 1, 65536, 128, dtype) for dtype in _DTYPES),
    Case(32, 32, 8, 1, 65536, 128, "fp16", ragged=True),
    *(
        Case(b, h, h, n, n, 64, dtype)
        for b, h, n in ((1, 12, 197), (1, 3, 1025), (2, 12, 577), (4, 12, 577), (2, 12, 1025))
        for dtype in _DTYPES
    ),
)


class Inputs(NamedTuple):
    """Operands of a case. Ragged ones are also packed: tokens, and where the contexts start."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: list[int]
    packed: tuple[Tensor, ...] = ()


def lengths_of(case: Case) -> list[int]:
    """The lengths of a case's contexts, in an order of chance that is the same each time."""
    if not case.ragged:
        return [case.keys] * case.batch
    steps = max(1, case.batch - 1)
    lengths = [round(case.keys / 64 ** (i / steps)) for i in range(case.batch)]
    random.Random(0).shuffle(lengths)  # noqa: S311
    return lengths


def inputs(case: Case, device: torch.device, make: Callable[..., Tensor] = torch.randn) -> Inputs:
    """The operands, [B, H, N, D]; what lies behind the end of a ragged context is not read."""
    how = {"device": device, "dtype": _DTYPES[case.dtype]}
    query = make((case.batch, case.heads, case.queries, case.dim), **how)
    key, value = (make((case.batch, case.kv_heads, case.keys, case.dim), **how) for _ in range(2))
    lengths = lengths_of(case)
    if not case.ragged:
        return Inputs(query, key, value, lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    ones = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    tokens = [packing.packed(t.transpose(1, 2), starts, sum(lengths)) for t in (key, value)]
    return Inputs(query, key, value, lengths, (query.squeeze(2), *tokens, ones, starts))


def exact(case: Case, given: Inputs) -> Tensor:
    """The output in float64, one sequence at a time."""
    group = case.heads // case.kv_heads
    outs = []
    for i, length in enumerate(given.lengths):
        q = given.query[i].double()
        k, v = (t[i, :, :length].double() for t in (given.key, given.value))
        q = q.view(case.kv_heads, group * case.queries, case.dim)
        outs.append(reference.attention(q[None], k[None], v[None])[0].view(given.query.shape[1:]))
    return torch.stack(outs)


def streams(case: Case) -> dict[str, dict[str, Any]]:
    """What `stream_k` is asked for, by the contenders' names."""
    found: dict[str, dict[str, Any]] = {"stream-k": {}}
    if case.queries == 1:
        return found | {"stream-k 528": {"programs": 528}}
    table = tiling.load_table("h200")
    if case.dtype == "fp16":
        small = next(t for t in table.tiles if t.mode == "half" and t.dim == 64)
        return found | {
            "stream-k 64x64": {"tile": small, "programs": 264},
            "stream-k 64x64 wave": {"tile": small, "programs": 132},
        }
    ahead = next(t for t in table.tiles if t.mode == "split" and t.ahead and t.dim == 64)
    within = next(
        t
        for t in table.tiles
        if t.mode == "split" and t.dim == 64 and not (t.ahead or t.specialized)
    )
    narrow = replace(ahead, block_n=64, stages=3, registers=0)
    return found | {
        "stream-k 64x64 ahead": {"tile": narrow, "programs": 264},
        "stream-k one launch": {"tile": replace(within, registers=0), "programs": 264},
    }


def elsa(case: Case, given: Inputs) -> Iterator[Contender]:
    """Stream-K, its variants, and what serves such calls today."""
    own: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
    if case.ragged:
        operands: tuple[Any, ...] = (*given.packed, 1, case.keys)
        call = functools.partial(varlen_attention, *operands, **own)
        read = functools.partial(_as_rows, case)
        for name, knobs in streams(case).items():
            yield Contender(
                name, functools.partial(call, backend="triton"),
                functools.partial(stream_k, **knobs), read=read,
            )  # fmt: skip
        yield Contender("packed", functools.partial(call, backend="triton"), read=read)
        mask = _inside(case, given)
        yield Contender("fixed split, padded", functools.partial(
            attention, given.query, given.key, given.value, mask, backend="triton", **own
        ))  # fmt: skip
        return
    dense = functools.partial(attention, given.query, given.key, given.value, **own)
    for name, knobs in streams(case).items():
        run = functools.partial(dense, backend="triton")
        notes = {}
        with stream_k(**knobs):
            notes["schedule"] = explain(
                given.query, given.key, given.value, backend="triton", **own
            ).schedule
        yield Contender(name, run, functools.partial(stream_k, **knobs), notes=notes)
    notes = {"schedule": explain(given.query, given.key, given.value, **own).schedule}
    yield Contender("today", dense, notes=notes)


def peers(case: Case, given: Inputs) -> Iterator[Contender]:
    """PyTorch's kernels: padded, and those of packed sequences where it has them."""
    own: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
    mask = _inside(case, given) if case.ragged else None
    call = functools.partial(
        F.scaled_dot_product_attention, given.query, given.key, given.value, mask, **own
    )
    for name, backend in _SDPA.items():
        if name == "sdpa-math" and case.ragged:
            continue
        yield Contender(name, call, functools.partial(_sdpa, backend))
    if case.ragged:
        yield Contender("each-sdpa", functools.partial(_each, given, own))
        if case.dtype == "fp16":
            yield Contender(
                "varlen-attn", functools.partial(_varlen_attn, case, given),
                read=functools.partial(_as_rows, case),
            )  # fmt: skip


def _sdpa(backend: SDPBackend) -> AbstractContextManager[object]:
    chosen: AbstractContextManager[object] = sdpa_kernel(backend)
    return chosen


def _as_rows(case: Case, returned: object) -> Tensor:
    assert isinstance(returned, Tensor)
    return returned.view(case.batch, case.heads, 1, case.dim)


def _inside(case: Case, given: Inputs) -> Tensor:
    """bool [B, 1, 1, N], True for the keys of each context."""
    lengths = torch.tensor(given.lengths, device=given.key.device)
    return (torch.arange(case.keys, device=lengths.device) < lengths[:, None])[:, None, None]


def _each(given: Inputs, own: dict[str, Any]) -> Tensor:
    """Each context alone, in slices of the padded batch."""
    parts = [
        F.scaled_dot_product_attention(
            given.query[i : i + 1], given.key[i : i + 1, :, :n], given.value[i : i + 1, :, :n],
            **own,
        )
        for i, n in enumerate(given.lengths)
    ]  # fmt: skip
    return torch.cat(parts)


def _varlen_attn(case: Case, given: Inputs) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value, ones, starts = given.packed
    own: dict[str, Any] = {"enable_gqa": True} if case.heads != case.kv_heads else {}
    out = varlen_attn(query, key, value, ones, starts, 1, case.keys, **own)
    assert isinstance(out, Tensor)
    return out


def measure(case: Case, rounds: int, budget: float, device: torch.device) -> dict[str, Any]:
    """One case: microseconds, error and schedule of each contender, and who could not take part."""
    torch.manual_seed(0)
    given = inputs(case, device)
    expected = exact(case, given)
    field: list[Contender] = []
    errors: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for contender in (*elsa(case, given), *peers(case, given)):
        try:
            out = contender.output()
            if device.type == "cuda":
                torch.cuda.synchronize()  # an asynchronous failure must show here
        except (RuntimeError, ImportError, NotImplementedError, TypeError) as error:
            left_out[contender.name] = first_line(error)[:160]
            continue
        with contender.context(), torch.inference_mode():
            again = contender.call()
        field.append(contender)
        errors[contender.name] = reference.relative_l2(out, expected)
        if contender.name.startswith("stream-k"):
            read = contender.read or _same
            errors[f"{contender.name} again"] = float((read(again) - out).abs().max())
    samples, notes = time_cuda(field, rounds=rounds, budget_seconds=budget)
    rows: dict[str, dict[str, Any]] = {
        c.name: {
            "us": round(statistics.median(samples[c.name]) * 1e6, 2),
            "error": errors[c.name], "differs_again": errors.get(f"{c.name} again"),
            **c.notes, **({"note": notes[c.name]} if c.name in notes else {}),
        }
        for c in field
    }  # fmt: skip
    return {"case": case.name, **_ratios(rows), "rows": rows, "left_out": left_out}


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much longer the best of the others take than the best stream-K."""
    times: dict[str, list[float]] = {"stream-k": [], "ours": [], "peer": []}
    for name, row in rows.items():
        kind = "ours" if name in _OURS else "peer"
        times["stream-k" if name.startswith("stream-k") else kind].append(row["us"])
    if not times["stream-k"]:
        return {}
    own = min(times.pop("stream-k"))
    return {f"{name} / stream-k": round(min(us) / own, 3) for name, us in times.items() if us}


def _same(returned: object) -> Tensor:
    assert isinstance(returned, Tensor)
    return returned


def tasks() -> list[tuple[Case, str]]:
    """What the workers compile: a contender of elsa's of each case."""
    return [
        (case, name)
        for case in CASES
        for name in (*streams(case), *(_OURS[:2] if case.ragged else _OURS[2:]))
    ]


def compile_ahead(seconds: float) -> None:
    """Fill Triton's cache by processes of their own; none is waited for longer than `seconds`."""
    end = time.monotonic() + seconds
    workers = min(_WORKERS, os.cpu_count() or 1)
    command = [sys.executable, "-m", "elsa_core.bench.stream", "--compile"]
    running = [
        subprocess.Popen([*command, f"{i}/{workers}"], stdout=sys.stderr) for i in range(workers)
    ]
    for each in running:
        try:
            each.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


def _compile(part: str) -> None:
    """A worker: call its share of the contenders once, with zeros."""
    own, workers = (int(n) for n in part.split("/"))
    # contenders of one name and dtype share kernels
    kinds = sorted({(case.dtype, name, case.queries == 1, case.ragged) for case, name in tasks()})
    for case, name in tasks():
        kind = (case.dtype, name, case.queries == 1, case.ragged)
        if kinds.index(kind) % workers != own:
            continue
        given = inputs(case, torch.device("cuda"), _zeros)
        for contender in elsa(case, given):
            if contender.name == name:
                with contender.context(), torch.inference_mode():
                    contender.call()
        torch.cuda.synchronize()
        del given


def _zeros(shape: tuple[int, ...], **how: Any) -> Tensor:
    """Zeros of one row's memory, so that all workers fit on the GPU at once."""
    return torch.zeros(shape[-1], **how).expand(shape)


def main(arguments: list[str]) -> None:
    """Measure all cases and print them.

    Raises:
        ArgumentError: the output exists.
        UnavailableError: torch sees no CUDA GPU.
    """
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.stream")
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.6, help="seconds of timing a case")
    parser.add_argument("--compile", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.exists():
        raise ArgumentError(f"{given.output} exists")
    if not torch.cuda.is_available():
        raise UnavailableError("stream: torch sees no CUDA GPU")
    if given.compile:
        _compile(given.compile)
        return
    compile_ahead(min(_COMPILING, given.seconds / 2))
    sys.stderr.write(f"compiled after {time.monotonic() - begin:.1f} s\n")
    rows: list[dict[str, Any]] = []
    device = torch.device("cuda")
    for case in CASES:
        taken = time.monotonic() - begin
        if taken > given.seconds:
            rows.append({"case": case.name, "left_out": {"all": "no time was left"}})
            continue
        row = measure(case, given.rounds, given.budget, device)
        rows.append(row)
        times = ", ".join(f"{n} {r['us']} ({r['error']:.1e})" for n, r in row["rows"].items())
        sys.stderr.write(f"{taken:5.1f} s  {case.name}: {times}; without {row['left_out']}\n")
    document = {"environment": environment.describe(device), "cases": rows}
    sys.stdout.write(json.dumps(document, indent=1, default=str) + "\n")
    if given.output is not None:
        write_json(given.output, json.loads(json.dumps(document, default=str)))


if __name__ == "__main__":
    main(sys.argv[1:])
