"""Kernel packs: GPU kernels compiled ahead of time, with an index, used instead of Triton's JIT."""
