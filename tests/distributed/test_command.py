"""`elsa profile --sequence-parallel` under torchrun, and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

import elsa_cli

SCHEMA = Path(elsa_cli.__file__).parent / "schemas" / "result-1.json"
_PROFILE = ["-m", "elsa_cli", "profile"]
_SMALL = ["vit_tiny_patch16_224", "--img", "48", "--sequence-parallel", "--device", "cpu"]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: PLW1510
        [sys.executable, *command], capture_output=True, text=True, timeout=300,
        env=os.environ | variables,
    )  # fmt: skip


def test_two_ranks_print_one_document() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, *_PROFILE, *_SMALL, "--rounds", "3", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    found = document["results"]["scaling"]
    assert found["ranks"] == 2 and found["tokens"] == [5, 5]
    assert found["difference"] < 1e-5
    assert found["speedup"] == pytest.approx(found["seconds_one"] / found["seconds"])
    assert found["efficiency"] == pytest.approx(found["speedup"] / 2)
    # 12 blocks: keys and values of 5 tokens, 192 channels in float32
    assert found["bytes_sent"] == 12 * 2 * 5 * 192 * 4


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        ([], 3, "--sequence-parallel needs ranks: torchrun"),
        (["--train"], 2, "--train is not for --sequence-parallel"),
        (["--batch-size", "1,2"], 2, "--sequence-parallel takes one --batch-size"),
    ],
)
def test_what_it_refuses(flags: list[str], code: int, line: str) -> None:
    done = run(*_PROFILE, *_SMALL, *flags, RANK="", WORLD_SIZE="")
    assert done.returncode == code and line in done.stderr and not done.stdout
