"""Plans and kernels in one file: what the library serves calls by where there is no Python planner.

`recorded` runs a model, and every layout of its calls is planned and noted; `write` puts those
layouts and their kernels into bytes that `csrc/cuda/planfile.h` reads. A call of another layout,
such as another batch size, has no plan then, and says so in one line. A file holds them
for one architecture or several, and the library takes those of the GPU that is there. The last 32
bytes are the SHA-256 of those before: what was changed is refused before anything of it is loaded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elsa_core.backends.cuda.library import Library
from elsa_core.backends.cuda.plan import Kernel
from elsa_core.errors import UnavailableError

MAGIC = 0x534E414C50414C45
VERSION = 3


@dataclass(frozen=True)
class Recorded:
    """The calls of some runs.

    Attributes:
        layouts: as the library noted them: the operator's name, its layout, its plan.
        kernels: those that the plans launch, by the number in the plans.
    """

    layouts: tuple[tuple[str, bytes, bytes], ...]
    kernels: dict[int, Kernel]

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators called, without "elsa::", in alphabetical order."""
        return tuple(sorted({name.removeprefix("elsa::") for name, _, _ in self.layouts}))


def joined(parts: Sequence[Recorded]) -> Recorded:
    """Several runs as one; the same layout twice is kept once."""
    kernels = {number: kernel for part in parts for number, kernel in part.kernels.items()}
    layouts = {(name, words): plan for part in parts for name, words, plan in part.layouts}
    return Recorded(tuple((*key, plan) for key, plan in sorted(layouts.items())), kernels)


def recorded(library: Library, run: Callable[[], object]) -> Recorded:
    """Run `run` and note every layout of a call that the library serves in it.

    Raises:
        UnavailableError: a call is one for Python: it does more than launch kernels.
    """
    library.record()
    try:
        run()
    finally:
        noted, numbers = library.recorded()
    found, at = [], 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return noted[at - size : at]

    while at < len(noted):
        name = take(*struct.unpack("<I", take(4))).decode()
        words = take(8 * struct.unpack("<I", take(4))[0])
        found.append((name, words, take(*struct.unpack("<Q", take(8)))))
    layouts = tuple(found)
    lost = next((name for name, _, plan in layouts if not plan), None)
    if lost is not None:
        raise UnavailableError(
            f"a call of {lost} is not by kernels of this package alone: PyTorch serves it, as it "
            "does where rows or channels are few"
        )
    return Recorded(layouts, {number: library.kernels[number] for number in numbers})


def write(plans: Mapping[int, Recorded], served: str) -> bytes:
    """The bytes of a file.

    Args:
        plans: what was recorded by the architecture that it is for, 90 for sm_90. Its kernels run
            on no other.
        served: what the message of a call without a plan says of those that have one.
    """
    names = sorted({name for each in plans.values() for name in each.operators})
    out = [struct.pack("<QI", MAGIC, VERSION), _text(served), _count(names)]
    for name in names:
        schema = getattr(torch.ops.elsa, name).default._schema
        out += [_text(name), _text(Library.types(schema)), struct.pack("<I", len(schema.returns))]
        out.append(_text(str(schema).removeprefix("elsa::")))
    out.append(_count(plans))
    for arch, each in sorted(plans.items()):
        out += [struct.pack("<I", arch), _count(each.kernels)]
        for number, kernel in sorted(each.kernels.items()):
            out += [struct.pack("<I", number), _text(kernel.symbol)]
            facts = kernel.threads, kernel.shared, kernel.cluster, kernel.flags
            out.append(struct.pack("<4IQ", *facts, len(kernel.code)) + kernel.code)
        out.append(_count(each.layouts))
        for name, words, plan in each.layouts:
            out += [_text(name), struct.pack("<I", len(words) // 8), words]
            out.append(struct.pack("<Q", len(plan)) + plan)
    body = b"".join(out)
    return body + hashlib.sha256(body).digest()


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def _count(items: Any) -> bytes:
    return struct.pack("<I", len(items))
