"""Export: a patched model as files that run without this package, proven in a fresh process."""
