"""One record per operator, and what PyTorch is told of it.

A record needs a name, a schema and a reference in plain PyTorch. With these alone `elsa::<name>`
exists on every device and is made of the reference's own operations: autograd, fake tensors,
compilers and `torch.func` see through it. An operator that has kernels of its own also has a fake
and the formulas of its gradients, and then `elsa::<name>_eager` too: the reference on every device
and in every dtype, opaque, beside the kernels that `elsa_core.dispatch` and the native library add
to `elsa::<name>`.
"""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._decomp
from torch import Tensor

from elsa_core.base import calls

Grads = tuple[Tensor | None, ...]
_LIBRARY = torch.library.Library("elsa", "FRAGMENT")
# All records by their names, "attention" say, in the order of their registration.
RECORDS: dict[str, Operator] = {}
# By the names of schemas, "elsa::attention_eager" say; variants are their operator's.
BY_SCHEMA: dict[str, Operator] = {}


@dataclass(frozen=True)
class Backward:
    """The operator `elsa::<name>_backward` that computes an operator's gradients.

    Attributes:
        schema: its arguments and results.
        fake: what it returns, on fake tensors.
        reference: its formulas in plain PyTorch.
        formula: of the second derivatives, or what raises.
        setup_context: of that formula.
        names: of its arguments, where the dispatcher reads them.
    """

    schema: str
    fake: Callable[..., Any]
    reference: Callable[..., Any]
    formula: Callable[..., Any]
    setup_context: Callable[..., None] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """What is known of one operator.

    Attributes:
        name: `elsa::<name>`.
        schema: its arguments and results, as `torch.library.define` takes them.
        reference: the same in plain PyTorch.
        portable: the same in operations that `torch.onnx` translates, for any length; without one
            the reference.
        fake: what it returns, on fake tensors; without one the reference is traced through.
        setup_context, formula: of its gradients, as `torch.library.register_autograd` takes them;
            without them autograd records the reference.
        backward: the operator of its gradients, whose overload is then the formula's first
            argument; without one the formula calls PyTorch's.
        kind: "attention", "window" or "linear": what proofs, profiles and exporters may ask of its
            arguments; any other word makes them leave it alone.
        terms: the tensor arguments that a gradient may be wanted of, in the order of `needs`.
        twin: whether `elsa::<name>_eager` stands beside it.
        onnx: its `elsa_core.exporting.onnx_operator.OnnxExport`, which writes nodes of its own;
            without one `elsa.export` writes the portable form.
        bench: its `elsa_core.profiling.bench.peers.Bench`: cases, peers and the float64 output.
        bench_gradients: the same of calls with their gradients.
        names: the full names that serve the same call; this and what follows is set by `register`.
        exported: what a call is written with while `torch.onnx.export` makes a graph.
        overload: `torch.ops.elsa.<name>.default`. eager: the overload that runs the reference.

    `onnx` and the benches are objects, or where to find one when it is asked for
    ("package.module:NAME"): an operator imports neither exporters nor measurements.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    portable: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None
    formula: Callable[..., Grads] | None = None
    backward: Backward | None = None
    kind: str = ""
    terms: tuple[str, ...] = ()
    twin: bool = False
    onnx: Any = None
    bench: Any = None
    bench_gradients: Any = None
    names: tuple[str, ...] = ()
    exported: Any = None
    overload: Any = None
    eager: Any = None

    def part(self, name: str) -> Any:
        """What "onnx", "bench" or "bench_gradients" stands for; None where the record has none."""
        given = getattr(self, name)
        if not isinstance(given, str):
            return given
        module, _, attribute = given.partition(":")
        return getattr(importlib.import_module(module), attribute)


def register(record: Operator) -> Operator:
    """Define an operator, whose reference then serves it; ValueError: its name is taken."""
    if record.name in RECORDS:
        raise ValueError(f"the operator {record.name!r} is registered already")
    record = replace(record, exported=record.portable or record.reference)
    names = (record.name, f"{record.name}_eager") if record.twin else (record.name,)
    for name in names:
        backward = record.backward
        _define(name, record.schema, record.reference, record)
        if record.fake is None:
            continue
        if backward is not None:
            full = f"elsa::{name}_backward"
            _define(f"{name}_backward", backward.schema, backward.reference, record)
            torch.library.register_fake(full, backward.fake, lib=_LIBRARY)
            torch.library.register_autograd(
                full, backward.formula, setup_context=backward.setup_context, lib=_LIBRARY
            )
        _describe(name, record, f"{name}_backward")
    overloads = [getattr(torch.ops.elsa, name).default for name in names]
    full_names = tuple(f"elsa::{name}" for name in names)
    record = replace(record, names=full_names, overload=overloads[0], eager=overloads[-1])
    RECORDS[record.name] = record
    BY_SCHEMA.update(dict.fromkeys(full_names, record))
    return record


def implement(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Give `elsa::<name>` a kernel of one dispatch key ("CUDA", "CompositeExplicitAutograd")."""
    # a bundle that was loaded before may have registered kernels of its own
    _LIBRARY.impl(name, kernel, key, allow_override=True)


