"""Linear layers, and gated ones."""
