"""Attention over packed sequences of different lengths."""
