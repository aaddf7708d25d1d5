"""Whether a patched model agrees with the original, against float64."""
