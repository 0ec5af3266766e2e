"""A pass of one micro-batch through the layers of a partition: what goes into it, and comes out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gpipebal.pipeline.layers.buffers import Kept
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.randomness.randomness import OwnRandomness

__all__ = ["ForwardResult", "Pass", "Tail"]


class Tail(NamedTuple):
    """What runs after the layers of the last partition, if the pipeline computes the loss.

    Attributes:
        kind: Names the loss; another may behave differently.
        run: Returns the loss of an output.
        asks_for_a_graph: Whether it may compute otherwise if no graph is recorded.
    """

    kind: Hashable
    run: Callable[[Any], Tensor]
    asks_for_a_graph: bool


class Pass(NamedTuple):
    """What one pass of a micro-batch through the layers depends on.

    Attributes:
        kind: Kind of the micro-batch, from `kind_of`.
        state: Settings of the caller.
        randomness: Random numbers of the micro-batch.
        tail: Runs after the layers.
        marks: Receives the number of autograd's next node before each layer; None: torch does not
            tell.
    """

    kind: Hashable
    state: CallerState
    randomness: OwnRandomness
    tail: Tail | None
    marks: list[int | None]


@dataclass
class ForwardResult:
    """Outputs of a run of a partition, as leaves, still in the graph if one was recorded.

    Attributes:
        inputs: Leaves of the input, as they are in the graph if one was recorded.
        leaves: Leaves of the output.
        structure: Their pytree.
        needs_gradient: Which of them need a gradient.
        kept: What a recompute has to know of the layers; None if there will be none.
        overlaps: Indices of leaves in the memory of an input that another value on its way shares.
    """

    inputs: list[Any]
    leaves: list[Any]
    structure: Any
    needs_gradient: list[bool]
    kept: Kept | None
    overlaps: frozenset[int]
