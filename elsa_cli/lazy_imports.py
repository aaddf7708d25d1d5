"""A quick start: timm and PyTorch's counter of FLOPs without what a command does not need of them.

torchvision and timm ask for PyTorch's compiler as they are imported, which takes longer to import
than all of timm, for one question and one decorator. Both are answered by stand-ins that import it
when they are called. timm's client of the hub and triton are as if not installed, for the time of
that import alone.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

_UTILS = "torch._dynamo.utils"


class _Utils(ModuleType):
    """`torch._dynamo.utils` until more of it is asked for than torchvision asks."""

    def is_compile_supported(self, device_type: Any) -> Any:
        return self.__getattr__("is_compile_supported")(device_type)

    def __getattr__(self, name: str) -> Any:
        """What the module itself has of that name; imports it."""
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(sys.modules.get(_UTILS), _Utils):
            del sys.modules[_UTILS]
        return getattr(importlib.import_module(_UTILS), name)


@contextmanager
def _without(package: str) -> Iterator[None]:
    """The package cannot be imported meanwhile; nothing where it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def import_flop_counter() -> None:
    """Import `torch.utils.flop_counter` without triton, whose kernels no model here has."""
    logger = logging.getLogger("torch.utils.flop_counter")
    before, logger.disabled = logger.disabled, True  # it would say that triton is not there
    try:
        with _without("triton"):
            import torch.utils.flop_counter  # noqa: F401
    finally:
        logger.disabled = before


def import_timm(*, hub: bool = True) -> None:
    """Import timm; nothing where it is imported already, or not installed.

    Without `hub` timm does not import the client of the hub, and can download nothing.
    """
    from torch import compiler
    from torch._compile import _disable_dynamo as later

    if "timm" in sys.modules or "torch._dynamo" in sys.modules:
        return
    before: Any = compiler.disable

    def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        # Without a function it makes a decorator, and options are of newer versions.
        given = fn is not None and not options.keys() - {"reason"}
        return later(fn, recursive) if given else before(fn, recursive, **options)

    sys.modules[_UTILS] = _Utils(_UTILS)
    compiler.disable = disable
    try:
        with nullcontext() if hub else _without("huggingface_hub"):
            import timm  # noqa: F401
    except ImportError:
        pass  # the loader says so
    finally:
        compiler.disable = before
        if isinstance(sys.modules.get(_UTILS), _Utils):
            del sys.modules[_UTILS]
