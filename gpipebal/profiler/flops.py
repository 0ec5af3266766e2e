"""Floating-point operations of a forward, by torch's own formulas."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopCounter"]


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations of a block.

    The formulas are those of `torch.utils.flop_counter`: of matrix products, convolutions and
    attention. All other operations are as good as free beside them, and count as nothing. torch's
    own `FlopCounterMode` would also set hooks on all modules of the process, and the counts by
    module that those give are not needed here.

    Attributes:
        total: Floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **keywords, out_val=result))
        return result
