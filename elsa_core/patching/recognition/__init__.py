"""Softmax attention recognised as a model's own forward runs."""

from elsa_core.patching.recognition.pending import Watch, is_pending

__all__ = ["Watch", "is_pending"]
