"""Whatever is wrong ends with one line, the right exit code, and nothing left behind."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import signalled, started
from safetensors.torch import save_file

from .conftest import TINY, Elsa


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Files that the test made may be there afterwards, and no others."""
    yield
    names = {path.name for path in tmp_path.rglob("*")}
    assert not [name for name in names if "elsa" in name or "tmp" in name], names


def header(text: str, data: bytes) -> bytes:
    """A safetensors file with this header."""
    return struct.pack("<Q", len(text)) + text.encode() + data


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.safetensors", b"", ("empty",)),
        ("short.safetensors", b"abc", ("short",)),
        ("truncated.safetensors", header(json.dumps({"a": ENTRY}), b"\0" * 8), ()),
        ("notes.txt", b"hello", ("not a model file",)),
        ("junk.pth", b"junk", ()),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "patch"])
def test_a_file_that_is_no_model(
    elsa: Elsa, command: str, name: str, content: bytes, words: tuple[str, ...]
) -> None:
    Path(name).write_bytes(content)
    elsa(command, name).fails(4, name, *words)


def test_a_name_in_a_file_does_not_steer_the_terminal(elsa: Elsa) -> None:
    hostile = "\x1b]0;owned\x07"
    Path("a.safetensors").write_bytes(header(json.dumps({hostile: ENTRY}), b"\0" * 16))
    answer = elsa("inspect", "a.safetensors")
    answer.fails(4, "a.safetensors", "owned")
    assert answer.err.rstrip("\n").isprintable()
    Path("m").mkdir()
    Path("m/config.json").write_text('{"architecture": "test_vit"}')
    model = pytest.importorskip("timm").create_model("test_vit")
    save_file(model.state_dict(), "m/model.safetensors", {"elsa_weights": hostile})
    answer = elsa("inspect", "m")
    assert answer.code == 0 and "saved from \\x1b]0;owned\\x07" in answer.out
    assert "\x1b" not in answer.out


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (("patch", "./folder"), 4, ("folder", "config.json")),
        (("export", *TINY, "--formats", "torchscript", "--zip", "-o", ".."), 2, ("names a file",)),
        (("patch", "./none.safetensors"), 4, ("none.safetensors",)),
        (("inspect", ""), 4, ("empty",)),
        (("patch", *TINY, "--exclude", "*"), 1, ("exclude",)),
        (("patch", *TINY, "--include", "nothing.*"), 1, ("include",)),
        (("patch", "vit_tiny_patch16_224", "--img", "65"), 2, ("65", "16")),
        (("patch", *TINY, "--dtype", "bf16", "--precision", "turbo"), 2, ("turbo", "bfloat16")),
        (("check", *TINY, "--images", "folder"), 4, ("no image",)),
    ],
)
def test_what_does_not_fit_is_named(
    elsa: Elsa, line: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    Path("folder").mkdir()
    elsa(*line).fails(code, *words)


@pytest.mark.parametrize("path", ["~nosuchuser/x", "n" * 300], ids=len)
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("patch", "vit", "-o", "{}"), 2),
        (("patch", "vit", "--plan", "{}"), 2),
        (("check", "vit", "--images", "{}"), 2),
        (("export", "vit", "-o", "{}"), 2),
        (("export", "vit", "--zip", "-o", "{}"), 2),
        (("profile", "vit", "-o", "{}"), 2),
        (("bench", "attention", "-o", "{}"), 2),
        (("bench", "--compare", "{}"), 2),
        (("inspect", "--all", "--state", "{}"), 2),
        (("inspect", "{}"), 4),
        (("patch", "{}"), 4),
        (("profile", "{}"), 4),
        (("verify", "{}"), 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_path_that_cannot_be(elsa: Elsa, line: tuple[str, ...], code: int, path: str) -> None:
    elsa(*(word.format(path) for word in line)).fails(code, path[:100])


RESULTS = {
    "profile": (("profile", *TINY, "--resume", "f.json"), 4),
    "state": (("inspect", "--all", "--state", "f.json"), 4),
    "resume": (("bench", "models", "--resume", "-o", "f.json", "--allow-busy"), 4),
    "compare": (("bench", "--compare", "f.json"), 2),
    "from": (("bench", "--compare", "attention_cpu", "--from", "f.json"), 2),
}
NONE = {
    "digits": '{"command": ' + "9" * 5000 + "}",
    "deep": "[" * 100_000,
    "binary": "\udcff",
    "fifo": "",
    "device": "",
}


@pytest.mark.parametrize("content", NONE)
@pytest.mark.parametrize("line", RESULTS)
def test_a_file_that_holds_no_results(elsa: Elsa, line: str, content: str) -> None:
    """A FIFO was waited for; numbers of thousands of digits were an internal error."""
    words, code = RESULTS[line]
    if content == "fifo":
        os.mkfifo("f.json")
    elif content == "device":
        Path("f.json").symlink_to("/dev/zero")
    else:
        Path("f.json").write_text(NONE[content], errors="surrogateescape")
    elsa(*words).fails(code, "f.json", {"fifo": "a FIFO", "device": "a device"}.get(content, ""))


@pytest.mark.parametrize("command", ["bench attention", "bench models", "profile"])
@pytest.mark.parametrize("results", [None, {}, {"cases": [1]}, {"cases": [{"case": {"name": 1}}]}])
def test_results_that_cannot_be_compared_with(elsa: Elsa, command: str, results: object) -> None:
    """They are refused before anything is measured."""
    document = {"command": command, "environment": {}, "results": results}
    Path("f.json").write_text(json.dumps(document))
    elsa("bench", "--compare", "f.json").fails(4, "f.json", "lacks what `elsa bench` writes")


def test_a_long_number_is_refused_at_once(elsa: Elsa) -> None:
    elsa("inspect", "test_vit", "--mean", "1" * 100_000 + "x").fails(2, "is not a list of numbers")


def test_a_shard_with_a_name_too_long(elsa: Elsa) -> None:
    weights = {"weight_map": {"a": "n" * 300 + ".safetensors"}}
    Path("model.safetensors.index.json").write_text(json.dumps(weights))
    elsa("inspect", "model.safetensors.index.json").fails(4, "no .safetensors file beside")


@pytest.mark.parametrize("command", ["inspect", "patch", "check", "profile"])
def test_an_unknown_model_names_close_ones(elsa: Elsa, command: str) -> None:
    elsa(command, "vit_bas_patch16_224").fails(4, "vit_bas_patch16_224", "vit_base_patch16_224")


def test_a_model_without_attention(elsa: Elsa) -> None:
    elsa("patch", "resnet18").fails(1, "attention")
    answer = elsa("inspect", "resnet18")
    answer.shows("no attention found in resnet18")
    assert answer.out.splitlines()[-1] == "Next: elsa list (models with attention)"
    assert "\n\n\n" not in answer.out


@pytest.mark.parametrize("command", ["patch", "check", "export"])
@pytest.mark.parametrize("given", ["--inputs=f.pt", "--input-size=3x160x160"])
def test_images_beside_other_inputs(elsa: Elsa, command: str, given: str) -> None:
    """They were left out without a word, and the check passed."""
    Path("images").mkdir()
    elsa(command, "test_vit", "--images", "images", given).fails(2, "--images", given[:8])
    # a default, which other inputs replace
    Path("pyproject.toml").write_text('[tool.elsa]\nimages = "images"\n')
    assert "--images" not in elsa(command, "test_vit", "--inputs", "none.pt").err


def test_a_page_of_a_bundle(elsa: Elsa) -> None:
    """None was written, without a word."""
    Path("bundle").mkdir()
    Path("bundle/manifest.json").write_text("{}")
    elsa("inspect", "bundle", "--html", "page.html").fails(2, "--html", "manifest")


@pytest.mark.parametrize("command", ["patch", "check", "profile", "export"])
def test_a_glob_that_matches_no_site(elsa: Elsa, command: str) -> None:
    line = (command, "test_vit", "--exclude", "block.0.*")
    elsa(*line).fails(2, "--exclude", "'block.0.*' matches none", "'blocks.0.attn'")


SIZES = ["0", "-5", "1000000000", "abc", "64x", "0x64", "1e3", "", "32769", "9" * 5000]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[:10])
@pytest.mark.parametrize("flag", ["--img", "--img-size"])
def test_an_image_size_that_is_none(elsa: Elsa, flag: str, size: str) -> None:
    elsa("patch", "vit_tiny_patch16_224", f"{flag}={size}").fails(2, "--img-size")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch-size", "0"), ("--batch-size", "-1"), ("--batch-size", "many"), ("--seed", "-1"),
        ("--dtype", "fp8"), ("--device", "gpu"), ("--device", "cuda:x"), ("--precision", "exact"),
        ("--backend", "cudnn"), ("--nonsense",), ("--seed",), ("--seed", "9" * 5000),
    ],
    ids=lambda words: " ".join(words)[:30],
)  # fmt: skip
def test_a_bad_option(elsa: Elsa, arguments: tuple[str, ...]) -> None:
    elsa("check", *TINY, *arguments).fails(2, arguments[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(elsa: Elsa) -> None:
    for command in ("patch", "profile"):
        elsa(command, *TINY, "--device", "cuda").fails(3, "--device cuda", "--device cpu")
    elsa("profile", *TINY, "--baselines", "compile+graph").fails(3, "needs a CUDA GPU")
    elsa("patch", *TINY, "--backend", "triton").fails(3, "triton")


@pytest.mark.parametrize("command", ["patch", "export"])
def test_a_target_that_cannot_be_written_is_found_before_the_work(elsa: Elsa, command: str) -> None:
    """It took up to minutes: no model is looked up before."""
    Path("file").touch()
    for target in ("/proc/elsa/out", "/dev/null/out", "file/below", "file"):
        answer = elsa(command, "no/such/model", "-o", target, "--force")
        answer.fails(2, target)
    foreign = Path("thesis")
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    arguments = (command, "vit_tiny_patch16_224", "--img", "32", "-o", foreign, "--force")
    elsa(*arguments, "--include", "no.such").fails(2, "is not a directory that elsa wrote")


@pytest.mark.parametrize(
    ("words", "code"),
    [("check", 2), ("inspect no/such/model", 4), ("patch vit_tiny -o /proc/elsa/out", 2),
     ("no-such-command", 2)],
)  # fmt: skip
def test_an_error_is_a_document_too(elsa: Elsa, words: str, code: int) -> None:
    answer = elsa(*words.split(), "--json")
    answer.fails(code)
    found = json.loads(answer.out)
    assert found["schema_version"] == 1 and found["exit_code"] == code
    assert answer.err == f"error: {found['error']}\n"


def test_ctrl_c_in_the_middle_of_writing(tmp_path: Path) -> None:
    """The process is held while the weights are half written, and is interrupted there."""
    program = (
        "import sys, time, pathlib, safetensors.torch as st\n"
        "def slow(tensors, filename, metadata=None):\n"
        "    pathlib.Path(filename).write_bytes(b'half')\n"
        "    pathlib.Path('writing').touch()\n"
        "    time.sleep(60)\n"
        "st.save_file = slow\n"
        f"sys.argv = ['elsa', 'patch', *{TINY!r}, '-o', 'target']\n"
        "from elsa_cli.main import main\n"
        "main()\n"
    )
    ended = signalled(started("-c", program), Path("writing").exists)
    assert ended == (130, "", "interrupted; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["writing"]


def test_ctrl_c_while_checking(tmp_path: Path) -> None:
    child = started("-m", "elsa_cli", "check", *TINY, "-b", "64", "--verbose")
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("preparing inputs"):
            break
    time.sleep(0.3)
    code, out, err = signalled(child, lambda: True)
    assert (code, out) == (130, ""), err
    assert err.splitlines()[-1] == "interrupted; nothing was written"
