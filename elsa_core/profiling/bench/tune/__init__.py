"""Tiles measured on the GPU at hand, for `elsa bench --tune`."""
