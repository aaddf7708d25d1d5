"""What the tests of the benchmarks share."""

from __future__ import annotations

import jsonschema
import pytest

from elsa_cli.schema import document


@pytest.fixture(scope="session")
def schema() -> jsonschema.Draft202012Validator:
    """The schema of the documents that --json prints."""
    return jsonschema.Draft202012Validator(document())
