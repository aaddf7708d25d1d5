"""Small files that would fill the machine: exit 4, one line, and little memory, in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from processes import environment
from sampling import some

from .conftest import TINY, Answer, without_beats

# A command that imports torch and timm takes 0.5 to 0.6 GiB; the smallest of these files took 7.8.
MOST = 1.5 * 2**30


# A process counts what the one that started it held, so a small one starts the command.
STARTED = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(child.pid, 0)
open(sys.argv[1], "w").write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def measured(*words: str) -> tuple[Answer, int]:
    """What a command answers, and the most memory in bytes that its process has held."""
    with tempfile.NamedTemporaryFile("r") as most:
        command = [sys.executable, "-c", STARTED, most.name, sys.executable, "-m", "elsa_cli"]
        ended = subprocess.run(
            [*command, *words], capture_output=True, text=True, env=environment(), check=False
        )
        scale = 1 if sys.platform == "darwin" else 1024
        answer = Answer(ended.returncode, ended.stdout, without_beats(ended.stderr))
        return answer, int(Path(most.name).read_text()) * scale


def thin_image(folder: Path) -> list[str]:
    """60 000 pixels, 3.7 thousand million after its shorter side is resized."""
    (folder / "images").mkdir()
    Image.new("L", (1, 60_000)).save(folder / "images" / "thin.png")
    return ["check", *TINY, "--images", "images"]


def deflated(folder: Path) -> list[str]:
    """2 GiB of zeros in 10 MB."""
    torch.save({"w": torch.zeros(1000)}, folder / "plain.pth")
    with (
        zipfile.ZipFile(folder / "plain.pth") as old,
        zipfile.ZipFile(folder / "model.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for member in old.infolist():
            if not member.filename.endswith("data/0"):
                new.writestr(member.filename, old.read(member))
                continue
            with new.open(member.filename, "w", force_zip64=True) as file:
                zeros = bytes(1 << 26)
                for _ in range(32):
                    file.write(zeros)
    return ["inspect", "model.pth"]


def sparse(folder: Path) -> list[str]:
    """4 GiB of holes in a file that takes one block."""
    header = b'{"w":{"dtype":"F32","shape":[1073741824],"data_offsets":[0,4294967296]}}'
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**32)
    return ["inspect", "model.safetensors"]


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="no memory of a child is told")
@pytest.mark.parametrize(
    ("made", "words"),
    some(
        [
            (thin_image, "thin.png"),
            (deflated, "compressed"),
            (sparse, "no known architecture"),
        ]
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_would_fill_the_memory(tmp_path: Path, made: object, words: str) -> None:
    answer, bytes_held = measured(*made(tmp_path))  # type: ignore[operator]
    answer.fails(4, words)
    assert bytes_held < MOST
