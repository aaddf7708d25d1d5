"""What the tests of the benchmarks share."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest


@pytest.fixture(scope="session")
def schema() -> jsonschema.Draft202012Validator:
    """The schema of the documents that --json prints."""
    text = resources.files("elsa_cli").joinpath("schemas/result-1.json").read_text("utf-8")
    loaded = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(loaded)
    return jsonschema.Draft202012Validator(loaded)
