"""Whose bundle it is: signatures, the question before its library runs, and what is only read."""

import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from command import Elsa
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from processes import alive, environment, gone, seen_from_proc, signalled, started
from sampling import some
from test_hostile import rewrite

from elsa_core.base import files
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.exporting import archive, signature
from elsa_core.exporting.bundle import _staged, check_output, export
from elsa_core.exporting.manifest import files_in, hashed
from elsa_core.exporting.verify import verify
from elsa_core.loading.loader import Loaded
from elsa_core.proof import CheckReport

PEM = serialization.Encoding.PEM
SSH = serialization.Encoding.OpenSSH


@pytest.fixture
def elsewhere(copy: Path) -> Path:
    """A bundle of which nothing can run here: its libraries are for another machine."""
    rewrite(copy, lambda m: [x.update(platform="linux-riscv64") for x in m["libraries"].values()])
    return copy


def keys(folder: Path, ssh: bool = False) -> tuple[Path, Path]:
    """A new key: the files of its private and its public half."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key", folder / "key.pub"
    form, public_form = serialization.PrivateFormat, serialization.PublicFormat
    own, others = (form.PKCS8, public_form.SubjectPublicKeyInfo)
    if ssh:
        own, others = (form.OpenSSH, public_form.OpenSSH)
    private.write_bytes(key.private_bytes(PEM, own, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(SSH if ssh else PEM, others))
    return private, public


def sign(bundle: Path, private: Path) -> None:
    key = signature.read_key(private, "private")
    signed = key.sign((bundle / "manifest.json").read_bytes())
    (bundle / "manifest.sig").write_bytes(signed)


def test_nothing_runs_without_trust(
    elsewhere: Path, elsa: Elsa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which is no setting."""
    monkeypatch.setenv("ELSA_TRUST", "1")
    (tmp_path / "elsa.toml").write_text("trust = true\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = elsa("verify", elsewhere)
    warning, line = err.splitlines()
    assert code == 2
    assert "'trust' is ignored" in warning and "needs --trust or a signature" in line
    code, _, err = elsa("verify", elsewhere, "--trust")
    assert code == 0 and "about to run the library of" in err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2)])
