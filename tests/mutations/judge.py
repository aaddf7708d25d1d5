"""Judging one mutant: a copy of the tree, a process that is forked with the imports done, pytest.

The copy alone is changed. A process that hangs or grows is ended with all that it started.
"""

import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .source import Mutant
from .suites import suite_of

LIMIT_BYTES = 16 << 30
# Of the processor's time, which another program beside does not lengthen; the longest suite takes a
# third of it.
LIMIT_SECONDS = 150
HANGS_SECONDS = 1200.0
ROOT = Path(__file__).parents[2]
_PYTEST = ("-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        word: "killed" (a test failed, the process died or hung), "survived", "same code" (the
            compiler writes the same library) or "invalid" (it does not compile).
        by: the test that failed, or how the process ended.
        seconds: what that took.
    """

    word: str
    by: str
    seconds: float


@dataclass
class Judge:
    """Two copies of the tree, one to change, and what is known of the one without a change.

    Attributes:
        folder: an empty one, for the copies and what is compiled.
        sets: the instruction sets of this machine, the best first.
        libraries: digests, by library and instruction set.
        passing: tests that pass without a change.
    """

    folder: Path
    sets: list[str] = field(default_factory=list)
    libraries: dict[tuple[str, str], str] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        _import_ahead()
        for copy in (self.changed, self.plain):
            for name in tracked():
                if (ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, copy / name)
        (self.folder / "objects").mkdir()

    @property
    def changed(self) -> Path:
        """The copy whose files are changed, one at a time."""
        return self.folder / "changed"

    @property
    def plain(self) -> Path:
        """The copy that stays as it is."""
        return self.folder / "plain"

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests of the mutant's file on it.

        Raises:
            RuntimeError: the test that fails does so without the mutant as well.
        """
        suite = suite_of(mutant.file)
        assert suite is not None
        start = time.monotonic()
        word, by, isa = "same code", "", ""
        native = suite.language == "c++"
        for isa in self._instruction_sets() if native else ("",):
            if native:
                self._plain_library(mutant.file, isa)
            with self._applied(mutant):
                word, by = self._run(suite.tests, mutant.file if native else "", isa)
            if word != "same code":
                break
        if word == "killed" and "::" in by and by not in self.passing:
            without = self._run((by,), mutant.file if native else "", isa, changed=False)
            if without[0] not in ("survived", "same code"):
                raise RuntimeError(f"fails without a mutant: {by}: {without}")
            self.passing.add(by)
        return Verdict(word, by, round(time.monotonic() - start, 1))

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self.changed / mutant.file
        text = path.read_text()
        path.write_text(mutant.applied(text))
        try:
            yield
        finally:
            path.write_text(text)
            shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def _instruction_sets(self) -> list[str]:
        if not self.sets:
            facts = self._apart(_facts)
            if "best" not in facts:
                raise RuntimeError(f"the library cannot be built: {facts}")
            names = facts["names"]
            self.sets = names[names.index(facts["best"]) :: -1]
        return self.sets

    def _plain_library(self, file: str, isa: str) -> str:
        """The digest of the library that the sources give without a change."""
        key = (_library(file), isa)
        if key not in self.libraries:
            self.libraries[key] = self._apart(_digest, _library(file), isa=isa)["digest"]
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        return self.libraries[key]

    def _run(
        self, tests: tuple[str, ...], file: str, isa: str, *, changed: bool = True
    ) -> tuple[str, str]:
        """The verdict's word and reason; `file` is the changed one, where it is compiled."""
        library = _library(file) if file else ""
        plain = self._plain_library(file, isa) if file and changed else ""
        other = isa if self.sets and isa != self.sets[0] else ""
        answer = self._apart(_tests, tests, library, plain, other, isa=isa, file=file)
        return answer["word"], answer["by"]

    def _apart(
        self, function: Callable[..., dict[str, Any]], *given: Any, isa: str = "", file: str = ""
    ) -> dict[str, Any]:
        """Call a function in a forked process of its own, with the changed copy as the tree."""
        answer, log = self.folder / "answer.json", self.folder / "log"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._in_child(function, given, self._variables(isa, file), answer, log)
        try:
            code = _wait(child, HANGS_SECONDS)
        finally:
            _end(child)
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        how = "no answer in time" if code is None else f"the process ended with {code}"
        return {"word": "killed", "by": how}

    def _in_child(
        self, function: Callable[..., dict[str, Any]], given: tuple[Any, ...],
        variables: dict[str, str], answer: Path, log: Path,
    ) -> None:  # fmt: skip
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            used = int(sum(os.times()[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT_SECONDS, used + LIMIT_SECONDS))
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(variables)
            os.chdir(self.changed)
            places = {str(ROOT), ""}
            sys.path[:] = [str(self.changed), *(p for p in sys.path if p not in places)]
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            said = json.dumps(function(*given))
            answer.with_suffix(".part").write_text(said)
            answer.with_suffix(".part").replace(answer)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)

    def _variables(self, isa: str, file: str) -> dict[str, str]:
        script = Path(__file__).with_name("compile.py")
        compiler = shlex.join([sys.executable, "-I", "-S", str(script)])
        return {
            "PYTHONPATH": str(self.changed), "CXX": compiler, "ELSA_SET": isa or "avx512",
            "ELSA_CACHE_DIR": str(self.folder / ("cache" if isa else "usual")),
            "ELSA_MUTANT": str(self.changed), "ELSA_PLAIN": str(self.plain),
            "ELSA_CHANGED": file or "nothing.cpp",
            "ELSA_OBJECTS": str(self.folder / "objects"), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip


def tracked() -> list[str]:
    """The files of the tree, those that git does not know yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(done.stdout.splitlines())


def _library(file: str) -> str:
    return "ort_library" if file.startswith("csrc/onnxruntime/") else "native"


def _import_ahead() -> None:
    """What takes seconds and holds nothing of the tree: each forked process has it."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import timm  # noqa: F401
    import torchvision  # noqa: F401


def _wait(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def _end(child: int) -> None:
    """End a process, what it started, and its entry in the table of processes."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # it was waited for
        os.waitpid(child, 0)


# What runs in the forked process: the tree's packages are imported there, from the changed copy.


def _build(library: str) -> Path:
    if library == "ort_library":
        from elsa_core.exporting import ort_library

        return ort_library.build()
    from elsa_core.backends import native

    return native.build()


def _facts() -> dict[str, Any]:
    from elsa_core.backends import compiler, native

    return {"names": [name.lower() for name in compiler.kernels()], "best": native.isa()}


def _digest(library: str) -> dict[str, Any]:
    return {"digest": hashlib.sha256(_build(library).read_bytes()).hexdigest()}


def _tests(tests: tuple[str, ...], library: str, plain: str, isa: str) -> dict[str, Any]:
    """Run pytest; `isa` names kernels that are not this machine's best."""
    import pytest

    from elsa_core.errors import UnavailableError

    if library:
        try:
            digest = _digest(library)["digest"]
        except UnavailableError as error:
            names = re.sub(r"(/[\w.+-]+)+/", "", str(error))  # paths are of this machine
            return {"word": "invalid", "by": names[-200:]}
        if digest == plain:
            return {"word": "same code", "by": ""}
        if isa:
            os.environ["ELSA_CPU_ISA"] = isa
    first: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                first.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                first.append(report.nodeid)

    if any(test.startswith(("tests/backends/", "tests/conformance/")) for test in tests):
        os.environ["WHOLE_MATRICES"] = "1"  # all cases that a suite names
    code = pytest.main([*_PYTEST, *tests], plugins=[Watch()])
    import elsa_core

    if not Path(elsa_core.__file__ or "").is_relative_to(Path.cwd()):
        raise RuntimeError(f"the tests read {elsa_core.__file__}")
    if code == 0:
        return {"word": "survived", "by": ""}
    return {"word": "killed", "by": first[0] if first else f"pytest ended with {int(code)}"}
