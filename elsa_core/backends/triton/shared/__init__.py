"""What the kernels of all operators share."""
