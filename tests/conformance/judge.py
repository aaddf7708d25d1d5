"""One judge: a call's results and gradients against float64, beside PyTorch's own error.

A result is right if its error is at most twice that of the peer, which is PyTorch in the same dtype
on contiguous copies, plus a band of rounding; if rows that see nothing are zeros; and if the
operands, and what lies around them, are as before. What a call allocates was filled with NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import UnavailableError

from . import oracle
from .cases import Call, Case, build, dtype_of

ULPS = 4
# Products of operands of 11 significant bits: what "turbo" promises.
TURBO = 2.0**-10
# Calls of one kind before the one that is judged: what is kept between calls is then in use.
CALLS = 3
Results = dict[str, Tensor]
# Operators that are arguments of another one's function.
PUBLIC = {"sparsity": "attention", "dropout": "attention"}


def public(operator: str, backend: str, lse: bool) -> Callable[[dict[str, Any]], Results]:
    """The public function, with results by name."""
    asked = {"return_lse": True} if lse else {}

    def call(arguments: dict[str, Any]) -> Results:
        out = getattr(elsa, PUBLIC.get(operator, operator))(**arguments, **asked, backend=backend)
        return {"out": out[0], "lse": out[1]} if lse else {"out": out}

    return call


def explained(operator: str, backend: str, arguments: dict[str, Any]) -> str:
    """The backend that `explain` names."""
    given = {name: given for name, given in arguments.items() if name != "sparsity"}
    explain = (
        "explain" if operator in ("attention", "sparsity", "dropout") else f"explain_{operator}"
    )
    return getattr(elsa, explain)(**given, backend=backend).backend


def peer(operator: str) -> Callable[[dict[str, Any]], Results]:
    """PyTorch in the call's own dtype; where its operator is NaN, the definition."""
    definition = getattr(oracle, PUBLIC.get(operator, operator))

    def by_definition(arguments: dict[str, Any]) -> Results:
        return _defined(definition, arguments)

    def attention(arguments: dict[str, Any]) -> Results:
        q, k, v, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        found = by_definition(arguments)
        groups = q.shape[-3] // max(1, k.shape[-3])
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=arguments["is_causal"], scale=arguments["scale"]
        )
        if not bool(out.isfinite().all()) or 0 in out.shape:
            return found
        return {"out": out, "lse": found["lse"]}

    return attention if operator in ("attention", "sparsity") else by_definition


def _defined(definition: Callable[..., Results], arguments: dict[str, Any]) -> Results:
    given = dict(arguments)
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    if "cu_seqlens_q" in given:  # packed operands are positional
        packed = [given.pop(name) for name in names]
        return definition(*packed, **given)
    return definition(**given)


def converted(arguments: dict[str, Any], to: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Arguments with every floating tensor, and those in tuples, passed through `to`."""

    def one(given: Any) -> Any:
        if isinstance(given, Tensor):
            return to(given) if given.is_floating_point() else given
        if isinstance(given, tuple):
            return tuple(map(one, given))
        return given

    return {name: one(given) for name, given in arguments.items()}


def visible(call: Call) -> dict[str, Any]:
    """The arguments with zeros in keys that hold NaN or infinity, which no query sees."""
    if call.arguments.get("attn_mask") is None:
        return call.arguments
    key = call.arguments["key"]
    return call.arguments | {"key": torch.where(key.isfinite(), key, 0.0)}


def run(
    function: Callable[[dict[str, Any]], Results],
    arguments: dict[str, Any],
    wants: tuple[str, ...],
    cotangents: Results | None,
) -> Results:
    """Results, and "d <name>" of the wanted arguments where cotangents are given."""
    if cotangents is None:
        with torch.no_grad():
            return function(arguments)
    leaves = {name: arguments[name].detach().requires_grad_() for name in wants}
    found = function(arguments | leaves)
    outputs = [(t, cotangents[name].to(t.dtype)) for name, t in found.items() if name in cotangents
               and t.requires_grad]  # fmt: skip
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if outputs:
        grads = torch.autograd.grad(
            [t for t, _ in outputs], list(leaves.values()), [c for _, c in outputs],
            allow_unused=True,
        )  # fmt: skip
    results = {name: t.detach() for name, t in found.items()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"d {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def cotangents_of(exact: Results, dtype: torch.dtype) -> Results:
    """What is propagated back: the same numbers for oracle, peer and backend."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(t.shape, generator=generator).to(
            t.device, torch.float32 if name == "lse" else dtype
        )
        for name, t in exact.items()
    }


