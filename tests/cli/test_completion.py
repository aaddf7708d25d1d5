"""Completion: the scripts are valid, and names come without an import of timm."""

import shutil
import subprocess
import time

import pytest
from click.shell_completion import BashComplete
from processes import environment, python

from elsa_cli.main import cli

from .conftest import Elsa


def complete(words: str) -> list[str]:
    """What bash would be offered for the last of `words`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMP_WORDS", words)
        patched.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        shell = BashComplete(cli, {}, "elsa", "_ELSA_COMPLETE")
        return [item.value for item in shell.get_completions(*shell.get_completion_args())]


def test_the_output_options_of_the_script(elsa: Elsa) -> None:
    script = elsa("completion", "bash").shows("COMP_WORDBREAKS")  # colons stay in one word
    assert elsa("completion", "bash", "-q").out == script
    results = elsa("completion", "bash", "--json").document()["results"]
    assert results["shell"] == "bash" and results["script"].rstrip() == script.rstrip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("elsa pa", "patch"),
        ("elsa patch vit_base_patch16_2", "vit_base_patch16_224"),
        ("elsa patch vit_base_patch16_224.aug", "vit_base_patch16_224.augreg_in21k"),
        ("elsa patch open_cl", "open_clip:"),
        ("elsa patch open_clip:ViT-B", "open_clip:ViT-B-32"),
        ("elsa patch torchvision:vit_b", "torchvision:vit_b_16"),
        ("elsa patch timm:eva02_ti", "timm:eva02_tiny_patch14_224"),
        ("elsa patch x --dev", "--device"),
        ("elsa patch x --dtype b", "bf16"),
        ("elsa patch x --arch deit3_s", "deit3_small_patch16_224"),
        ("elsa completion z", "zsh"),
        ("elsa help pr", "profile"),
        ("elsa export x --formats torchscript,o", "torchscript,onnx"),
        ("elsa export x --gpu-archs sm_80,sm_10", "sm_80,sm_100"),
        ("elsa build --cuda --arch sm_8", "sm_86"),
        ("elsa profile x --dtype fp32,b", "fp32,bf16"),
        ("elsa profile x --baselines eager,com", "eager,compile"),
        ("elsa profile x --precision i", "ieee"),
        ("elsa patch x --device cu", "cuda"),
    ],
)
def test_offers(words: str, expected: str) -> None:
    if expected.startswith("torchvision"):
        pytest.importorskip("torchvision")
    assert expected in complete(words)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("elsa profile x --dtype fp32,", ["fp32,fp16", "fp32,bf16"]),
        ("elsa profile x --precision strict,ieee,", ["strict,ieee,turbo", "strict,ieee,lean"]),
        ("elsa profile x --baselines eager,co", ["eager,control", "eager,compile",
                                                 "eager,compile+graph"]),
        ("elsa export x --formats onnx,", ["onnx,torchscript", "onnx,pt2"]),
        ("elsa patch ./mod", ["./mod"]),
    ],
)  # fmt: skip
def test_offers_what_fits_and_is_not_there_yet(words: str, offered: list[str]) -> None:
    assert complete(words) == offered


@pytest.mark.alone
def test_is_fast_enough_for_a_key_press() -> None:
    words = {"COMP_WORDS": "elsa patch vit_tiny", "COMP_CWORD": "2"}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("-m", "elsa_cli", env=environment(_ELSA_COMPLETE="bash_complete", **words))
        times.append(time.perf_counter() - start)
        assert "plain,vit_tiny_patch16_224" in done.stdout.splitlines() and done.stderr == ""
    assert min(times) < 0.6, times


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid(elsa: Elsa, shell: str) -> None:
    answer = elsa("completion", shell)
    answer.shows("_ELSA_COMPLETE")
    if shutil.which(shell):
        check = [shell, "--no-execute"] if shell == "fish" else [shell, "-n"]
        done = subprocess.run(
            check, input=answer.out, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_of_the_user(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert elsa("completion").out == elsa("completion", "zsh").out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    elsa("completion").fails(2, "bash, zsh, fish", "tcsh")
    elsa("completion", "tcsh").fails(2, "tcsh")
