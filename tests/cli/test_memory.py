"""A small file that would fill the machine: exit 4, one line, and little memory, in a process."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from processes import environment

from .conftest import Answer, without_beats

# A command that imports torch and timm takes 0.5 to 0.6 GiB; the file took 7.8.
MOST = 1.5 * 2**30


# A process counts what the one that started it held, so a small one starts the command.
STARTED = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
open("most", "w").write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="no memory of a child is told")
def test_a_file_that_would_fill_the_memory() -> None:
    """1.25 GiB of deflated zeros in 6 MB."""
    torch.save({"w": torch.zeros(1000)}, "plain.pth")
    with (
        zipfile.ZipFile("plain.pth") as old,
        zipfile.ZipFile("model.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for member in old.infolist():
            with new.open(member.filename, "w", force_zip64=True) as file:
                file.write(old.read(member))
                for _ in range(20 * member.filename.endswith("data/0")):
                    file.write(bytes(1 << 26))
    command = [sys.executable, "-c", STARTED, sys.executable, "-m", "elsa_cli"]
    ended = subprocess.run(
        [*command, "inspect", "model.pth"], capture_output=True, text=True, env=environment(),
        check=False,
    )  # fmt: skip
    Answer(ended.returncode, ended.stdout, without_beats(ended.stderr)).fails(4, "compressed")
    scale = 1 if sys.platform == "darwin" else 1024
    assert int(Path("most").read_text()) * scale < MOST
