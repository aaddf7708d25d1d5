"""Files that are copied into a bundle as they are."""
