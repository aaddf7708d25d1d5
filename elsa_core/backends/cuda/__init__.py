"""The CUDA library: GPU calls whose layout was seen before, without Python or Triton's launcher.

The planners of `elsa_core.backends.triton` decide as ever how a call is computed. Where the library
is on, the first call of a layout runs through them, and what it allocated and launched is kept as
data; later ones of that layout are allocated and launched by C++ through the CUDA driver. Calls
that do anything else, and whatever the library cannot load, stay in Python.

It is off unless asked for until training steps are timed with it.

Environment variables:
    ELSA_CUDA_LIBRARY: "1" switches it on, for this process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from elsa_core.backends.support import Support

VARIABLE = "ELSA_CUDA_LIBRARY"
_LOG = logging.getLogger("elsa")
_SERVED: set[str] = set()
_FAILED: list[str] = []


def activate(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Let the library serve operators on CUDA devices, if it was asked for; never raises.

    kernels: what computes each operator in Python, with all its arguments. Where the library cannot
    be loaded one warning says why, and `serves` that the caller is to register them itself.
    """
    if os.environ.get(VARIABLE) != "1" or _FAILED:
        return
    try:
        _activate(kernels)
    except Exception as error:  # whatever is wrong with this machine, Triton goes on
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _FAILED.append(reason)
        _LOG.warning("the CUDA library is off, Triton's launcher takes over: %s", reason)


def _activate(kernels: Mapping[str, Callable[..., Any]]) -> None:
    import torch

    from elsa_core.backends.cuda import calls, library
    from elsa_core.errors import UnavailableError

    if torch.version.cuda is None:
        raise UnavailableError("this PyTorch is built without CUDA")
    loaded = library.load()
    for operator, kernel in kernels.items():
        calls.serve(loaded, operator, kernel, "CUDA")
        _SERVED.add(operator)


def serves(operator: str) -> bool:
    """Whether the library is the kernel of an operator on CUDA devices."""
    return operator in _SERVED


def status() -> Support:
    """Whether the library serves operators of this process, and why not. Never raises."""
    if _SERVED:
        return Support(True, f"serves {', '.join(sorted(_SERVED))}")
    return Support(False, _FAILED[0] if _FAILED else f"off: set {VARIABLE}=1 to try it")


def forget() -> None:
    """Drop every plan, for example after a backend came or went."""
    if _SERVED:
        from elsa_core.backends.cuda import library

        library.load().clear()


def direct(overload: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What computes an eager call: the operator if the library serves it, else `otherwise`."""
    if not serves(overload._schema.name.removeprefix("elsa::")):
        return otherwise
    from elsa_core.backends.cuda import calls

    return calls.direct(overload)
