"""The words by which the CUDA library knows a call."""

from typing import Any

import torch

from elsa_core.backends.cuda.planfile import words_of


def layout(*arguments: Any) -> bytes:
    """A call's words, as if its tensors lay on a GPU and were aligned."""
    return words_of(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
        if isinstance(a, torch.Tensor) else a
        for a in arguments
    )  # fmt: skip
