"""Long rows, resident and offloaded, against PyTorch's: `python -m benchmarks.long_context`.

Groups, for --match: `million` (1 048 576 tokens, one head), `host` (16 heads, keys and values in
host memory), `exceeding` (a device too small for keys and values), `vggt` (the global attention of
416 400 tokens, of random operands) and `llama` (LLaMA-13B with random weights, of as many layers as
fit, prefilled through transformers, weights resident and streamed from host memory layer by layer).
Errors are of sampled rows against float64. A call takes seconds: rounds are not in turns.
"""

from __future__ import annotations

import functools
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Row, main, options, row
from elsa_core import reference
from elsa_core.measuring.memory_limit import release
from elsa_core.offload import streaming
from elsa_core.ops.attention.api import attention
from elsa_core.precision import DTYPES

_SAMPLED: Final = 8  # rows of each head
HOST: Final = "elsa, keys and values on the host"
_WARM: Final = 65536  # queries of the calls that compile
_LAYERS: Final = 40  # of LLaMA-13B
_ALIVE: Final = 10  # tensors [tokens, hidden] of a layer at its peak, beside its MLP's three
_SHARE: Final = 0.9  # of the free memory: the rest is for kernels and fragments


class Sizes(NamedTuple):
    """What is measured: shapes [batch, heads, tokens, head_dim], and a LLaMA."""

    million: tuple[int, int, int, int] = (1, 1, 1 << 20, 64)
    host: tuple[int, int, int, int] = (1, 16, 1 << 20, 64)
    few: int = 4096  # queries of `exceeding`, whose keys are those of `host`
    vggt: tuple[int, int, int, int] = (1, 16, 416_400, 64)
    prefill: tuple[int, ...] = (32768, 65536)
    hidden: int = 5120
    intermediate: int = 13824
    llama_heads: int = 40


QUICK: Final = Sizes(
    (1, 1, 515, 16), (1, 2, 515, 16), 33, (1, 2, 301, 16), (65,), 64, 96, 4
)  # fmt: skip


