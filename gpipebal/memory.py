"""Predicted peak memory of the partitions of a chain.

A cell (one micro-batch in one partition) holds its input, and from its forward or recompute until
its backward a graph: what its layers save, as a union of storages. How many cells are in flight
at once is up to the schedule, so each partition's row of it is walked, action by action::

    gpipe  never                  m graphs
           except_last, always    m - 1 inputs, and the graph of the one that is at work
    1f1b   partition j of n       min(m, n - j) graphs; or as many inputs, of which one has a graph

with parameters, gradients, buffers and optimizer state beside them. Inside an action the layers
are walked too. The peak is mostly in a backward: in the first, where the gradients of the
parameters come into being one by one (``zero_grad`` frees them between steps), or in the next,
where all of them exist, and what a layer adds to them lives beside them for a moment.

Some things live longer than they are needed. The mini-batch's input is the caller's, and there all
the time. A backward keeps the gradient that it started from until it ends: the engine was called
with it. With ``loss(pipe(x)).backward()`` the last partition has the outputs of all micro-batches,
then a copy of them in one piece, then what the loss adds, and until the end their gradient and the
loss. With `GPipe.step` the loss is one more layer of the last partition.

Where two neighbours share one memory (partitions on one CPU), the tensor at the cut exists once.
It is charged to the partition that receives it, unless the sender makes it anew in a recompute.
What waits for a busy neighbour is charged to nobody, and skip connections between partitions are
not counted: a profile does not tell of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipebal.plan import PeakMemory
from gpipebal.profile import LayerProfile, Profile
from gpipebal.schedule import Action, Checkpoint, make_schedule

__all__ = ["partition_memory"]

#: Storages, as indices into `Profile.storages`.
_Storages = frozenset[int]


def partition_memory(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str = "gpipe",
    loss_inside: bool | None = None,
    shared_memory: bool = False,
) -> tuple[PeakMemory, ...]:
    """Predict the peak memory of every partition in a training step.

    Args:
        profile: Costs for one micro-batch.
        bounds: First layer of each partition, then the number of layers.
        chunks: Micro-batches per mini-batch.
        checkpoint: Which micro-batches are recomputed: one mode, or one for each partition.
        schedule: ``'gpipe'`` or ``'1f1b'``.
        loss_inside: Whether the last partition computes the loss, micro-batch by micro-batch, as
            in `GPipe.step`, or the caller does; None: the caller with ``'gpipe'``, and the last
            partition with schedules that turn back before the last forward.
        shared_memory: Whether all partitions live in one memory.

    Returns:
        One `PeakMemory` per partition, in bytes.

    Raises:
        BalanceError: an unknown checkpoint mode, or not one per partition.
        UnsupportedPlanError: an unknown schedule.

    Complexity:
        O(n s + k m) for n layers that save s storages each, k partitions and m micro-batches.

    Example:
        >>> profile = Profile.from_costs([1.0, 1.0], saved_bytes=[100, 100], chunks=8)
        >>> for schedule in ("gpipe", "1f1b"):
        ...     peaks = partition_memory(
        ...         profile, (0, 1, 2), chunks=8, checkpoint="never", schedule=schedule
        ...     )
        ...     print([peak.activations for peak in peaks])
        [800, 800]
        [200, 100]
    """
    n_partitions = len(bounds) - 1
    inside = schedule != "gpipe" if loss_inside is None else loss_inside
    loss = _loss_of(profile)
    peaks = []
    for j, row in enumerate(make_schedule(schedule, n_partitions, chunks, checkpoint).rows):
        last = j == n_partitions - 1
        layers = profile.layers[bounds[j] : bounds[j + 1]]
        received = frozenset(profile.layers[bounds[j] - 1].outputs if j else profile.inputs)
        partition = _Partition(
            profile,
            (*layers, loss) if last and inside else layers,
            received=received,
            handed=frozenset(layers[-1].outputs if shared_memory and not last else ()),
            callers=frozenset() if j else received,
            loss=loss if last and not inside else None,
            target_bytes=loss.buffer_bytes if last and inside else 0,
            last=last,
            chunks=chunks,
        )
        highest = partition.highest(row)
        states = [layer.optimizer_bytes for layer in layers]
        peaks.append(
            PeakMemory(
                parameters=sum(layer.parameter_bytes for layer in layers),
                gradients=highest.gradients,
                buffers=sum(layer.buffer_bytes for layer in layers),
                optimizer=None if None in states else sum(b for b in states if b is not None),
                activations=highest.activations,
                transient=highest.transient,
                outputs=highest.outputs,
            )
        )
    return tuple(peaks)


class _Moment(NamedTuple):
    """Bytes at one moment of a step, beside parameters, buffers and optimizer state."""

    activations: int
    gradients: int = 0
    transient: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class _Partition:
    """What decides the memory of one partition.

    Attributes:
        profile: Costs of all layers.
        layers: Its layers, and behind them the loss if it computes that.
        received: Storages of a cell's input.
        handed: Storages of a cell's output that are charged to the partition that gets them.
        callers: Storages of a cell's input that are the caller's, and there all the time.
        loss: What the caller computes behind it; None: nothing.
        target_bytes: What the loss inside it is given for each micro-batch; the caller's too.
        last: Whether it is the last one.
        chunks: Micro-batches of a mini-batch.
    """

    profile: Profile
    layers: Sequence[LayerProfile]
    received: _Storages
    handed: _Storages
    callers: _Storages
    loss: LayerProfile | None
    target_bytes: int
    last: bool
    chunks: int

    def highest(self, row: Sequence[Action]) -> _Moment:
        """Walk through a row of the schedule, and return the moment with the most memory."""
        recomputed = {action.micro_batch for action in row if action.kind == "R"}
        # What a cell holds: its input, its graph, or the graph that its recompute made.
        of_input = self._bytes(self.received)
        of_graph = self._bytes(self._graph - self.handed)
        of_new_graph = self._bytes(self._graph)
        in_flight = self.chunks * self.profile.bytes_of(self.callers)
        outputs = self.chunks * self.target_bytes
        moments: list[_Moment] = []
        found: dict[tuple[str, bool, bool], _Moment] = {}
        n_forwards = 0
        gradients_exist = False
        for _, kind, i in row:
            again = i in recomputed
            before, after = {
                "F": (0, of_input if again else of_graph),
                "R": (of_input, of_new_graph),
                "B": (of_new_graph if again else of_graph, 0),
            }[kind]
            key = (kind, again, gradients_exist)
            if key not in found:
                # Cells are alike, so one of each kind is walked through.
                found[key] = max(self._moments(*key), key=_height)
            own = found[key]
            others = in_flight - before
            moments.append(own._replace(activations=others + own.activations, outputs=outputs))
            in_flight = others + after
            gradients_exist = gradients_exist or kind == "B"
            if kind == "F" and self.loss is not None:
                n_forwards += 1
                outputs += self._bytes(self._outputs if again else self._outputs - self._graph)
                if n_forwards == self.chunks:
                    most, outputs = self._around_loss(self.loss, outputs)
                    moments.append(_Moment(in_flight, outputs=most))
        return max(moments, key=_height)

    def _around_loss(self, loss: LayerProfile, outputs: int) -> tuple[int, int]:
        """Find what the caller adds between the phases, at most, and what stays of it.

        Args:
            loss: The loss over one micro-batch; over the mini-batch all of it is as many times
                larger as there are micro-batches.
            outputs: Bytes of the outputs of all micro-batches.
        """
        m, output_bytes = self.chunks, self.layers[-1].output_bytes
        # One micro-batch is the mini-batch; several are copied into one piece.
        joined = m * output_bytes if m > 1 else outputs
        gather = outputs + (joined if m > 1 else 0)
        # The output lives while the loss runs, and on until its backward if that needs it.
        forward = joined + m * loss.forward_peak_bytes
        saved = self.profile.bytes_of(set(loss.saved) - (self._graph if m == 1 else set()))
        backward = m * (saved + loss.output_bytes + loss.backward_peak_bytes)
        # The gradient of the output, and the loss: its number may have a large storage.
        stays = m * (output_bytes + loss.output_bytes)
        return max(gather, forward, backward), stays

    def _moments(self, kind: str, again: bool, gradients_exist: bool) -> Iterator[_Moment]:
        """Walk through one action of one cell, with what this cell holds alone.

        Args:
            kind: What the action does.
            again: Whether the cell is one that is recomputed.
            gradients_exist: Whether the parameters have gradients before.
        """
        if kind == "B":
            # A recompute makes its output anew, and nobody else holds that.
            return self._backward(frozenset() if again else self.handed, gradients_exist)
        return self._forward(kind == "R" or not again, gradients_exist)

    def _forward(self, records: bool, gradients_exist: bool) -> Iterator[_Moment]:
        """Walk through a forward or a recompute; `records`: it makes a graph."""
        gradients = self._all_gradients if gradients_exist else 0
        seen = set(self.received)
        held = self._bytes(self.received)
        given = self.received
        for layer in self.layers:
            # The input of a layer lives while it runs, even if nothing saves it.
            live = self._bytes(given - seen)
            yield _Moment(held, gradients, live + layer.forward_peak_bytes)
            if records:
                held += self._bytes(frozenset(layer.saved) - seen)
                seen.update(layer.saved)
            given = frozenset(layer.outputs)

    def _backward(self, elsewhere: _Storages, gradients_exist: bool) -> Iterator[_Moment]:
        """Walk through a backward; what is in `elsewhere` is charged to a neighbour."""
        gradients = self._all_gradients if gradients_exist else 0
        seen = set(self.received | elsewhere)
        held = self._bytes(self.received - elsewhere)
        held_up_to = []
        for layer in self.layers:
            held += self._bytes(frozenset(layer.saved) - seen)
            seen.update(layer.saved)
            held_up_to.append(held)
        # The gradient of a tensor is as large as the tensor. That of the last partition's output
        # is the caller's, or that of the loss: a number.
        started_from = 0 if self.last else self.layers[-1].output_bytes
        flowing = 0
        for k in reversed(range(len(self.layers))):
            layer = self.layers[k]
            transient = started_from + flowing + _backward_peak(layer, gradients_exist)
            yield _Moment(held_up_to[k], gradients, transient)
            if not gradients_exist:
                gradients += layer.gradient_bytes
            flowing = self.layers[k - 1].output_bytes

    @cached_property
    def _graph(self) -> _Storages:
        return self.received.union(*(layer.saved for layer in self.layers))

    @property
    def _outputs(self) -> _Storages:
        return frozenset(self.layers[-1].outputs)

    @cached_property
    def _all_gradients(self) -> int:
        return sum(layer.gradient_bytes for layer in self.layers)

    def _bytes(self, storages: _Storages) -> int:
        return self.profile.bytes_of(storages - self.callers)


def _height(moment: _Moment) -> tuple[int, int]:
    """Order moments by their sum; of equal ones that with more activations says more."""
    return sum(moment), moment.activations


def _backward_peak(layer: LayerProfile, gradients_exist: bool) -> int:
    """Return the largest memory of a layer's backward beyond what was there at its start.

    Where gradients exist this is an upper bound: of a layer with several parameters, what is
    added to one gradient is gone before the next is made.
    """
    return layer.backward_peak_bytes


def _loss_of(profile: Profile) -> LayerProfile:
    """Describe the loss over one micro-batch as a layer that saves what it is given."""
    last = profile.layers[-1]
    # Measured for the mini-batch of the profile; it grows with the rows. Not measured: what is
    # saved, its gradient, and as much again on the way.
    n_bytes = profile.step.loss_bytes
    needs = 3 * last.output_bytes if n_bytes is None else n_bytes // profile.chunks
    return LayerProfile(
        name="loss",
        kind="loss",
        forward_time=0.0,
        backward_time=0.0,
        recompute_time=0.0,
        saved=last.outputs,
        backward_peak_bytes=max(last.output_bytes, needs - last.output_bytes),
    )
