"""Generated inputs against everything that reads: `python -m tests.fuzz --minutes N` for long."""
