"""Softmax attention recognised as a model's own forward runs."""

from elsa_core.patching.recognition.pending import Pending, Watch

__all__ = ["Pending", "Watch"]
