"""What is exported: one module, its inputs, and what is known of where it comes from."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elsa_core.base.calls import plain_multihead
from elsa_core.base.inputs import generated_inputs, resolved_input_size, text_shape
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ArgumentError, ElsaError, ExportError, NothingPatchedError
from elsa_core.exporting.reference import BATCH_SIZES
from elsa_core.loading import Given, Plan, Preprocess, of_model, with_given
from elsa_core.patching import patched_scope, patched_sites, shared_copy

if TYPE_CHECKING:
    from elsa_core.loading import Loaded

Result = TypeVar("Result")
TOWERS = ("image", "text")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ExportTarget:
    """One export."""

    model: nn.Module  # patched, in eval mode
    inputs: tuple[Tensor, ...]  # two rows each, or as many as the largest batch has
    first: tuple[Tensor, ...]  # two rows: what the tracers see
    input_names: tuple[str, ...]  # one a tensor
    output_names: tuple[str, ...]  # one a tensor, that a person can read
    preprocess: Preprocess | None  # of an image; None for text and for unknown models
    dtype: torch.dtype  # of the weights; float32, float16 or bfloat16
    device: str  # "cpu" or "cuda"
    plan: Plan  # which sites are patched, and how
    name: str  # the architecture, or the model's class
    weights: str  # where they come from, in words
    tower: str | None  # "image" or "text" for one side of a CLIP
    loaded: Loaded | None  # what `load` knows, where the module is all of what it loaded


def export_target(
    model: nn.Module, loaded: Loaded | None, inputs: Tensor | tuple[Tensor, ...] | None, seed: int,
    batches: Sequence[int] = BATCH_SIZES, given: Given | None = None,
) -> ExportTarget:  # fmt: skip
    """Look at the model once and refuse what cannot be exported. `batches` are the sizes that it is
    to be verified at, `given` what the user says of the preprocessing."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    sites = patched_sites(model)
    if not sites:
        raise NothingPatchedError("export: no site of this model is patched; call patch first")
    if model.training:
        raise ArgumentError("export: the model is in training mode; call model.eval() first")
    dtype, device = _home(model)
    ways = {(vars(m)["elsa_precision"], vars(m)["elsa_backend"]) for m in sites.values()}
    if len(ways) > 1:
        raise ArgumentError(
            "export: the sites are patched with several precisions or backends; patch with one"
        )
    rows = max(2, *batches)  # tracers see two
    found = _inputs(model, loaded, inputs, rows, seed, dtype, device)
    whole, images = loaded, found[0].ndim == 4
    if loaded is not None:
        if loaded.model is not model or loaded.tower or loaded.recipe.library == "python":
            whole = None
        images = tuple(found[0].shape[1:]) == loaded.input_size if loaded.is_given else images
    preprocess, given = None, given or Given()
    if images and loaded is not None:
        preprocess = with_given(loaded.recipe.preprocess, given)
    elif images:
        preprocess = of_model(model, resolved_input_size(model, None), given)
    out = None
    with torch.no_grad(), contextlib.suppress(Exception):  # the reference says why
        out = model(*(tensor[:1] for tensor in found))
    tower = "text" if isinstance(model, TextTower) else loaded.tower if loaded else None
    single = "image" if found[0].is_floating_point() else "text"
    several = tuple(f"input_{index}" for index in range(len(found)))
    classes = getattr(model, "num_classes", 0)
    logits = isinstance(classes, int) and classes > 0
    first = f"{tower}_features" if tower else "logits" if logits else "features"
    outputs = (first, *(f"output_{i}" for i in range(1, len(tree_leaves(out)))))
    if isinstance(out, Mapping):
        leaves = {key: len(tree_leaves(out[key])) for key in out if out[key] is not None}
        outputs = tuple(
            key if count == 1 else f"{key}_{index}"
            for key, count in leaves.items()
            for index in range(count)
        )
    return ExportTarget(
        model=_with_tuples(model) if isinstance(out, Mapping) else model,
        inputs=found,
        first=tuple(tensor[:2] for tensor in found),
        input_names=(single,) if len(found) == 1 else several,
        output_names=outputs,
        preprocess=preprocess,
        dtype=dtype,
        device=device.type,
        # the plan that repeats the patching of these sites
        plan=Plan(*ways.pop(), (), (), tuple(sites), scope=patched_scope(model)),
        name=type(model).__name__ if loaded is None else loaded.name,
        weights="the model's own" if loaded is None else loaded.weights,
        tower=tower,
        loaded=whole,
    )


def _with_tuples(model: nn.Module) -> nn.Module:
    """A copy over the same weights that returns a tuple in the place of a mapping, whose class the
    artefacts' readers lack."""
    cls: Any = type(model)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out = cls.forward(self, *args, **kwargs)
        return tuple(value for value in out.values() if value is not None)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    found = shared_copy(model)
    found.__class__ = type(cls.__name__, (cls,), names)
    return found


