"""Who serves a call, and why.

`choose(operator, ..., mode)` gives the name. `table.BACKENDS` is ordered: `auto` takes the first
backend of the call's device that can serve it, unless a row of the shipped table `measured.json`
holds: one ordered list of conditions, a mode and who serves (inference of some shapes, training,
gradients, what a patched module leaves to its original forward, the default scope of `patch`).
Registered backends go ahead of it.

A backend of another package joins by `register(Backend(...))`: one function and not an entry point
of packaging, because a backend that is imported is one that its user wants.
"""

from __future__ import annotations

from elsa_core.base.switches import switched
from elsa_core.dispatch import launches
from elsa_core.dispatch.chooser import (
    BY_ROW,
    RUNS,
    SERVING,
    Route,
    choose,
    chosen,
    gradient_by,
    implementation,
    is_whole,
    kernels_of,
    mask_kind,
    names,
    plain_alone,
    register,
    route,
    rows_of,
    select,
    state_run,
    support,
    unregister,
)
from elsa_core.dispatch.faults import peer_fault, without_gaps
from elsa_core.dispatch.gradients import recorded, shard_backward
from elsa_core.dispatch.launches import compile_kernels
from elsa_core.dispatch.measured import (
    attention_facts,
    eager_least,
    eager_products,
    product_by_pytorch,
    scope,
)
from elsa_core.dispatch.table import BACKENDS, PLAIN, SHIPPED

__all__ = [
    "BACKENDS", "BY_ROW", "PLAIN", "RUNS", "SERVING", "SHIPPED", "Route", "attention_facts",
    "choose", "chosen", "compile_kernels", "eager_least", "eager_products", "gradient_by",
    "implementation", "is_whole", "kernels_of", "launches", "mask_kind", "names", "peer_fault",
    "plain_alone", "product_by_pytorch", "recorded", "register", "route", "rows_of",
    "scope", "select", "shard_backward", "state_run", "support", "switched", "unregister",
    "without_gaps",
]  # fmt: skip
