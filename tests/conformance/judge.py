"""One judge: a call's results and gradients against float64, beside PyTorch's own error.

A result is right if its error is at most twice that of the peer, which is PyTorch in the same dtype
on contiguous copies, plus a band of rounding; if rows that see nothing are zeros; and if the
operands, and what lies around them, are as before. What a call allocates was filled with NaN.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import UnavailableError

from . import losses, oracle
from .cases import Call, Case, build, dtype_of

ULPS = 4
# Products of operands of 11 significant bits: what "turbo" promises.
TURBO = 2.0**-10
# Calls of one kind before the one that is judged: what is kept between calls is then in use.
CALLS = 3
COMPILER = "inductor" if os.environ.get("WHOLE_MATRICES", "0") != "0" else "aot_eager"
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
    """PyTorch in the call's own dtype; where its operator is NaN, the definition. Of packed
    sequences in half precision on a GPU its operator, one after another."""
    definition = getattr(oracle, PUBLIC.get(operator, operator))

    def by_definition(arguments: dict[str, Any]) -> Results:
        return _defined(definition, arguments)

    def attention(arguments: dict[str, Any]) -> Results:
        q, k, v, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        found = oracle.attention(**arguments)
        groups = q.shape[-3] // max(1, k.shape[-3])
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
        if mask is not None:  # PyTorch's kernels for a GPU read rows of 16 bytes each
            keys = k.shape[-2]
            mask = mask.expand(*q.shape[:-1], keys)
            mask = F.pad(mask, (0, -keys % 8))[..., :keys]
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=arguments["is_causal"], scale=arguments["scale"]
        )
        if not bool(out.isfinite().all()) or 0 in out.shape:
            return found
        return {"out": out, "lse": found["lse"]}

    def packed(arguments: dict[str, Any]) -> Results:
        query = arguments["query"]
        if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
            return by_definition(arguments)

        def sequence(*operands: Tensor, **terms: Any) -> Results:  # of a batch of one
            named = dict(zip(("query", "key", "value"), (t[None] for t in operands), strict=True))
            given = {"is_causal": False, "scale": None, "attn_mask": None} | terms | named
            return {name: t[0] for name, t in attention(given).items()}

        return _defined(functools.partial(oracle.by_sequence, sequence), arguments)

    if operator == "varlen_attention":
        return packed
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


def kept(arguments: dict[str, Any]) -> Tensor:
    """Which weights stay: those that plain attention gives identity matrices as values."""
    key, value = arguments["key"], arguments["value"]
    eye = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)
    given = arguments | {"value": eye.expand(*value.shape[:-2], -1, -1)}
    torch.manual_seed(0)
    with torch.no_grad():
        return public("dropout", "eager", False)(given)["out"] != 0


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


def differentiated(
    function: Callable[[dict[str, Any]], Results], wants: tuple[str, ...], cotangents: Results
) -> Callable[[dict[str, Any]], Results]:
    """The gradients as a function, so that `run` gives second derivatives."""

    def call(arguments: dict[str, Any]) -> Results:
        out = function(arguments)["out"]
        given = [arguments[name] for name in wants]
        cotangent = cotangents["out"].to(out.dtype)
        grads = torch.autograd.grad(out, given, cotangent, create_graph=True, allow_unused=True)
        return {f"1 {n}": g for n, g in zip(wants, grads, strict=True) if g is not None}

    return call


def by_transform(
    function: Callable[[dict[str, Any]], Results],
    arguments: dict[str, Any],
    wants: tuple[str, ...],
    along: Results,
    tangent: bool,
) -> Results:
    """Results and derivatives by `torch.func`: "t out" along tangents, or "d <name>"."""
    leaves = tuple(arguments[name].detach() for name in wants)

    def call(*given: Tensor) -> Tensor:
        return function(arguments | dict(zip(wants, given, strict=True)))["out"]

    if tangent:
        tangents = tuple(
            along[f"d {name}"].to(t.dtype) for name, t in zip(wants, leaves, strict=True)
        )
        out, moved = torch.func.jvp(call, leaves, tangents)
        return {"out": out, "t out": moved}
    out, back = torch.func.vjp(call, *leaves)
    grads = back(along["out"].to(out.dtype))
    return {"out": out} | {f"d {name}": g for name, g in zip(wants, grads, strict=True)}


def fresh(t: Tensor) -> Tensor:
    """A dense copy in memory of its own, which starts as PyTorch's allocator aligns it."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t.detach())


