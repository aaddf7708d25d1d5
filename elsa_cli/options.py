"""The options that commands share, and the class of every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import click

from elsa_cli import completion, config, values
from elsa_cli.console import Session
from elsa_cli.errors import PlaceError

Decorator = Callable[[Any], Any]

PRECISIONS = ("strict", "ieee", "turbo", "lean")
# As `elsa_core.proof.paths.PATHS`, which needs torch; a test compares them.
PATHS = ("eager", "graph", "compile", "compile+graph")
# Rows of a checked batch: more than one, or nothing is known of the later ones, and an odd number.
CHECKED_ROWS = 3
LARGEST_BATCH = 65536

# Click folds it to the terminal.
MODEL_HELP = """MODEL is a timm name or the beginning of one (the shortest match is taken and
shown), open_clip:NAME[/TAG], torchvision:NAME, hf-hub:OWNER/NAME, a .safetensors file or its index,
a .pth, .pt, .bin or .ckpt file, or a directory that `elsa patch -o`, `elsa export`
or transformers' `save_pretrained` wrote."""

# What stands at the end of each command's help page: two command lines that work.
_MODEL = "vit_base_patch16_224"
EXAMPLES = {
    "list": ("elsa list swin", "elsa list 'vit_*' --json"),
    "inspect": (f"elsa inspect {_MODEL}", "elsa inspect model.safetensors --html sites.html"),
    "patch": (f"elsa patch {_MODEL} --check", f"elsa patch {_MODEL} --pretrained -o DIR"),
    "check": (f"elsa check {_MODEL} --images DIR", f"elsa check {_MODEL} --dtype bf16 --grad"),
    "profile": (f"elsa profile {_MODEL}", f"elsa profile {_MODEL} --img 384 --html report.html"),
    "eval": (
        f"elsa eval {_MODEL} --pretrained --images DIR",
        "elsa eval model.safetensors --images DIR --limit 500",
    ),
    "export": (
        f"elsa export {_MODEL} --pretrained -o DIR",
        "elsa export model.safetensors --formats onnx --onnx-mode standard",
    ),
    "verify": ("elsa verify DIR --files-only", "elsa verify DIR --key key.pub"),
    "bench": ("elsa bench attention --quick", "elsa bench models --dry-run"),
    "doctor": ("elsa doctor", "elsa doctor --json"),
    "build": ("elsa build", "elsa build --cuda --arch sm_90"),
    "completion": ('eval "$(elsa completion bash)"', "elsa completion fish | source"),
    "help": ("elsa help patch", "elsa help bench models"),
}


class Options(SimpleNamespace):
    """The values of a command's options by name; a shared one that it lacks has its default."""

    SHARED: ClassVar[dict[str, Any]] = {
        "img_size": None, "batch_size": CHECKED_ROWS, "seed": 0, "dtype": "fp32", "device": "auto",
        "pretrained": False, "arch": None, "weights": None, "model_kwargs": (), "mean": None,
        "std": None, "crop_pct": None, "interpolation": None, "precision": "strict",
        "backend": "auto", "include": (), "exclude": (), "scope": "auto", "images": None,
        "inputs": None, "input_size": None, "paths": None, "grad": False, "sparsity": None,
        "sparsity_bound": 0.0, "offload": None,
    }  # fmt: skip

    def __init__(self, **given: Any) -> None:
        super().__init__(**(self.SHARED | given))


