"""The errors that elsa raises on purpose. Each carries one line: what was wrong, where, what to do.

The command line maps each class to one exit code; library users catch `ElsaError`.
"""


class ElsaError(Exception):
    """Base of every error that elsa raises on purpose."""


class ArgumentError(ElsaError, ValueError):
    """An argument is wrong: its name, its value and what would be right (exit code 2)."""


class TooLargeError(ArgumentError):
    """A size at which the model needs more memory than the machine has (exit code 2)."""


class UnavailableError(ElsaError, RuntimeError):
    """A backend, device, extra, compiler or the network is missing (exit code 3)."""


class ModelError(ElsaError):
    """A model or file cannot be read, or is not supported (exit code 4)."""


class NothingPatchedError(ElsaError):
    """No attention site of the model was patched (exit code 1)."""


class ExportError(ElsaError):
    """An export failed, or the artefact does not reproduce the model (exit code 5)."""
