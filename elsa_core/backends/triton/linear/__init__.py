"""Gluon kernels of `elsa::linear`."""
