"""Attention within windows of an image or a volume."""
