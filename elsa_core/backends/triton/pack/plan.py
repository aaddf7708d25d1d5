"""What a pack is to hold: the kernels that the planners ask for, one architecture at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elsa_core.backends.triton.pack import sources, specialize
from elsa_core.backends.triton.pack.cases import Case, gpus
from elsa_core.backends.triton.pack.specialize import Specialized
from elsa_core.backends.triton.shared.device import describing
from elsa_core.backends.triton.shared.launch import Launch, recording


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    kernel: Any
    special: Specialized
    target: Any


@dataclass
class Plan:
    """The kernels of one architecture, and which of them each case takes.

    Attributes:
        arch: 90 for sm_90.
        jobs: kernels by key, in the order in which they were first asked for.
        calls: keys of the launches of each case that is routed to these kernels, by its name and
            the GPU's.
    """

    arch: int
    jobs: dict[str, Job] = field(default_factory=dict)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Launches of all calls."""
        return sum(len(keys) for keys in self.calls.values())

    def served(self, keys: Iterable[str]) -> float:
        """The share of calls whose launches are all among `keys`."""
        known = set(keys)
        if not self.calls:
            return 0.0
        return sum(known.issuperset(call) for call in self.calls.values()) / len(self.calls)


class Planner:
    """Plans cases for one architecture; no GPU is asked."""

    def __init__(self, arch: int):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self.plan = Plan(arch)
        self.target = GPUTarget("cuda", arch, 32)
        self.backend = make_backend(self.target)
        self.binders: dict[int, Any] = {}
        self.known: dict[Hashable, str] = {}
        self.seen: list[str] = []

    def add(self, cases: Iterable[Case]) -> Plan:
        """Plan cases for every GPU of the architecture."""
        listed = list(cases)
        for gpu in gpus(self.plan.arch):
            with describing(gpu.facts), recording(self._record):
                for case in listed:
                    self.seen = []
                    case.launch()
                    if self.seen:
                        self.plan.calls[f"{case.name} on {gpu.facts.name}"] = tuple(self.seen)
        return self.plan

    def _record(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        self.seen.append(self.key(launch, tensors))

    def key(self, launch: Launch, tensors: tuple[Any, ...]) -> str:
        """The key in `plan.jobs` of what a launch compiles; calls that differ in runtime arguments
        alone share it.
        """
        kernel, tail = launch.kernel, launch.tail
        fixed = tuple(
            (p.name, repr(tail[p.name]))
            for p in kernel.params
            if p.name in tail and (p.is_constexpr or not p.do_not_specialize)
        )
        given = tuple((t.dtype, t.data_ptr() % 16) for t in tensors)
        seen = (id(kernel), fixed, given, repr(launch.options))
        if seen not in self.known:
            self.known[seen] = self._specialized(launch, tensors)
        return self.known[seen]

    def _specialized(self, launch: Launch, tensors: tuple[Any, ...]) -> str:
        kernel = launch.kernel
        if id(kernel) not in self.binders:
            self.binders[id(kernel)] = specialize.binder_of(kernel, self.backend)
        special = specialize.specialize(
            kernel, tensors, launch.tail, launch.options, self.backend, self.binders[id(kernel)]
        )
        key = specialize.key_of(kernel, special, sources.source_key(kernel), self.plan.arch)
        self.plan.jobs.setdefault(key, Job(kernel, special, self.target))
        return key
