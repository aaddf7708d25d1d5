"""From a name, a file or a directory to a model, and a patched model to a directory.

The names below are what other packages import; every other name of this package is its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from elsa_core.base import lazy

if TYPE_CHECKING:
    from elsa_core.loading.fit import check_sizes
    from elsa_core.loading.fromfile import files_of
    from elsa_core.loading.library import UninitialisedParameters
    from elsa_core.loading.loader import Loaded, load, load_model
    from elsa_core.loading.plan import PLAN_NAME, Plan, apply_plan, read_plan
    from elsa_core.loading.recipe import Given, Preprocess, assumed_text, with_given
    from elsa_core.loading.recognise import meta_model, small_model
    from elsa_core.loading.saving import check_target, save, write_model
    from elsa_core.loading.spec import ModelSpec, parse
    from elsa_core.loading.stated import names_of, of_model

_HOMES = {
    "fromfile": ("files_of",),
    "fit": ("check_sizes",),
    "library": ("UninitialisedParameters",),
    "loader": ("Loaded", "load", "load_model"),
    "plan": ("PLAN_NAME", "Plan", "apply_plan", "read_plan"),
    "recipe": ("Given", "Preprocess", "assumed_text", "with_given"),
    "recognise": ("meta_model", "small_model"),
    "saving": ("check_target", "save", "write_model"),
    "stated": ("names_of", "of_model"),
    "spec": ("ModelSpec", "parse"),
}

__all__ = [
    "PLAN_NAME", "Given", "Loaded", "ModelSpec", "Plan", "Preprocess", "UninitialisedParameters",
    "apply_plan", "assumed_text", "check_sizes", "check_target", "files_of", "load", "load_model",
    "meta_model", "names_of", "of_model", "parse", "read_plan", "save", "small_model", "with_given",
    "write_model",
]  # fmt: skip

__getattr__ = partial(lazy.attribute, __name__, _HOMES)
