"""Changed sources that the tests must notice; see `python -m tests.mutations --help`."""
