"""The bench of several devices: what the model of cost says, and one run of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from elsa_core.bench import distributed
from elsa_core.bench.distributed import Case, modelled

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def test_the_model_of_long_runs_hides_a_ring() -> None:
    found = modelled(Case((1, 8, 262144, 64), "fp32"), 4, "cuda")
    shard = 2 * 8 * 65536 * 64 * 4
    assert found["ring"]["bytes_sent"] == found["gather"]["bytes_sent"] == 3 * shard
    assert found["heads"]["bytes_sent"] == 2 * shard * 3 // 4
    assert found["ring"]["overlap"] > 0.9 and found["gather"]["overlap"] == pytest.approx(0)
    assert found["heads"]["overlap"] == pytest.approx(0, abs=1e-9)
    assert 0.95 < found["ring"]["efficiency"] < 1
    # 4 x 65536 x 262144 x 8 x 128 multiply-adds at 50e12 a second on one device
    assert found["gather"]["seconds"] == pytest.approx(
        65536 * 262144 * 8 * 128 / 50e12 + 20e-6 + 3 * shard / 200e9
    )


def test_the_model_of_few_heads_and_short_runs() -> None:
    assert "heads" not in modelled(Case((1, 1, 1048576, 64), "fp16"), 2, "cuda")
    short = modelled(Case((1, 8, 1024, 64), "fp16"), 8, "cuda")
    assert all(0 < each["efficiency"] < 0.5 for each in short.values())


def test_two_ranks_measure_beside_the_model() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--quick", "--rounds", "1", "--no-model", "--model", "4,8"]
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, *torchrun, "-m", distributed.__name__, *flags],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forward, backward = json.loads(done.stdout)["attention"]
    assert list(forward["model_of_cost"]) == ["2", "4", "8"] and forward["speedup"] > 0
    assert forward["model_of_cost"]["2"]["gather"]["bytes_sent"] == 129 * 2 * 32 * 4
    assert "model_of_cost" not in backward
