"""Implementations of the attention operator. A backend never imports another one."""
