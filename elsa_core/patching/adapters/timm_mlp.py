"""timm's MLPs on `elsa_core.linear`: the first layer with its activation in one call.

Read against timm 1.0.20 to 1.0.31. Gated MLPs have both products and the gate in one call where a
kernel takes them, which is not chosen by auto until measured.
"""

from __future__ import annotations

from typing import Any

from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.ops.linear.api import served_gated
from elsa_core.patching.adapters.common import (
    activation_of,
    is_plain_linear,
    is_small,
    passed,
    project,
)
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.torch_layers import linear_parts, why_not_plain


class ElsaMlp(Mlp):  # type: ignore[misc]  # timm is untyped
    """The MLP of a ViT block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = Mlp
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return _why_not(module, module.fc1, module.fc2)

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.elsa_added(x, None, None)

    def elsa_added(self, x: Tensor, residual: Tensor | None, scale: Tensor | None) -> Tensor:
        """residual + scale * forward(x); the two are for calls without dropout."""
        return _second(self, _activated(self, self.fc1, x), residual, scale)


class _Gates:
    """What the MLPs with a gate share; `_layers` names their first linear layers."""

    elsa_precision: str
    elsa_backend: str
    _layers: tuple[str, ...]

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self: Any, x: Tensor) -> Tensor:
        # hidden channels are about four times as many
        if is_small(self, x, 4 * x.numel() * x.shape[-1], "linear"):
            out: Tensor = super().forward(x)  # type: ignore[misc]
            return out
        hidden = _gated(self, x)
        return _second(self, self._apart(x) if hidden is None else hidden)


class ElsaSwiGLU(_Gates, SwiGLU):  # type: ignore[misc]  # timm is untyped
    """An MLP with a gate, of two first layers: [..., C] -> [..., C], any floating dtype."""

    elsa_base = SwiGLU
    _layers = ("fc1_g", "fc1_x")

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return _why_not(module, module.fc1_g, module.fc1_x, module.fc2)

    def _apart(self, x: Tensor) -> Tensor:
        """The gated hidden channels, by two products."""
        return _activated(self, self.fc1_g, x) * project(self, self.fc1_x, x)


class ElsaGluMlp(_Gates, GluMlp):  # type: ignore[misc]
    """An MLP whose first layer computes gate and value: [..., C] -> [..., C], any floating dtype.

    Of linear layers; one of convolutions stays as it is.
    """

    elsa_base = GluMlp
    _layers = ("fc1",)

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return _why_not(module, module.fc1, module.fc2)

    def _apart(self, x: Tensor) -> Tensor:
        """The gated hidden channels, by one product and a pass over its halves."""
        first, second = project(self, self.fc1, x).chunk(2, dim=-1)
        product: Tensor = first * self.act(second) if self.gate_last else self.act(first) * second
        return product


# The helpers take the module as Any: timm is untyped, and its attributes differ between versions.


def _why_not(module: Any, *layers: nn.Module) -> str:
    reason = next(filter(None, map(why_not_plain, layers)), "")
    if not reason and not activation_of(module.act):
        return f"its activation is a {type(module.act).__qualname__}"
    return reason


def _activated(module: Any, layer: nn.Module, x: Tensor) -> Tensor:
    """The activation of a layer's output, in one call unless something watches the activation."""
    activation = "" if is_watched(module.act) else activation_of(module.act)
    if not activation:  # one without a name may have taken its place since
        apart: Tensor = module.act(project(module, layer, x))
        return apart
    return project(module, layer, x, activation=activation)


def _gated(module: Any, x: Tensor) -> Tensor | None:
    """The gated hidden channels of x, in one call; None where no kernel takes it, or something
    watches what is between.
    """
    layers = [getattr(module, name) for name in module._layers]
    if not dispatch.linear_form(dispatch.GATED, x.device):
        return None
    if any(map(is_watched, (module.act, *layers))) or not activation_of(module.act):
        return None
    if not all(map(is_plain_linear, layers)):
        return None
    gate, value = map(_operands, layers) if len(layers) == 2 else _halved(module, layers[0])
    return served_gated(
        x, gate[:2], value[:2], activation_of(module.act), module.elsa_precision,
        module.elsa_backend, (*gate[2:], *value[2:]),
    )  # fmt: skip


def _operands(layer: Any) -> tuple[Any, ...]:
    """Weight and bias of a layer, and the halves and powers that are kept of it, if any."""
    kept = getattr(layer, "elsa_halves", None)
    return layer.weight, layer.bias, *((None, None) if kept is None else kept())


def _halved(module: Any, layer: Any) -> list[tuple[Any, ...]]:
    """The operands of gate and value in a layer that computes both."""
    rows = zip(_operands(layer), (0, 0, 1, 0), strict=True)  # where each has its rows
    parts = [(None, None) if t is None else t.chunk(2, dim) for t, dim in rows]
    pair = [tuple(part[i] for part in parts) for i in (0, 1)]
    return pair[::-1] if module.gate_last else pair


def _second(
    module: Any, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """What follows the activation: dropout, norm, the last layer, dropout."""
    x = passed(module.norm, passed(module.drop1, x))
    return passed(module.drop2, project(module, module.fc2, x, residual=residual, scale=scale))
