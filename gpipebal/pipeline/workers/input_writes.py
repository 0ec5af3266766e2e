"""Writes of layers to the input of their partition, which others read again.

On the first micro-batch of a kind the layers work on copies, and the facts tell which leaves they
write to. A layer may begin to do so later: a dropout in place whose probability is raised, or a
layer with a switch. Where the first module says so beforehand its input is copied in any case. Any
other write is noticed by the tensors' counts of writes, or refused by autograd; then the mini-batch
fails, because the memory may be the caller's, and the partition copies this leaf from then on.

Autograd does not say which tensor it has refused to write to: one of the input, or a parameter of
the layer. So all leaves that it may be are suspected, and copied. If it then refuses a write of the
same layer again it was none of them, and no more is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline.values.microbatch import Packet, uncounted
from gpipebal.pipeline.workers.passes import Facts

__all__ = ["ONE_BY_ONE", "LateWrites", "Watch"]

#: So many layers are looked at one by one: who writes to an input is mostly one of the first. To
#: look at each of many small ones would show in their times.
ONE_BY_ONE = 3

#: What torch says of a write to a leaf of autograd, or to a view of one.
_REFUSAL = "leaf Variable that requires grad is being used in an in-place operation"


class Watch:
    """Counts the writes to the leaves of an input while the layers run.

    Args:
        leaves: The leaves; those that count no writes are left alone.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._counted: dict[int, Tensor] = {
            i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and not x.is_inference()
        }
        self._counts: list[list[int]] = []

    def look(self) -> None:
        """Count before each of the first `ONE_BY_ONE` layers, and at the end."""
        self._counts.append([one._version for one in self._counted.values()])

    def found(self) -> tuple[frozenset[int], int, bool] | None:
        """Return which leaves were written to, and by which layer first; None: none was.

        Returns:
            Indices of the leaves; that of the layer; and whether it may be one after it.
        """
        first, last = self._counts[0], self._counts[-1]
        if first == last:
            return None
        columns = zip(self._counted, first, last, strict=True)
        written = frozenset(i for i, before, after in columns if before != after)
        look = next(k for k, counts in enumerate(self._counts) if counts != first)
        return written, look - 1, look == len(self._counts) - 1


class LateWrites:
    """Leaves of a partition's input that are copied although the facts say nothing of writes.

    Args:
        layers: The partition's layers.
        partition: Which partition it is.
    """

    def __init__(self, layers: Sequence[nn.Module], partition: int) -> None:
        self._layers = layers
        self._partition = partition
        self._noticed: frozenset[int] = frozenset()
        # By layer: leaves one of which it was perhaps refused to write to.
        self._suspected: dict[int, frozenset[int]] = {}

    def copied(self, packet: Packet, facts: Facts | None) -> Collection[int]:
        """Return the indices of the leaves that layers write to, or may write to undetected.

        A write to memory that another value has too would not be seen there if it went to a copy:
        such a leaf is not copied on suspicion, so that the write is noticed, and refused.
        """
        leaves = packet.leaves
        if facts is None:
            return range(len(leaves))
        # Modules that work in place take one tensor.
        late = self._noticed.union(*self._suspected.values())
        if _says_in_place(self._layers[0]):
            late |= {0}
        # Where no writes are counted, an unchanged value once proves nothing.
        return facts.written_inputs | uncounted(leaves) | (late - packet.overlaps)

    def check(self, watch: Watch, describe: Callable[[int], str], *, loss: bool) -> None:
        """Make sure that no layer has written to the input itself.

        Args:
            watch: Has counted the writes.
            describe: Names a layer, given by its index.
            loss: Whether a loss has followed the layers.

        Raises:
            ModelError: one has.
        """
        found = watch.found()
        if found is None:
            return
        written, k, is_last = found
        self._noticed |= written
        more = is_last and (loss or k < len(self._layers) - 1)
        raise ModelError(
            f"an input of partition {self._partition} was written to while {describe(k)} "
            f"{'or one after it ' if more else ''}ran: by it, or by a layer of another partition "
            "that has the same memory. No layer wrote to it when this kind of micro-batch was "
            "first seen.\n"
            "Fix: run the mini-batch again, with the values that it had before: layers write to a "
            "copy from now on. Or let the layer work on a clone()."
        )

    def check_error(
        self,
        error: RuntimeError,
        k: int,
        describe: Callable[[int], str],
        packet: Packet,
        copied: Collection[int],
    ) -> None:
        """Make sure that an error is not that of autograd about a write to the input.

        Args:
            error: What a layer raised.
            k: Index of the layer.
            describe: Names a layer, given by its index.
            packet: The input.
            copied: Indices of the leaves that layers had copies of, to which they may write.

        Raises:
            ModelError: it may be.
        """
        if not _is_refusal(error):
            return
        needs = packet.needs_gradient
        suspected = frozenset(i for i, it_needs in enumerate(needs) if it_needs and i not in copied)
        if not suspected:
            self._suspected.pop(k, None)
            return
        self._suspected[k] = self._suspected.get(k, frozenset()) | suspected
        raise ModelError(
            f"{describe(k)} writes to a tensor that requires a gradient, probably to an "
            f"input of partition {self._partition}: no layer wrote to it when this kind of "
            "micro-batch was first seen.\n"
            "Fix: run the mini-batch again: layers write to a copy from now on. Or let the "
            "layer work on a clone()."
        ) from error


def _is_refusal(error: RuntimeError) -> bool:
    """Tell whether autograd has refused to write to a leaf."""
    with suppress(Exception):  # the error's own class may refuse to be read
        return _REFUSAL in str(error)
    return False


def _says_in_place(layer: nn.Module) -> bool:
    """Tell whether the first module in a layer says that it may write to its input.

    Dropout in place writes where its probability is above zero, and never in evaluation mode.
    """
    while isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
        inner = next(iter(layer._modules.values()), None)
        if inner is None:
            return False
        layer = inner
    return layer.training and layer.__dict__.get("inplace") is True
