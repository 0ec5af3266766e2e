"""What a verification has compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Agreement", "VerifyReport"]


@dataclass(frozen=True)
class Agreement:
    """How well the values of one kind agree.

    Attributes:
        count: How many were compared.
        difference: The largest difference, as a fraction of the tensor's largest value; 0 if all
            are the same to the bit.
        name: Which one differs most; empty if none differs.
    """

    count: int
    difference: float
    name: str

    @classmethod
    def of(cls, differences: Mapping[str, float]) -> Self:
        """Summarise relative differences, given by name."""
        name = max(differences, key=lambda name: differences[name], default="")
        largest = differences.get(name, 0.0)
        return cls(len(differences), largest, name if largest else "")

    def __str__(self) -> str:
        if not self.name:
            return "the same to the bit"
        return f"largest relative difference {self.difference:.2g} ({self.name})"


@dataclass(frozen=True)
class VerifyReport:
    """A finding that a pipeline does what the plain model does, and what was compared for it.

    The plain model got one micro-batch after the other. A layer whose result depends on the number
    of rows, such as batch normalisation in training, may give other numbers for the whole
    mini-batch.

    Attributes:
        runs: The runs of the pipeline that were compared with the plain model's.
        micro_batches: Micro-batches of each run.
        balance: Number of layers in each partition.
        outputs: Tensors of the output.
        losses: The loss; none without a `loss_fn`.
        gradients: Gradients of parameters and of the input.
        buffers: Buffers after the run.
        without_gradients: Why no gradients were compared; empty if some were.
    """

    runs: tuple[str, ...]
    micro_batches: int
    balance: list[int] = field(hash=False)
    outputs: Agreement
    losses: Agreement
    gradients: Agreement
    buffers: Agreement
    without_gradients: str

    def __str__(self) -> str:
        alike = " over the same micro-batches" if self.micro_batches > 1 else ""
        lines = [
            f"The pipeline does what the plain model does{alike}: {', '.join(self.runs)}; "
            f"micro-batches={self.micro_batches}, balance={self.balance}"
        ]
        for name in ("outputs", "losses", "gradients", "buffers"):
            agreement: Agreement = getattr(self, name)
            if name == "gradients" and self.without_gradients:
                lines.append(f"  gradients: none, {self.without_gradients}")
            elif agreement.count:
                lines.append(f"  {name}: {agreement.count}, {agreement}")
        return "\n".join(lines)
