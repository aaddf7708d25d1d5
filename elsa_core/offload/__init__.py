"""Attention whose keys and values, or all operands, stay in host memory.

Blocks of keys and values stream through two buffers of the device, each copied while the one before
it is folded. `elsa_core.attention(..., offload="host")` is `attention` of this package.
"""

from elsa_core.offload.attention import attention, requested
from elsa_core.offload.streaming import Report, report

__all__ = ["Report", "attention", "report", "requested"]
