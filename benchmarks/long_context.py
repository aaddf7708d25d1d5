"""Long rows, resident and offloaded, against PyTorch's: `python -m benchmarks.long_context`.

Groups, for --match: `million` (1 048 576 tokens, one head), `host` (16 heads, keys and values in
host memory), `exceeding` (a device too small for keys and values) and `vggt` (the global attention
of 416 400 tokens, of random operands). Errors are of sampled rows against float64. A call takes
seconds: rounds are not in turns.
"""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, main, options, row
from elsa_core import reference
from elsa_core.measuring.memory_limit import release
from elsa_core.offload import streaming
from elsa_core.ops.attention.api import attention

_SAMPLED: Final = 8  # rows of each head
HOST: Final = "elsa, keys and values on the host"
_WARM: Final = 65536  # queries of the calls that compile
_streamed: Any = functools.partial(attention, offload="host")


class Sizes(NamedTuple):
    """Shapes [batch, heads, tokens, head_dim] of what is measured."""

    million: tuple[int, int, int, int] = (1, 1, 1 << 20, 64)
    host: tuple[int, int, int, int] = (1, 16, 1 << 20, 64)
    few: int = 4096  # queries of `exceeding`, whose keys are those of `host`
    vggt: tuple[int, int, int, int] = (1, 16, 416_400, 64)


QUICK: Final = Sizes((1, 1, 515, 16), (1, 2, 515, 16), 33, (1, 2, 301, 16))


def operands(shape: tuple[int, ...], device: torch.device, queries: int = 0) -> list[Tensor]:
    """Query, key and value, float32, drawn on the device."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, tokens, head_dim = shape
    return [
        torch.randn((batch, heads, n, head_dim), generator=generator, device=device)
        for n in (queries or tokens, tokens, tokens)
    ]


def exceeding(sizes: Sizes, device: torch.device, rounds: int) -> Iterator[Row]:
    """Few queries, and a device that has half of what keys and values take."""
    tensors = operands(sizes.host, device, sizes.few)
    exact, away = _oracle(*tensors), _away(tensors)
    tensors.clear()
    moved = away[1].nbytes + away[2].nbytes
    with _device_of(moved // 2, device):
        try:
            fits = bool([t.to(device) for t in away])
        except torch.OutOfMemoryError:
            fits = False
        release(device)
        times, out = _timed(lambda: _streamed(*away), lambda: _streamed(*away), rounds)
    name = f"exceeding/{'x'.join(map(str, sizes.host))}-fp32, {sizes.few} queries, memory for half"
    found = row(f"{name} of the keys and values", HOST, times, **_report(),
                error=reference.relative_l2(_sampled(out), exact))  # fmt: skip
    yield found | {"key_value_bytes": moved, "resident_fits": fits,
                   "bytes_per_second": moved / found["median"]}  # fmt: skip


def _ways(
    name: str, shape: tuple[int, ...], device: torch.device, rounds: int, *,
    offloaded: bool = False, peer: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """elsa resident; offloaded (`ratio`: of the resident call's speed); PyTorch's own choice of
    kernel, once (`ratio`: its time over elsa's)."""
    name, tensors = f"{name}/{'x'.join(map(str, shape))}-fp32", operands(shape, device)

    def timed(who: str, call: Callable[..., Any], given: list[Tensor], rounds: int) -> Row:
        # some of the queries against all keys: compiles the kernels of the whole call, which depend
        # on the number of keys, and warms the pools of memory
        warm = functools.partial(call, given[0][:, :, :_WARM], *given[1:])
        times, out = _timed(lambda: call(*given), warm, rounds)
        return row(name, who, times, error=reference.relative_l2(_sampled(out), _oracle(*tensors)))

    yield (own := timed("elsa", attention, tensors, rounds))
    if offloaded:
        found = timed(HOST, _streamed, _away(tensors), rounds)
        yield found | _report() | {"ratio": own["median"] / found["median"]}
    if peer:
        found = timed("sdpa", F.scaled_dot_product_attention, tensors, 1)
        yield found | {"ratio": found["median"] / own["median"]}


def _away(tensors: list[Tensor]) -> list[Tensor]:
    """The query where it is, a copy of keys and values in host memory, pinned for a GPU."""
    query, *others = tensors
    held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in others]
    return [query, *(h.copy_(t) for h, t in zip(held, others, strict=True))]


def _report() -> Row:
    report = streaming.report()
    assert report is not None
    return {"hidden": report.hidden, "copied_bytes": report.copied_bytes}


def _timed(
    call: Callable[[], Any], warm: Callable[[], Any], rounds: int
) -> tuple[list[float], Tensor]:
    """Seconds of calls after a warm one, and the last output."""
    warm()
    times, out = [], torch.empty(0)
    for _ in range(rounds):
        out = torch.empty(0)  # one output at a time
        _wait()
        begun = time.perf_counter()
        out = call()
        _wait()
        times.append(time.perf_counter() - begun)
    return times, out


def _sampled(rows: Tensor) -> Tensor:
    return rows[:, :, :: max(1, rows.shape[2] // _SAMPLED)][:, :, :_SAMPLED]


def _oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The float64 output of some rows, a head at a time."""
    rows = _sampled(query)
    heads = [
        reference.attention(rows[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1])[0]
        for i in range(query.shape[1])
    ]
    return torch.cat(heads, 1)


@contextmanager
def _device_of(size: int, device: torch.device) -> Iterator[None]:
    """This process may take so many bytes of the device beside what it has; on a CPU all."""
    if device.type != "cuda":
        yield
        return
    release(device)
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = min(1.0, (torch.cuda.memory_reserved(device) + size) / total)
    torch.cuda.set_per_process_memory_fraction(allowed, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cases(given: Namespace) -> dict[str, Any]:
    """The groups."""
    sizes = QUICK if given.quick else Sizes()
    return {
        "million": functools.partial(_ways, "million", sizes.million, offloaded=True, peer=True),
        "host": functools.partial(_ways, "host", sizes.host, offloaded=True),
        "exceeding": functools.partial(exceeding, sizes),
        "vggt": functools.partial(_ways, "vggt", sizes.vggt, peer=True),
    }


@torch.no_grad()
def measure(name: str, group: Any, given: Namespace) -> list[Row]:
    """The rows of one group."""
    rows = list(group(given.device, given.rounds))
    release(given.device)
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=1))
