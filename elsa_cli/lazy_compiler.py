"""Imports timm without PyTorch's compiler, which takes longer to import than all of timm.

torchvision and timm ask for the compiler as they are imported, for one question and one decorator.
Meanwhile both are answered by stand-ins that import it when they are called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_UTILS = "torch._dynamo.utils"


class _Utils(ModuleType):
    """`torch._dynamo.utils` until more of it is asked for than torchvision asks."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        return _real().is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


def _real() -> Any:
    if isinstance(sys.modules.get(_UTILS), _Utils):
        del sys.modules[_UTILS]
    import torch._dynamo.utils

    return torch._dynamo.utils


def import_timm() -> None:
    """Import timm; nothing where it is imported already, or not installed."""
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
        import timm  # noqa: F401
    except ImportError:
        pass  # the loader says so
    finally:
        compiler.disable = before
        if isinstance(sys.modules.get(_UTILS), _Utils):
            del sys.modules[_UTILS]
