"""`python -m tests.conformance.draw --operator attention --seconds 200 --seed N --device cuda`:
random calls against float64; a failing one is printed as a command that makes it again. With
`--table` the cases of the suite instead, on every backend or the one that is named.
"""

import argparse
import json
import math
import random
import sys
import time
import warnings
from typing import Any

import torch

from . import edges, models, on_cpu
from .backends import GRAPHS, HAS, MODES, backends, serves, table
from .cases import LAYOUTS, MASKS, Case
from .judge import judge

Draw = random.Random
ALIKE = 128  # calls in a row for which the same kernels are compiled
FAULTS = 20  # of the table, after which the others are not tried


def _length(r: Draw, most: int = 700) -> int:
    """Mostly short, odd ones and those beside a power of two among them."""
    near = 2 ** r.randint(0, 9) + r.randint(-1, 1)
    return max(0, min(most, r.choice((near, r.randint(1, 70), r.randint(1, most)))))


# What a kernel is compiled for is drawn from `k`, which starts anew for each of a kind's calls;
# sizes and numbers are drawn from `r`.


def _attention(k: Draw, r: Draw) -> dict[str, Any]:
    kv_heads = r.choice((1, 1, 2, 3))
    heads = kv_heads * r.choice((1, 1, 1, 2, 3))
    causal = k.random() < 0.25
    mask = None if causal or k.random() < 0.5 else k.choice(list(MASKS))
    fewest = {None: 0, "least finite": 64}.get(mask, 5)  # a row of nothing else: see limits.md
    dim = k.choice((8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 160, 256, k.randint(1, 256)))
    return {
        "batch": [r.choice((1, 2, 3))], "heads": heads, "kv_heads": kv_heads,
        "queries": max(4, _length(r)) if mask else _length(r),
        "keys": max(fewest, _length(r)),
        "dim": dim, "value_dim": dim if k.random() < 0.7 else k.randint(1, 256),
        "dtype": k.choice(("float32", "float32", "float16", "bfloat16")), "mask": mask,
        "causal": causal, "scale": r.choice((None, None, None, 0.0, -0.2, 1.0)),
        "layout": k.choice(("dense", *LAYOUTS)),
        "data": r.choice(("normal", "normal", "large", "shifted", "dominant key")),
    }  # fmt: skip


def _entmax(k: Draw, r: Draw) -> dict[str, Any]:
    # above 2 the roots of weights next to zero have no bound, see `losses`
    alphas = (1.25, 1.5, 1.5, 2.0, "heads", "batch and heads")
    found = _attention(k, r) | {"alpha": k.choice(alphas), "data": r.choice(("normal", "shifted"))}
    return found | {"queries": min(found["queries"], 200), "keys": min(found["keys"], 300)}


def _packed(k: Draw, r: Draw) -> dict[str, Any]:
    dense = _attention(k, r)
    lengths = [_length(r, 200) * (r.random() > 0.1) for _ in range(r.randint(1, 5))]
    same = ("heads", "kv_heads", "dim", "value_dim", "dtype", "causal", "scale", "data")
    layouts = [name for name in LAYOUTS if name not in ("packed", "expanded")]
    return {name: dense[name] for name in same} | {
        "lengths": lengths, "index": k.choice(("int32", "int64")), "layout": k.choice(layouts),
        "key_lengths": None if r.random() < 0.6 else [_length(r, 200) for _ in lengths],
        "longest": k.random() < 0.7,
    }  # fmt: skip


def _packed_entmax(k: Draw, r: Draw) -> dict[str, Any]:
    return _packed(k, r) | {"alpha": k.choice((1.5, 2.0, "heads", "batch and heads"))}


def _windows(k: Draw, r: Draw) -> dict[str, Any]:
    axes = k.choice((2, 2, 2, 3))
    window = [k.randint(1, 12 if axes == 2 else 4) for _ in range(axes)]
    grid = k.random() < 0.15
    return {
        "batch": r.randint(1, 3), "window": window, "grid": grid, "heads": r.randint(1, 4),
        "size": [w * r.randint(1, 3) if grid else r.randint(1, 3 * w) for w in window],
        "shift": [0 if grid or r.random() < 0.4 else r.randrange(w) for w in window],
        "dim": k.choice((8, 16, 24, 32, 32, 64, k.randint(1, 96))),
        "dtype": k.choice(("float32", "float32", "float16", "bfloat16")),
        "bias": k.choice((None, "dense", "table", "transposed")), "pad": k.random() < 0.5,
        "cosine": k.random() < 0.3, "channels": k.choice(("qkv", "head")),
        "mask_value": r.choice((-100.0, -100.0, -math.inf, 0.0)),
        "terms": k.choice((None, None, "float32")),
        "scale": r.choice((None, None, 0.0, -0.3)),
        "layout": k.choice(("dense", "odd rows", "unaligned", "sliced", "guarded")),
    }  # fmt: skip


