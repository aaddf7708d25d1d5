"""Exact attention of dense and packed operands, of sparse tiles and by alpha-entmax, in Triton."""

from __future__ import annotations

# Integers of every kernel here: none is a constant of it, so that no length is compiled for.
INTEGERS = [
    "heads", "group", "n_q", "n_k", "batch", "chunk", "tiles", "shift", "scale_exp",
    "sequences", "steps", "slots", "least", "lse_h", "blocks", "length", "others", "own_step",
    "step", "longest", "width", "key_programs", "programs", "m_b", "m_h", "q_blocks", "k_blocks",
    "parts", "states", "alpha_b", "alpha_h", "l_b", "l_h", "l_n",
    "mask_b", "mask_h", "mask_q", "mask_k",
    *(f"{t}_{axis}" for t in ("q", "k", "v", "g", "o", "dq", "dk", "dv") for axis in "bhnd"),
]  # fmt: skip
