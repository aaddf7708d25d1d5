"""Clocks, intervals, the machine and its limits: what `bench` and `profiling` both stand on.

Nothing here imports models, cases or reports.
"""