def _layers(k: Draw, r: Draw) -> dict[str, Any]:
    # not relu: a sum next to zero has one slope or the other, in whichever order it was added
    activations = ("none", "none", "gelu", "gelu_tanh", "quick_gelu", "silu")
    return {
        "batch": [r.randint(1, 3), _length(r)], "depth": 1 + _length(r), "width": 1 + _length(r),
        "dtype": k.choice(("float32", "float32", "float16", "bfloat16")),
        "bias": k.random() < 0.7, "activation": k.choice(activations),
        "residual": k.random() < 0.4, "scale": k.random() < 0.3, "value": k.random() < 0.2,
        "layout": k.choice(("dense", "odd rows", "unaligned", "sliced", "channels first")),
    }  # fmt: skip


DRAWS = {
    "attention": _attention, "window_attention": _windows, "linear": _layers,
    "varlen_attention": _packed, "entmax_attention": _entmax,
    "entmax_varlen_attention": _packed_entmax,
    "sparsity": lambda k, r: _attention(k, r) | {"sparsity": "exact"},
    "dropout": lambda k, r: _attention(k, r) | {"dropout": r.choice((0.1, 0.5, 0.9))},
}  # fmt: skip


def drawn(operator: str, kind: int, r: Draw) -> Case:
    """A random case of an operator, of the kind with that number."""
    return Case(operator, "drawn", DRAWS[operator](Draw(kind), r))


def _report(case: Case, backend: str, mode: str, device: str, seed: int, said: list[str]) -> None:
    row = json.dumps({"case": dict(case.changes), "backend": backend, "mode": mode, "seed": seed})
    print(
        f"{case.name}: {'; '.join(said)}\n  python -m tests.conformance.draw "
        f"--operator {case.operator} --device {device} --again '{row}'",
        flush=True,
    )


def main() -> int:
    given = _arguments()
    torch.set_num_threads(1)
    failed = count = 0
    if given.models:
        return models.main(given.seconds, given.seed, given.device)
    if given.again:
        row = json.loads(given.again)
        case = Case(given.operator, "again", row["case"])
        said = judge(case, row["backend"], row["mode"], given.device, row["seed"])
        print("; ".join(said) or "right")
        return bool(said)
    if given.on_cpu:
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what a lane does not store
        on_cpu.install(given.on_cpu)
    if given.edges:
        return edges.main(given.device, given.on_cpu or given.backend) > 0
    if given.table:
        rows = [
            row
            for operator in ([given.operator] if given.operator else HAS)
            for row in (on_cpu.rows(given.on_cpu, operator) if given.on_cpu
                        else table(operator, given.device))
            if given.backend in (None, row[2]) and (given.name or row[0].name) == row[0].name
        ]  # fmt: skip
        for case, mode, backend in rows[:: given.every]:
            if failed == FAULTS:
                break
            said = judge(case, backend, mode, given.device)
            failed += bool(said)
            if said:
                _report(case, backend, mode, given.device, 0, said)
        print(f"{len(rows[:: given.every])} calls, {failed} faults")
        return failed > 0
    end = time.monotonic() + given.seconds
    r = Draw(given.seed)
    modes = (*MODES, *GRAPHS) if given.device == "cuda" else MODES
    while time.monotonic() < end:
        operator, kind = given.operator or r.choice(list(HAS)), r.randrange(1 << 30)
        drawn_mode = Draw(kind).choice(modes)
        for _ in range(ALIKE):
            if time.monotonic() >= end:
                break
            case, seed, mode = drawn(operator, kind, r), r.randrange(1 << 30), drawn_mode
            if getattr(case, "data", "normal") not in ("normal", "shifted"):
                # gradients of saturated rows are what is left of sums that cancel
                mode = mode.replace("train", "infer")
            for backend in backends(operator, given.device):
                if given.backend in (None, backend) and serves(backend, case, mode, given.device):
                    said = judge(case, backend, mode, given.device, seed)
                    count += 1
                    failed += bool(said)
                    if said:
                        _report(case, backend, mode, given.device, seed, said)
    print(f"{count} calls, {failed} faults")
    return failed > 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.draw", description=__doc__)
    parser.add_argument("--operator", choices=list(HAS), help="default: all of them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="this one alone")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="the cases of the suite")
    parser.add_argument("--edges", action="store_true", help="what no row of the table says")
    parser.add_argument("--name", help="of the table, this case alone")
    parser.add_argument("--on-cpu", choices=on_cpu.BACKENDS, help="a GPU's kernels on the CPU")
    parser.add_argument("--every", type=int, default=1, help="of the table, one in so many")
    parser.add_argument("--models", action="store_true", help="patched models, disturbed")
    parser.add_argument("--again", help="a row that was printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
