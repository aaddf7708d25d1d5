"""Attention with alpha-entmax in place of softmax, dense and packed."""
