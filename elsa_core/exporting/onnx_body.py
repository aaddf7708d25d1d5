"""What decides the body of one of elsa's ONNX operators."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Body:
    """What decides a body.

    Attributes:
        op_type: "Attention", "PackedAttention" or "WindowAttention".
        inputs: which inputs the nodes have.
        boolean_mask: the mask is boolean rather than additive.
        causal: some node is causal.
        grouped: some node has fewer key heads than query heads.
        shifted: some node shifts its windows.
        padded: some node pads its image.
        head_first: channels are (heads, 3, head_dim).
        grid: windows take every n-th token.
        standard: may hold the standard `Attention` of opset 23.
    """

    op_type: str
    inputs: tuple[str, ...]
    boolean_mask: bool = False
    causal: bool = False
    grouped: bool = False
    shifted: bool = False
    padded: bool = False
    head_first: bool = False
    grid: bool = False
    standard: bool = False

    def kind(self) -> Body:
        """What nodes of one function must agree in: the rest serves more than asks for it."""
        return replace(self, causal=False, grouped=False, shifted=False, padded=False)

    def joined(self, other: Body) -> Body:
        """A body for the nodes of both, which are of one kind."""
        return replace(
            self,
            causal=self.causal or other.causal,
            grouped=self.grouped or other.grouped,
            shifted=self.shifted or other.shifted,
            padded=self.padded or other.padded,
        )
