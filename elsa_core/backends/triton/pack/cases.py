"""The calls that packs are built for: a list of data, planned by the planners themselves.

A case is one call of a model's site for one image. `cases.json` has those of model families at
their default size; `expanded` multiplies them by batch sizes, dtypes and directions. `Planner` has
the kernels that such calls ask for.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import backward as attention_backward
from elsa_core.backends.triton.attention import backward_tiling
from elsa_core.backends.triton.pack.specialize import Compiler, Job
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.device import Described, describing
from elsa_core.backends.triton.shared.launch import Launch, recording
from elsa_core.backends.triton.window import backward as window_backward
from elsa_core.backends.triton.window import planner as window_planner
from elsa_core.backends.triton.window import tiling as window_tiling

CASES = Path(__file__).with_name("cases.json")
DEVICES = json.loads(Path(__file__).with_name("devices.json").read_text("utf-8"))["devices"]
ARCHITECTURES = sorted({row["arch"] for row in DEVICES})  # that packs can be built for
BATCHES = (1, 8)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MASK_VALUE = -100.0


@dataclass(frozen=True)
class Case:
    """One call of a row of `cases.json`, for `batch` images in a dtype of `DTYPES`; training: its
    gradients. name: `attention/vit_base_patch16_224/12x197x64/b8-fp16`, perhaps with `-training`.
    """

    name: str
    row: dict[str, Any]
    batch: int
    dtype: str
    training: bool

    def launch(self) -> None:
        """Make the call on tensors without memory: for `launch.recording`."""
        _CALLS[self.row["operator"]](self)

    def empty(self, *shape: int) -> Tensor:
        """A tensor without memory, in the case's dtype."""
        return torch.empty(shape, dtype=DTYPES[self.dtype], device="meta")


@dataclass(frozen=True)
class Gpu:
    """A GPU that packs are planned for. shared_memory: bytes that a program may use."""

    arch: int
    facts: Described
    shared_memory: int


def gpus(arch: int) -> list[Gpu]:
    """The GPUs of one architecture, as `devices.json` describes them; none for an unknown one."""
    return [
        Gpu(arch, Described(row["name"], divmod(arch, 10), row["multiprocessors"]),
            row["shared_memory"])
        for row in DEVICES if row["arch"] == arch
    ]  # fmt: skip


def expanded(
    only: str = "*", batches: tuple[int, ...] = BATCHES, path: Path = CASES
) -> Iterator[Case]:
    """The cases whose name matches a glob."""
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    for row in rows:
        for batch in batches:
            for dtype in DTYPES:
                for training in (False, True):
                    name = f"{_name(row)}/b{batch}-{dtype}{'-training' if training else ''}"
                    if fnmatch.fnmatchcase(name, only):
                        yield Case(name, row, batch, dtype, training)


def _name(row: dict[str, Any]) -> str:
    operator = row["operator"]
    if operator == "attention":
        tokens = str(row["keys"])
        tokens = tokens if row["keys"] == row["queries"] else f"{row['queries']}:{tokens}"
        what = f"{row['batch'] * row['heads']}x{tokens}x{row['head_dim']}"
        what += "" if row["mask"] == "none" else f"-{row['mask']}"
    elif operator == "window_attention":
        size, window = ("x".join(map(str, row[key])) for key in ("size", "window"))
        what = f"{row['heads']}x{size}-{window}{'-shifted' if any(row['shift']) else ''}"
    else:
        what = f"{row['rows']}x{row['depth']}x{row['columns']}-{row['activation']}"
        what += "-residual" if row["residual"] else ""
    return f"{operator}/{row['model']}/{what}"


def _attention(case: Case) -> None:
    from elsa_core.backends import triton

    row = case.row
    b, h, n = row["batch"] * case.batch, row["heads"], row["queries"]
    d, dv = row["head_dim"], row["value_dim"]
    q = case.empty(b, n, h, d).transpose(1, 2)
    k, v = (case.empty(b, row["keys"], row["key_heads"], w).transpose(1, 2) for w in (d, dv))
    mask = None
    if row["mask"] != "none":
        full = zip((b, h, n, row["keys"]), row["mask_full"], strict=True)
        dtype = torch.bool if row["mask"] == "bool" else q.dtype
        mask = torch.empty([n if f else 1 for n, f in full], dtype=dtype, device="meta")
    causal, scale = row["causal"], d**-0.5
    if not case.training:
        triton.attention_forward(q, k, v, mask, causal, scale, "strict")
        return
    # in half precision PyTorch's own kernels train
    if q.dtype != torch.float32 or not backward_tiling.serves(q, k, v, mask, causal):
        return
    needs = (True, True, True, mask is not None and mask.is_floating_point())
    lse = torch.empty((b, h, n), dtype=torch.float32, device="meta")
    out = case.empty(b, n, h, dv).transpose(1, 2)
    attention_backward.attention_backward(
        out, torch.empty_like(lse), q, k, v, mask, out, lse, causal, scale, "strict", needs
    )


