"""What the names in a class's code say without a run: whether its forward may compute attention."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

_CALLS: Final = {
    "scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS",
}  # fmt: skip
_SOFTMAXES: Final = {"softmax", "log_softmax"}
_PRODUCTS: Final = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_MOST = 64  # functions: a class whose forward reaches more is a whole model, no attention layer


# Bound: reading the code of a class takes milliseconds, and a process sees some hundred classes.
@functools.lru_cache(maxsize=1024)
def may_attend(cls: type, forward: object) -> bool:
    """Whether `forward`, its helpers of the same package and the methods that they call name an
    attention function, or a softmax and a product of matrices. A class may get another forward."""
    if cls.__module__.startswith("torch.nn."):
        return False
    package = cls.__module__.partition(".")[0]
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    seen: set[Any] = set()
    pending: list[Any] = [forward]
    names: set[str] = set()
    while pending and len(seen) < _MOST:
        found = pending.pop(0)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        function = inspect.unwrap(found) if callable(found) else found
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        for code in codes:  # and of the lambdas and comprehensions inside it
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            names.update(code.co_names)
            names.update("@" for i in dis.get_instructions(code) if i.argrepr in ("@", "@="))
            for name in code.co_names:
                pending += [base.__dict__[name] for base in bases if name in base.__dict__]
                helper = function.__globals__.get(name)
                if callable(helper):
                    names.add(str(getattr(helper, "__name__", name)))
                if str(getattr(helper, "__module__", "")).partition(".")[0] == package:
                    pending.append(helper)
    return bool(_CALLS & names) or bool(_SOFTMAXES & names and _PRODUCTS & names)
