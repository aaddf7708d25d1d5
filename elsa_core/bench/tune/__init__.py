"""Tiles measured on the GPU at hand: `search` for `elsa bench --tune`, tools for shipped tables.

`python -m elsa_core.bench.tune.attention` and `python -m elsa_core.bench.tune.window` time the
candidates that the shipped tables are chosen from; `window_cases` is what their results are judged
on, and the GPU tests'.
"""
