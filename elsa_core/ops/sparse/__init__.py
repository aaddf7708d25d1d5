"""Attention that skips blocks of keys whose weights are negligible."""