def _window(case: Case) -> None:
    row = case.row
    tokens, heads, channels = math.prod(row["window"]), row["heads"], row["channels"]
    qkv = case.empty(row["batch"] * case.batch, *row["size"], 3 * channels)
    bias = index = None
    if row["bias"]:
        bias = case.empty(heads, tokens, tokens)
    if row["table"]:
        bias = case.empty(row["table"], heads)
        index = torch.empty((tokens, tokens), dtype=torch.int64, device="meta")
    pad = case.empty(3 * channels) if row["pad"] else None
    logit = torch.empty(heads, dtype=torch.float32, device="meta") if row["cosine"] else None
    arguments = (
        qkv, bias, index, pad, logit, heads, row["window"], row["shift"],
        (channels // heads) ** -0.5, _MASK_VALUE, row["layout"], row["grid"], "strict",
    )  # fmt: skip
    if not case.training:
        window_planner.window_attention(*arguments)
    elif tokens <= window_tiling.load_table(device.table_of(-1)).gradients:
        grad = case.empty(*qkv.shape[:-1], channels)
        needs = (True, bias is not None, pad is not None, logit is not None)
        window_backward.window_attention_backward(grad, *arguments, needs)


def _linear(case: Case) -> None:
    from elsa_core.backends.triton.linear import planner

    of_sm_90 = device.capability_of(torch.device("meta")) == (9, 0)
    if not of_sm_90 or case.dtype != "fp32":  # as `gate` has it
        return
    row = case.row
    rows, depth, columns = row["rows"] * case.batch, row["depth"], row["columns"]
    x, weight = case.empty(rows, depth), case.empty(columns, depth)
    bias = case.empty(columns) if row["bias"] else None
    if case.training:
        planner.backward(case.empty(rows, columns), x, weight, (True, True, bias is not None))
        return
    residual = case.empty(rows, columns) if row["residual"] else None
    scale = case.empty(columns) if row["scale"] else None
    planner.linear(x, weight, bias, row["activation"], residual, scale)


_CALLS = {"attention": _attention, "window_attention": _window, "linear": _linear}


class Planner:
    """The kernels of one architecture that cases ask for; no GPU is asked. jobs: by key, in the
    order in which they were first asked for. calls: keys of the launches of each case that is
    routed to these kernels, by its name and the GPU's.
    """

    def __init__(self, arch: int):
        self.arch = arch
        self.jobs: dict[str, Job] = {}
        self.calls: dict[str, tuple[str, ...]] = {}
        self._compiler = Compiler(arch)
        self._known: dict[Hashable, str] = {}

    def add(self, cases: Iterable[Case]) -> Planner:
        """Plan cases for every GPU of the architecture."""
        listed, seen = list(cases), list[str]()
        for gpu in gpus(self.arch):
            with describing(gpu.facts), recording(lambda *given: seen.append(self.key(*given))):
                for case in listed:
                    case.launch()
                    if seen:
                        self.calls[f"{case.name} on {gpu.facts.name}"] = tuple(seen)
                        seen.clear()
        return self

    def key(self, launch: Launch, tensors: tuple[Any, ...]) -> str:
        """The key in `jobs` of what a launch compiles; calls that differ in runtime arguments alone
        share it.
        """
        kernel, tail = launch.kernel, launch.tail
        fixed = tuple(
            (p.name, repr(tail[p.name]))
            for p in kernel.params
            if p.name in tail and (p.is_constexpr or not p.do_not_specialize)
        )
        given = tuple((t.dtype, t.data_ptr() % 16) for t in tensors)
        seen = (id(kernel), fixed, given, repr(launch.options))
        if seen not in self._known:
            job = self._compiler.job(kernel, tensors, tail, launch.options)
            self._known[seen] = job.key
            self.jobs.setdefault(job.key, job)
        return self._known[seen]
