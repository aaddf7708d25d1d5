"""Files that may be hostile: regular ones alone, within a bound, and JSON without surprises."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from elsa_core.base.messages import first_line
from elsa_core.errors import ModelError

CONFIG_BYTES = 16_000_000
RESULT_BYTES = 256 * 2**20  # of what was measured: no run of this package writes as much
# The rest is for the interpreter, the libraries and what the model computes.
_MEMORY_SHARE = 0.8
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file: a FIFO without a writer would block, and /dev/zero never ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = _KINDS.get(stat.S_IFMT(kind), "a special file")
        raise ModelError(f"{path} cannot be read: it is {what}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read at most `limit` bytes from a regular file; ModelError where there are more, or none."""
    try:
        with open_regular(path) as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes")
    return raw


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 text of at most `limit` bytes from a regular file; ModelError otherwise."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8 text") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that may be hostile; ModelError where it is none."""
    return parse_json(read_text(path, CONFIG_BYTES), str(path))


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object from text that may be hostile; ModelError where it is none."""
    try:
        content = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        why = first_line(error)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif "integer string conversion" in why:  # whose text names a setting of Python's
            why = "a number in it has thousands of digits"
        raise ModelError(f"{where} is not JSON: {why}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{where} is not a JSON object")
    return content


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: an object in which a name occurs twice is refused."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:80]!r} occurs twice")
    return result


def too_small_memory(needed: int) -> int | None:
    """The bytes of the machine's memory where it cannot hold `needed` ones; None where it can, or
    does not say how much it has."""
    try:
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return present if needed > _MEMORY_SHARE * present else None


def check_fits(path: Path, needed: int) -> None:
    """Refuse tensors of `needed` bytes that the machine's memory cannot hold."""
    if present := too_small_memory(needed):
        raise ModelError(
            f"{path} holds {needed / 2**30:.1f} GiB of tensors; this machine has"
            f" {present / 2**30:.1f} GiB of memory"
        )
