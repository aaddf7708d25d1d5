"""Measuring tests run on one thread: they test what is kept, not speed, and others may be busy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

import jsonschema
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def schema() -> jsonschema.Draft202012Validator:
    """The schema of the documents that --json prints."""
    text = resources.files("elsa_cli").joinpath("schemas/result-1.json").read_text("utf-8")
    loaded = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(loaded)
    return jsonschema.Draft202012Validator(loaded)
