"""Who serves a call, and why.

`table.BACKENDS` is ordered: `auto` takes the first backend of the call's device that can serve it.
The shipped table `measured.json` then says where PyTorch's own kernels are the faster exact ones
(inference of some shapes on the GPU that was measured, training), and who is asked for gradients in
which order; a row is data, with its date and hardware.

A backend of another package joins by `register(Backend(...))`: one function and not an entry point
of packaging, because a backend that is imported is one that its user wants.
"""

from __future__ import annotations

from elsa_core.base.switches import switched
from elsa_core.dispatch import launches
from elsa_core.dispatch.choose import (
    BY_ROW,
    DIRECT,
    RUNS,
    SERVING,
    Chosen,
    chosen,
    gradient_name,
    implementation,
    kernels_of,
    mask_kind,
    name_of,
    names,
    plain_alone,
    register,
    rows_of,
    select,
    state_run,
    support,
    training_name,
    trains_original,
    unregister,
    whole_name,
)
from elsa_core.dispatch.explained import route
from elsa_core.dispatch.faults import Layout, peer_fault
from elsa_core.dispatch.gradients import recomputes, recorded, shard_backward
from elsa_core.dispatch.measured import (
    GATED,
    eager_least,
    eager_products,
    eager_rows,
    linear_by_pytorch,
    linear_form,
    product_by_pytorch,
    scope,
    unmeasured,
)
from elsa_core.dispatch.measured import training as training_row
from elsa_core.dispatch.route import Route
from elsa_core.dispatch.table import BACKENDS, PLAIN, SHIPPED

__all__ = [
    "BACKENDS",
    "BY_ROW",
    "DIRECT",
    "GATED",
    "PLAIN",
    "RUNS",
    "SERVING",
    "SHIPPED",
    "Chosen",
    "Layout",
    "Route",
    "chosen",
    "eager_least",
    "eager_products",
    "eager_rows",
    "gradient_name",
    "implementation",
    "kernels_of",
    "launches",
    "linear_by_pytorch",
    "linear_form",
    "mask_kind",
    "name_of",
    "names",
    "peer_fault",
    "plain_alone",
    "product_by_pytorch",
    "recomputes",
    "recorded",
    "register",
    "route",
    "rows_of",
    "scope",
    "select",
    "shard_backward",
    "state_run",
    "support",
    "switched",
    "training_name",
    "training_row",
    "trains_original",
    "unmeasured",
    "unregister",
    "whole_name",
]
