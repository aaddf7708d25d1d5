"""How the values of options are read. One that does not fit is a usage error."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


class _Shown(click.ParamType):  # type: ignore[type-arg]  # generic in new Clicks only
    """A type that help pages show as its `metavar`; None: by its name."""

    metavar: str | None = None

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.metavar


class Number(click.FloatRange):
    """A number within a range; Click lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


@dataclass(eq=False, repr=False)
class Parsed(_Shown):
    """What `read` makes of the match of a pattern with a text. A text that does not match, or of
    which it makes None, is a usage error that ends in `refusal`; its ValueError is one too."""

    name: str
    pattern: str
    read: Callable[[re.Match[str]], Any]
    refusal: str
    metavar: str | None = None
    offered: Sequence[str] = ()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # read already
        match = re.fullmatch(self.pattern, value.strip(), re.IGNORECASE | re.DOTALL)
        try:
            found = None if match is None else self.read(match)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found is None:
            self.fail(f"{value[:60]!r} {self.refusal}", param, ctx)
        return found

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return completion.among(self.offered, incomplete)


class Listed(_Shown):
    """Several values of one type with commas between them: `224,384`. Gives a tuple without
    repetitions."""

    def __init__(self, each: click.ParamType, shown: str = "") -> None:  # type: ignore[type-arg]
        self.each, self.name = each, f"{each.name} list"
        self.metavar = f"{shown or each.name.upper()}[,...]"

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

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(LONG_DTYPES.get(str(value), value), param, ctx)


class FilePath(click.Path):
    """A path with "~" expanded, which can be looked up, whether it exists or not."""

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


def _image_size(match: re.Match[str]) -> tuple[int, int]:
    """(height, width) of `384`, or `HEIGHTxWIDTH`."""
    sides = [int(side) for side in match[0].lower().split("x")]
    if not all(1 <= side <= LARGEST_SIDE for side in sides):
        raise ValueError(f"{match[0]} is outside 1 to {LARGEST_SIDE} pixels")
    return sides[0], sides[-1]


def _key_value(match: re.Match[str]) -> tuple[str, Any]:
    """The value is read as timm's `--model-kwargs` reads it: a Python literal, else text."""
    key, value = match.groups()
    try:
        literal = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return key, value
    return key, list(literal) if isinstance(literal, tuple) else literal


def _numbers(match: re.Match[str]) -> tuple[float, ...] | None:
    found = tuple(float(part) for part in match[0].replace(",", " ").split())
    return found if all(map(math.isfinite, found)) else None


def _sparsity(match: re.Match[str]) -> str | float | None:
    if match[0].lower() == "exact":
        return "exact"
    return float(match[0]) if 0.0 < float(match[0]) < 1.0 else None


def _known_architecture(match: re.Match[str]) -> int:
    """One that kernels can be compiled for without its GPU."""
    if f"sm_{match[1]}" not in completion.ARCHS:
        raise ValueError(f"sm_{match[1]} is unknown: choose of {', '.join(completion.ARCHS)}")
    return int(match[1])


_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
IMAGE_SIZE = Parsed("size", r"[+-]?\d{1,20}(x[+-]?\d{1,20})?", _image_size,
                    "is not a size in pixels (like 224 or 224x320)", "PIXELS|HxW")  # fmt: skip
# The form alone is looked at: whether the device exists needs torch.
DEVICE = Parsed("device", r"auto|cpu|mps|cuda(:\d{1,3})?", lambda match: match[0].lower(),
                "is no device; use auto, cpu, cuda, cuda:N or mps", offered=DEVICES)  # fmt: skip
SHAPE = Parsed("shape", r"0*[1-9][0-9]{0,5}(x0*[1-9][0-9]{0,5})*",
               lambda match: tuple(map(int, match[0].lower().split("x"))),
               "is no shape (like 1x96x96x96)", "NxNx...")  # fmt: skip
# Literals are parsed by Python, whose parser recurses.
KEY_VALUE = Parsed("key=value", r"([^\W\d]\w*)=(.{0,400})", _key_value,
                   "is not KEY=VALUE (like window_size=8)", "KEY=VALUE")  # fmt: skip
NUMBERS = Parsed("numbers", rf"{_NUMBER}([\s,]+{_NUMBER})*", _numbers,
                 "is not a list of numbers", "NUMBER[,...]")  # fmt: skip
SPARSITY = Parsed("exact|NUMBER", f"exact|{_NUMBER}", _sparsity,
                  "is neither exact nor a number in (0, 1)")  # fmt: skip
ARCHITECTURE = Parsed("arch", r"(?:sm_)?(\d{2,3})", _known_architecture,
                      "is no architecture (like sm_90)", offered=completion.ARCHS)  # fmt: skip
FORMAT_LIST = Listed(
    Parsed("format", "|".join(FORMATS), lambda match: match[0].lower(),
           f"is no format; choose among {', '.join(FORMATS)}", offered=FORMATS)
)  # fmt: skip
BASELINE_LIST = Listed(
    Parsed("name", ".*", lambda match: match[0], "", offered=completion.BASELINES)
)
