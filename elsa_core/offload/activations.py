"""What a backward needs, in host memory from the forward on: `patch(model, offload="host")`.

As `torch.autograd.graph.save_on_cpu`, but for what gains nothing there: parameters and buffers,
which stay on the device anyway, and small tensors. Copies are queued on the stream of the work
itself, into pinned memory, so that the host does not wait for them. Broadcast dims are not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core.errors import ArgumentError

_LEAST = 2**16  # bytes: below that a copy takes the host longer than the bytes are worth
_PLAIN = (Tensor, nn.Parameter)  # other subclasses stay where they are


class _Saved(NamedTuple):
    """A tensor on the host with its device and shape, or one that stayed, with its version."""

    tensor: Tensor
    device: torch.device | None
    shape: torch.Size
    version: int


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Within it, what autograd saves of a model's forward goes to host memory: tensors that are
    `away`, of `least` bytes or more, but for the model's parameters and buffers.

    A forward that saves something while a CUDA graph is recorded raises ArgumentError.
    """

    def __init__(
        self,
        model: nn.Module,
        away: Callable[[Tensor], bool] = lambda tensor: tensor.device.type not in ("cpu", "meta"),
        least: int = _LEAST,
    ) -> None:
        self._away, self._least = away, least
        held = (*model.parameters(), *model.buffers())
        self._own = {t.untyped_storage().data_ptr() for t in held if type(t) in _PLAIN
                     and t.layout == torch.strided}  # fmt: skip
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        # detached: the packed value must not hold the tensor that it was packed from
        stays = _Saved(tensor.detach(), None, tensor.shape, tensor._version)
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return stays
        if not self._away(tensor) or tensor.nbytes < self._least:
            return stays
        if tensor.untyped_storage().data_ptr() in self._own:
            return stays
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "offload='host' cannot be recorded in a CUDA graph with gradients: patch without it"
            )
        part = stays.tensor
        for dim, step in enumerate(part.stride()):
            if step == 0 and part.shape[dim] > 1:
                part = part.narrow(dim, 0, 1)
        host = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
        host.copy_(part, non_blocking=True)
        return _Saved(host, tensor.device, tensor.shape, 0)


def require_eager() -> None:
    """Make a compiler leave the call of the model, and begin anew within it; with fullgraph=True it
    says that it cannot."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="patch(offload='host') stores what the backward needs outside a compiled program: "
            "leave fullgraph=True out, or patch without offload"
        )


def streams(site: Any, query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """Whether a patched site's attention streams through a GPU: its model is in host memory.

    Those are eager calls without gradients, dropout, sparsity and additive masks, which such a call
    refuses or may refuse, of no backend by name; the others run where the model is.
    """
    if getattr(site, "elsa_sparsity", None) is not None or torch.compiler.is_compiling():
        return False
    here = query.is_cpu and key.is_cpu and site.elsa_backend == "auto"
    if not here or not torch.cuda.is_available():
        return False
    return not (dropout_p or torch.is_grad_enabled()) and (mask is None or mask.dtype == torch.bool)


def _unpack(saved: _Saved) -> Tensor:
    if saved.device is None:
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(saved.shape)} is at version {saved.tensor._version}, "
                f"expected version {saved.version}"
            )
        return saved.tensor
    return saved.tensor.to(saved.device, non_blocking=True).expand(saved.shape)
