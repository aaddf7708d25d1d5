"""ONNX Runtime's C ABI as far as the custom-op library uses it, played by this process.

`Runtime` takes what a library registers and runs one kernel of it as the CUDA provider would: on
tensors whose addresses, allocator and stream are its own. A status is a number, and its text is
kept; every other handle is the number of a Python object.
"""

import ctypes
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAM = 0x5EED00  # of a session
OUT = 0x7000_0000  # the output's address
PROVIDER = b"CUDAExecutionProvider"
# Offsets in OrtCustomOp.
_NAME, _PROVIDER, _TYPE, _DESTROY, _CREATE, _COMPUTE = 16, 24, 32, 72, 136, 144
_P, _I, _S, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64


@dataclass
class Tensor:
    """A value: ONNX's number of its type, its sizes, its address."""

    kind: int
    sizes: tuple[int, ...]
    address: int


class StatusError(Exception):
    """The text of a status."""


class Runtime:
    """The runtime of an API version, and of the device that its CUDA provider has."""

    def __init__(self, path: str, version: int, device: int, stream: int, out: int, memory: bool):
        self.version, self.device, self.stream = version, device, stream
        self.out, self.memory = out, memory  # the output's address; whether there is scratch
        self.operators: list[int] = []
        self.freed: list[int] = []
        self.scratch: list[tuple[int, int]] = []  # address, bytes
        self.attributes: dict[str, Any] = {}
        self.inputs: Sequence[Tensor | None] = ()
        self.output: Tensor | None = None
        self.texts: dict[int, str] = {}
        self.alive = 0  # allocators
        self._objects: dict[int, Any] = {}
        self._next = itertools.count(1)
        self._kept: list[Any] = []
        self._table = (_P * 279)()
        self._fill()
        api = ctypes.addressof(self._table)
        self._get_api = self._function(_P, ctypes.c_uint32)(
            lambda version: api if version <= self.version else None
        )
        base = (_P * 2)(ctypes.cast(self._get_api, _P), None)
        register = ctypes.CDLL(path).RegisterCustomOps
        register.restype = _P
        self._ask(register(None, base))

    def names(self, provider: bytes | None) -> set[str]:
        """The operators of a provider, of floats."""
        return {self._text(op, _NAME) for op in self._of(provider)}

    def run(self, name: str, inputs: Sequence[Tensor | None], **attributes: Any) -> Tensor:
        """Create a kernel of the CUDA provider, compute once, and destroy it; its output.

        Raises:
            StatusError: with the text of the status.
        """
        self.attributes, self.inputs, self.output = attributes, inputs, None
        kinds = [op for op in self._of(PROVIDER) if self._text(op, _NAME) == name]
        kind = inputs[0].kind if inputs[0] is not None else 0
        op = next(op for op in kinds if self._member(op, _TYPE, _I, _P, _S)(op, 0) == kind)
        kernel = _P()
        create = self._member(op, _CREATE, _P, _P, _P, _P, _P)
        self._ask(create(op, ctypes.addressof(self._table), 1, ctypes.addressof(kernel)))
        try:
            self._ask(self._member(op, _COMPUTE, _P, _P, _P)(kernel, 2))
        finally:
            self._member(op, _DESTROY, None, _P)(kernel)
        assert self.output is not None
        return self.output

    def _of(self, provider: bytes | None) -> list[int]:
        def own(op: int) -> Any:
            return self._member(op, _PROVIDER, ctypes.c_char_p, _P)(op)

        return [op for op in self.operators if own(op) == provider]

    def _text(self, op: int, offset: int) -> str:
        return str(self._member(op, offset, ctypes.c_char_p, _P)(op).decode())

    @staticmethod
    def _member(op: int, offset: int, result: Any, *arguments: Any) -> Any:
        address = _P.from_address(op + offset).value
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def _function(self, result: Any, *arguments: Any) -> Callable[[Any], Any]:
        def made(function: Any) -> Any:
            self._kept.append(ctypes.CFUNCTYPE(result, *arguments)(function))
            return self._kept[-1]

        return made

    def _ask(self, status: int | None) -> None:
        if status:
            raise StatusError(self.texts[status])

    def _new(self, thing: Any) -> int:
        number = next(self._next) * 16
        self._objects[number] = thing
        return number

    def _status(self, code: int, text: bytes) -> int:
        self.texts[len(self.texts) + 1] = text.decode()
        return len(self.texts)

    def _entry(self, index: int, result: Any, *arguments: Any) -> Callable[[Any], None]:
        def put(function: Any) -> None:
            self._table[index] = ctypes.cast(self._function(result, *arguments)(function), _P)

        return put

    def _fill(self) -> None:
        """The entries. One that answers nothing answers null, which is no error."""
        self._entry(0, _P, _I, ctypes.c_char_p)(self._status)
        self._entry(26, _P, ctypes.c_char_p, _P)(lambda name, out: _put(out, _P, 3))
        self._entry(27, _P, _P, _P)(lambda domain, op: self.operators.append(op))
        self._entry(28, _P, _P, _P)(lambda options, domain: None)
        for index in (93, 99):
            self._entry(index, None, _P)(lambda handle: None)
        self._tensors()
        self._attributes()
        self._memory()

    def _tensors(self) -> None:
        def given(context: int, index: int, out: int) -> None:
            tensor = self.inputs[index]
            _put(out, _P, None if tensor is None else self._new(tensor))

        def result(context: int, index: int, sizes: int, rank: int, out: int) -> None:
            first = self.inputs[0]
            assert first is not None
            found = tuple((_N * rank).from_address(sizes))
            self.output = Tensor(first.kind, found, self.out)
            _put(out, _P, self._new(self.output))

        def sizes(info: int, out: int, rank: int) -> None:
            (_N * rank).from_address(out)[:] = self._objects[info].sizes

        own = self._objects
        self._entry(51, _P, _P, _P)(lambda value, out: _put(out, _P, own[value].address))
        self._entry(60, _P, _P, _P)(lambda info, out: _put(out, _I, own[info].kind))
        self._entry(61, _P, _P, _P)(lambda info, out: _put(out, _S, len(own[info].sizes)))
        self._entry(62, _P, _P, _P, _S)(sizes)
        self._entry(65, _P, _P, _P)(lambda value, out: _put(out, _P, value))
        self._entry(88, _P, _P, _P)(lambda context, out: _put(out, _S, len(self.inputs)))
        self._entry(90, _P, _P, _S, _P)(given)
        self._entry(91, _P, _P, _S, _P, _S, _P)(result)

    def _attributes(self) -> None:
        def one(kind: Any) -> Callable[[int, bytes, int], int | None]:
            def get(info: int, name: bytes, out: int) -> int | None:
                if name.decode() not in self.attributes:
                    return self._status(1, b"no attribute")
                return _put(out, kind, self.attributes[name.decode()])

            return get

        def text(info: int, name: bytes, out: int, size: int) -> None:
            data = self.attributes[name.decode()].encode() + b"\0"
            ctypes.memmove(out, data, len(data))

        def many(info: int, name: bytes, out: int | None, size: int) -> None:
            values = self.attributes[name.decode()]
            if out:
                (_N * len(values)).from_address(out)[:] = values
            _put(size, _S, len(values))

        self._entry(85, _P, _P, ctypes.c_char_p, _P)(one(ctypes.c_float))
        self._entry(86, _P, _P, ctypes.c_char_p, _P)(one(_N))
        self._entry(87, _P, _P, ctypes.c_char_p, _P, _P)(text)
        self._entry(163, _P, _P, ctypes.c_char_p, _P, _P)(many)

    def _memory(self) -> None:
        """The provider's allocator, 4, whose memory is described by 5, and its stream."""

        def allocator(info: int, kind: int, out: int) -> None:
            assert kind == 0
            self.alive += 1
            _put(out, _P, 4)

        def scratch(context: int, memory: int, size: int, out: int) -> None:
            assert (context, memory) == (2, 5)
            if self.memory:
                self.scratch.append((0x6000_0000 + (len(self.scratch) << 24), size))
            _put(out, _P, self.scratch[-1][0] if self.memory else None)

        def release(allocator: int) -> None:
            self.alive -= 1

        self._entry(72, _P, _P, _P)(lambda memory, out: _put(out, _I, self.device))
        self._entry(76, _P, _P, _P)(lambda allocator, at: self.freed.append(at))
        self._entry(77, _P, _P, _P)(lambda allocator, out: _put(out, _P, 5))
        self._entry(132, None, _P)(release)
        self._entry(193, _P, _P, _P)(lambda context, out: _put(out, _P, self.stream))
        if self.version >= 18:
            self._entry(277, _P, _P, _P, _S, _P)(scratch)
            self._entry(278, _P, _P, _I, _P)(allocator)


def _put(out: int, kind: Any, value: Any) -> None:
    kind.from_address(out).value = value


def main() -> None:
    """Answer a question on standard input in a process whose driver is the stub: a library, an API
    version, a device and more of `Runtime`, and calls one after another."""
    asked = json.load(sys.stdin)
    calls, answers = asked.pop("calls"), []
    runtime = Runtime(**asked)
    for name, inputs, attributes in calls:
        given = [each and Tensor(each[0], tuple(each[1]), each[2]) for each in inputs]
        try:
            answers.append({"sizes": runtime.run(name, given, **attributes).sizes, "error": ""})
        except StatusError as error:
            answers.append({"error": str(error)})
    log = Path(os.environ["STUB_LOG"])
    json.dump(
        {
            "answers": answers, "log": log.read_text().splitlines() if log.exists() else [],
            "cpu": sorted(runtime.names(None)), "cuda": sorted(runtime.names(PROVIDER)),
            "scratch": runtime.scratch, "freed": runtime.freed, "alive": runtime.alive,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    main()
