"""Triton and Gluon kernels of `elsa::attention`, and who plans their launches."""