@contextmanager
def spoilt_memory(arguments: dict[str, Any]) -> Iterator[None]:
    """Fill what is allocated with NaN: by PyTorch itself on a CPU, where memory is taken again on a
    GPU."""
    sizes = [t for t in arguments.values() if isinstance(t, Tensor)]
    if sizes and sizes[0].is_cuda:
        left = [torch.full_like(t, math.nan) for t in sizes if t.is_floating_point() for _ in "123"]
        del left
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def memory_of(arguments: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The whole memory behind every tensor, and a copy."""
    found = []
    for given in arguments.values():
        if isinstance(given, Tensor) and given.numel():
            storage = given.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=given.device).set_(storage)
            found.append((whole, whole.clone()))
    return found


def faults(
    found: Results, exact: Results, peers: Results, dtype: torch.dtype, precision: str
) -> list[str]:
    """What is wrong with results, as lines."""
    said = []
    largest = max((_norm(t) for name, t in exact.items() if name.startswith("d ")), default=0.0)
    lse = exact.get("lse")
    of_scores = 0.0
    if lse is not None and bool(lse.isfinite().any()):  # large scores are rounded more coarsely
        scores = torch.where(lse.isfinite(), lse, 0.0).abs().max().item()
        of_scores = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * scores / 16
    for name, right in exact.items():
        got = found.get(name)
        if got is None:
            continue
        if got.shape != right.shape:
            said.append(f"{name} has shape {list(got.shape)}, not {list(right.shape)}")
            continue
        if right.numel() == 0:
            continue
        wanted = dtype if name != "lse" else torch.promote_types(dtype, torch.float32)
        if not name.startswith("d ") and got.dtype != wanted:
            said.append(f"{name} is {got.dtype}, not {wanted}")
        got, other = got.double(), peers[name].double()
        if name == "lse":
            said += _lse_faults(got, right, other, wanted, precision)
            continue
        if not bool(got.isfinite().all()):
            said.append(f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} are not finite")
            continue
        size = _norm(right)
        if name.startswith("d ") and size < 1e-3 * largest:
            size = largest  # what is left of sums that cancel
        rounding = ULPS * (torch.finfo(dtype).eps + of_scores) if precision != "turbo" else TURBO
        error, of_peer = _norm(got - right), _norm(other - right)
        of_peer = of_peer if math.isfinite(of_peer) else 0.0
        if error > 2 * of_peer + rounding * size:
            said.append(f"{name}: error {error:.2e}, PyTorch's {of_peer:.2e}, size {size:.2e}")
    if lse is not None and found["out"].shape == exact["out"].shape:
        hidden = found["out"][lse == -math.inf]
        if hidden.numel() and bool((hidden != 0).any()):
            said.append("rows that see nothing are not zeros")
    return said


def _norm(t: Tensor) -> float:
    return t.double().norm().item()


def _lse_faults(
    got: Tensor, right: Tensor, other: Tensor, dtype: torch.dtype, precision: str
) -> list[str]:
    if not torch.equal(got == -math.inf, right == -math.inf):
        return ["lse: -inf in other rows than those that see nothing"]
    seen = right.isfinite()
    if not bool(seen.any()):
        return []
    error, of_peer = ((t - right)[seen].abs().max().item() for t in (got, other))
    band = 2 * ULPS * torch.finfo(dtype).eps if precision != "turbo" else 4 * TURBO
    if not error <= 2 * of_peer + band * (1 + right[seen].abs().max().item()):
        return [f"lse: error {error:.2e}, of the definition in {dtype}: {of_peer:.2e}"]
    return []


@functools.lru_cache(maxsize=8)
def references(
    case: Case, mode: str, device: str, seed: int
) -> tuple[Results, Results, Results | None]:
    """The exact results, the peer's, and what is propagated back."""
    call = build(case, device, seed)
    clean = visible(call)
    definition = getattr(oracle, PUBLIC.get(case.operator, case.operator))

    def exactly(given: dict[str, Any]) -> Results:
        return _defined(definition, given)

    doubles = converted(clean, lambda t: t.detach().double().contiguous())
    with torch.no_grad():
        exact = exactly(doubles)
    grads = None
    if mode.startswith("train"):
        grads = cotangents_of(exact, dtype_of(case))
        if "lse" not in mode:
            grads.pop("lse", None)
        exact = run(exactly, doubles, call.wants, {n: t.double() for n, t in grads.items()})
    alike = converted(clean, lambda t: t.detach().contiguous())
    return exact, run(peer(case.operator), alike, call.wants, grads), grads


def judge(case: Case, backend: str, mode: str, device: str = "cpu", seed: int = 0) -> list[str]:
    """What is wrong with one case on one backend; nothing where it is right."""
    call = build(case, device, seed)
    arguments = call.arguments
    exact, peers, grads = references(case, mode, device, seed)
    before = memory_of(arguments)
    function = public(case.operator, backend, "lse" in mode)
    try:
        if explained(case.operator, backend, arguments) != backend and backend != "auto":
            return [f"explain does not name {backend}"]
        with spoilt_memory(arguments):
            for _ in range(1 if grads else CALLS):
                found = run(function, arguments, call.wants, grads)
    except UnavailableError as error:
        return [f"refused: {error}"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    said = faults(found, exact, peers, dtype_of(case), case.precision)
    if not all(torch.equal(now, then) for now, then in before):
        said.append("an operand, or what lies around it, was written")
    return said
