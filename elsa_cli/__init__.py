"""The command line of elsa: the only package here that prints or exits."""
