"""The CUDA library on a real GPU gives Triton's bits in less of the host's time."""

import csv
import subprocess
from pathlib import Path

import pytest
from processes import environment, python

from benchmarks import host

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


def run(*command: str, asked: bool = True) -> subprocess.CompletedProcess[str]:
    env = environment(ELSA_CUDA_LIBRARY="1" if asked else "0")
    return python(*command, env=env, timeout=1800)


def test_equal_to_triton() -> None:
    """`cuda_gpu.py`: operators bit by bit, streams, graphs, threads, devices, memory, models."""
    done = run("-m", "pytest", "-n", "0", str(HERE / "cuda_gpu.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.alone
def test_host_time() -> None:
    """A warm call takes the host at most its bar (`host.BARS`) of the peer's time; without the
    library, what `python -m benchmarks.host` measures is printed alone."""
    slow = []
    for asked in (False, True):
        done = run("-m", "benchmarks.host", "--rounds", "10", asked=asked)
        assert done.returncode == 0, done.stderr
        rows = [row for row in csv.DictReader(done.stdout.splitlines()) if row["ratio"]]
        assert {row["case"].partition("-")[0] for row in rows} == set(host.BARS)
        for row in rows:
            print(f"library {'on' if asked else 'off'}: {row}")
            if asked and float(row["ratio"]) < float(row["bar"]):
                slow.append(row)
    assert not slow
