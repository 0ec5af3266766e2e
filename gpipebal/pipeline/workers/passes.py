"""Passes of micro-batches through the layers of a partition, and facts about each kind of these.

Facts are found out on the first micro-batch of a kind, and used for the others. A kind consists of
the modes of the layers, the form of the input, the caller's settings, whether the input is read
again, and the loss that follows. Layers and losses may behave differently if one of these is
different.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gpipebal.pipeline.layers.buffers import Kept
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.randomness.randomness import OwnRandomness
from gpipebal.pipeline.values.microbatch import Packet
from gpipebal.pipeline.values.tensors import are_equal, has_storage, version_of

__all__ = ["MOST_KINDS", "Facts", "ForwardResult", "Pass", "Tail", "kind_of", "was_written"]


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


#: Kinds of micro-batches that are remembered at one time.
MOST_KINDS = 64


@dataclass
class Facts:
    """What was found out about one kind of micro-batch.

    Attributes:
        written_inputs: Indices of the leaves of the input that the layers write to.
        outputs_need_gradient: For each leaf of the output, whether it needs a gradient.
    """

    written_inputs: frozenset[int]
    outputs_need_gradient: tuple[bool, ...]


def kind_of(
    mode: Hashable, packet: Packet, state: CallerState, *, protect: bool, loss: Hashable
) -> Hashable:
    """Name the kind of a micro-batch.

    Args:
        mode: The state of the layers, from `Modules.mode`.
        packet: The input.
        state: Settings of the caller.
        protect: Whether the input must stay as it is: only then is a write to it noticed in
            inference mode, where tensors count no versions.
        loss: Names the loss that follows the layers; None: there is none.
    """
    kinds = [_form(leaf) if isinstance(leaf, Tensor) else _name(leaf) for leaf in packet.leaves]
    return (
        mode,
        None if packet.structure.is_leaf() else str(packet.structure),
        tuple(kinds),
        tuple(packet.needs_gradient),
        state.autocast,
        state.inference_mode,
        state.grad_enabled,
        protect,
        loss,
    )


def _form(tensor: Tensor) -> Hashable:
    """Describe a tensor by what decides which operations give views, and which copies."""
    if not has_storage(tensor):
        return tensor.dtype, tensor.dim(), tensor.numel() == 0
    return tensor.dtype, tuple([min(size, 2) for size in tensor.shape]), tensor.is_contiguous()


def _name(leaf: Any) -> Hashable:
    """Name a leaf that is not a tensor: a switch by its value, anything else by its type.

    A number is not named by its value: one that counts the steps would make each step a kind.
    """
    if isinstance(leaf, (bool, str)):
        return (type(leaf).__name__, leaf)
    return type(leaf).__qualname__


def was_written(before: Any, leaf: Any, version: int | None) -> bool:
    """Tell whether a leaf has been written to.

    Args:
        before: The leaf that the layers were meant to get.
        leaf: What the layers were given: `before`, or a copy of it.
        version: What `version_of(leaf)` returned before they ran.
    """
    if not isinstance(leaf, Tensor):
        return False
    if version is None:
        # If the tensor counts no versions, `leaf` is a copy wherever `before` is read later.
        return leaf is not before and not are_equal(leaf, before)
    return version_of(leaf) != version
