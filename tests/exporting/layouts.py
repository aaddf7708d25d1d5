"""The words by which the CUDA library knows a call."""

from __future__ import annotations

import struct
from typing import Any

import torch

from elsa_core.backends.cuda.record import DTYPES


def layout(*arguments: Any) -> bytes:
    """A call as the library writes its layout."""
    words: list[int] = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            words.append(DTYPES[each.dtype] << 8 | each.dim() << 16 | 1 << 24)
            words += [*each.shape, *each.stride()]
        elif isinstance(each, float):
            words += struct.unpack("<Q", struct.pack("<d", each))
        elif isinstance(each, str):
            data = each.encode()
            assert len(data) <= 8
            words += [len(data), int.from_bytes(data, "little")]
        elif isinstance(each, list):
            words += [len(each), *each]
        else:
            words.append((1 << 64) - 1 if each is None else int(each))
    return struct.pack(f"<{len(words)}Q", *words)
