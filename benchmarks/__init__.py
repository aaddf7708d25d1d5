"""Studies that no command needs, on one harness, and what makes `results/` and its tables."""
