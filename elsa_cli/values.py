"""How the values of options are read. One that does not fit is a usage error."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from elsa_cli import completion

DEVICES = ("auto", "cpu", "cuda", "cuda:0", "mps")
DTYPES = ("fp32", "fp16", "bf16")
LONG_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
FORMATS = ("torchscript", "onnx", "pt2")
# As `elsa_core.dispatch.names()`, which a command line that only helps does not import: it needs
# torch. A test compares them. --help and `elsa doctor` show the words.
BACKENDS = {
    "auto": "the first that serves the call",
    "native": "C++ on a CPU",
    "triton": "Triton on a GPU",
    "portable": "CUDA C++ on a GPU, float32 without tensor cores",
    "sdpa": "PyTorch's own attention",
    "eager": "plain PyTorch operations",
}
# Far above any image a model meets, far below where arithmetic on sizes overflows.
LARGEST_SIDE = 32768
LONGEST_LITERAL = 400  # literals are parsed by Python, whose parser recurses


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in new Clicks only
    """What `read` makes of a text; the ValueError that it raises is the usage error."""

    def __init__(
        self, name: str, read: Callable[[str], Any], metavar: str | None = None,
        offered: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.name, self.read, self.metavar, self.offered = name, read, metavar, offered

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # read already
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return completion.among(self.offered, incomplete)


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Several values of one type with commas between them: `224,384`. Gives a tuple without
    repetitions."""

    def __init__(self, each: click.ParamType, shown: str = "") -> None:  # type: ignore[type-arg]
        self.each, self.name = each, f"{each.name} list"
        self.shown = shown or each.name.upper()

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"{self.shown}[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        return tuple(dict.fromkeys(self.each.convert(part, param, ctx) for part in parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """What the last of the values may continue as, without those that stand before it."""
        offered = self.each.shell_complete(ctx, param, incomplete.rpartition(",")[2])
        return completion.among([item.value for item in offered], incomplete)


class DtypeName(click.Choice):  # type: ignore[type-arg]
    """fp32, fp16 or bf16; PyTorch's own names are understood too."""

    def __init__(self) -> None:
        super().__init__(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(LONG_DTYPES.get(str(value), value), param, ctx)


class FilePath(click.Path):
    """A path with "~" expanded, which can be looked up, whether it exists or not.

    A directory is refused unless `folder`.
    """

    def __init__(self, *, folder: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=folder)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; a usage error for an unknown user's home, a name too long, a loop of links."""
        try:
            path = Path(str(super().convert(value, param, ctx))).expanduser()
            with suppress(FileNotFoundError, NotADirectoryError):
                path.stat()
        except (OSError, RuntimeError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            self.fail(f"{str(value)[:120]}: {said}", param, ctx)
        return path


def _image_size(text: str) -> tuple[int, int]:
    """(height, width) of `384`, or `HEIGHTxWIDTH`."""
    plain = text.strip().lower()
    if not re.fullmatch(r"[+-]?\d{1,20}(x[+-]?\d{1,20})?", plain):
        raise ValueError(f"{plain[:60]!r} is not a size in pixels (like 224 or 224x320)")
    sides = [int(side) for side in plain.split("x")]
    if not all(1 <= side <= LARGEST_SIDE for side in sides):
        raise ValueError(f"{text} is outside 1 to {LARGEST_SIDE} pixels")
    return sides[0], sides[-1]


def _device(text: str) -> str:
    """The form alone is looked at: whether the device exists needs torch."""
    plain = text.strip().lower()
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", plain):
        raise ValueError(f"{text!r} is no device; use auto, cpu, cuda, cuda:N or mps")
    return plain


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**20 for part in parts):
        raise ValueError(f"{text[:60]!r} is no shape (like 1x96x96x96)")
    return tuple(int(part) for part in parts)


def _key_value(text: str) -> tuple[str, Any]:
    """The value is read as timm's `--model-kwargs` reads it: a Python literal, else text."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier() or len(value) > LONGEST_LITERAL:
        raise ValueError(f"{text[:60]!r} is not KEY=VALUE (like window_size=8)")
    try:
        literal = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return key, value
    return key, list(literal) if isinstance(literal, tuple) else literal


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"{text[:60]!r} is not a list of numbers")
    return found


def _sparsity(text: str) -> str | float:
    if text == "exact":
        return text
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < 1.0:
        raise ValueError(f"{text!r} is neither exact nor a number in (0, 1)")
    return number


def _architecture(text: str) -> int:
    """90 for `sm_90`, or `90`."""
    found = re.fullmatch(r"(?:sm_)?(\d{2,3})", text.strip().lower())
    if found is None:
        raise ValueError(f"{text[:60]!r} is no architecture (like sm_90)")
    return int(found[1])


def _known_architecture(text: str) -> int:
    """One that kernels can be compiled for without its GPU."""
    arch = _architecture(text)
    if f"sm_{arch}" not in completion.ARCHS:
        raise ValueError(f"sm_{arch} is unknown: choose of {', '.join(completion.ARCHS)}")
    return arch


def _formats(text: str) -> tuple[str, ...]:
    given = tuple(name.strip() for name in text.lower().split(","))
    for name in given:
        if name not in FORMATS:
            raise ValueError(f"{name!r} is no format; choose among {', '.join(FORMATS)}")
    return given


IMAGE_SIZE = Parsed("size", _image_size, "PIXELS|HxW")
DEVICE = Parsed("device", _device, offered=DEVICES)
SHAPE = Parsed("shape", _shape, "NxNx...")
KEY_VALUE = Parsed("key=value", _key_value, "KEY=VALUE")
NUMBERS = Parsed("numbers", _numbers, "NUMBER[,...]")
SPARSITY = Parsed("exact|NUMBER", _sparsity)
ARCHITECTURE = Parsed("arch", _architecture, offered=completion.ARCHS)
KNOWN_ARCHITECTURE = Parsed("arch", _known_architecture, offered=completion.ARCHS)
FORMAT_LIST = Parsed("formats", _formats, "A,B,...", FORMATS)
