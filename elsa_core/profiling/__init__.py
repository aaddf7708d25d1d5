"""`elsa profile`: what patching gained, where in the model, and whether to believe it."""
