"""Softmax attention recognised as a model's own forward runs.

Within a `Watch` a product of two tensors becomes a pending tensor; scales, biases, masks, softmax
and views are noted on it; its product with values is one call of `elsa_core.attention`. Whatever is
not recognised is computed as the model wrote it.
"""

from elsa_core.patching.recognition.pending import Watch, is_pending

__all__ = ["Watch", "is_pending"]
