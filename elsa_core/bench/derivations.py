"""What tensors derived from weights cost on a CPU, as shares of the sites that use them.

    python -m elsa_core.bench.derivations [MODEL ...] --batch 1 --threads 1

Each row printed is one model: how many sites derive something, the time of their forwards on
weights that are frozen, and what is added to it by comparing the weights with those that a value
was derived from, which is what an evaluation on a CPU does, or by deriving the value in every call.
Sites run on what reaches them in the model; each time is the least of the rounds. Needs timm.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import elsa_core
from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import load_model
from elsa_core.patching import DERIVED

MODELS = (
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "maxvit_tiny_tf_224"),
    *("levit_256", "torchvision:swin_t", "torchvision:swin_v2_t", "torchvision:maxvit_t"),
)


@dataclass(frozen=True)
class Shares:
    """Of one model.

    Attributes:
        model: its name. sites: how many derive something.
        milliseconds: of the forwards of these sites, with nothing to compare or derive.
        compared: the time of comparing as a share of that. derived: that of deriving anew.
    """

    model: str
    sites: int
    milliseconds: float
    compared: float
    derived: float

    def __str__(self) -> str:
        return (
            f"{self.model:32} {self.sites:3} sites {self.milliseconds:8.2f} ms"
            f"  compared {self.compared:6.1%}  derived {self.derived:6.1%}"
        )


@torch.no_grad()
def shares(name: str, *, batch: int = 1, rounds: int = 20) -> Shares:
    """Measure one model with random weights, in float32 on the CPU, with PyTorch's threads now.

    Args:
        name: of a model, as `elsa_core.load` takes it.
        batch: of images.
        rounds: of which the fastest counts.

    Raises:
        ModelError: no site of it derives anything.
    """
    loaded = load_model(name)
    elsa_core.patch(loaded.model)
    calls = _calls(loaded.model, loaded.example_inputs(batch))
    if not calls:
        raise ModelError(f"no site of {name} derives tensors from weights")
    site, compared, anew = 0.0, 0.0, 0.0
    for derivation, run in calls:
        DERIVED.freeze(derivation)
        frozen = _least(run, rounds)
        DERIVED.drop(derivation.site)
        DERIVED.get(derivation)  # kept, to be compared
        compared += _least(lambda each=derivation: DERIVED.get(each), rounds)  # type: ignore[misc]
        anew += _least(lambda each=derivation: each.compute(each.attention), rounds)  # type: ignore[misc]
        site += frozen
        DERIVED.drop(derivation.site)
    return Shares(name, len(calls), 1e3 * site, compared / site, anew / site)


def _calls(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[Any, Callable[[], Any]]]:
    """The derivations of a model's sites, each with the site's call in a forward."""
    found: list[tuple[Any, Callable[[], Any]]] = []

    def note(site: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        derivation = site.elsa_derivation()  # type: ignore[operator]
        if derivation is not None and derivation.keep:
            found.append((derivation, lambda: site(*given, **named)))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "elsa_derivation")
    ]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _least(call: Callable[[], Any], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main(arguments: list[str]) -> int:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.derivations")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(arguments)
    for name in ("batch", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(given, name)}")
    torch.set_num_threads(given.threads)
    try:
        for name in given.models:
            sys.stdout.write(f"{shares(name, batch=given.batch)}\n")
    except ElsaError as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
