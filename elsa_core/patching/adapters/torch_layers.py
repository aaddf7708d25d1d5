"""PyTorch's own layers on `elsa_core.linear`: `nn.Linear`, the convolution of a patch embedding,
chains of linear layers and activations, the encoder layer.

Read against torch 2.10 to 2.15. On a CPU a recorded program holds PyTorch's own operators: bundles
of a model patched as a whole need no library for its layers there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from elsa_core import calls, short_calls
from elsa_core.linear import served
from elsa_core.operators.linear import epilogue
from elsa_core.patching.adapters.common import (
    activation_of,
    by_pytorch,
    is_elsas,
    is_plain_linear,
    passed,
    project,
    why_no_weight,
)
from elsa_core.patching.adapters.derived import DERIVED, Derivation, Derives
from elsa_core.patching.adapters.halves import NONE, Halves, of_layer
from elsa_core.patching.adapters.handing import taken, taken_norm, waiting
from elsa_core.patching.adapters.host import (
    all_original,
    has_hooks,
    is_host_bound,
    is_settled,
    is_shown,
    is_within_original,
    told,
)


class ElsaLinear(Derives, nn.Linear):
    """A linear layer: [..., K] -> [..., N], any floating dtype."""

    elsa_base = nn.Linear
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_no_weight(module)

    def elsa_derivation(self) -> Derivation | None:
        """The halves of the weight, where a kernel reads them."""
        return of_layer(self)

    def elsa_halves(self) -> Halves:
        """What `freeze` keeps of the weight, if it still holds."""
        if DERIVED.keeps_nothing():
            return NONE
        return DERIVED.frozen(self, (self.weight,)) or NONE

    def forward(self, input: Tensor) -> Tensor:
        if is_within_original(self):
            return by_pytorch(self, input)
        if not is_elsas(self, input):
            return super().forward(input)
        terms, norm = NONE, None
        if waiting():
            terms, norm = taken(self, input, self.weight.shape[0]), taken_norm(self, input)
        work = input.numel() * self.weight.shape[0]
        # no compiler reads what calls before it have found
        if not is_compiling() and short_calls.LINEAR.serve is not None and terms[0] is None:
            large = norm is None and short_calls.is_large(work, input.dtype)
            short = self._elsa_short(input) if large else None
            if short is not None:
                return short

        def by_elsa() -> Tensor:
            return served(
                input, self.weight, self.bias, "none", *terms, self.elsa_precision,
                self.elsa_backend, *self.elsa_halves(), norm,
            )  # fmt: skip

        form = terms[0] is None, terms[1] is None, norm is None
        if is_host_bound(self, "linear", input, work, by_elsa, form):
            if norm is not None:
                input = functional.layer_norm(input, input.shape[-1:], *norm)
            return epilogue(super().forward(input), "none", *terms)
        return by_elsa()

    def _elsa_short(self, input: Tensor) -> Tensor | None:
        """A call by the short way, of a product that does not wait for the host; None of others."""
        own, space = self._parameters, self.__dict__  # the host finds them sooner than attributes
        if "weight" not in own or "bias" not in own or "weight" in space or "bias" in space:
            return None  # something derived stands for a parameter
        given = (input, own["weight"], own["bias"], "none", None, None, self.elsa_precision)
        out = short_calls.product((*given, *self.elsa_halves()), self.elsa_backend)
        if out is not None and not is_settled(self):
            told(self, False)
        return out


class ElsaPatchConv2d(Derives, nn.Conv2d):
    """A convolution whose stride is its kernel, as a product: [B, C, H, W] -> [B, N, H/h, W/w].

    The result lies in memory as [B, H/h, W/w, N], which is the tokens that embeddings make of it.
    """

    elsa_base = nn.Conv2d
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        whole = (
            tuple(module.stride) == tuple(module.kernel_size)
            and math.prod(module.kernel_size) > 1
            and module.groups == 1
            and all(step == 1 for step in module.dilation)
            and module.padding in ((0, 0), "valid")
        )
        return why_no_weight(module) if whole else "its windows overlap, are padded or grouped"

    def elsa_derivation(self) -> Derivation | None:
        """The halves of the weight [N, C * h * w], where a kernel reads them."""
        return of_layer(self)

    def forward(self, input: Tensor) -> Tensor:
        whole = input.dim() != 4 or (not input.is_cuda and calls.recorded())
        if whole or is_within_original(self):
            return super().forward(input)
        work = input.numel() * self.out_channels
        if is_host_bound(self, "linear", input, work, lambda: self._elsa_product(input)):
            return super().forward(input)
        return self._elsa_product(input)

    def _elsa_product(self, input: Tensor) -> Tensor:
        height, width = self.kernel_size
        rows, columns = input.shape[2] // height, input.shape[3] // width
        cut = input[:, :, : rows * height, : columns * width]
        tiles = cut.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, H/h, W/w, C * h * w]
        halves = DERIVED.frozen(self, (self.weight,)) or NONE
        out = served(
            patches, self.weight.flatten(1), self.bias, "none", None, None, self.elsa_precision,
            self.elsa_backend, *halves,
        )  # fmt: skip
        return out.permute(0, 3, 1, 2)


class ElsaSequential(nn.Sequential):
    """Linear layers, each with the activation behind it in one call; the rest as it is."""

    elsa_base = nn.Sequential
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_no_chain(module)

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self, input: Tensor) -> Tensor:
        return chained(self, input, super().forward)


_FUNCTIONS = {functional.relu: "relu", functional.gelu: "gelu"}


class ElsaTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's encoder layer, whose first linear layer takes the activation: no site itself."""

    elsa_base = nn.TransformerEncoderLayer
    elsa_companion = True
    elsa_any_scope = True
    elsa_scope: str = "model"  # "attention" where no layer within is patched
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites whose products take the layer's terms."""
        return module.self_attn, module.linear1, module.linear2

    def forward(self, src: Tensor, *given: Any, **named: Any) -> Tensor:
        own = super().forward
        if is_within_original(self) or is_compiling() or src.is_nested or not src.is_cuda:
            return own(src, *given, **named)
        operator, work = "linear", src.numel() * self.linear1.out_features
        if self.elsa_scope != "model":
            tokens = src.shape[1 if self.self_attn.batch_first and src.dim() == 3 else 0]
            operator, work = "attention", src.numel() * tokens
        if is_host_bound(self, operator, src, work, lambda: own(src, *given, **named)):
            out: Tensor = all_original(own, src, *given, **named)
            return out
        return own(src, *given, **named)

    def _ff_block(self, x: Tensor) -> Tensor:
        activate: Any = self.activation
        if isinstance(activate, nn.Module):
            name = "" if is_shown(activate) else activation_of(activate)
        else:
            name = _FUNCTIONS.get(activate, "")
        if not name or self.elsa_scope != "model" or is_within_original(self):
            return super()._ff_block(x)
        x = passed(self.dropout, project(self, self.linear1, x, activation=name))
        return passed(self.dropout2, project(self, self.linear2, x))


