"""Every architecture of the model libraries: its sites, and whether a small version agrees."""
