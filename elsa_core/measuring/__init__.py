"""Clocks, intervals, the machine and its limits: what `bench` and `profiling` both stand on.

Nothing here knows a model, a case or a report, and nothing here imports them.
"""
