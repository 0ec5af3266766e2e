"""The data of a study: a mini-batch, its target, and how both are divided and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.numbers import Arrived
from gpipebal.profiler.chain.outputs import Outputs
from gpipebal.profiler.chain.value import Value
from gpipebal.units import count

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """A mini-batch with its target, which gives micro-batches of any size.

    Attributes:
        sample: What the chain is called with.
        sizes: Rows of its micro-batches, the largest first.
        target: Its target, in a measurement on the device; None: it has none.
        out_dims: Dimension along which each tensor of the output has its rows, as `GPipe` takes it.
    """

    sample: Batch
    sizes: Sequence[int]
    target: Batch | None = None
    out_dims: Any = 0

    @property
    def rows(self) -> int:
        """Rows of the mini-batch."""
        return sum(self.sizes)

    @property
    def joined_dims(self) -> Any:
        """Dimension along which outputs are joined; None: one micro-batch's is the mini-batch's."""
        return self.out_dims if len(self.sizes) > 1 else None

    def start_of(self, rows: int, device: torch.device) -> Value:
        """Return the chain's input for a micro-batch of a number of rows."""
        with memory_for(f"a micro-batch of {count(rows, 'row')}"):
            return Value.of(self.sample.first(rows).copied_to(device).value)

    def of_sizes(self, sizes: Sequence[int], device: torch.device) -> Data:
        """Return a mini-batch of micro-batches of other sizes, copied to a device; rows repeat."""
        sample = self.sample.repeated(sum(sizes), self.rows).copied_to(device)
        return replace(self, sample=sample, sizes=sizes, target=self._target_of(sizes))

    def target_of(self, sizes: Sequence[int]) -> Any:
        """Return the target of such a mini-batch, as a loss takes it."""
        with memory_for("the target"):
            target = self._target_of(sizes)
            return None if target is None else target.value

    def first_target(self, sizes: Sequence[int]) -> Any:
        """Return the target of its first micro-batch, as a loss takes it.

        Raises:
            ModelError: the target cannot be divided.
            BalanceError: it has other rows than the sample.
        """
        with memory_for("the target"):
            target = self._target_of(sizes)
            return None if target is None else target.first_of(sizes).value

    def dims(self) -> dict[str, Any]:
        """Return the dimensions as a `GPipe` takes them."""
        in_dims, keyword_dims = self.sample.as_given
        return {"in_dims": in_dims, "keyword_dims": keyword_dims, "out_dims": self.out_dims}

    def outputs(self, first: Arrived, sizes: Sequence[int]) -> Outputs:
        """Return the outputs of a mini-batch, derived from that of its first micro-batch."""
        return Outputs(first, sizes, self.out_dims)

    def _target_of(self, sizes: Sequence[int]) -> Batch | None:
        return None if self.target is None else self.target.repeated(sum(sizes), self.rows)
