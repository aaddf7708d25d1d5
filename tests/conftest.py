"""How tests share a machine: side by side, one thread each, alone where time is measured."""

import fcntl
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import Answer, Elsa

# What this machine lacks, read before any test changes the environment.
LACKING = {name for name in ("g++", "c++", "clang++") if shutil.which(name) is None}
NO_COMPILER = len(LACKING) == 3 and "CXX" not in os.environ

PLAIN = "ELSA_TESTS_PLAIN_FOLDER"  # of all workers, where the name of TMPDIR has a space


def pytest_configure(config: pytest.Config) -> None:
    if " " in tempfile.gettempdir() and PLAIN not in os.environ:
        os.environ[PLAIN] = folder = tempfile.mkdtemp(dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    gc.disable()  # modules and tests stay: looking for garbage is a tenth of collecting them
    # The models here are small: threads that wait for one another cost more than they bring. Tests
    # of several threads ask for them.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup`
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that none is left to one process at the end; last those that run alone,
    which the other process would hold up for as long as its own test takes."""

    def turn(item: pytest.Item) -> int:
        if item.get_closest_marker("alone"):
            return 2
        return 0 if item.get_closest_marker("long") else 1

    items.sort(key=turn)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if NO_COMPILER:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="there is no C++ compiler"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that ends because this machine has no C++ compiler is skipped, and says so."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    lacks = isinstance(error, FileNotFoundError) and error.filename in LACKING
    if report.failed and (lacks or (NO_COMPILER and "no C++ compiler was found" in str(error))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "there is no C++ compiler")
    return report


def hold() -> None:
    """What is alive between two tests is no garbage: a collection in a test need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    hold()
    gc.set_threshold(10_000, 10, 10)  # a compiler makes far more objects than garbage
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """A test marked `alone` waits until no other one runs, and holds up those that would begin."""
    folder = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    side_by_side = hasattr(item.config, "workerinput")  # then each folder is in one of all workers
    alone = item.get_closest_marker("alone") is not None
    with (folder.parent if side_by_side else folder).joinpath("processor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        torch.set_grad_enabled(True)  # a test which leaves it off is at fault, not the next one
        torch.manual_seed(0)  # numbers do not depend on the tests that ran before
        result = yield
        if not torch.is_grad_enabled():
            item.warn(pytest.PytestWarning(f"{item.nodeid} left gradients off"))
        if nextitem is not None and nextitem.path != item.path:
            hold()  # full collections took two seconds each by the end of a run
        return result


@pytest.fixture(scope="session", autouse=True)
def a_common_processor(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is decided by the processor's maker is the same wherever the tests run."""
    from elsa_core.backends import processor

    processor.CPUINFO = tmp_path_factory.mktemp("processor") / "cpuinfo"
    processor.CPUINFO.write_text("vendor_id\t: GenuineIntel\n", encoding="utf-8")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes this processor one of another maker and instruction set; the file that says so."""
    from elsa_core.backends import processor

    def pretend(vendor: str, capability: str) -> Path:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return tmp_path / "cpuinfo"

    return pretend


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder that the first process of a run to ask for it fills; others must not change it."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def find(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / f"once-{name}"
        with shared.joinpath(f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                half = tmp_path_factory.mktemp(name)
                fill(half)
                half.rename(folder)
        return folder

    return find


@pytest.fixture(scope="session")
def inductor_place() -> Callable[[], AbstractContextManager[None]]:
    """A context in which Inductor can compile C++: its commands quote no path, so a temporary
    folder whose name has a space is replaced. Tests skip where there is no compiler."""

    @contextmanager
    def place() -> Iterator[None]:
        if NO_COMPILER:
            pytest.skip("there is no C++ compiler")
        if PLAIN not in os.environ:
            yield
            return
        from torch._inductor import codecache  # its headers lie where tempdir was at import

        folder = os.environ[PLAIN]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codecache, "_HEADER_DIR", f"{folder}/headers", raising=False)
            patch.setattr(codecache, "_HEADER_LOCK_DIR", f"{folder}/locks", raising=False)
            patch.setattr(tempfile, "tempdir", folder)
            patch.setenv("TMPDIR", folder)
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
            yield

    return place


@pytest.fixture
def inductor(inductor_place: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """What tests need in which Inductor compiles C++."""
    with inductor_place():
        yield


@pytest.fixture
def elsa(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Elsa:
    """Run the command in this process; torch and timm are imported once for all tests."""
    from elsa_cli import console
    from elsa_cli.main import run

    monkeypatch.setattr(console, "_BEAT_SECONDS", 3600.0)  # no lines of progress

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(each) for each in arguments])
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def learnt_digits(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """Weights of a ViT of 17 tokens that was trained on four fifths of scikit-learn's digits:
    `vit_tiny_patch16_224` of timm with an `img_size` of 8, `patch_size=2`, `in_chans=1`,
    `num_classes=10`, `embed_dim=64`, `depth=2` and `num_heads=2`. It saw none of every fifth."""

    def train(folder: Path) -> None:
        import torch.nn.functional as F
        from safetensors.torch import save_file
        from sklearn.datasets import load_digits
        from timm.models.vision_transformer import VisionTransformer

        data = load_digits()
        seen = torch.arange(len(data.images)) % 5 != 0
        images = (torch.from_numpy(data.images).float().unsqueeze(1)[seen] / 16.0 - 0.3) / 0.375
        labels = torch.from_numpy(data.target).long()[seen]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = VisionTransformer(
                img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=2,
                num_heads=2,
            )  # fmt: skip
            epochs, size = 18, 50
            steps = epochs * -(-len(images) // size)
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
            for _ in range(epochs):
                for rows in torch.randperm(len(images)).split(size):
                    optimizer.zero_grad()
                    F.cross_entropy(model(images[rows]), labels[rows]).backward()
                    optimizer.step()
                    schedule.step()
        save_file(model.state_dict(), folder / "model.safetensors")

    return once("digits", train) / "model.safetensors"


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a file or directory another user's: in truth as root, else in what `stat` says."""
    foreign: set[int] = set()
    real = {"stat": os.stat, "fstat": os.fstat}

    def look(name: str) -> Callable[..., Any]:
        def told(*arguments: Any, **options: Any) -> Any:
            facts = real[name](*arguments, **options)
            if facts.st_ino not in foreign:
                return facts
            fields = {field: getattr(facts, field) for field in dir(facts) if field[:3] == "st_"}
            return SimpleNamespace(**fields | {"st_uid": 65534})

        return told

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
            return
        foreign.add(path.stat().st_ino)
        for name in real:
            monkeypatch.setattr(os, name, look(name))

    return give
