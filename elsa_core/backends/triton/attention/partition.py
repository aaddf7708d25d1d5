"""How the GPU kernels cut and merge a call, read from its plan."""

from __future__ import annotations

import torch
from torch import Tensor

from elsa_core.backends import triton
from elsa_core.backends.partition import STATE_BYTES, Partition, RoundTrip
from elsa_core.backends.triton.attention import planner
from elsa_core.backends.triton.shared import device
from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.errors import UnavailableError
from elsa_core.precision import dtype_name


def partition(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    precision: str,
) -> Partition:  # fmt: skip
    """The plan of a call; without a GPU, as the one would make it whose table is shown."""
    head_dim = query.shape[3]
    if query.dtype not in triton.DTYPES or head_dim > LARGEST_HEAD_DIM:
        raise UnavailableError(
            f"the GPU kernels take {dtype_name(query.dtype)} with head_dim {head_dim} on no GPU: "
            "eager serves it there; trace it with --device cpu"
        )
    try:
        there = None if query.is_cuda else device.gluon_known()
        call = planner.plan_call(
            query, key, value, attn_mask, is_causal, head_dim**-0.5, precision,
            specialized=there and planner.fits_specialized(query, key, value, attn_mask),
        )  # fmt: skip
    except ImportError as error:
        raise UnavailableError(
            f"a GPU's schedule needs Triton ({error}); pip install triton"
        ) from None
    queries, keys, constants = query.shape[2], key.shape[2], call.fold.tail
    rows = constants.get("BM", 1)  # one query has no tile of queries
    key_tile = constants["BN"] if "BN" in constants else constants["KEYS"]  # or all are one tile
    whole = -(-keys // key_tile) * key_tile
    split_keys = min(constants.get("chunk", whole), whole)
    splits, table = 1, device.device_table(query.get_device())
    states = RoundTrip("registers", "m, S, W in float32", 0, 0, 0, 0)
    if call.states is not None:
        splits, of_splits, value_dim = call.states
        count = splits * of_splits
        size = count * (value_dim + 1) * STATE_BYTES
        # A state (m, S, W) and (m + ln S, 1, W / S) are the same element: this is how it travels.
        states = RoundTrip("memory", "lse, W / S in float32", count, size, size, size)
    how = "" if table[0].measured else ", tiles not measured"
    here = "" if query.is_cuda else ", planned without it"
    return Partition(
        backend="triton",
        schedule=call.words,
        machine=f"{table[0].gpu}, {table[1]} multiprocessors{how}{here}",
        queries=queries,
        keys=keys,
        query_tile=rows,
        query_tiles=-(-queries // rows),
        key_tile=key_tile,
        key_tiles=-(-keys // key_tile),
        splits=splits,
        split_keys=split_keys,
        chain_keys=constants.get("CHAIN") or split_keys,
        programs=call.fold.grid[0] * call.fold.grid[1],
        ahead_bytes=call.workspace * torch.float16.itemsize,
        states=states,
    )
