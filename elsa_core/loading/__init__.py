"""From a name, a file or a directory to a model, and a patched model to a directory.

The names below are what other packages import; every other name of this package is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elsa_core.base import lazy

if TYPE_CHECKING:
    from elsa_core.loading.architecture import check_sizes, files_of, meta_model, small_model
    from elsa_core.loading.library import UninitialisedParameters
    from elsa_core.loading.loader import Loaded, load, load_model
    from elsa_core.loading.plan import PLAN_NAME, Plan, apply_plan, read_plan
    from elsa_core.loading.preprocessing import assumed_text, of_model, with_given
    from elsa_core.loading.python_models import read_inputs
    from elsa_core.loading.recipe import Given, Preprocess
    from elsa_core.loading.saving import check_target, save, write_model
    from elsa_core.loading.spec import ModelSpec, parse
    from elsa_core.loading.stated import names_of

_HOMES = {
    "architecture": ("check_sizes", "files_of", "meta_model", "small_model"),
    "library": ("UninitialisedParameters",),
    "loader": ("Loaded", "load", "load_model"),
    "plan": ("PLAN_NAME", "Plan", "apply_plan", "read_plan"),
    "preprocessing": ("assumed_text", "of_model", "with_given"),
    "python_models": ("read_inputs",),
    "recipe": ("Given", "Preprocess"),
    "saving": ("check_target", "save", "write_model"),
    "stated": ("names_of",),
    "spec": ("ModelSpec", "parse"),
}

__all__ = [
    "PLAN_NAME",
    "Given",
    "Loaded",
    "ModelSpec",
    "Plan",
    "Preprocess",
    "UninitialisedParameters",
    "apply_plan",
    "assumed_text",
    "check_sizes",
    "check_target",
    "files_of",
    "load",
    "load_model",
    "meta_model",
    "names_of",
    "of_model",
    "parse",
    "read_inputs",
    "read_plan",
    "save",
    "small_model",
    "with_given",
    "write_model",
]


def __getattr__(name: str) -> Any:
    return lazy.attribute(__name__, _HOMES, name)
