"""Models with their published weights, converted and resized by the library that published them."""

from __future__ import annotations

from torch import nn

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.loading import libraries
from elsa_core.loading.building import BUILD_ERRORS
from elsa_core.loading.recipe import Recipe


def build_published(recipe: Recipe) -> tuple[nn.Module, str]:
    """Build the model with its published weights, and name them.

    Raises:
        ModelError: no weights are published for the name, or they do not fit it.
        UnavailableError: they are not in the cache and the network cannot be reached.
    """
    published = libraries.of(recipe.library).published
    if published is None:
        raise ModelError(f"{recipe.library} publishes no weights: leave out --pretrained")
    try:
        with quiet():
            model, origin = published(recipe)
    except ElsaError:
        raise
    except OSError as error:
        raise UnavailableError(
            f"the weights of {recipe.name} cannot be fetched: {first_line(error)};"
            " leave out --pretrained for random weights"
        ) from error
    except BUILD_ERRORS as error:
        raise ModelError(
            f"the published weights of {recipe.name} do not load: {first_line(error)}"
        ) from error
    return model.eval(), f"pretrained ({origin})"
