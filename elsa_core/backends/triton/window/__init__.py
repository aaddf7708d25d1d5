"""Triton kernels of `elsa::window_attention`."""
