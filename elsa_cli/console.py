"""What a command says and where: the result on stdout, everything else on stderr.

Nothing here imports Rich until something is drawn.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import logging
import math
import os
import shlex
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from elsa_cli import signals
from elsa_cli.errors import INTERRUPTED, PlaceError, cut, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
Update = Callable[..., None]  # (text, steps done, steps in all), the numbers where they are known

# For terminals and files whose encoding lacks a character that elsa's own texts use.
_ASCII = {"·": "-", "→": "->", "…": "...", "✓": "ok", "✗": "no", "≤": "<=", "—": "-"}

# A file or a pipe has no width: numbers stay on one line there, and prose is folded all the same.
PIPE_WIDTH = 200
# What is left of a column that is folded.
FOLDED_WIDTH = 8
# Between two lines of progress where stderr is a file or a pipe.
_BEAT_SECONDS = 10.0

# Keeps a mark and what follows on one line; no white space to Rich, which breaks at all others.
_GLUE = "\u2800"


def version() -> str:
    """The text of `elsa_core/base/version.py`, read without importing elsa_core."""
    package = importlib.util.find_spec("elsa_core")
    folders = package.submodule_search_locations if package else None
    if not folders:
        return "unknown"
    return Path(folders[0], "base/version.py").read_text(encoding="utf-8").split('"')[-2]


def jsonable(value: Any) -> Any:
    """`value` as plain JSON data: paths and other objects as text, non-finite floats as null,
    because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    return str(value)


class _Closed(io.StringIO):
    """A stdout that is closed."""

    def write(self, text: str) -> int:
        if text:  # Rich ends a capture by writing nothing
            raise OSError(errno.EBADF, "stdout is closed")
        return 0


