"""The operators that run within a `with` block."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """elsa: arguments and first result of each call of elsa's attention; windows: how many of them
    are of windows; names: of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.elsa: list[tuple[tuple[Any, ...], Any]] = []
        self.windows = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name
        self.names.append(name)
        if name.startswith(("elsa::attention", "elsa::window_attention")):
            self.elsa.append((args, out[0]))
            self.windows += "window" in name
        return out

    def others(self, *parts: str) -> list[str]:
        """The operators that are not elsa's and have one of these parts in their names."""
        own = [name for name in self.names if not name.startswith("elsa::")]
        return [name for name in own if any(part in name for part in parts)]
