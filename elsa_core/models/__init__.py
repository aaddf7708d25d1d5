"""Finding, rewriting and proving attention in models."""
