"""Finding attention in a model and rewriting it."""