def as_graph(call: Callable[[], Results], given: list[Tensor]) -> Results:
    """What a CUDA graph of a call on `given` tensors gives when it is replayed over memory full of
    NaN."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            found = call()
    except BaseException:
        torch.cuda.set_stream(before)  # PyTorch leaves the capture's own
        del graph
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        raise
    read = {t.untyped_storage().data_ptr() for t in given}
    for t in found.values():
        # what is propagated back may be a gradient as it is
        if t._base is None and t.is_leaf and t.untyped_storage().data_ptr() not in read:
            t.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return {name: t.clone() for name, t in found.items()}


class Program(torch.nn.Module):
    """A call with tensors as inputs, which `torch.export` takes."""

    def __init__(self, function: Callable[..., Results], constants: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.constants = function, constants

    def forward(self, **tensors: Tensor) -> Results:
        return self.function(self.constants | tensors)


def exported(function: Callable[..., Results], arguments: dict[str, Any]) -> Results:
    """By the program that `torch.export` makes of a call."""
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
    program = Program(function, {k: v for k, v in arguments.items() if k not in tensors})
    return torch.export.export(program, (), tensors).module()(**tensors)


def execute(
    case: Case, mode: str, backend: str, arguments: dict[str, Any], wants: tuple[str, ...],
    along: Results | None,
) -> Results:  # fmt: skip
    """One case on a backend, in a mode."""
    torch.manual_seed(0)  # of what dropout drops
    function = public(case.operator, backend, "lse" in mode)
    if mode == "twice":
        assert along is not None
        return run(differentiated(function, wants, along), arguments, wants, along)
    if mode in ("tangent", "train func"):
        assert along is not None
        return by_transform(function, arguments, wants, along, mode == "tangent")
    if mode.endswith("compiled"):
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend=COMPILER)
    if mode.endswith("graph"):
        given = [t for t in (*arguments.values(), *(along or {}).values()) if isinstance(t, Tensor)]
        return as_graph(lambda: run(function, arguments, wants, along), given)
    if mode.endswith("exported"):
        with torch.no_grad():
            return exported(function, arguments)
    for _ in range(1 if along else CALLS):
        torch.manual_seed(0)
        found = run(function, arguments, wants, along)
    return found


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
    case: Case, found: Results, exact: Results, peers: Results, known: dict[str, float],
    of_scores: tuple[float, float], moved: Sequence[Results],
) -> list[str]:  # fmt: skip
    """What is wrong with results, as lines. known, of_scores: losses, as `losses` gives them.
    moved: the exact results of operands that were rounded, where that is to be allowed for."""
    dtype, precision, left_out = dtype_of(case), case.precision, 0.0
    if case.operator == "sparsity" and case.sparsity != "exact":
        left_out = 2 * case.sparsity * (case.keys or case.queries)
    said = []
    largest = max((_norm(t) for name, t in exact.items() if name != "lse"), default=0.0)
    lse = exact.get("lse")
    scores = 0.0
    if lse is not None and lse.numel():  # large scores are rounded more coarsely
        scores = 1.0 + torch.where(lse.isfinite(), lse, 0.0).abs().max().item()
        scores *= torch.finfo(torch.promote_types(dtype, torch.float32)).eps
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
        if name in ("out", "lse") and got.dtype != wanted:
            said.append(f"{name} is {got.dtype}, not {wanted}")
        times = known.get(name, 2.0)
        if times == math.inf:
            continue
        got, other = got.double(), peers[name].double()
        if name == "lse":
            said += _lse_faults(got, right, other, case, precision)
            continue
        if not bool(got.isfinite().all()):
            said.append(f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} are not finite")
            continue
        size = _norm(right)
        if name != "out" and size < 1e-3 * largest:
            size = largest  # what is left of sums that cancel
        rounding = ULPS * torch.finfo(dtype).eps + of_scores[name != "out"] * scores
        rounding = (TURBO if precision == "turbo" else rounding) + left_out
        if case.operator.startswith("entmax") and case.alpha not in (1.0, 1.01, 1.25, 1.5, 2.0):
            rounding *= 8  # weights are powers of score - threshold, which cancel
        if losses.is_random(case) and name in ("d alpha", "d logit_scale"):
            rounding *= 64  # numbers that are sums over all scores, which may cancel
        error, of_peer = _norm(got - right), _norm(other - right)
        of_peer = of_peer if math.isfinite(of_peer) else 0.0
        of_operands = 2 * max((_norm(each[name] - right) for each in moved), default=0.0)
        if error > times * of_peer + rounding * size + of_operands:
            said.append(f"{name}: error {error:.2e}, PyTorch's {of_peer:.2e}, size {size:.2e}")
    if lse is not None and "out" in found and found["out"].shape == exact["out"].shape:
        empty = lse == -math.inf  # [H, T] of packed sequences
        hidden = found["out"][empty if empty.shape == found["out"].shape[:-1] else empty.mT]
        if hidden.numel() and bool((hidden != 0).any()):
            said.append("rows that see nothing are not zeros")
    return said


def _norm(t: Tensor) -> float:
    return t.double().norm().item()


def _lse_faults(got: Tensor, right: Tensor, other: Tensor, case: Case, precision: str) -> list[str]:
    if not torch.equal(got == -math.inf, right == -math.inf):
        return ["lse: -inf in other rows than those that see nothing"]
    seen = right.isfinite()
    if not bool(seen.any()):
        return []
    error, of_peer = ((t - right)[seen].abs().max().item() for t in (got, other))
    dtype = torch.promote_types(dtype_of(case), torch.float32)
    # a tensor core cuts off each of its sums; the cases of the table do without
    steps = case.dim / 16 if losses.is_random(case) else 0.0
    band = (2 * ULPS + steps) * torch.finfo(dtype).eps if precision != "turbo" else 4 * TURBO
    if not error <= 2 * of_peer + band * (1 + right[seen].abs().max().item()):
        return [f"lse: error {error:.2e}, of the definition in {dtype}: {of_peer:.2e}"]
    return []


@functools.lru_cache(maxsize=8)
def references(
    case: Case, mode: str, device: str, seed: int
) -> tuple[Results, Results, Results | None]:
    """The exact results and the peer's, for the host to judge, and what is propagated back."""
    exact, peers, along = _references(case, mode, device, seed)
    return on_host(exact), on_host(peers), along


