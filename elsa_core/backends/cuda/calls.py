"""The operators that the library serves: what a call of an unknown layout does, and its errors."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda import plan as plans
from elsa_core.backends.cuda.library import Library
from elsa_core.backends.cuda.plan import PlanError, arguments_of
from elsa_core.errors import UnavailableError

_LOG = logging.getLogger("elsa")
_log_once = functools.cache(_LOG.log)
_LIBRARY = torch.library.Library("elsa", "FRAGMENT")
INTERRUPTED = "the call was interrupted"  # what is said of Ctrl-C
_DEFAULT = re.compile(r"=[^,)]+")
# Calls whose plans the driver refused; a driver that always does is asked no more.
_REFUSALS = itertools.count(1)
_MOST_REFUSALS = 16


def serve(
    library: Library, operator: str, kernel: Callable[..., Any], key: str,
    level: int = logging.INFO,
) -> None:  # fmt: skip
    """Make the library the kernel of `elsa::<operator>` for a dispatch key.

    `elsa::<operator>_plan` is what it asks of a layout that it has no plan for: the call's results,
    and what it is to keep. An error comes back as a text behind "E": the library's own frames would
    lose it.

    kernel: what computes a call in Python, with all its arguments; asked once for each layout, and
    every time where the library cannot serve it. level: of the log, where the driver refuses.

    Raises:
        UnavailableError: the library refuses.
    """
    schema = getattr(torch.ops.elsa, operator).default._schema
    given, _, returned = _DEFAULT.sub("", str(schema)).partition(") -> ")
    given, results = given.partition("(")[2], len(schema.returns)

    def answer(*arguments: Any) -> tuple[Tensor, ...]:
        *arguments, known = arguments  # type: ignore[assignment]
        try:
            if known:  # as one for Python
                found, said = kernel(*arguments), b""
            else:
                found, said = _planned(library, operator, kernel, level, arguments)
            found = found if isinstance(found, tuple) else (found,)
        except BaseException as error:
            found = tuple(torch.empty(0) for _ in range(results))
            said = b"E" + (str(error) or type(error).__name__).encode()
            if not isinstance(error, Exception):
                said = f"E{INTERRUPTED}".encode()
        kept = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else None
        return *found, torch.empty(0, dtype=torch.uint8) if kept is None else kept

    full = f"{operator}_plan"
    if not hasattr(torch.ops.elsa, full):  # a first try may have been interrupted
        _LIBRARY.define(f"{full}({given}, bool known) -> ({returned.strip('()')}, Tensor)")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"elsa::{full}", key):
        _LIBRARY.impl(full, answer, key)
    library.register(operator, key)


def _planned(
    library: Library, operator: str, kernel: Callable[..., Any], level: int,
    arguments: Sequence[Any],
) -> tuple[Any, bytes]:  # fmt: skip
    """Run a call in Python and say what the library is to keep for its layout.

    Returns:
        The results, and "P" and a plan; "N" where such calls are for Python; nothing where the next
        one is to be asked about again (a CUDA graph is recorded, kernels are compiled ahead, a
        launch hook is set, or the driver refused).
    """
    from elsa_core.backends.cuda.record import Apart, Recorder
    from elsa_core.backends.triton.shared.launch import RECORDERS

    _listen(library)
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or RECORDERS:
        return kernel(*arguments), b""
    # objects of their own: two arguments may be one tensor in this call, and not in the next
    own = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    kind = Apart if "torch._dynamo" in sys.modules else Recorder
    recorder = kind([a for a in own if a is None or isinstance(a, Tensor)])
    with recorder:
        results = kernel(*own)
    results = results if isinstance(results, tuple) else (results,)
    plan, said = None, b"" if recorder.hooked else b"N"
    try:
        if not recorder.hooked:
            plan = recorder.plan(results, library.number)
            said = b"P" + plans.write(plan)
            library.check(said[1:], max(0, results[0].get_device()))
    except PlanError as reason:
        plan = None
        _LOG.debug("a call that the CUDA library leaves to Python: %s", reason)
    except UnavailableError as error:  # it may pass, as want of memory does
        plan, said = None, b"" if next(_REFUSALS) < _MOST_REFUSALS else b"N"
        said_once = "the CUDA library does not take such calls; Triton launches them: %s"
        _log_once(level, said_once, str(error))
    noted = library.noted  # once: another thread may end what is recorded
    if noted is not None:
        noted.append((f"elsa::{operator}", own, plan))
    return results, said


_LISTENING = threading.Lock()
_HEARD: list[Library] = []


def _listen(library: Library) -> None:
    """From now on hear of launches, and forget plans where the planners forget theirs."""
    with _LISTENING:  # a second listener would note each launch twice
        if not _HEARD:
            from elsa_core.backends.cuda import record
            from elsa_core.backends.triton.shared import launch
            from elsa_core.backends.triton.shared.plans import PLANS

            launch.attach(functools.partial(_launched, library), record.heard)
            PLANS.on_clear.append(library.clear)
            _HEARD.append(library)


def _launched(
    library: Library, compiled: Any, grid: tuple[int, ...], values: tuple[Any, ...],
    pointers: tuple[Tensor, ...],
) -> bool:  # fmt: skip
    """Launch a kernel on the current stream; whether it could be. Neither Triton's driver is asked
    nor its launcher, which a C compiler makes.
    """
    if 0 in grid:
        return True
    try:
        slots = [plans.Pointer(slot) for slot in range(len(pointers))]
        given = arguments_of(compiled, values, slots)
        step = plans.Launch(library.number(compiled), grid, given)  # type: ignore[arg-type]
        found = plans.write(plans.Plan(len(pointers), (), 0, (step,)))
        library.launch(found, [p.data_ptr() for p in pointers], max(0, pointers[0].get_device()))
    except (PlanError, UnavailableError) as reason:
        _LOG.debug("a launch that is Triton's: %s", reason)
        return False
    return True