def operands(shape: tuple[int, ...], device: torch.device, queries: int = 0) -> list[Tensor]:
    """Query, key and value, float32, drawn on the device."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, tokens, head_dim = shape
    return [
        torch.randn((batch, heads, n, head_dim), generator=generator, device=device)
        for n in (queries or tokens, tokens, tokens)
    ]


def million(sizes: Sizes, device: torch.device, rounds: int) -> Iterator[Row]:
    """One head of a million tokens."""
    yield from _ways("million", sizes.million, device, rounds, offloaded=True, peer=True)


def host(sizes: Sizes, device: torch.device, rounds: int) -> Iterator[Row]:
    """Keys and values on the host: as fast as on the device?"""
    yield from _ways("host", sizes.host, device, rounds, offloaded=True)


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
    few = f", {sizes.few} queries, memory for half of the keys and values"
    found = row(_name("exceeding", sizes.host) + few, HOST, times, **_report(),
                error=reference.relative_l2(_sampled(out), exact))  # fmt: skip
    yield found | {"key_value_bytes": moved, "resident_fits": fits,
                   "bytes_per_second": moved / found["median"]}  # fmt: skip


def vggt(sizes: Sizes, device: torch.device, rounds: int) -> Iterator[Row]:
    """The global attention of a VGGT over 416 400 tokens, in float32."""
    yield from _ways("vggt", sizes.vggt, device, rounds, peer=True)


def _ways(
    group: str, shape: tuple[int, ...], device: torch.device, rounds: int, *,
    offloaded: bool = False, peer: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """elsa resident; offloaded (`ratio`: of the resident call's speed); PyTorch's own choice of
    kernel, once (`ratio`: its time over elsa's)."""
    name, tensors = _name(group, shape), operands(shape, device)

    def timed(who: str, call: Callable[..., Any], given: list[Tensor], rounds: int) -> Row:
        times, out = _timed(lambda: call(*given), lambda: _warm(call, given), rounds)
        return row(name, who, times, error=reference.relative_l2(_sampled(out), _oracle(*tensors)))

    yield (own := timed("elsa", attention, tensors, rounds))
    if offloaded:
        found = timed(HOST, _streamed, _away(tensors), rounds)
        yield found | _report() | {"ratio": own["median"] / found["median"]}
    if peer:
        found = timed("sdpa", F.scaled_dot_product_attention, tensors, 1)
        yield found | {"ratio": found["median"] / own["median"]}


def llama(
    sizes: Sizes, device: torch.device, rounds: int, layers: int | None, dtype: str
) -> Iterator[Row]:
    """Prefill of a LLaMA through transformers, with weights resident and streamed.

    layers: None for as many as fit.
    """
    from transformers import LlamaConfig, LlamaModel

    from elsa_core.patching.adapters.hf_transformers import register

    register()
    torch.manual_seed(0)
    release(device)
    count = layers or fitting(sizes, dtype, _free(device), _free(torch.device("cpu")))
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, vocab_size=1000,
        num_attention_heads=sizes.llama_heads, num_hidden_layers=count,
        max_position_embeddings=max(sizes.prefill), use_cache=False,
    )  # fmt: skip
    with device:
        model = LlamaModel(config).to(DTYPES[dtype]).eval()
    with torch.inference_mode():
        for weights in ("resident", "host"):
            runner = Streamed(model.layers, device) if weights == "host" else None
            for tokens in sizes.prefill:
                name = f"llama/{tokens}-{dtype}, {count} layers, weights {weights}"
                yield from _prefill(name, model, runner, tokens, rounds)


def fitting(sizes: Sizes, dtype: str, free: int, host: int) -> int:
    """Layers whose weights fit into the free bytes of a device beside the longest prefill, and once
    more into those of the host, from which they are streamed: 1 to LLaMA-13B's 40.
    """
    width = DTYPES[dtype].itemsize
    hidden, within = sizes.hidden, sizes.intermediate
    layer = width * (4 * hidden**2 + 3 * hidden * within)
    prefill = width * max(sizes.prefill) * (_ALIVE * hidden + 3 * within)
    on_device = int(_SHARE * free - prefill) // layer
    return max(1, min(_LAYERS, on_device, int(_SHARE * host) // layer))


def _free(device: torch.device) -> int:
    """Free bytes of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _prefill(name: str, model: Any, runner: Streamed | None, tokens: int, rounds: int) -> list[Row]:
    """One length by elsa and by PyTorch's attention, on the same weights."""
    device = next(model.parameters()).device
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    rows, outs = [], []

    def call() -> Tensor:
        hidden: Tensor = model(ids).last_hidden_state
        if runner is not None:
            runner.finish()
        return hidden

    for way in ("elsa", "sdpa"):
        model.set_attn_implementation(way)
        times, out = _timed(call, call, rounds)
        outs.append(out)
        rows.append(row(name, way, times))
        if runner is not None:
            report = runner.timeline.report()
            waited = max(0.0, report.seconds - report.fold_seconds) / len(model.layers)
            rows[-1] |= {"wait_per_layer": waited, "hidden": report.hidden}
    rows[0]["difference"] = reference.relative_l2(outs[0], outs[1].double())
    rows[0]["ratio"] = rows[1]["median"] / rows[0]["median"]
    return rows


class Streamed:
    """Equal layers whose weights stay in host memory and stream through two buffers, in place.

    A layer's weights are copied while the layer before it computes. For inference; `finish` ends a
    forward of the model.
    """

    def __init__(self, layers: nn.ModuleList, device: torch.device) -> None:
        names = [name for name, _ in layers[0].named_parameters()]
        self._stacked = []
        for name in names:
            parts = [layer.get_parameter(name) for layer in layers]
            held = torch.empty(
                (len(parts), *parts[0].shape), dtype=parts[0].dtype,
                pin_memory=device.type == "cuda",
            )  # fmt: skip
            for i, part in enumerate(parts):
                held[i].copy_(part.detach())
                part.data = part.data.new_empty(0)
            self._stacked.append(held)
        self._names, self._device, self._layers = names, device, layers
        self.timeline = streaming.Timeline(device.type == "cuda")
        self._loader = streaming.Loader(device, self.timeline)
        self._coming: Iterator[tuple[Tensor, ...]] | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._before)

    def _before(self, layer: nn.Module, _: Any) -> None:
        if self._coming is None:
            self.timeline = streaming.Timeline(self._device.type == "cuda")
            self._loader.timeline = self.timeline
            bounds = [(i, i + 1) for i in range(len(self._layers))]
            dims = [0] * len(self._stacked)
            self._coming = self._loader.blocks(self._stacked, dims, bounds)
        for name, part in zip(self._names, next(self._coming), strict=True):
            layer.get_parameter(name).data = part[0]

    def finish(self) -> None:
        """What the next forward needs: no layer under way."""
        if self._coming is not None:
            next(self._coming, None)
            self._coming = None


def _away(tensors: list[Tensor]) -> list[Tensor]:
    """The query where it is, a copy of keys and values in host memory, pinned for a GPU."""
    query, *others = tensors
    held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in others]
    return [query, *(h.copy_(t) for h, t in zip(held, others, strict=True))]


def _name(group: str, shape: tuple[int, ...]) -> str:
    return f"{group}/{'x'.join(map(str, shape))}-fp32"


def _report() -> Row:
    report = streaming.report()
    assert report is not None
    return {"hidden": report.hidden, "copied_bytes": report.copied_bytes}


def _streamed(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return attention(query, key, value, offload="host")


def _warm(call: Callable[..., Any], tensors: list[Tensor]) -> None:
    """Some of the queries against all keys: compiles the kernels of the whole call, which depend on
    the number of keys, and warms the pools of memory.
    """
    query, key, value = tensors
    call(query[:, :, :_WARM], key, value)


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
    groups: dict[str, Any] = {"million": million, "host": host, "exceeding": exceeding,
                              "vggt": vggt}  # fmt: skip
    found = {name: functools.partial(each, rounds=given.rounds) for name, each in groups.items()}
    for dtype in given.dtypes:
        found[f"llama-{dtype}"] = functools.partial(
            llama, rounds=given.rounds, layers=given.layers, dtype=dtype
        )
    return found


@torch.no_grad()
def measure(name: str, group: Any, given: Namespace) -> list[Row]:
    """The rows of one group."""
    rows = list(group(QUICK if given.quick else Sizes(), given.device))
    release(given.device)
    return rows


if __name__ == "__main__":
    parser = options(__doc__, rounds=1)
    parser.add_argument(
        "--layers", type=int, help="of the LLaMA [as many as fit into the free memory, 40 at most]"
    )
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "fp16"), default=["fp32", "fp16"])
    main(__doc__, cases, measure, parser)
