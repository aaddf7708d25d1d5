"""Triton kernels of `elsa::linear`."""

# Gradients of weights with fewer elements gain nothing: they are PyTorch's.
LEAST_WEIGHT = 1 << 17
