"""What reaches the elsa operator inside a model, measured against float64 as it passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core import dispatch, ops, reference
from elsa_core.backends import eager_window
from elsa_core.backends.window_call import WindowCall
from elsa_core.proof.compare import HOPELESS_SAMPLES, SITE_SAMPLES, TURBO_EPS, map_floating
from elsa_core.proof.samples import jittered
from elsa_core.reference import Drift

# Entries of P that are rebuilt for one call: 2**18 are 2 MiB in float64, about 40 ms of one core.
_SAMPLE = 1 << 18

# Values of qkv that one call of the window operator is judged on: 16 MiB in float64.
_WINDOW_SAMPLE = 1 << 21

# At least so many images and rows of each image are sampled, whatever the length: a fault may begin
# at the second image, or at the second block of rows.
_FEWEST_IMAGES = 2
_FEWEST_ROWS = 8

_Pair = tuple[float, float]


@dataclass(frozen=True)
class OperatorCall:
    """One call of the operator: what it cost in accuracy and how large its logits were.

    `p_error` and `y_error` are relative Euclidean errors of P and Y against float64, on `rows`
    sampled rows of P. Allowed is `factor` times the error of PyTorch's own products on the same
    tensors (the paper's Algorithm 2) plus a band: for P two ulp of the float32 lse, whose absolute
    rounding is a relative one of P; for Y one ulp of its dtype. Where one sample condemns P or Y,
    the root mean square over nearby ones counts, of both. This sees what no output in bfloat16 can
    show, such as one key left out of 197.

    The window operator returns no lse: its P is not known (0 of 0). `padded`: windows were filled
    up, None for the attention operator. `tiles` of keys and those `left_out` are counted where
    sparsity was asked for.
    """

    drift: Drift
    rows: int
    largest_logit: float
    p_error: float
    p_allowed: float
    y_error: float
    y_allowed: float
    keys: int = 0
    padded: bool | None = None
    tiles: int = 0
    left_out: int = 0

    def reason(self) -> str:
        for name, error, allowed in (
            ("weights P", self.p_error, self.p_allowed),
            ("output", self.y_error, self.y_allowed),
        ):
            if not error <= allowed:
                return f"the operator's {name}: error {error:.2e}, allowed {allowed:.2e}"
        return ""


class OperatorCapture(TorchDispatchMode):
    """Measures every call of the elsa operator that happens under it; keeps no tensor.

    P is rebuilt from what the operator returned, exp(scores - lse), on evenly spaced rows, so that
    the memory stays bounded whatever the length. `backends` are the registered ones that served a
    call, whose kernels may be no operator of elsa: nothing is measured of these calls.
    """

    elsa_observes = True  # judged is what runs while no tracer, mode or transform is active

    def __init__(self, factor: float = 2.0, bound: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factor, self.bound = factor, bound
        self.calls: list[OperatorCall] = []
        self.backends: set[str] = set()
        self._registered: dict[tuple[str, str], Callable[..., Any]] = {}

    def __enter__(self) -> OperatorCapture:
        def noted(backend: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.backends.add(backend)
            return run(*args, **kwargs)

        runs = dispatch.RUNS
        self._registered = {key: run for key, run in runs.items() if key[1] not in dispatch.SHIPPED}
        for key, run in self._registered.items():
            runs[key] = partial(noted, key[1], run)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        dispatch.RUNS.update(self._registered)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        record = ops.BY_SCHEMA.get(func._schema.name)
        if record is not None and record.kind in ("attention", "window", "sparse", "varlen"):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            if record.kind == "window":
                if given["qkv"].numel():
                    self.calls.append(_measure_windows(func, given, result, self.factor))
            elif record.kind == "varlen":
                out, lse = result
                if not lse.isneginf().all():  # of no query with a key there is nothing to judge
                    self.calls.append(_measure_packed(func, given, out, lse, self.factor))
            elif given["query"].numel() and given["key"].numel():
                out, lse = result[:2]
                bound = self.bound if record.kind == "sparse" else 0.0
                call = _measure(func, given, out, lse, self.factor, bound)
                if record.kind == "sparse":
                    tiles, left_out = result[2].sum((0, 1))[:2].tolist()
                    call = replace(call, tiles=tiles, left_out=left_out)
                self.calls.append(call)
        return result


def _measure(
    operator: Any, given: dict[str, Any], out: Tensor, lse: Tensor, factor: float, bound: float
) -> OperatorCall:
    query, key, value, scale = (given[name] for name in ("query", "key", "value", "scale"))
    batch, heads, length, _ = query.shape
    images = _spread(batch, max(_FEWEST_IMAGES, _SAMPLE // (heads * key.shape[2])), query.device)
    each = _SAMPLE // (len(images) * heads * key.shape[2])
    rows = _spread(length, max(_FEWEST_ROWS, each), query.device)
    k, v = key[images], value[images]
    mask = _mask(given, images, rows)
    turbo = given["precision"] == "turbo" and query.dtype == torch.float32
    # the rounding that every fp32 score and lse has, of which P is the exponential
    ulp = TURBO_EPS if turbo else torch.finfo(lse.dtype).eps
    sizes = _scores(query[images][:, :, rows].abs(), k.abs(), None, abs(scale))
    seen: list[tuple[Drift, float, float]] = []

    @cache
    def sample(seed: int) -> tuple[_Pair, _Pair]:
        """Errors of P and of Y, the operator's and the peer's; of the first one also its drift."""
        moved, own, norms = query, out, lse
        if seed != 0:
            moved = jittered(query, seed)
            own, norms, *_ = operator(**(given | {"query": moved}))
        q = moved[images][:, :, rows]
        scores = _scores(q, k, mask, scale)
        row_lse = norms[images][:, :, rows].unsqueeze(-1)
        p = torch.where(row_lse == -math.inf, torch.zeros_like(scores), (scores - row_lse).exp())
        p_peer, y_peer = reference.algorithm2(q, k, v, mask, scale=scale)
        p_exact, y_exact = reference.algorithm2(
            q.double(), k.double(), v.double(), mask, scale=scale
        )
        y = own[images][:, :, rows]
        if seed == 0:
            # The size of the scores' terms, sum |q_i k_i| * scale, as it reaches the weights:
            # scores that cancel are rounded as their terms are.
            norm, reached = p_exact.norm(), torch.where(p_exact > 0, sizes * p_exact, 0.0).norm()
            weighed = float(reached / norm) if norm > 0 and reached.isfinite() else 0.0
            drift = reference.drift(p, p_exact, y, y_exact)
            seen.append((drift, float(scores.nan_to_num(0.0, 0.0, 0.0).abs().max()), weighed))
        of_p = reference.relative_l2(p, p_exact), reference.relative_l2(p_peer, p_exact)
        of_y = reference.relative_l2(y, y_exact), reference.relative_l2(y_peer.to(y.dtype), y_exact)
        return of_p, of_y

    sample(0)
    drift, largest_logit, weighed = seen[0]
    largest_lse = float(lse[images][:, :, rows].nan_to_num(0.0, 0.0, 0.0).abs().max())
    band = 2 * ulp * max(1.0, largest_lse, weighed) + bound
    p_error, p_allowed = _settled(lambda seed: sample(seed)[0], factor, band)
    eps = TURBO_EPS if turbo else torch.finfo(out.dtype).eps
    y_error, y_allowed = _settled(lambda seed: sample(seed)[1], factor, eps + bound)
    return OperatorCall(
        drift=drift, rows=len(images) * heads * len(rows), largest_logit=largest_logit,
        p_error=p_error, p_allowed=p_allowed, y_error=y_error, y_allowed=y_allowed,
        keys=key.shape[2],
    )  # fmt: skip


def _measure_packed(
    operator: Any, given: dict[str, Any], out: Tensor, lse: Tensor, factor: float
) -> OperatorCall:
    """The last of the longest packed sequences; a site's own output shows what became of the
    others."""
    starts, others = (given[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    pairs = zip(pairwise(starts), pairwise(others), strict=True)
    sizes = [(b - a) * (d - c) for (a, b), (c, d) in pairs]
    last = len(sizes) - 1 - sizes[::-1].index(max(sizes))
    rows, keys = slice(*starts[last : last + 2]), slice(*others[last : last + 2])
    bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
    ends = [t.new_tensor([0, s.stop - s.start]) for t, s in zip(bounds, (rows, keys), strict=True)]

    def alone(query: Tensor, key: Tensor, value: Tensor, **terms: Any) -> tuple[Tensor, Tensor]:
        packed = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
        terms.pop("attn_mask")
        found, norm = operator(*packed, *ends, **terms)
        return found.transpose(0, 1).unsqueeze(0), norm.unsqueeze(0)

    terms = {name: given[name] for name in ("is_causal", "scale", "precision")}
    one = {"query": given["query"][rows], "key": given["key"][keys], "value": given["value"][keys]}
    alike = {name: tensor.transpose(0, 1).unsqueeze(0) for name, tensor in one.items()}
    return _measure(
        alone, {**alike, **terms, "attn_mask": None}, out[rows].transpose(0, 1).unsqueeze(0),
        lse[:, rows].unsqueeze(0), factor, 0.0,
    )  # fmt: skip


def _measure_windows(
    operator: Any, given: dict[str, Any], out: Tensor, factor: float
) -> OperatorCall:
    qkv = given["qkv"]
    most = max(_FEWEST_IMAGES, _WINDOW_SAMPLE // qkv[0].numel())
    images = _spread(qkv.shape[0], most, qkv.device)
    given = given | {"qkv": qkv[images]}
    exact, wide = map_floating(given, torch.float64), map_floating(given, torch.float32)
    plain = ops.WINDOW_ATTENTION.reference
    y, y_ref = out[images], plain(**exact)

    def sample(seed: int) -> _Pair:
        own, peer, oracle = y, wide, y_ref
        if seed != 0:
            other = {"qkv": jittered(given["qkv"], seed)}
            own, peer = operator(**(given | other)), wide | map_floating(other, torch.float32)
            oracle = plain(**(exact | map_floating(other, torch.float64)))
        error = reference.relative_l2(own, oracle)
        return error, reference.relative_l2(plain(**peer).to(own.dtype), oracle)

    turbo = given["precision"] == "turbo" and out.dtype == torch.float32
    eps = TURBO_EPS if turbo else torch.finfo(out.dtype).eps
    y_error, y_allowed = _settled(sample, factor, eps)
    heads = (-1, given["num_heads"], out.shape[-1] // given["num_heads"])
    windows = zip(qkv.shape[1:4], given["window_size"], strict=True)
    return OperatorCall(
        drift=reference.drift(None, None, y.reshape(heads), y_ref.reshape(heads)),
        rows=y_ref.reshape(heads).shape[:2].numel(),
        largest_logit=eager_window.largest_score(WindowCall(**wide)),
        p_error=0.0, p_allowed=0.0, y_error=y_error, y_allowed=y_allowed,
        keys=math.prod(given["window_size"]),
        padded=any(size % window for size, window in windows),
    )  # fmt: skip


def _settled(sample: Callable[[int], _Pair], factor: float, ulp: float) -> _Pair:
    """(error, allowed) of the call, sample 0, or of that and nearby ones where it is condemned."""
    error, peer = sample(0)
    if not error <= factor * peer + ulp:
        samples = [(error, peer)]
        for seed in range(1, SITE_SAMPLES):
            samples.append(sample(seed))
            hopeless = all(e > 10 * (factor * p + ulp) for e, p in samples)
            if hopeless and seed + 1 >= HOPELESS_SAMPLES:
                break
        error, peer = (math.sqrt(fmean(x * x for x in each)) for each in zip(*samples, strict=True))
    return error, factor * peer + ulp


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scores in float32 (float64 for float64), the state's own precision. [b, H, rows, Nk]."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = key.to(wide).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query.to(wide) @ key.mT) * scale
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.to(wide)


def _spread(size: int, most: int, device: torch.device) -> Tensor:
    """At most so many places, evenly spread, the first and the last among them."""
    places = torch.linspace(0, size - 1, min(size, most), dtype=torch.float64)
    distinct: Tensor = places.round().long().unique()
    return distinct.to(device)


def _mask(given: dict[str, Any], images: Tensor, rows: Tensor) -> Tensor | None:
    """The mask of these images and rows, with key j <= query i added where it is causal."""
    mask: Tensor | None = given["attn_mask"]
    if mask is not None and mask.shape[0] > 1:
        mask = mask[images]
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if not given["is_causal"]:
        return mask
    visible = torch.arange(given["key"].shape[2], device=rows.device) <= rows.unsqueeze(1)
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, -math.inf)
