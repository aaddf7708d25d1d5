"""Who competes: elsa in each precision, and every other exact attention that takes the case."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elsa_core import reference
from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError, UnavailableError
from elsa_core.measuring.memory_limit import available_bytes
from elsa_core.measuring.timing import Contender
from elsa_core.ops.attention.api import attention, explain
from elsa_core.ops.window.api import explain_window_attention, window_attention
from elsa_core.profiling.bench import cases
from elsa_core.profiling.bench.cases import WINDOW_IMAGES, Case, Inputs, bench_of

_SDPA: Final = {
    "cpu": {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-math": SDPBackend.MATH},
    "cuda": {
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa-math": SDPBackend.MATH,
    },
}
# Score matrices that are alive at once: scores, their softmax, and a copy for a bias or a scale.
_SCORE_COPIES: Final = 3
_ERRORS: Final = (ElsaError, RuntimeError, ImportError, NotImplementedError)


FLASH_4: Final = "flash-attn-4"
_FLASH_4_MAJORS: Final = (9, 10, 11, 12)  # compute capabilities with kernels for its gradients
_HALF: Final = (torch.float16, torch.bfloat16)


def field_of(
    case: Case, tensors: Inputs, *, backend: str = "auto", flex: bool = False
) -> tuple[list[Contender], dict[str, str]]:
    """Everyone who can compute the case, elsa's precisions first, then the peers; and why others
    take no part, by name.

    Each contender is called once here, which compiles and warms it. One that fails is left out
    with the first line of its error.
    """
    bench, contenders = bench_of(case), []
    left_out: dict[str, str] = {}
    makers: dict[str, Callable[[], Contender] | str] = {
        f"elsa-{precision}": partial(bench.elsa, case, tensors, precision, backend)
        for precision in case.precisions
    }
    for name, make in (makers | dict(bench.peers(case, tensors, flex))).items():
        if isinstance(make, str):
            left_out[name] = make
            continue
        try:
            with warnings.catch_warnings():
                # A backend that declines a case warns why before it raises.
                warnings.simplefilter("ignore")
                contender = make()
                contender.output()
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # an asynchronous failure must show here
        except Exception as error:  # compilers of packages have errors of their own
            if name in makers and not isinstance(error, _ERRORS):
                raise
            kind = "" if isinstance(error, _ERRORS) else f"{type(error).__name__}: "
            left_out[name] = f"{kind}{first_line(error)}"[:200]
        else:
            contenders.append(contender)
    return contenders, left_out


def of_attention(
    case: Case, tensors: Inputs, flex: bool
) -> dict[str, Callable[[], Contender] | str]:
    """Every other exact softmax attention: PyTorch's, eager, ONNX Runtime's, FlashAttention 4,
    FlexAttention."""
    device = tensors.query.device
    large = too_large(case, device)
    by_pytorch = partial(F.scaled_dot_product_attention, *tensors)
    found: dict[str, Callable[[], Contender] | str] = {
        name: partial(Contender, name, by_pytorch, partial(sdpa_kernel, choice))
        for name, choice in _SDPA[device.type].items()
    }
    if large:
        found["sdpa-math"] = large
    if device.type == "cpu":
        found["eager"] = large or (lambda: Contender("eager", partial(plain_attention, *tensors)))
        found["onnxruntime"] = lambda: _onnxruntime(tensors)
        return found
    found[FLASH_4] = flash_4_refusal(tensors.query, tensors.mask) or (lambda: flash_4(*tensors[:3]))
    if flex:
        found["flex"] = lambda: _flex(tensors)
    return found


def too_large(case: Case, device: torch.device) -> str:
    """Why score matrices of a case do not fit in memory; empty where they do."""
    needed, there = _SCORE_COPIES * case.score_bytes, available_bytes(device) // 2
    if needed <= there:
        return ""
    return f"its score matrices take {needed / 2**30:.1f} GiB, {there / 2**30:.1f} GiB are there"


def of_elsa(
    attend: Callable[..., Any], explained: Callable[..., Any], operands: tuple[Any, ...],
    precision: str, backend: str, *, terms: dict[str, Any] | None = None,
    read: Callable[[object], Tensor] | None = None,
) -> Contender:  # fmt: skip
    """A call of one of elsa's operators, and what serves it."""
    chosen = {**(terms or {}), "precision": precision, "backend": backend}
    route = explained(*operands, **chosen)
    notes = {"backend": route.backend, "schedule": route.schedule, "arithmetic": route.arithmetic}
    call = partial(attend, *operands, **chosen)
    return Contender(f"elsa-{precision}", call, precision=precision, read=read, notes=notes)


