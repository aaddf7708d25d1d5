"""timm's MLPs on `elsa_core.linear`: the first layer with its activation in one call.

Read against timm 1.0.20 to 1.0.31. `GluMlp` gates one half of its first layer's output by the other
half, which no epilogue does: its two linear layers are patched alone.
"""

from __future__ import annotations

from typing import Any

from timm.layers.mlp import Mlp, SwiGLU
from torch import Tensor, nn

from elsa_core.operators.linear import epilogue
from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.common import (
    activation_of,
    all_original,
    is_host_bound,
    is_shown,
    is_within_original,
    passed,
    project,
)
from elsa_core.patching.adapters.torch_layers import linear_parts, why_not_plain


class ElsaMlp(Mlp):  # type: ignore[misc]  # timm is untyped
    """The MLP of a ViT block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = Mlp
    elsa_normalises = True
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
        return self.elsa_added(x)

    def elsa_added(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """residual + scale * forward(norm(x)); the first two are for calls without dropout."""

        def by_elsa() -> Tensor:
            return _second(self, _activated(self, self.fc1, x, norm), residual, scale)

        work = x.numel() * self.fc1.weight.shape[0]
        if is_within_original(self) or is_host_bound(self, "linear", x, work, by_elsa):
            x = x if norm is None else norm(x)
            shown = flat.served(self, flat.mlp, x)
            if shown is None:
                shown = all_original(super().forward, x)
            return epilogue(shown, "none", residual, scale)
        return by_elsa()


class ElsaSwiGLU(SwiGLU):  # type: ignore[misc]  # timm is untyped
    """An MLP with a gate: [..., C] -> [..., C], any floating dtype."""

    elsa_base = SwiGLU
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return _why_not(module, module.fc1_g, module.fc1_x, module.fc2)

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.elsa_added(x)

    def elsa_added(
        self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """residual + scale * forward(x); the two are for calls without dropout."""
        gate = _activated(self, self.fc1_g, x)
        return _second(self, gate * project(self, self.fc1_x, x), residual, scale)


# The helpers take the module as Any: timm is untyped, and its attributes differ between versions.


def _why_not(module: Any, *layers: nn.Module) -> str:
    reason = next(filter(None, map(why_not_plain, layers)), "")
    if not reason and not activation_of(module.act):
        return f"its activation is a {type(module.act).__qualname__}"
    return reason


def _activated(module: Any, layer: nn.Module, x: Tensor, norm: nn.Module | None = None) -> Tensor:
    """The activation of a layer's output, in one call unless a hook sees the activation."""
    if is_shown(module.act):
        shown: Tensor = module.act(project(module, layer, x, norm=norm))
        return shown
    return project(module, layer, x, activation=activation_of(module.act) or "none", norm=norm)


def _second(module: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None) -> Tensor:
    """What follows the activation: dropout, norm, the last layer, dropout."""
    x = passed(module.norm, passed(module.drop1, x))
    return passed(module.drop2, project(module, module.fc2, x, residual=residual, scale=scale))
