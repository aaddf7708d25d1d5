"""Which backend and schedule serve each patched site, from one forward's own calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from elsa_core import dispatch, ops
from elsa_core.errors import ElsaError
from elsa_core.ops.attention.api import explain
from elsa_core.ops.linear.api import explain_linear
from elsa_core.ops.window.api import explain_window_attention
from elsa_core.patching import is_layer


class Served(NamedTuple):
    """What serves a site's calls of the operator; the schedule is empty where none explains it."""

    backend: str = ""
    schedule: str = ""
    precision: str = ""


def served(patched: nn.Module, inputs: tuple[Any, ...], paths: Sequence[str]) -> dict[str, Served]:
    """What serves each site. A layer that calls no operator of elsa's is plain PyTorch's."""
    watch, handles = _Watch(), []
    for path in paths:
        module = patched.get_submodule(path)
        enter = partial(lambda path, module, args: watch.sites.append((path, module)), path)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(watch.leave, with_kwargs=True))
    try:
        with torch.inference_mode(), watch:
            patched(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return watch.found


class _Watch(TorchDispatchMode):
    """Asks for the route of the first call of elsa's operators in each site: of linear layers in
    those that are layers, of any other operator in those that are attention.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Served] = {}
        self.sites: list[tuple[str, nn.Module]] = []  # a projection lies within attention

    def leave(self, module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        path, _ = self.sites.pop()
        if not is_layer(module) or path in self.found:
            return
        # It called no operator of elsa's: a CPU's kernels take eager calls alone, which one under
        # a dispatch mode is not. Those that are large enough for them.
        input = next(each for each in (*args, *named.values()) if isinstance(each, Tensor))
        asked, precision = (str(vars(module)[f"elsa_{name}"]) for name in ("backend", "precision"))
        self.found[path] = Served(dispatch.PLAIN, "", precision)
        weight = next((p for p in module.parameters() if p.dim() == 2), None)
        if weight is not None and not input.is_cuda and input.shape[-1] == weight.shape[1]:
            terms = (input, weight, None, "none", None, None, precision)
            serving = dispatch.SERVING.get(("linear", input.device.type, asked), ())
            with _disable_current_modes():
                if any(serve(*terms) is not None for serve in serving):
                    route = explain_linear(input, weight, precision=precision, backend=asked)
                    self.found[path] = Served(route.backend, "", precision)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        record = ops.of(schema.name)
        if self.sites and record is not None:
            path, module = self.sites[-1]
            if path not in self.found and is_layer(module) == (record.kind == "linear"):
                names = [argument.name for argument in schema.arguments]
                given = dict(zip(names, args, strict=False)) | (kwargs or {})
                self.found[path] = _route(record, schema.name, given, module)
        return func(*args, **(kwargs or {}))


def _route(
    record: ops.Operator, operator: str, given: Mapping[str, Any], module: nn.Module
) -> Served:
    asked = str(vars(module).get("elsa_backend", "auto"))
    precision = str(given.get("precision", "strict"))
    chosen = {"precision": precision, "backend": asked}
    # a mask beside causality, which the operator takes and its public face does not; or the backend
    # that was asked for is gone
    with contextlib.suppress(ElsaError):
        route: Any = None
        if record.kind == "attention":
            query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
            causal = bool(given["is_causal"]) and mask is None
            route = explain(query, key, value, mask, 0.0, causal, given["scale"], True, **chosen)
        elif record.kind == "window":
            route = explain_window_attention(**given, backend=asked)
        elif record.kind == "linear":
            value = given.get("value")
            route = explain_linear(
                given["input"], given["weight"], given.get("bias"),
                activation=given.get("activation", "none"), residual=given.get("residual"),
                scale=given.get("scale"),
                value=None if value is None else (value, given.get("value_bias")), **chosen,
            )  # fmt: skip
        if route is not None:
            return Served(route.backend, route.schedule, precision)
    tensor = next(value for value in given.values() if isinstance(value, Tensor))
    backend = dispatch.PLAIN
    if operator != str(record.eager._schema.name):
        backend = dispatch.kernels_of(record.name, tensor.device.type)
    return Served(backend, "", precision)
