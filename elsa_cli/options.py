"""The options that commands share, the class of every command, and how their values are read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from elsa_cli import completion, config, examples, file_options
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])

DEVICES = ("auto", "cpu", "cuda", "cuda:0", "mps")
DTYPES = ("fp32", "fp16", "bf16")
LONG_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PRECISIONS = ("strict", "ieee", "turbo", "lean")
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
# Rows of a checked batch: more than one, or nothing is known of the later ones, and an odd number.
CHECKED_ROWS = 3
# Far above any image a model meets, far below where arithmetic on sizes overflows.
LARGEST_SIDE = 32768
LARGEST_BATCH = 65536

# Click folds it to the terminal.
MODEL_HELP = """MODEL is a timm name or the beginning of one (the shortest match is taken and
shown), open_clip:NAME[/TAG], torchvision:NAME, hf-hub:OWNER/NAME, a .safetensors file or its index,
a .pth, .pt, .bin or .ckpt file, or a directory that `elsa patch -o`, `elsa export`
or transformers' `save_pretrained` wrote."""

pass_session = click.make_pass_decorator(Session, ensure=True)


class Command(click.Command):
    """A command whose defaults may come from a config file and from `ELSA_<OPTION>` variables:
    ELSA_IMG_SIZE for --img-size."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        if any(param.name == "model" for param in attributes.get("params", ())):
            attributes["help"] = f"{inspect.cleandoc(attributes['help'])}\n\n{MODEL_HELP}"
        for param in attributes.get("params", ()):
            if isinstance(param, click.Option) and not config.is_command_line_only(param):
                # Named after the flag, which is what a user knows, not after the parameter.
                flag = max(param.opts, key=len).lstrip("-")
                param.envvar = f"ELSA_{flag.upper().replace('-', '_')}"
        attributes.setdefault("epilog", examples.of(args[0] if args else attributes["name"]))
        settings = {"help_option_names": ["-h", "--help"]}
        attributes["context_settings"] = settings | attributes.get("context_settings", {})
        super().__init__(*args, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Asking for help must work whatever the config file holds.
        asks = {"-h", "--help"}.intersection(args)
        if not asks and not ctx.resilient_parsing:
            self._read_config(ctx)
        return super().parse_args(ctx, args)

    def _read_config(self, ctx: click.Context) -> None:
        from elsa_cli.main import all_commands

        session = ctx.find_object(Session) or ctx.ensure_object(Session)
        try:
            found = config.find(_here(), session.warn)
            if found is None:
                return
            path, table = found
            ctx.meta["elsa.config"] = str(path)
            ctx.default_map = config.defaults(path, table, self, all_commands(), session.warn)
        except (config.ConfigError, OSError) as error:
            # `doctor` reports the file instead of failing because of it.
            if self.name != "doctor":
                raise
            ctx.meta["elsa.config.error"] = str(error)

    def invoke(self, ctx: click.Context) -> Any:
        session = ctx.find_object(Session) or ctx.ensure_object(Session)
        with session.guarded():
            return super().invoke(ctx)


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise PlaceError(
            f"the current directory cannot be used: {error.strerror}; change into one that is there"
        ) from None


class ImageSize(click.ParamType):  # type: ignore[type-arg]  # generic in new Clicks only
    """`384`, or `HEIGHTxWIDTH`."""

    name = "size"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "PIXELS|HxW"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """The size as (height, width); a usage error for anything else."""
        text = str(value).strip().lower()
        if not re.fullmatch(r"[+-]?\d{1,20}(x[+-]?\d{1,20})?", text):
            self.fail(f"{text[:60]!r} is not a size in pixels (like 224 or 224x320)", param, ctx)
        sides = [int(side) for side in text.split("x")]
        if not all(1 <= side <= LARGEST_SIDE for side in sides):
            self.fail(f"{value} is outside 1 to {LARGEST_SIDE} pixels", param, ctx)
        return sides[0], sides[-1]


class DtypeName(click.Choice):  # type: ignore[type-arg]
    """fp32, fp16 or bf16; PyTorch's own names are understood too."""

    def __init__(self) -> None:
        super().__init__(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The short name; a usage error for any other."""
        return super().convert(LONG_DTYPES.get(str(value), value), param, ctx)


class DeviceName(click.ParamType):  # type: ignore[type-arg]
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`: the form alone; whether it exists needs torch."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name in lower case; a usage error where it cannot be a device."""
        text = str(value).strip().lower()
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text):
            self.fail(f"{value!r} is no device; use auto, cpu, cuda, cuda:N or mps", param, ctx)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return completion.starting(DEVICES, incomplete)


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
            self.fail(
                f"{str(value)[:120]}: {getattr(error, 'strerror', None) or error}", param, ctx
            )
        return path


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Several values of one type with commas between them: `224,384`. Gives a tuple without
    repetitions."""

    def __init__(self, each: click.ParamType, shown: str = "") -> None:  # type: ignore[type-arg]
        self.each = each
        self.name = f"{each.name} list"
        self.shown = shown or each.name.upper()

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"{self.shown}[,...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values in the order given; a usage error where one is none of the type."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        return tuple(dict.fromkeys(self.each.convert(part, param, ctx) for part in parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """What the last of the values may continue as, without those that stand before it."""
        last = incomplete.rpartition(",")[2]
        offered = self.each.shell_complete(ctx, param, last)
        return completion.among([item.value for item in offered], incomplete)


class Shape(click.ParamType):  # type: ignore[type-arg]
    """Sizes with an x between them: `1x96x96x96`. Gives a tuple."""

    name = "shape"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NxNx..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The sizes; a usage error where one is no positive whole number."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split("x")
        if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**20 for part in parts):
            self.fail(f"{str(value)[:60]!r} is no shape (like 1x96x96x96)", param, ctx)
        return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Options:
    """The shared options as one value; a command without one of them sees its default."""

    img_size: tuple[int, int] | None = None
    batch_size: int = CHECKED_ROWS
    seed: int = 0
    dtype: str = "fp32"
    device: str = "auto"
    pretrained: bool = False
    arch: str | None = None
    weights: str | None = None
    model_kwargs: tuple[tuple[str, Any], ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    precision: str = "strict"
    backend: str = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scope: str = "auto"
    images: Path | None = None
    inputs: Path | None = None
    input_size: tuple[int, ...] | None = None
    paths: tuple[str, ...] | None = None
    grad: bool = False
    sparsity: str | float | None = None
    sparsity_bound: float = 0.0

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """Take this class's fields out of `values` (a command's keyword arguments)."""
        return cls(
            **{each.name: values.pop(each.name) for each in fields(cls) if each.name in values}
        )

    def source(self) -> dict[str, Any]:
        """What `load_model` takes about a weights file: architecture and preprocessing."""
        from elsa_core.loading import Given

        return {
            "arch": self.arch,
            "weights": self.weights,
            "model_kwargs": dict(self.model_kwargs),
            "preprocess": Given(self.mean, self.std, self.crop_pct, self.interpolation),
        }

    def torch_dtype(self) -> torch.dtype:
        """The dtype that --dtype names."""
        from elsa_core import precision

        return precision.DTYPES[self.dtype]


def typed(names: Iterable[str]) -> list[str]:
    """The flags among these parameters that stand on the command line itself.

    Variables and config files hold defaults for every run, which say nothing about this one.
    """
    ctx = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    return [flags[name] for name in names if ctx.get_parameter_source(name) is source]


def resolve_device(name: str) -> str:
    """The device that --device names, `auto` settled (CUDA where there is one, else the CPU).

    Raises: UnavailableError where the machine has no such device.
    """
    import torch

    from elsa_core.errors import UnavailableError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(name.partition(":")[2] or 0)
        if count == 0:
            build = "sees no GPU" if torch.version.cuda else "was built without CUDA"
            raise UnavailableError(
                f"--device {name}: torch {torch.__version__} {build}; use --device cpu, "
                "or see `elsa doctor`"
            )
        if index >= count:
            raise UnavailableError(f"--device {name}: there are only cuda:0 to cuda:{count - 1}")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UnavailableError("--device mps: this machine has none; use --device cpu")
    return name


def _flag(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.find_object(Session) or ctx.ensure_object(Session), name, True)

    return callback


def _session_flag(*names: str, field: str, text: str) -> Callable[[Function], Function]:
    return click.option(
        *names, is_flag=True, expose_value=False, callback=_flag(field), help=text, is_eager=True
    )


def apply(options: list[Callable[[Function], Function]]) -> Callable[[Function], Function]:
    """The options as one decorator, in this order on the help page."""

    def decorate(function: Function) -> Function:
        # The option that is applied last comes first on the help page.
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def output_options(function: Function) -> Function:
    """--json, --quiet, --verbose, --debug: every command has them."""
    options: list[Callable[[Function], Function]] = [
        _session_flag("--json", field="json", text="Print one JSON document instead of a table."),
        _session_flag("--quiet", "-q", field="quiet", text="Print the verdict only; no progress."),
        _session_flag("--verbose", "-v", field="verbose", text="Log each step and all warnings."),
        _session_flag("--debug", field="debug", text="Show the traceback of an error."),
    ]
    return apply(options)(function)


def model_options(function: Function) -> Function:
    """MODEL and how it is built: size, weights, dtype, device."""
    return _model_options(function, ImageSize(), DtypeName())


def optional_model_options(function: Function) -> Function:
    """`model_options` where MODEL may be missing (None)."""
    return _model_options(function, ImageSize(), DtypeName(), required=False)


def swept_model_options(function: Function) -> Function:
    """`model_options` that take several sizes and dtypes."""
    return _model_options(function, Listed(ImageSize(), "PIXELS|HxW"),
                          Listed(DtypeName(), "|".join(DTYPES)))  # fmt: skip


def _model_options(function: Function, size: Any, dtype: Any, *, required: bool = True) -> Function:
    options: list[Callable[[Function], Function]] = [
        click.argument("model", required=required, shell_complete=completion.models),
        click.option(
            "--img-size", "--img", type=size, help="Input size, when not the model's own."
        ),
        click.option("--pretrained", is_flag=True, help="Load trained weights (cache or network)."),
        click.option(
            "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
            help="Seed of random weights and generated inputs.",
        ),
        click.option(
            "--arch", metavar="NAME", shell_complete=completion.models,
            help="timm architecture of a weights file that does not say it.",
        ),
        click.option(
            "--dtype", type=dtype, default="fp32", show_default=True,
            help="Type of weights and inputs.",
        ),
        click.option(
            "--device", type=DeviceName(), default="auto", show_default=True,
            help="auto, cpu, cuda, cuda:N or mps.",
        ),
    ]  # fmt: skip
    options += file_options.all_of_them()
    return apply(options)(function)


def example_options(function: Function) -> Function:
    """--inputs and --input-size."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--inputs", type=FilePath(), metavar="FILE",
            help="Run the model on the arguments in this file (.pt, .npz).",
        ),
        click.option(
            "--input-size", type=Shape(),
            help="Run the model on noise of this shape, the batch left out: 1x96x96x96.",
        ),
    ]  # fmt: skip
    return apply(options)(function)


def backend_option(function: Function) -> Function:
    """--backend, with what each name is."""
    words = "; ".join(f"{name}: {about}" for name, about in BACKENDS.items())
    return click.option(
        "--backend", type=click.Choice(tuple(BACKENDS)), default="auto", show_default=True,
        help=f"Kernels to use. {words}.",
    )(function)  # fmt: skip


def kernel_options(function: Function) -> Function:
    """--precision and --backend."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--precision", type=click.Choice(PRECISIONS), default="strict", show_default=True,
            help="Of float32 calls. strict: as exact as PyTorch. ieee: without tensor cores. "
            "turbo: faster, 11 bits. lean: without workspace.",
        ),
        backend_option,
    ]  # fmt: skip
    return apply(options)(function)


def input_options(function: Function) -> Function:
    """--batch-size and --images."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--batch-size", "-b", type=click.IntRange(1, LARGEST_BATCH), default=CHECKED_ROWS,
            show_default=True, help="Images in a batch of the check. Two or more show mix-ups.",
        ),
        click.option(
            "--images", type=FilePath(folder=True), metavar="DIR",
            help="Check on the images of this folder too.",
        ),
    ]  # fmt: skip
    return apply(options)(function)