# Kernels in Python for CUDA tensors which a compiled library may take the place of at the first
# call: that library registers for the key "CUDA", where nothing may stand before.
_ON_CUDA: dict[str, Callable[..., Any]] = {}


def implement_on_cuda(name: str, kernel: Callable[..., Any]) -> None:
    """Give `elsa::<name>` a kernel for CUDA tensors, where none is registered for them."""
    _ON_CUDA[name] = kernel
    known = RECORDS.get(name)
    if known is not None and known.twin:  # of others the reference serves the other devices
        _LIBRARY.impl(name, partial(_by_device, name, None), "CompositeExplicitAutograd")


def _by_device(
    name: str, reference: Callable[..., Any] | None, first: Tensor, *rest: Any, **named: Any
) -> Any:
    on_cuda = _ON_CUDA.get(name) if first.is_cuda else None
    serve = on_cuda or reference
    if serve is None:
        raise NotImplementedError(f"elsa::{name} has no kernel for {first.device.type} tensors")
    return serve(first, *rest, **named)


def variant(record: Operator, name: str, kernel: Callable[..., Any], key: str) -> Any:
    """Define `elsa::<name>` and give its overload: a record's operator by another kernel of one
    dispatch key, with the gradients of `elsa::<record.name>`. The record has a fake and an operator
    of its gradients."""
    _LIBRARY.define(name + record.schema)
    _LIBRARY.impl(name, kernel, key)
    BY_SCHEMA[f"elsa::{name}"] = record
    _describe(name, record, f"{record.name}_backward")
    return getattr(torch.ops.elsa, name).default


def _define(name: str, schema: str, reference: Callable[..., Any], record: Operator) -> None:
    """Define `elsa::<name>`, where no native library that was loaded first has, by plain PyTorch
    on the devices that get no kernel of their own."""
    if not hasattr(torch.ops.elsa, name):
        _LIBRARY.define(name + schema)
    if record.fake is None:
        _LIBRARY.impl(name, reference, "CompositeImplicitAutograd")
    elif name.removesuffix("_backward").endswith("_eager"):
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    elif not record.twin:
        _LIBRARY.impl(name, partial(_by_device, name, reference), "CompositeExplicitAutograd")


def _describe(name: str, record: Operator, backward: str) -> None:
    """Register fake, formula and translation of `name`; backward: the operator that the formula
    calls, if the record has one."""
    exported, fake = record.exported, record.fake
    assert exported is not None and fake is not None
    torch.library.register_fake(f"elsa::{name}", fake, lib=_LIBRARY)
    # `torch.onnx.export` reads `torch._decomp.decomposition_table`. The entry goes into a view in
    # front of it: torch.compile reads the table itself, and refuses an operator in it where the
    # environment variable CI is set. Fake tensors of open shapes, which may see the view, get the
    # fake.
    table: Any = torch._decomp.decomposition_table
    if not isinstance(table, ChainMap) or table.maps[0] is not _TRANSLATIONS:
        torch._decomp.decomposition_table = ChainMap(_TRANSLATIONS, table)  # type: ignore[assignment]
    _TRANSLATIONS[getattr(torch.ops.elsa, name).default] = lambda *given: (
        exported(*given) if calls.exporting_onnx() else fake(*given)
    )
    formula = record.formula
    if formula is None:
        return
    if record.backward is not None:
        formula = partial(formula, getattr(torch.ops.elsa, backward).default)
    torch.library.register_autograd(
        f"elsa::{name}", formula, setup_context=record.setup_context, lib=_LIBRARY
    )


# What `torch.onnx.export` replaces in an exported program, beside PyTorch's own decompositions.
_TRANSLATIONS: dict[Any, Callable[..., Any]] = {}