def _home(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    names = ", ".join(sorted(map(str, dtypes))) or "no floating weights"
    if not dtypes or not dtypes <= set(DTYPES):
        raise ArgumentError(f"export: takes float32, float16 and bfloat16 models, not {names}")
    if len(dtypes) > 1:
        raise ArgumentError(f"export: the model's weights are of several dtypes: {names}")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise ArgumentError(f"export: the model must be on the CPU or on one GPU, not on {names}")
    return dtypes.pop(), devices.pop()


def _inputs(
    model: nn.Module, loaded: Loaded | None, given: Tensor | tuple[Tensor, ...] | None, rows: int,
    seed: int, dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, ...]:  # fmt: skip
    if given is None and loaded is not None and loaded.is_given:
        given = loaded.example_inputs(rows, seed)
    if given is not None:
        tensors = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(t, Tensor) and t.ndim > 0 and len(t) > 0 for t in tensors):
            raise ArgumentError(
                "export: inputs must be tensors that have the batch as their first dimension"
            )
        # an example's own rows, repeated where they are too few
        repeated = (t.repeat(-(-rows // len(t)), *(1,) * (t.ndim - 1))[:rows] for t in tensors)
        return tuple(t.to(device, dtype if t.is_floating_point() else None) for t in repeated)
    if text_shape(model) is not None:
        if getattr(model, "visual", None) is not None:
            raise ArgumentError(
                f"export: {type(model).__name__} is two towers: export one (--tower image or text)"
            )
        return token_cases(model, rows, seed)["noise"]
    size = resolved_input_size(model, None) if loaded is None else loaded.input_size
    case = generated_inputs(size, rows, seed=seed, dtype=dtype, device=device)["noise"]
    return case if isinstance(case, tuple) else (case,)


def token_cases(model: nn.Module, rows: int, seed: int) -> dict[str, tuple[Tensor]]:
    """Token ids for a text tower, int64 [rows, context length], by name. Raises ArgumentError where
    the tower does not say its context length and vocabulary."""
    text = text_shape(model)
    if text is None:
        raise ArgumentError(
            f"export: {type(model).__name__} does not say its context_length and vocab_size: give "
            "inputs"
        )
    device = next(model.parameters()).device
    cases = generated_inputs(
        (1, 1, 1), rows, seed=seed, dtype=torch.float32, device=device, text=text
    )
    return {name: (case[1],) for name, case in cases.items()}


class TextTower(nn.Module):
    """The text side of open_clip's `CLIP`, whose parts lie in the CLIP itself.

    Runs the class's own `encode_text`: token ids int64 [batch, context] -> features [batch, dim].
    The parts are shared with the CLIP, under the names that they have there.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self._encode: Any = type(clip).encode_text
        for name, value in vars(clip).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, module in clip.named_children():
            if name != "visual":
                self.add_module(name, module)
        for name, parameter in clip.named_parameters(recurse=False):
            if name not in ("logit_scale", "logit_bias"):
                self.register_parameter(name, parameter)
        for name, buffer in clip.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        features: Tensor = self._encode(self, text)
        return features


def tower_of(model: nn.Module, name: str) -> nn.Module:
    """The image or text tower of a CLIP; it shares the CLIP's weights."""
    if name not in TOWERS:
        raise ArgumentError(f"tower={name!r} is unknown: choose one of {', '.join(TOWERS)}")
    visual = getattr(model, "visual", None)
    if not isinstance(visual, nn.Module) or not hasattr(model, "encode_text"):
        raise ArgumentError(
            f"tower (--tower) {name}: {type(model).__name__} is one model, not a CLIP of two towers"
        )
    if name == "image":
        return visual
    text = getattr(model, "text", None)
    return text if isinstance(text, nn.Module) else TextTower(model).eval()


def attempt(what: str, model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run `action`, which runs the model; a failure becomes an ExportError that names the module.

    Only after a failure does it run again, followed by hooks: patched blocks of windows leave their
    attention to the original forward where a hook waits for its call.
    """
    try:
        with quiet(), torch.no_grad(), plain_multihead():
            return action()
    except (ElsaError, MemoryError, OSError):
        raise
    except Exception as error:
        paths, entered = {each: path for path, each in model.named_modules()}, list[nn.Module]()
        with ExitStack() as hooks, quiet(), torch.no_grad(), plain_multihead():
            for each in paths:
                enter = each.register_forward_pre_hook(lambda each, _: entered.append(each))
                leave = each.register_forward_hook(lambda *_: entered.__delitem__(-1))
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            with contextlib.suppress(Exception):
                action()
        at = entered[-1] if entered else model
        where = f"module {paths[at]!r}" if paths[at] else "the model"
        name = type(at).__name__
        raise ExportError(f"{what} failed in {where} ({name}): {first_line(error)}") from error
