"""`python:PACKAGE.MODULE:FACTORY`: a model that your own code makes, and inputs of its own."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError, ModelError


def build_own(name: str, given: Mapping[str, Any]) -> nn.Module:
    """Import the module of "PACKAGE.MODULE:FACTORY", from the current directory too, and call its
    factory with `given`; what they print goes to stderr. ModelError: no such factory, it raises, or
    gives no `nn.Module`."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ModelError(f"python:{name}: give python:PACKAGE.MODULE:FACTORY")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` has it
    step = f"cannot import {module}:"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                if not hasattr(found, part):
                    raise ModelError(f"python:{name}: {module} has no {attribute}")
                found = getattr(found, part)
            if not callable(found):
                kind = type(found).__name__
                raise ModelError(f"python:{name}: {attribute} is no factory, but a {kind}")
            step = f"{attribute} raised"
            model = found(**given)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"python:{name}: {step} {said}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"python:{name}: {attribute} gives a {type(model).__name__}, no torch.nn.Module"
        )
    return model.eval()


def read_inputs(path: Path, model: nn.Module) -> tuple[Any, ...]:
    """The arguments of a model's `forward` in a file: a tensor, a sequence, or a dict by names; .pt
    (read without running code in it) or .npz (`arr_0`, ... of `numpy.savez(path, first, second)` in
    order). ArgumentError: no such file, another kind, or other names."""
    where = f"inputs (--inputs) {path}"
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                found: Any = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            if all(name.startswith("arr_") for name in found):
                found = tuple(found.values())
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, Tensor):
            return (found,)
        if isinstance(found, tuple | list) and found:
            return tuple(found)
        if not isinstance(found, dict) or not found:
            raise ArgumentError(f"{where}: holds no tensor, sequence or dict")
        bound = inspect.signature(model.forward).bind(**found)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(f"{where}: {first_line(error)}") from error
    last = list(bound.arguments)[-1]
    bound.apply_defaults()
    if bound.kwargs:
        raise ArgumentError(f"{where}: {', '.join(bound.kwargs)} cannot be given by place")
    return bound.args[: list(bound.arguments).index(last) + 1]