class Session:
    """One run of the command: its output flags, its consoles, and what it has written so far."""

    def __init__(self) -> None:
        self.debug = self.json = self.quiet = self.verbose = self._documented = False
        self.arguments: list[str] = []
        self.written: list[Path] = []
        self.warned: list[str] = []
        # Python has None for a stream that the caller closed.
        self._stdout: TextIO = sys.stdout or _Closed()
        self._stderr: TextIO = sys.stderr or io.StringIO()
        self._interactive = self._stderr.isatty() and os.environ.get("TERM") != "dumb"
        for stream in (self._stdout, self._stderr):
            # A path that the encoding cannot show must not end the command.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    # The result, on stdout

    def document(
        self, command: str, results: Any, environment: dict[str, Any] | None = None, **failure: Any
    ) -> None:
        """Print the one JSON document of `command`; only with --json. `environment`: what the
        results depend on, if it is more than what every command knows. `failure`: what there is in
        their place where the command failed before."""
        if not self.json or self._documented:
            return
        content = failure
        if not failure:
            from elsa_cli.probes import environment as known

            place = known() if environment is None else environment
            content = {"command": command, "environment": place, "results": results}
        self._documented = True
        document = {"schema_version": SCHEMA_VERSION, "elsa_version": version(), **content}
        self._write(json.dumps(jsonable(document), indent=2, allow_nan=False) + "\n")

    def keep(self, document: dict[str, Any], path: Path | None) -> None:
        """Write a document of results into the file that --output names, where it names one."""
        from elsa_core.measuring import documents

        if path is not None:
            self.written.append(documents.write(document, path))

    def text(self, text: str) -> None:
        """Print a text as it is; nothing with --json."""
        if not self.json:
            self._write(text.rstrip("\n") + "\n")

    def line(self, text: str = "", style: str = "", *, even_quiet: bool = False) -> None:
        """Print one line of the human result (nothing with --json; with --quiet only verdicts)."""
        if self.json or (self.quiet and not even_quiet):
            return
        from rich.text import Text

        with self._drawing() as console:
            # A file or a pipe gets the line whole, so that it can be searched.
            console.print(Text(self.fit(text), style=style), soft_wrap=not console.is_terminal)

    def verdict(self, text: str, *, good: bool = True) -> None:
        self.line(text, "bold" if good else "bold red", even_quiet=True)

    def again(
        self, command: str, *added: str, without: Sequence[str] = (), valued: Sequence[str] = ()
    ) -> str:
        """A next step: this command line as `command`, with words added and flags left out, those
        that are `valued` with their values."""
        attached = tuple(f"{flag}=" if flag.startswith("--") else flag for flag in valued)
        words = [
            word
            for last, word in pairwise(self.arguments)
            if word not in (*without, *valued)
            and last not in valued
            and not word.startswith(attached)
        ]
        more = (word for word in added if word not in words or not word.startswith("-"))
        return shlex.join(["elsa", command, *words, *more])

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: int | None = None
    ) -> None:
        """Print a table. A column whose title starts with ">" is aligned to the right.

        Where the terminal is too narrow, column number `wrap` is folded, then columns whose titles
        start with "~" are left out, the last first, and then other texts are folded, the first
        column, which holds paths and names, last. Without `wrap` none is. Numbers never are: lines
        may be longer than the terminal is wide.
        """
        if self.json or self.quiet or not rows:
            return
        from rich import box
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        shown, folded = list(range(len(columns))), set[int]()
        titles = [self.fit(title.removeprefix("~").lstrip(">")) for title in columns]
        cells = [[self.fit(text) for text in row] for row in rows]
        widest = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]

        def width() -> int:
            """The least, with two blanks between columns."""
            least = [max(FOLDED_WIDTH, cell_len(title)) for title in titles]
            kept = (min(widest[i], least[i]) if i in folded else widest[i] for i in shown)
            return sum(kept) + 2 * (len(shown) - 1)

        with self._drawing() as console:
            if wrap is not None and width() > console.width:
                folded.add(wrap)
            for index in reversed(range(len(columns))):
                if columns[index].startswith("~") and width() > console.width:
                    shown.remove(index)
            texts = [index for index in shown if ">" not in columns[index][:2]]
            for index in (*texts[1:], *texts[:1]) if wrap is not None else ():
                if width() > console.width:
                    folded.add(index)
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
                          header_style="bold", show_edge=False)  # fmt: skip
            for index in shown:
                table.add_column(
                    titles[index], overflow="fold", no_wrap=index not in folded,
                    justify="right" if ">" in columns[index][:2] else "left",
                )  # fmt: skip
            for row, fitted in zip(rows, cells, strict=True):
                made = []
                for index in shown:
                    text, style = fitted[index], ""
                    if row[index].startswith(("✓", "✗")):
                        text = text.replace(" ", _GLUE, 1)
                        style = "green" if row[index][0] == "✓" else "red"
                    elif row[index].startswith(("FAIL", "no:")):
                        style = "red"
                    made.append(Text(text, style))
                table.add_row(*made)
            console.width = max(console.width, width())
            console.print(table)

    def fit(self, text: str) -> str:
        """`text`, printable, with elsa's own symbols in ASCII where stdout cannot show them."""
        text = printable(text)
        try:
            text.encode(self._stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return "".join(_ASCII.get(character, character) for character in text)
        return text

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[Console]:
        """A console of Rich's; what it has printed at the end is written, without blanks at the
        ends of lines."""
        from rich.console import Console

        # Rich takes a terminal's own width, or COLUMNS.
        known = self._stdout.isatty() or "COLUMNS" in os.environ
        width = None if known else PIPE_WIDTH
        console = Console(
            file=self._stdout, width=width, highlight=False, markup=False, emoji=False
        )
        with console.capture() as capture:
            yield console
        lines = (line.rstrip(" ") for line in capture.get().replace(_GLUE, " ").splitlines())
        self._write("\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except OSError as error:
            # At exit Python flushes stdout once more and would complain.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            self._stdout = io.StringIO()
            # A reader that has seen enough (`| head`) is none: the command's verdict still stands.
            if not isinstance(error, BrokenPipeError):
                raise PlaceError(f"cannot write the result: {error.strerror}") from error

    # Everything else, on stderr

    @contextlib.contextmanager
    def stage(self, text: str, *, drawn: bool = True, imports: bool = False) -> Iterator[Update]:
        """Show that `text` is going on, while it is; yields `update(label, done, total)`.

        A stderr that is no terminal gets a line every 10 s. Not `drawn` where a library draws
        progress of its own. Where it only `imports` packages, Ctrl-C ends the process at once.
        """
        signals.check()
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if imports:
                stack.enter_context(signals.importing(self._leave))
            if self.quiet or not drawn or (imports and not self._interactive):
                yield lambda label, done=0, total=0: None
            else:
                bar = self._bar() if self._interactive else self._beating(text, start)
                show = stack.enter_context(bar)
                show(text, 0, 0)
                yield lambda label, done=0, total=0: show(
                    f"{text} {done}/{total} {label}" if total else f"{text}: {label}", done, total
                )
            signals.check()
        if self.verbose:
            self.log(f"{text}: {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Update]:
        from rich import progress
        from rich.console import Console

        console = Console(file=self._stderr, highlight=False, markup=False, emoji=False)
        utf = (self._stderr.encoding or "").lower().startswith("utf")
        bar = progress.Progress(
            progress.SpinnerColumn("dots" if utf else "line"),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20), progress.TimeElapsedColumn(),
            console=console, transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=None)
            yield lambda text, done, total: bar.update(
                task, description=one_line(text), completed=done, total=total or None
            )

    @contextlib.contextmanager
    def _beating(self, text: str, start: float) -> Iterator[Update]:
        ended, last = threading.Event(), [text]

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                self.log(f"{last[0]} ({time.perf_counter() - start:.0f} s)")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lambda text, done, total: last.__setitem__(0, text)
        finally:
            ended.set()
            thread.join()

    def log(self, text: str, mark: str = "", colour: str = "") -> None:
        """Print one line on stderr, begun by `mark` in a terminal's colour."""
        if mark and self._interactive and not os.environ.get("NO_COLOR"):
            mark = f"\x1b[{colour}m{mark}\x1b[0m"
        start = f"{mark} " if mark else ""
        with contextlib.suppress(OSError):
            self._stderr.write(start + one_line(text) + "\n")
            self._stderr.flush()

    def warn(self, text: str, *, even_quiet: bool = False) -> None:
        self.warned.append(text)
        if even_quiet or not self.quiet:
            self.log(cut(one_line(text)), "warning:", "33")

    def ask(self, about: str, question: str) -> bool | None:
        """Whether the answer to a question on stderr is yes; None where no person at a terminal can
        be asked."""
        if not (self._interactive and sys.stdin and sys.stdin.isatty()):
            return None
        self.log(about)
        self._stderr.write(f"{one_line(question)} [y/N] ")
        self._stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def fail(self, code: int, line: str, error: BaseException) -> None:
        """Say on stderr why the command ends, and with --json in the document, where none was
        printed."""
        if self.debug and line and code != INTERRUPTED:
            lines = "".join(traceback.format_exception(error)).splitlines()
            self._stderr.writelines(f"{printable(line)}\n" for line in lines)
        if code == INTERRUPTED:
            kept = ", ".join(dict.fromkeys(map(str, self.written)))
            line = f"interrupted; {kept} is complete" if kept else f"{line}; nothing was written"
            self.log(line)
        elif line:
            self.log(line, "error:", "1;31")
        if line:
            with contextlib.suppress(PlaceError):
                self.document("", None, error=line, exit_code=code)

    def _leave(self, code: int) -> None:
        """End inside an import, where no exception gets through."""
        if self._interactive:
            self._stderr.write("\r\x1b[2K\x1b[?25h")  # Rich has hidden the cursor
        if code == INTERRUPTED:
            self.log("interrupted; nothing was written")
        os._exit(code)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """While it lasts, whatever a library prints, warns or logs cannot reach stdout; warnings
        and log lines of other packages show with --verbose alone."""

        def show(message: Warning | str, category: Any, filename: str, *_: Any, **__: Any) -> None:
            if self.verbose or "elsa_" in filename:
                self.warn(str(message))

        def relay(record: logging.LogRecord) -> None:
            """Elsa's log records from WARNING on, everyone's with --verbose."""
            if self.verbose:
                self.warned.append(record.getMessage())
                self.log(f"{record.name}: {record.getMessage()}")
            elif record.name.startswith("elsa") and record.levelno >= logging.WARNING:
                self.warn(record.getMessage())

        root, handler = logging.getLogger(), logging.Handler()
        handler.emit = relay  # type: ignore[method-assign]
        if not self._interactive:
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        root.addHandler(handler)
        try:
            with contextlib.redirect_stdout(self._stderr), warnings.catch_warnings():
                warnings.showwarning = show
                yield
        finally:
            root.removeHandler(handler)
