"""What TorchScript and torch.export share: a quiet forward, and the module at which it failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn

from elsa_core.base.calls import plain_multihead
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ElsaError, ExportError

Result = TypeVar("Result")

# What a forward, a tracer or a serialiser raises for a model that it cannot follow.


def attempt(what: str, model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run `action`, which runs the model; a failure becomes one line that names the module.

    Only after a failure does it run again, followed by hooks: patched blocks of windows leave their
    attention to the original forward where a hook waits for its call.

    Raises:
        ExportError: `action` raised; the innermost module whose forward was running is named.
    """
    try:
        with quiet(), torch.no_grad(), plain_multihead():
            return action()
    except (ElsaError, MemoryError, OSError):
        raise
    except Exception as error:
        path, name = _where(model, action)
        where = f"module {path!r} ({name})" if path else f"the model ({name})"
        raise ExportError(f"{what} failed in {where}: {first_line(error)}") from error


def _where(model: nn.Module, action: Callable[[], object]) -> tuple[str, str]:
    """Path and class of the module in which `action` fails."""
    entered: list[tuple[str, str]] = []
    try:
        with _following(model, entered), quiet(), torch.no_grad(), plain_multihead():
            action()
    except Exception:
        return entered[-1] if entered else ("", type(model).__name__)
    return "", type(model).__name__


@contextmanager
def _following(model: nn.Module, entered: list[tuple[str, str]]) -> Iterator[None]:
    """Keep `entered` the stack of modules (path, class) whose forward is running."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            label = (path, type(module).__name__)

            def enter(_module: nn.Module, _args: object, label: tuple[str, str] = label) -> None:
                entered.append(label)

            def leave(_module: nn.Module, _args: object, _output: object) -> None:
                if entered:
                    entered.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        yield