class Command(click.Command):
    """A command whose defaults may come from a config file and from `ELSA_<OPTION>` variables:
    ELSA_IMG_SIZE for --img-size."""

    def __init__(self, name: str, **attributes: Any) -> None:
        if any(param.name == "model" for param in attributes["params"]):
            attributes["help"] = f"{inspect.cleandoc(attributes['help'])}\n\n{MODEL_HELP}"
        for param in attributes["params"]:
            if isinstance(param, click.Option):
                param.show_default = True
            only_typed = config.COMMAND_LINE_ONLY.intersection(param.opts)
            if isinstance(param, click.Option) and not only_typed:
                # Named after the flag, which is what a user knows, not after the parameter.
                flag = max(param.opts, key=len).lstrip("-")
                param.envvar = f"ELSA_{flag.upper().replace('-', '_')}"
        settings = {"help_option_names": ["-h", "--help"]}
        lines = ["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])]
        super().__init__(name, epilog="\n".join(lines), context_settings=settings, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Asking for help must work whatever the config file holds.
        if {"-h", "--help"}.intersection(args) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        from elsa_cli.main import all_commands

        session = ctx.ensure_object(Session)
        try:
            here = Path.cwd()
        except OSError as error:
            raise PlaceError(
                f"the current directory cannot be used: {error.strerror}; change into one that is "
                "there"
            ) from None
        try:
            found = config.find(here, session.warn)
            if found is not None:
                path, table = found
                ctx.meta["elsa.config"] = str(path)
                ctx.default_map = config.defaults(path, table, self, all_commands(), session.warn)
        except (config.ConfigError, OSError) as error:
            # `doctor` reports the file instead of failing because of it.
            if self.name != "doctor":
                raise
            ctx.meta["elsa.config.error"] = str(error)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with ctx.ensure_object(Session).guarded():
            return super().invoke(ctx)


def elsa_command(name: str, *options: Decorator) -> Callable[[Callable[..., None]], click.Command]:
    """A function (session, **values) as a command with these arguments and options, in this order
    on its help page, and --json, --quiet, --verbose and --debug."""

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated: Any = click.make_pass_decorator(Session, ensure=True)(function)
        # The option that is applied last comes first on the help page.
        for option in reversed((*options, *OUTPUT)):
            decorated = option(decorated)
        return click.command(name, cls=Command)(decorated)

    return decorate


def typed(names: Iterable[str]) -> list[str]:
    """The flags among these parameters that stand on the command line itself. Variables and config
    files hold defaults for every run, which say nothing about this one."""
    ctx = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    return [flags[name] for name in names if ctx.get_parameter_source(name) is source]


def resolve_device(name: str) -> str:
    """The device that --device names, `auto` settled (CUDA where there is one, else the CPU)."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(name.partition(":")[2] or 0)
        if count == 0:
            build = "sees no GPU" if torch.version.cuda else "was built without CUDA"
            raise PlaceError(
                f"--device {name}: torch {torch.__version__} {build}; use --device cpu, "
                "or see `elsa doctor`"
            )
        if index >= count:
            raise PlaceError(f"--device {name}: there are only cuda:0 to cuda:{count - 1}")
    if name == "mps" and not torch.backends.mps.is_available():
        raise PlaceError("--device mps: this machine has none; use --device cpu")
    return name


OUTPUT = tuple(
    click.option(
        *names, is_flag=True, expose_value=False, is_eager=True, help=text,
        callback=lambda ctx, param, on: setattr(ctx.ensure_object(Session), str(param.name), on),
    )
    for names, text in (
        (("--json",), "Print one JSON document instead of a table."),
        (("--quiet", "-q"), "Print the verdict only; no progress."),
        (("--verbose", "-v"), "Log each step and all warnings."),
        (("--debug",), "Show the traceback of an error."),
    )
)  # fmt: skip


def model_options(*, required: bool = True, swept: bool = False) -> tuple[Decorator, ...]:
    """MODEL and how it is built: size, weights, dtype, device, and what a weights file may not say,
    by timm's names. `swept`: several sizes and dtypes."""
    size: Any = values.IMAGE_SIZE
    dtype: Any = values.DtypeName(values.DTYPES)
    if swept:
        size = values.Listed(size, "PIXELS|HxW")
        dtype = values.Listed(dtype, "|".join(values.DTYPES))
    return (
        click.argument("model", required=required, shell_complete=completion.models),
        click.option(
            "--img-size", "--img", type=size, help="Input size, when not the model's own."
        ),
        flag("--pretrained", text="Load trained weights (cache or network)."),
        click.option(
            "--seed", type=click.IntRange(0, 2**32 - 1), default=0,
            help="Seed of random weights and generated inputs.",
        ),
        click.option(
            "--arch", metavar="NAME", shell_complete=completion.models,
            help="timm architecture of a weights file that does not say it.",
        ),
        click.option("--dtype", type=dtype, default="fp32", help="Type of weights and inputs."),
        click.option(
            "--device", type=values.DEVICE, default="auto", help="auto, cpu, cuda, cuda:N or mps."
        ),
        click.option(
            "--model-kwargs", type=values.KEY_VALUE, multiple=True,
            help="Argument of the library's constructor (repeatable), like window_size=8.",
        ),
        click.option(
            "--weights", metavar="KEY",
            help="Which weights of a file with several: state_dict_ema, teacher, model, ...",
        ),
        click.option(
            "--mean", type=values.NUMBERS, help="Mean of the images' channels, scaled to 0..1."
        ),
        click.option("--std", type=values.NUMBERS, help="Their standard deviation."),
        click.option(
            "--crop-pct", type=values.Number(0.05, 2.0), metavar="SHARE",
            help="Share of the resized image that the centre crop keeps.",
        ),
        click.option(
            "--interpolation",
            type=click.Choice(("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")),
            help="How images are resized.",
        ),
    )  # fmt: skip


def flag(*names: str, text: str) -> Decorator:
    return click.option(*names, is_flag=True, help=text)


def path_option(*names: str, text: str, metavar: str | None = "FILE", **more: Any) -> Decorator:
    """Of a file, or with DIR as `metavar` of a folder."""
    path = values.FilePath(path_type=Path, dir_okay=metavar == "DIR")
    return click.option(*names, type=path, metavar=metavar, help=text, **more)


EXAMPLE = (
    path_option("--inputs", text="Run the model on the arguments in this file (.pt, .npz)."),
    click.option(
        "--input-size", type=values.SHAPE,
        help="Run the model on noise of this shape, the batch left out: 1x96x96x96.",
    ),
)  # fmt: skip
INPUT = (
    click.option(
        "--batch-size", "-b", type=click.IntRange(1, LARGEST_BATCH), default=CHECKED_ROWS,
        help="Images in a batch of the check. Two or more show mix-ups.",
    ),
    path_option("--images", metavar="DIR", text="Check on the images of this folder too."),
)  # fmt: skip
SCOPE = click.option(
    "--scope", type=click.Choice(("auto", "attention", "model")), default="auto",
    help="attention: the sites. model: linear layers, MLPs and patch embedding too. auto: what was "
    "measured to be faster on the device.",
)  # fmt: skip
SITES = (
    click.option(
        "--include", multiple=True, metavar="GLOB",
        help="Only sites whose path matches (repeatable), like 'blocks.*'.",
    ),
    click.option(
        "--exclude", multiple=True, metavar="GLOB",
        help="Leave sites whose path matches as they are (repeatable).",
    ),
    SCOPE,
)  # fmt: skip
BACKEND = click.option(
    "--backend", type=click.Choice(tuple(values.BACKENDS)), default="auto",
    help=f"Kernels to use. {'; '.join(map(': '.join, values.BACKENDS.items()))}.",
)  # fmt: skip
KERNELS = (
    click.option(
        "--precision", type=click.Choice(PRECISIONS), default="strict",
        help="Of float32 calls. strict: as exact as PyTorch. ieee: without tensor cores. "
        "turbo: faster, 11 bits. lean: without workspace.",
    ),
    BACKEND,
)  # fmt: skip
PROOF = (
    click.option(
        "--path", "paths", type=values.Listed(click.Choice(PATHS), "|".join(PATHS)),
        help="How the whole patched model runs: as it is, as a CUDA graph, through "
        "torch.compile, as a CUDA graph of the compiled model.  [default: eager; on CUDA "
        "eager,graph,compile]",
    ),
    flag(
        "--grad",
        text="Also compare the gradients of every parameter and input, of each site and of the "
        "model.",
    ),
    click.option(
        "--sparsity", type=values.SPARSITY, default=None,
        help="Let attention leave out tiles of negligible weights: exact, or weights up to a "
        "number in (0, 1), which costs an error.",
    ),
    click.option(
        "--sparsity-bound", type=values.Number(min=0.0), default=0.0,
        help="The relative error that a number as --sparsity may add to what is allowed.",
    ),
)  # fmt: skip
