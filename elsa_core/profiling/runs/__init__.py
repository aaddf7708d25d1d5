"""One model run in several ways, in the same rounds: as loaded, fused, compiled, graphed, patched.

`bench` takes its whole-model figures from here, and `profiling` adds the time of each site.
"""
