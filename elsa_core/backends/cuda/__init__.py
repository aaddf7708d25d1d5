"""The CUDA library: GPU calls whose layout was seen before, without Python or Triton's launcher.

The planners of `elsa_core.backends.triton` decide as ever how a call is computed. The first call of
a layout runs through them, and what it allocated and launched is kept as data; later ones of that
layout are allocated and launched by C++ through the CUDA driver. Calls that do anything else, and
whatever the library cannot load, stay in Python.

It is built and loaded at the first call on a GPU. Where that fails Triton's launcher serves.

Environment variables:
    ELSA_CUDA_LIBRARY: "0" switches it off, for this process; "1" loads it at import, and warns
        where that fails.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from elsa_core.backends.support import Support
from elsa_core.base.calls import below_autograd

VARIABLE: Final = "ELSA_CUDA_LIBRARY"
_LOG = logging.getLogger("elsa")
_warn_once = functools.cache(_LOG.warning)
# What computes each operator in Python that the library serves, or would.
OFFERED: dict[str, Callable[..., Any]] = {}
_SERVED: set[str] = set()
_FAILED: list[str] = []
_DECIDED, _LOCK = threading.Event(), threading.RLock()


def offer(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Operators that the library is to serve on CUDA devices once it is loaded; never raises.

    kernels: what computes each operator in Python, with all its arguments.
    """
    OFFERED.update(kernels)
    given = os.environ.get(VARIABLE, "")
    if given not in ("", "0", "1"):
        _warn_once("%s=%r is neither 0 nor 1: ignored", VARIABLE, given)
    if given == "1":
        _DECIDED.set()
        _activate()


def ready() -> bool:
    """Load the library if this process has not tried yet; whether it serves. Never raises."""
    if not _DECIDED.is_set() and torch.cuda.is_available():
        with _LOCK:
            if not _DECIDED.is_set():
                _activate()
                _DECIDED.set()
    return bool(_SERVED)


def _activate() -> None:
    if _FAILED:
        return
    given = os.environ.get(VARIABLE)
    if given == "0":
        _FAILED.append(f"off: {VARIABLE} is 0")
        return
    level = logging.WARNING if given == "1" else logging.INFO
    try:
        from elsa_core.backends.cuda import library
        from elsa_core.backends.cuda.calls import serve
        from elsa_core.errors import UnavailableError

        if torch.version.cuda is None:
            raise UnavailableError("this PyTorch is built without CUDA")
        loaded = library.load()
        if torch.cuda.is_initialized():  # else the first call opens the driver
            loaded.open_driver()
        for operator, kernel in OFFERED.items():
            if operator not in _SERVED:  # a first try may have been interrupted
                serve(loaded, operator, kernel, "CUDA", level)
                _SERVED.add(operator)
    except Exception as error:  # whatever is wrong with this machine, Triton goes on
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _FAILED.append(reason)
        _LOG.log(level, "the CUDA library is off, Triton's launcher takes over: %s", reason)


def until_ready(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in Python that the library, if it can be loaded, takes the place of."""

    def call(*arguments: Any, **named: Any) -> Any:
        ready()
        return kernel(*arguments, **named)

    return call


def serves(operator: str) -> bool:
    """Whether the library is the kernel of an operator on CUDA devices."""
    return ready() and operator in _SERVED


def status() -> Support:
    """Whether the library serves operators of this process, and why not. Never raises."""
    if ready():
        return Support(True, f"serves {', '.join(sorted(_SERVED))}")
    return Support(False, _FAILED[0] if _FAILED else "off: there is no GPU")


def forget() -> None:
    """Drop every plan, for example after a backend came or went."""
    if _SERVED:
        from elsa_core.backends.cuda import library

        library.load().clear()


def direct(overload: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What computes an eager call: the operator if the library serves it, else `otherwise`.

    An error of PyTorch's dispatcher has lost its kind: `otherwise` meets it again, and raises what
    it is. Ctrl-C would not be met again.
    """
    operator = overload._schema.name.removeprefix("elsa::")

    def call(*arguments: Any) -> Any:
        if serves(operator):
            try:
                return below_autograd(overload, *arguments)
            except RuntimeError as error:
                from elsa_core.backends.cuda.calls import INTERRUPTED

                if INTERRUPTED in str(error):
                    raise KeyboardInterrupt(INTERRUPTED) from None
        return otherwise(*arguments)

    return call
