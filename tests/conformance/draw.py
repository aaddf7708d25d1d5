"""`python -m tests.conformance.draw --operator attention --seconds 200 --seed N --device cuda`:
random calls against float64; a failing one is printed as a command that makes it again. With
`--table` the cases of the suite instead, on every backend or the one that is named.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

import torch

from .backends import HAS, MODES, backends, serves, table
from .cases import LAYOUTS, MASKS, Case
from .judge import judge

Draw = random.Random


def _length(r: Draw, most: int = 700) -> int:
    """Mostly short, odd ones and those beside a power of two among them."""
    near = 2 ** r.randint(0, 9) + r.randint(-1, 1)
    return max(0, min(most, r.choice((near, r.randint(1, 70), r.randint(1, most)))))


def _attention(r: Draw) -> dict[str, Any]:
    kv_heads = r.choice((1, 1, 2, 3))
    heads = kv_heads * r.choice((1, 1, 1, 2, 3))
    causal = r.random() < 0.25
    mask = None if causal or r.random() < 0.5 else r.choice(list(MASKS))
    dim = r.choice((8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 160, 256, r.randint(1, 256)))
    return {
        "batch": [r.choice((1, 2, 3))], "heads": heads, "kv_heads": kv_heads,
        "queries": max(4, _length(r)) if mask else _length(r),
        "keys": max(5, _length(r)) if mask else _length(r),
        "dim": dim, "value_dim": dim if r.random() < 0.7 else r.randint(1, 256),
        "dtype": r.choice(("float32", "float32", "float16", "bfloat16")), "mask": mask,
        "causal": causal, "scale": r.choice((None, None, None, 0.0, -0.2, 1.0)),
        "layout": r.choice(("dense", *LAYOUTS)),
        "data": r.choice(("normal", "normal", "large", "shifted", "dominant key")),
    }  # fmt: skip


DRAWS = {"attention": _attention}


def drawn(operator: str, r: Draw) -> Case:
    """A random case of an operator."""
    return Case(operator, "drawn", DRAWS[operator](r))


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
    if given.again:
        row = json.loads(given.again)
        case = Case(given.operator, "again", row["case"])
        said = judge(case, row["backend"], row["mode"], given.device, row["seed"])
        print("; ".join(said) or "right")
        return bool(said)
    if given.table:
        rows = [
            row
            for operator in ([given.operator] if given.operator else HAS)
            for row in table(operator, given.device)
            if given.backend in (None, row[2])
        ]
        for case, mode, backend in rows[:: given.every]:
            said = judge(case, backend, mode, given.device)
            failed += bool(said)
            if said:
                _report(case, backend, mode, given.device, 0, said)
        print(f"{len(rows[:: given.every])} calls, {failed} faults")
        return failed > 0
    end = time.monotonic() + given.seconds
    r = Draw(given.seed)
    while time.monotonic() < end:
        case, seed = drawn(given.operator or r.choice(list(HAS)), r), r.randrange(1 << 30)
        # gradients of saturated rows are what is left of sums that cancel
        mode = r.choice(MODES if case.data in ("normal", "shifted") else MODES[::2])
        for backend in backends(given.operator, given.device):
            if given.backend in (None, backend) and serves(backend, case, mode):
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
    parser.add_argument("--every", type=int, default=1, help="of the table, one in so many")
    parser.add_argument("--again", help="a row that was printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
