"""From what a user names (an architecture, a file, a directory) to a model."""
