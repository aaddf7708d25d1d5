"""`elsa profile --sequence-parallel` gives one document under torchrun, and one line without it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Answer, Elsa
from processes import ports

_MODEL = ["profile", "vit_tiny_patch16_224", "--img", "48"]
_SMALL = [*_MODEL, "--sequence-parallel", "--device", "cpu"]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


def test_two_ranks_print_one_document() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "elsa_cli", *_SMALL, "--rounds", "3", "--json"]
    done = subprocess.run(  # noqa: PLW1510
        command, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Answer(0, done.stdout, "").document()["results"]["scaling"]
    assert found["difference"] < 1e-5 and found["ranks"] == 2
    assert found["speedup"] == pytest.approx(found["seconds_one"] / found["seconds"])
    assert found["efficiency"] == pytest.approx(found["speedup"] / 2)
    # class token and 3 x 3 patches; float32 keys and values of 192 channels in each of 12 blocks
    assert found["method"] == "gather" and found["tokens"] == [5, 5]
    assert found["bytes_sent"] == 12 * 5 * 2 * 192 * 4


_DYING = """
import os, signal
if os.environ.get("RANK") == "1":
    from elsa_core.distributed import groups
    gather, calls = groups.all_gather, []
    def dying(*given):
        calls.append(given)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*given)
    groups.all_gather = dying
"""


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """In the middle of a forward: the other one says so in a line, and as a document."""
    (tmp_path / "sitecustomize.py").write_text(_DYING)
    given = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports(1)[0]), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }  # fmt: skip
    command = [sys.executable, "-m", "elsa_cli", *_SMALL, "--rounds", "3", "--json"]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=200) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [3, -signal.SIGKILL]
    assert json.loads(said[0][0])["exit_code"] == 3 and said[1][0] == ""
    lines = [line for line in said[0][1].splitlines() if "rank 0 of 2 waited in vain" in line]
    assert len(lines) == 1 and "Traceback" not in said[0][1], said[0][1]


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        ([], 3, "--sequence-parallel needs ranks: torchrun"),
        (["--train"], 2, "--train is not for --sequence-parallel"),
        (["--sites"], 2, "--sites is not for --sequence-parallel"),
        (["--batch-size", "1,2"], 2, "--sequence-parallel takes one --batch-size"),
    ],
)
def test_what_it_refuses(
    flags: list[str], code: int, line: str, monkeypatch: pytest.MonkeyPatch, elsa: Elsa
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    answer = elsa(*_SMALL, *flags)
    answer.fails(code, line)
    assert not answer.out


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_says_what_is_wrong_on_all(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, elsa: Elsa
) -> None:
    monkeypatch.setenv("RANK", rank)
    answer = elsa(*_SMALL, "--train")
    assert answer.code == 2 and len(answer.err.splitlines()) == lines
