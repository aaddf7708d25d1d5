"""The library of `csrc/cuda`: built on first need, loaded, and told of kernels and plans."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from elsa_core.backends import compiler
from elsa_core.backends.cuda.plan import Kernel, Plan, kernel_of
from elsa_core.errors import UnavailableError

_UNITS = ("driver", "plan", "planfile", "operators", "python")
# The letters of `Operator::types` in csrc/cuda/operators.cpp.
_TYPES = {
    "Tensor": "T", "Optional[Tensor]": "O", "int": "n", "bool": "b", "float": "d", "str": "s",
    "List[int]": "N", "List[bool]": "B",
}  # fmt: skip


class Library:
    """One loaded library. Methods raise UnavailableError with what it says is wrong."""

    def __init__(self, path: Path):
        torch.ops.load_library(str(path))
        self._calls = ctypes.CDLL(str(path))
        self._locked = ctypes.PyDLL(str(path))
        self._numbers: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self.kernels: dict[int, Kernel] = {}
        # operator, arguments and plan of every call that is planned, while `planfile` records
        self.noted: list[tuple[str, list[Any], Plan | None]] | None = None

    def open_driver(self, path: str | None = None) -> None:
        """Open libcuda.so.1, or the file that a test names."""
        self._ask("elsa_cuda_open", None if path is None else path.encode())

    def register(self, operator: str, key: str) -> None:
        """Make the library the kernel of `elsa::<operator>` for a dispatch key.

        `elsa::<operator>_plan` must be defined: it takes the same and returns one tensor more.
        """
        schema = getattr(torch.ops.elsa, operator).default._schema
        types = self.types(schema)
        results = ctypes.c_uint32(len(schema.returns))
        # under the interpreter's lock: other threads read the table of kernels that this changes
        given = (operator.encode(), types.encode(), results, key.encode())
        self._ask("elsa_cuda_register", *given, of=self._locked)

    @staticmethod
    def types(schema: Any) -> str:
        """The letters of an operator's arguments."""
        return "".join(_TYPES[str(argument.type)] for argument in schema.arguments)

    def number(self, compiled: Any) -> int:
        """The number by which plans name a compiled kernel.

        Raises:
            PlanError: the library cannot launch it.
        """
        key = (compiled.hash, compiled.metadata.name)
        with self._lock:
            if key not in self._numbers:
                self._numbers[key] = self.add(kernel_of(compiled))
            return self._numbers[key]

    def add(self, kernel: Kernel) -> int:
        """Give the library a kernel; its number."""
        number = ctypes.c_uint32()
        self._ask(
            "elsa_cuda_add_kernel", kernel.symbol.encode(), kernel.code,
            ctypes.c_uint64(len(kernel.code)), *map(ctypes.c_uint32, kernel.facts),
            ctypes.byref(number),
        )  # fmt: skip
        self.kernels[number.value] = kernel
        return number.value

    def check(self, plan: bytes, device: int) -> None:
        """Read a plan as a call would, and load its kernels on a device; -1: only read it."""
        self._ask("elsa_cuda_load_plan", plan, ctypes.c_uint64(len(plan)), ctypes.c_int(device))

    def launch(self, plan: bytes, addresses: Sequence[int], device: int) -> None:
        """Make the launches of a plan without results and workspace on the current stream."""
        slots = (ctypes.c_uint64 * (len(addresses) + 1))(*addresses, 0)
        size, count = ctypes.c_uint64(len(plan)), ctypes.c_uint64(len(addresses))
        self._ask("elsa_cuda_launch", plan, size, ctypes.c_int(device), slots, count)

    def short(self, operator: str) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """Two functions about one that calls an operator, see csrc/cuda/python.cpp: one takes what
        that function was given and gives the first result of a call that was admitted, or None; the
        other takes the operator's arguments and these, and admits calls of their layout. None where
        this PyTorch has no such way.
        """
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if exchange is None:
            return None
        made: Any = (ctypes.py_object * 2)()
        given = (exchange, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg)
        refused = self._locked.elsa_cuda_short(
            operator.encode(), *map(ctypes.py_object, given), made
        )  # fmt: skip
        return None if refused else (made[0], made[1])

    def clear(self) -> None:
        """Forget every plan."""
        self._calls.elsa_cuda_clear()

    def counts(self) -> tuple[int, int]:
        """Layouts that are kept, and calls that ran without Python."""
        layouts, calls = ctypes.c_int64(), ctypes.c_int64()
        self._calls.elsa_cuda_counts(ctypes.byref(layouts), ctypes.byref(calls))
        return layouts.value, calls.value

    def _ask(self, name: str, *arguments: Any, of: ctypes.CDLL | None = None) -> None:
        function = getattr(of or self._calls, name)
        function.restype = ctypes.c_char_p
        error: bytes | None = function(*arguments)
        if error is not None:
            raise UnavailableError(error.decode(errors="replace"))


def recipe() -> compiler.Recipe:
    """How the library is built: by a C++ compiler alone, no CUDA toolkit."""
    return compiler.torch_recipe("libelsa-cuda", "CUDA library", "cuda", _UNITS)


@functools.cache
def load() -> Library:
    """The library, built if this machine has not built it yet.

    Raises:
        UnavailableError: it cannot be built or loaded.
    """
    path = compiler.build(recipe())
    try:
        return Library(path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error.__cause__ or error}") from None
