"""One computation three times: of the original, patched, and in float64. A model, or a site of it.

A module that is no copy has the original's class while it is judged (`original`), and the patched
one for the length of a patched run. A site is called and hooked at its `entry`: `forward`, or the
method that an adapter names. A block that computes its attention itself (Swin) is judged on that
method alone, since the residual and the MLP around it would hide small errors and a norm before it
would undo the hard cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError, ModelError
from elsa_core.patching import entry, original
from elsa_core.proof.compare import map_floating
from elsa_core.proof.oracle import exactly

# Positional and named arguments of one call.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Run = Callable[[Given], Any]
# Called with (module, args, kwargs, output); what it returns replaces the output, None keeps it.
Hook = Callable[[nn.Module, Any, dict[str, Any], Any], Any]


class PatchedError(Exception):
    """The patched code raised where the original did not."""


@contextmanager
def watched(module: nn.Module, entry: str, hook: Hook) -> Iterator[None]:
    """Call `hook` after every run of the site, for the length of a `with` block."""
    if entry == "forward":
        handle = module.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        return
    before = vars(module).get(entry)

    def run(*args: Any, **kwargs: Any) -> Any:
        inner = getattr(type(module), entry).__get__(module) if before is None else before
        output = inner(*args, **kwargs)
        changed = hook(module, args, kwargs, output)
        return output if changed is None else changed

    # An instance attribute goes before the method of whichever class the module has at the time.
    vars(module)[entry] = run
    try:
        yield
    finally:
        if before is None:
            del vars(module)[entry]
        else:
            vars(module)[entry] = before


@dataclass(frozen=True)
class Fault:
    """A deliberate error: the output of the patched site `path` times 1 + amount."""

    path: str
    amount: float

    @contextmanager
    def on(self, site: nn.Module) -> Iterator[None]:
        def disturb(_module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> Any:
            gain = 1.0 + self.amount
            if isinstance(output, Tensor):
                return output * gain
            return tuple(x * gain if isinstance(x, Tensor) else x for x in output)

        with watched(site, entry(site), disturb):
            yield


@dataclass(frozen=True)
class Sides:
    """The three runs of one computation, `what` (the path of a site, or "the model"). Each takes
    the arguments of a call. `weights` is the module whose parameters original and patched read,
    `oracle` the same in float64; `fault` is entered around a patched run."""

    what: str
    weights: nn.Module
    oracle: nn.Module
    original: Run
    run_patched: Run
    run_exact: Run
    fault: Callable[[], AbstractContextManager[None]] = nullcontext

    def patched(self, given: Given) -> Any:
        """What the patched code makes of the arguments; PatchedError where it raised."""
        with self.fault():
            return finding(lambda: self.run_patched(given))

    def exact(self, given: Given) -> Any:
        """What the original makes of them in float64, its own casts included (`exactly`);
        ModelError where it does not run so."""
        try:
            args, kwargs = map_floating(given, torch.float64)
            return exactly(lambda: self.run_exact((args, kwargs)), self.weights)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.what} does not run in float64, which the oracle needs ({first_line(error)})"
            ) from error


def of_model(
    model: nn.Module, oracle: nn.Module, sites: Mapping[str, nn.Module], fault: Fault | None
) -> Sides:
    """The whole model, which is patched; every run gets tensors of its own to write to."""

    def run_original(given: Given) -> Any:
        with original(model):
            return _run(model, "forward", own(given))

    return Sides(
        "the model", model, oracle, run_original,
        lambda given: _run(model, "forward", own(given)),
        lambda given: _run(oracle, "forward", own(given)),
        lambda: nullcontext() if fault is None else fault.on(sites[fault.path]),
    )  # fmt: skip


def of_site(
    path: str, module: nn.Module, patched_class: type[nn.Module], oracle: nn.Module, entry: str,
    fault: Fault | None,
) -> Sides:  # fmt: skip
    """One site, whose `module` has the original's class now."""

    def run_patched(given: Given) -> Any:
        before = type(module)
        module.__class__ = patched_class
        try:
            return _run(module, entry, given)
        finally:
            module.__class__ = before

    hit = fault is not None and fault.path == path
    return Sides(
        path, module, oracle,
        lambda given: _run(module, entry, given), run_patched,
        lambda given: _run(oracle, entry, given),
        lambda: fault.on(module) if hit and fault is not None else nullcontext(),
    )  # fmt: skip


def finding(run: Callable[[], Any]) -> Any:
    """Runs patched code; what it raises is a finding, except where elsa says what is missing."""
    try:
        return run()
    except (ElsaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PatchedError(
            f"the patched code raises {type(error).__name__}: {first_line(error)}"
        ) from error


def own(given: Given) -> Given:
    """Copies for one run: a model may write to its inputs (`x.sub_(mean)`)."""
    args, kwargs = given
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args), kwargs


def _run(module: nn.Module, entry: str, given: Given) -> Any:
    """Run a module alone, hooks included."""
    args, kwargs = given
    return (module if entry == "forward" else getattr(module, entry))(*args, **kwargs)
