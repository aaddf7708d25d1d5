"""Softmax attention, dense."""