def test_a_terminal_is_asked(elsewhere: Path, answer: str, code: int) -> None:
    """A process of its own with a terminal."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "elsa_cli", "verify", str(elsewhere)],
        stdin=follower, stderr=follower, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(leader, 4096)
    os.write(leader, answer.encode() + b"\n")
    out, _ = child.communicate(timeout=60)
    os.close(leader)
    assert child.returncode == code
    assert b"which can do anything that you can" in shown
    assert ("files match" in out) is (code == 0)


SLOW = """
import os, pathlib, subprocess, time
subprocess.Popen(["sleep", {word!r}])
pathlib.Path({begun!r}).touch()
time.sleep(600)
"""


@seen_from_proc
@pytest.mark.parametrize("number", some((signal.SIGTERM, signal.SIGHUP)))
def test_a_signal_ends_what_a_verification_has_started(
    copy: Path, tmp_path: Path, number: int
) -> None:
    """The processes that run artefacts, what those have started, and their folders."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("is ignored here, as `nohup` has it")
    scratch, slow, word = tmp_path / "scratch", tmp_path / "slow", f"98763.{os.getpid()}"
    scratch.mkdir()
    slow.mkdir()
    begun = slow / "begun"
    (slow / "onnxruntime.py").write_text(SLOW.format(word=word, begun=str(begun)))
    places = [str(slow), str(Path(files.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = environment(PYTHONPATH=os.pathsep.join(filter(None, places)), TMPDIR=str(scratch))
    child = started("-m", "elsa_cli", "verify", copy, "--trust", env=env)
    code, out, err = signalled(child, lambda: begun.exists() and alive(word), number)
    assert (code, out) == (128 + number, "") and "Traceback" not in err
    assert gone(word) and list(scratch.iterdir()) == []


def test_what_runs_is_what_was_compared(copy: Path) -> None:
    """Whoever may write to the bundle exchanged its files after they had been compared."""
    rewrite(copy, lambda m: m.update(artefacts={"onnx": m["artefacts"]["onnx"]}))

    def exchange(signed: bool) -> None:
        for each in files_in(copy):
            each.unlink()
            each.write_bytes(b"other code")

    report = verify(copy, before_run=exchange)
    assert report.failures == () and [each.status for each in report.artefacts] == ["ok"]


@pytest.mark.parametrize("ssh", [False, True], ids=["pem", "openssh"])
def test_a_signature_stands_for_trust(
    elsewhere: Path, tmp_path: Path, ssh: bool, elsa: Elsa
) -> None:
    private, public = keys(tmp_path, ssh)
    sign(elsewhere, private)
    zipped = tmp_path / "vit.zip"
    archive.write_zip(elsewhere, zipped)
    for path in (elsewhere, zipped):
        elsa("verify", path, "--key", public).shows("files and the signature match")
    assert elsa("verify", elsewhere).code == 2


def test_a_signature_that_does_not_match(copy: Path, tmp_path: Path, elsa: Elsa) -> None:
    private, public = keys(tmp_path)
    sign(copy, private)
    (tmp_path / "second").mkdir()
    _, other = keys(tmp_path / "second")
    manifest, signed = ((copy / f"manifest.{each}").read_bytes() for each in ("json", "sig"))
    for file, content, key, words, code in (
        ("manifest.json", manifest + b" ", public, "does not match the key", 1),
        ("manifest.sig", signed[::-1], public, "does not match the key", 1),
        ("manifest.sig", signed, other, "does not match the key", 1),
        ("manifest.sig", None, public, "it is not signed", 1),
        ("manifest.sig", bytes(100), public, "larger than 64 bytes", 4),
        ("load.py", b"print('mine')", public, "load.py has", 1),
    ):
        (copy / "manifest.json").write_bytes(manifest)
        (copy / "manifest.sig").write_bytes(signed)
        (copy / file).unlink()
        if content is not None:
            (copy / file).write_bytes(content)
        for trust in ((), ("--trust",)):
            said = elsa("verify", copy, "--key", key, *trust)._replace(out="")  # a table
            said.fails(code, words)


def test_openssl_agrees(copy: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    private, public = keys(tmp_path)
    sign(copy, private)
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin", "-in",
               "manifest.json", "-sigfile", "manifest.sig"]  # fmt: skip
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert "Success" in done.stdout, done


def test_export_signs(vit: Loaded, report: CheckReport, tmp_path: Path, elsa: Elsa) -> None:
    private, public = keys(tmp_path)
    out = tmp_path / "out"
    export(
        vit.model, out, formats=("torchscript",), loaded=vit, check=report, batches=(1,),
        key=signature.read_key(private, "private"),
    )  # fmt: skip
    assert verify(out, run=False, key=signature.read_key(public, "public")).signed
    elsa("export", "test_vit", "-o", tmp_path / "other", "--sign", public).fails(2)
    assert not (tmp_path / "other").exists()


def test_keys_that_are_none(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    other, locked, junk, fifo = (tmp_path / name for name in ("other", "locked", "junk", "fifo"))
    for path, key, closed in (
        (other, ec.generate_private_key(ec.SECP256R1()), serialization.NoEncryption()),
        (locked, Ed25519PrivateKey.generate(), serialization.BestAvailableEncryption(b"x")),
    ):
        path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, closed))
    junk.write_bytes(b"\xff" * 100)
    os.mkfifo(fifo)
    for path in (other, locked, junk, public, tmp_path / "none", tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(ArgumentError, match=r"\(--sign\)"):
            signature.read_key(path, "private")
    for path in (other, junk, private, tmp_path / "none", tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(ArgumentError, match=r"\(--key\)"):
            signature.read_key(path, "public")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_another_method_is_not_read(tmp_path: Path, method: int) -> None:
    """A bzip2 member of 4.6 kB took 12.9 GB: its reader hands out whole blocks of any size."""
    path = tmp_path / "bomb.zip"
    for name in ("manifest.json", "model.ts"):
        with zipfile.ZipFile(path, "w") as file:
            if name != "manifest.json":
                file.writestr("manifest.json", "{}")
            file.writestr(name, bytes(1 << 24), method)
        with pytest.raises(ModelError, match="neither stored nor deflated"):
            verify(path, run=False)


def test_reading_is_bounded(copy: Path) -> None:
    """A sparse file of 64 TB under a small name of the manifest, and a manifest of 1 TB."""
    with (copy / "load.py").open("r+b") as file:
        file.truncate(1 << 40)
    report = verify(copy, run=False)
    assert report.failures[0].startswith("load.py has more than")
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="larger than"):
        verify(copy, run=False)


def test_verify_files_only_needs_little_memory(copy: Path, tmp_path: Path) -> None:
    """Of a zip whose members are 64 MB of zeros each: the reading process stays small."""
    path = tmp_path / "large.zip"
    archive.write_zip(copy, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("more.bin", bytes(64 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert verify(path, run=False).failures == ("more.bin is not in the manifest",)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


def test_what_never_ends_is_refused_at_once(copy: Path) -> None:
    """And a link in the place of a file that was looked at: judged is what was opened."""
    path = copy / "load.py"
    target = path.rename(copy.parent / "load.py")
    for make in (
        lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(target),
    ):  # fmt: skip
        make()
        with pytest.raises(ModelError, match="is a link or a device"):
            verify(copy, run=False)
        with pytest.raises(ModelError, match=r"load\.py"):
            hashed(path)
        path.unlink()


def test_folders_in_folders(copy: Path) -> None:
    """1 100 of them were a RecursionError."""
    here = copy
    for _ in range(40):
        here = here / "d"
        here.mkdir()
    with pytest.raises(ModelError, match="nested folders"):
        verify(copy, run=False)


def test_a_zip_onto_a_directory_is_refused_before_the_work(copy: Path, elsa: Elsa) -> None:
    """With --force it ended in an error after minutes."""
    target = copy.rename(copy.with_suffix(".zip"))
    line = ["export", "no-such-model", "--zip", "-o", str(target)]
    for force in ((), ("--force",)):
        elsa(*line, *force).fails(2, "is a directory; with --zip, -o names a file")
    with pytest.raises(ArgumentError, match="is a directory"):
        check_output(target, target, zip=True, force=True)


def test_a_name_that_is_no_text(tmp_path: Path, elsa: Elsa) -> None:
    """Such a directory was written, and could not be loaded again."""
    for command in ("patch", "export"):
        elsa(command, "test_vit", "-o", tmp_path / "a\udcff").fails(2, "is no UTF-8 text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_a_target_is_never_missing_while_it_is_replaced(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "a").touch()
    if not files._exchanged(first, second):
        pytest.skip("this file system exchanges no names")
    assert [path.name for path in second.iterdir()] == ["a"]
    ended, missing = threading.Event(), 0

    def watch() -> None:
        nonlocal missing
        while not ended.is_set():
            missing += not second.exists()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(50):
        with files.staged(second) as staging:
            (staging / f"b{i}").touch()
    ended.set()
    watcher.join()
    assert missing == 0 and [path.name for path in second.iterdir()] == ["b49"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_zip_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the files that it was packed from were: a crash could leave an empty bundle."""
    target, flushed, flush = tmp_path / "bundle.zip", set[int](), os.fsync

    def noted(descriptor: int) -> None:
        assert not target.exists()
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with _staged(target, True) as staging:
        (staging / "README.md").write_text("a bundle")
    assert target.stat().st_ino in flushed