def joined(case: Case, *windows: Tensor) -> Tensor:
    """[windows, heads, T, head_dim] as they lie in images [images, H, W, C], one beside another."""
    across = math.isqrt(case.batch // WINDOW_IMAGES)  # windows along an axis of an image
    # [windows, 3, heads, T, head_dim] of query, key and value
    parts = torch.stack(windows, 1).flatten(1, 2).unflatten(0, (WINDOW_IMAGES, across, across))
    parts = parts.unflatten(4, (case.window, case.window))  # [n, y, x, heads, h, w, head_dim]
    image: Tensor = parts.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(3, 4).flatten(1, 2)
    return image


def windows_of(case: Case, image: Tensor) -> Tensor:
    """The way back: [images, H, W, C] -> [windows, heads, T, head_dim]."""
    across, side = math.isqrt(case.batch // WINDOW_IMAGES), case.window
    parts = image.unflatten(-1, (case.heads, case.head_dim)).unflatten(2, (across, side))
    parts = parts.unflatten(1, (across, side)).permute(0, 1, 3, 5, 2, 4, 6)
    windows: Tensor = parts.flatten(4, 5).flatten(0, 2)
    return windows


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Softmax attention in three operations."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    out: Tensor = scores.softmax(-1) @ value
    return out


def _flex(tensors: Inputs) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value, mask = tensors
    bias = None if mask is None else mask[0]
    score_mod: Any = None if bias is None else lambda score, b, h, i, j: score + bias[h, i, j]
    # After eight shapes the compiler would give up, and measure FlexAttention's unfused form.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return Contender("flex", partial(compiled, query, key, value, score_mod=score_mod))


def _onnxruntime(tensors: Inputs) -> Contender:
    """com.microsoft.MultiHeadAttention on preallocated buffers, with PyTorch's thread count.

    It takes tokens before heads: [batch, tokens, heads * head_dim].
    """
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed")
    import numpy as np
    import onnxruntime
    from onnx import parser

    query, key, value, mask = tensors
    batch, heads, queries, head_dim = query.shape
    if query.dtype != torch.float32:
        raise NotImplementedError(f"its CPU kernel takes float32, not {query.dtype}")
    feeds = {
        name: t.transpose(1, 2).flatten(2).contiguous().numpy()
        for name, t in (("query", query), ("key", key), ("value", value))
    }
    if mask is not None:
        feeds["bias"] = mask.numpy()
    shape = (batch, queries, heads * head_dim)
    given = ", ".join(f"float{list(array.shape)} {name}" for name, array in feeds.items())
    # Inputs by position: query, key, value, bias, key_padding_mask, attention_bias.
    names = "query, key, value" + (", , , bias" if mask is not None else "")
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        attention ({given}) => (float{list(shape)} output)
        {{ output = com.microsoft.MultiHeadAttention <num_heads: int = {heads}> ({names}) }}"""
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
    binding.bind_ortvalue_output("output", out)
    by_head = (batch, queries, heads, head_dim)
    return Contender(
        "onnxruntime", partial(session.run_with_iobinding, binding), pools=True,
        # the session reads the arrays in place: they are held here
        read=lambda _, held=feeds: (  # type: ignore[misc]
            torch.from_numpy(binding.copy_outputs_to_cpu()[0]).view(by_head).transpose(1, 2)
        ),
    )  # fmt: skip


def flash_4_refusal(query: Tensor, mask: Tensor | None) -> str:
    """Why FlashAttention 4 cannot take these inputs on this GPU, installed or not; else empty."""
    if query.dtype not in _HALF:
        return f"it takes float16 and bfloat16, not {query.dtype}".replace("torch.", "")
    if mask is not None:
        return "it takes no mask"
    major, minor = torch.cuda.get_device_capability(query.device)
    if major not in _FLASH_4_MAJORS:
        return f"it is for Hopper and Blackwell, not for compute capability {major}.{minor}"
    return ""


def flash_4_attention() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlashAttention 4 of [B, H, N, D], with gradients.

    It takes tokens before heads. Strides are arguments of its kernels, so that transposed views of
    queries, keys, values and gradients reach them without a copy.
    """
    try:
        from flash_attn.cute import flash_attn_func
    except ModuleNotFoundError as error:
        # FlashAttention 2 is a package `flash_attn` too, without this part.
        if error.name not in ("flash_attn", "flash_attn.cute"):
            raise
        raise UnavailableError("the package flash-attn-4 is not installed") from None
    function: Any = flash_attn_func

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        returned = function(*(t.transpose(1, 2) for t in (query, key, value)))
        # The lse comes with the output.
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out.transpose(1, 2)

    return attend


def flash_4(query: Tensor, key: Tensor, value: Tensor) -> Contender:
    """The forward of FlashAttention 4, whose first call compiles kernels, a second or two each."""
    call, package = partial(flash_4_attention(), query, key, value), FLASH_4
    with contextlib.suppress(metadata.PackageNotFoundError):
        package = f"{FLASH_4} {metadata.version(FLASH_4)}"
    return Contender(FLASH_4, call, notes={"package": package})


@dataclass(frozen=True)
class Bench:
    """How an operator is measured by `elsa bench attention`: what its record names.

    Attributes:
        tables: its cases by device type and table; no other operator's tables have these names.
        elsa: the call of elsa's: (case, inputs, precision, backend).
        peers: who else computes it, or why not: (case, inputs, whether to compile FlexAttention).
        exact: the output in float64, of (query, key, value, mask).
        error: of (case, output, float64 output); None for the relative L2 distance, of a part of
            the output where the whole would take long.
    """

    tables: Mapping[str, Mapping[str, tuple[Case, ...]]]
    elsa: Callable[[Case, Inputs, str, str], Contender]
    peers: Callable[[Case, Inputs, bool], Mapping[str, Callable[[], Contender] | str]] = (
        of_attention
    )
    exact: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = lambda *given: (
        reference.attention(*given)[0]
    )
    error: Callable[[Case, Tensor, Tensor], float] | None = None


ATTENTION = Bench(
    {"cpu": cases.CPU_TABLES, "cuda": cases.CUDA_TABLES},
    lambda case, tensors, precision, backend: of_elsa(
        attention, explain, tensors, precision, backend
    ),
)
WINDOW = Bench(
    {"cpu": cases.CPU_WINDOW_TABLES},
    # windows read from the images that they would have been cut from
    lambda case, tensors, precision, backend: of_elsa(
        window_attention, explain_window_attention,
        (joined(case, *tensors[:3]), None if tensors.mask is None else tensors.mask[0]),
        precision, backend, read=partial(windows_of, case),
        terms={"num_heads": case.heads, "window_size": (case.window,) * 2},
    ),
)  # fmt: skip
