"""What a backend is asked, and how it answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Support(NamedTuple):
    """A backend's answer.

    `reason` says why not, or what it serves slower than it could, in words fit for both a table and
    an exception.
    """

    ok: bool
    reason: str = ""


class Request(NamedTuple):
    """What decides whether a backend can serve a call: nothing here depends on a length.

    `precision` is one of `elsa_core.precision.PRECISIONS`, already validated against `dtype`.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    precision: str


class Backend(Protocol):
    """What every backend module offers beside its kernels."""

    def support(self, request: Request) -> Support:
        """Whether a request can be served, and why not; may load or build once."""

    def schedule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        precision: str,
    ) -> str:
        """How the call would be cut into tiles and merged, in words."""
