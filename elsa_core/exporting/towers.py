"""One tower of a CLIP as a model of its own: images or token ids in, features out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from elsa_core.errors import ArgumentError

TOWERS = ("image", "text")


class TextTower(nn.Module):
    """The text side of open_clip's `CLIP`, whose parts lie in the CLIP itself.

    Runs the class's own `encode_text`: token ids int64 [batch, context] -> features [batch, dim].
    The parts are shared with the CLIP, under the names that they have there.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self._encode: Any = type(clip).encode_text
        for name, value in vars(clip).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, module in clip.named_children():
            if name != "visual":
                self.add_module(name, module)
        for name, parameter in clip.named_parameters(recurse=False):
            if name not in ("logit_scale", "logit_bias"):
                self.register_parameter(name, parameter)
        for name, buffer in clip.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        features: Tensor = self._encode(self, text)
        return features


def tower_of(model: nn.Module, name: str) -> nn.Module:
    """The image or text tower of a CLIP; it shares the CLIP's weights."""
    if name not in TOWERS:
        raise ArgumentError(f"tower={name!r} is unknown: choose one of {', '.join(TOWERS)}")
    visual = getattr(model, "visual", None)
    if not isinstance(visual, nn.Module) or not hasattr(model, "encode_text"):
        raise ArgumentError(
            f"tower (--tower) {name}: {type(model).__name__} is one model, not a CLIP of two towers"
        )
    if name == "image":
        return visual
    text = getattr(model, "text", None)
    return text if isinstance(text, nn.Module) else TextTower(model).eval()