def rounded(case: Case, mode: str, device: str, seed: int) -> list[Results]:
    """The exact results of operands with an error of 16 roundings each, several times: the sums of
    their products are off by about two. A random case may lie where results change by that: a
    weight of entmax at the edge of its support, a sum of large terms that cancel.
    """
    steps = 16 * torch.finfo(torch.promote_types(dtype_of(case), torch.float32)).eps
    generator = torch.Generator().manual_seed(seed)

    def noisy(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
        return fresh(t).double() * (1 + steps * noise)

    return [on_host(_references(case, mode, device, seed, noisy)[0]) for _ in range(6)]


def on_host(results: Results) -> Results:
    """Copies that are compared without waiting for a GPU at each step."""
    return {name: t.detach().cpu() for name, t in results.items()}


def _references(
    case: Case, mode: str, device: str, seed: int,
    widened: Callable[[Tensor], Tensor] = lambda t: fresh(t).double(),
) -> tuple[Results, Results, Results | None]:  # fmt: skip
    call = build(case, device, seed)
    clean = visible(call)
    definition = getattr(oracle, PUBLIC.get(case.operator, case.operator))
    if case.operator == "dropout":
        clean = clean | {"keep": kept(clean)}

    def exactly(given: dict[str, Any]) -> Results:
        return _defined(definition, given)

    doubles = converted(clean, widened)
    with torch.no_grad():
        exact = exactly(doubles)
    alike = converted(clean, fresh)
    if mode.startswith("infer"):
        return exact, run(peer(case.operator), alike, call.wants, None), None
    along = cotangents_of(exact, dtype_of(case))
    if "lse" not in mode:
        along.pop("lse", None)
    if mode.startswith("train"):
        wide = {name: t.double() for name, t in along.items()}
        exact = run(exactly, doubles, call.wants, wide)
        return exact, run(peer(case.operator), alike, call.wants, along), along
    # derivatives that PyTorch's fused kernels lack: the peer is the definition
    along |= cotangents_of(
        {f"{kind} {name}": doubles[name] for name in call.wants for kind in "d1"}, dtype_of(case)
    )
    found = []
    for given in (doubles, alike):
        if mode == "tangent":
            found.append(by_transform(exactly, given, call.wants, along, True))
        else:
            twice = differentiated(exactly, call.wants, along)
            found.append(run(twice, given, call.wants, along))
    return found[0], found[1], along


def judge(case: Case, backend: str, mode: str, device: str = "cpu", seed: int = 0) -> list[str]:
    """What is wrong with one case on one backend; nothing where it is right."""
    call = build(case, device, seed)
    arguments = call.arguments
    exact, peers, along = references(case, mode, device, seed)
    before = memory_of(arguments)
    try:
        if explained(case.operator, backend, arguments) != backend and backend != "auto":
            return [f"explain does not name {backend}"]
        with spoilt_memory(arguments):
            found = on_host(execute(case, mode, backend, arguments, call.wants, along))
    except UnavailableError as error:
        return [f"refused: {error}"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    known = losses.factors(case, backend, mode, device), losses.of_scores(case, mode)
    said = faults(case, found, exact, peers, *known, [])
    if said and losses.is_random(case):
        moved = rounded(case, mode, device, seed)
        said = faults(case, found, exact, peers, *known, moved)
    written = [(now != then).any() for now, then in before]
    if written and bool(torch.stack(written).any()):
        said.append("an operand, or what lies around it, was written")
    return said