def why_no_chain(module: Any) -> str:
    """Why a sequence is no MLP of plain linear layers, of which one is followed by an activation
    that the operator knows; empty if it is."""
    layers = list(module)
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(linears) < 2 or any(map(why_not_plain, linears)):
        return "is no sequence of plain linear layers"
    pairs = itertools.pairwise(layers)
    fuses = any(isinstance(a, nn.Linear) and activation_of(b) for a, b in pairs)
    return "" if fuses else "has no activation that the product takes"


def why_not_plain(layer: nn.Module) -> str:
    """Why a layer within an MLP is no plain linear one; empty if it is."""
    if not is_plain_linear(layer):
        return f"holds a {type(layer).__qualname__}"
    return why_no_weight(layer)


def linear_parts(module: nn.Module) -> tuple[nn.Module, ...]:
    """The linear layers among a module's children."""
    return tuple(layer for layer in module.children() if is_plain_linear(layer))


def chained(site: Any, x: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
    """What the layers of a sequence make of x, in as few calls as there are linear layers; by its
    own forward in eager calls on a GPU that would wait for the host.
    """
    if is_within_original(site):
        return own(x)
    if x.is_cuda and not is_compiling():
        # none where they were replaced since, by LoRA for example
        sizes = (layer.weight.numel() for layer in site if is_plain_linear(layer))
        largest = max(sizes, default=0)
        work = x.numel() // x.shape[-1] * largest
        if largest and is_host_bound(site, "linear", x, work, lambda: _chained(site, x)):
            out: Tensor = all_original(own, x)
            return out
    return _chained(site, x)


def _chained(site: Any, x: Tensor) -> Tensor:
    layers = list(site)
    while layers:
        layer = layers.pop(0)
        if not is_plain_linear(layer):
            x = passed(layer, x)
            continue
        activation = activation_of(layers[0]) if layers and not has_hooks(layers[0]) else ""
        if activation:
            layers.pop(0)
        x = project(site, layer, x, activation=activation or "none")
    return x
