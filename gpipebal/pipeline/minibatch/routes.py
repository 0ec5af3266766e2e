"""Routes: how values and gradients get from one cell to another.

There is one inbox per partition and direction, with the values of micro-batch i under the key i.
Those of skip connections have an inbox of their own, under the skip's key and i, from which the
partition that pops them takes them, so no partition in between ever sees them::

    forward    caller ─▶ 0 ─▶ 1 ─▶ 2 ─▶ caller        backward  caller ◀─ 0 ◀─ 1 ◀─ 2 ◀─ caller
                         └─── skip ──▶┘                                   └◀── skip ──┘

A partition that is faster than the next one does not run ahead of it without end: before a forward
it waits until fewer than `MOST_WAITING` of its outputs are left to take, and before a backward the
same of its gradients. So what waits needs little memory, however many micro-batches there are. It
costs no time, unless times vary a lot from one micro-batch to the next. Nobody waits in a circle:
neighbours run forwards, and backwards, in one order, and what is next to take needs nothing that is
made after it.

What a partition takes is its own from then on: it empties the list that it found in the inbox, so
that a sender whose call has not yet returned keeps none of the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.recorder import MiniBatchRecord
from gpipebal.pipeline.values.lane import Events, Lane, Span
from gpipebal.pipeline.values.microbatch import Packet, join_packets, split_packet
from gpipebal.pipeline.workers.inbox import Inbox, Stop
from gpipebal.pipeline.workers.partition import Partition
from gpipebal.schedule import MOST_WAITING, Kind
from gpipebal.timeline import COPY_KIND

__all__ = ["Routes"]

#: The gradients of one packet's leaves, and what their reader waits for.
_Gradients = tuple[list[Tensor | None], Events]


class Routes:
    """The inboxes of one mini-batch.

    Partition j reads inbox j of each direction; the caller reads the forward's last inbox and the
    backward's first.

    Args:
        partitions: Partitions of the pipeline, with their skip connections.
        lanes: Their devices and streams.
        stop: Whether the mini-batch has been stopped.
        ledger: Where received tensors are charged; None when memory is not metered.
        record: Where the times of copies go; None when no trace is on.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        lanes: Sequence[Lane],
        stop: Stop,
        ledger: Ledger | None,
        record: MiniBatchRecord | None,
    ) -> None:
        self._partitions = partitions
        self._lanes = lanes
        self._ledger = ledger
        self._record = record
        self._values = [Inbox(stop) for _ in range(len(partitions) + 1)]
        # Partition j reads element j + 1, the caller reads element 0.
        self._gradients = [Inbox(stop) for _ in range(len(partitions) + 1)]
        self._skips, self._skip_gradients = Inbox(stop), Inbox(stop)
        # How many leaves each part of a cell's input has, to divide its gradients.
        self._parts: dict[tuple[int, int], list[int]] = {}

    def close(self) -> None:
        """Wake every waiting thread, after a stop; drop all values."""
        for inbox in (*self._values, *self._gradients, self._skips, self._skip_gradients):
            inbox.wake()

    def wait_for_room(self, j: int, kind: Kind) -> None:
        """Wait until a neighbour has taken enough for partition j to make more.

        Args:
            j: The partition.
            kind: ``'F'`` before it makes an output, ``'B'`` before it makes gradients. The caller
                takes those of the last and of the first partition afterwards, all at once.
        """
        if kind == "F" and j + 1 < len(self._partitions):
            self._values[j + 1].wait_for_room(MOST_WAITING)
        elif kind == "B" and j:
            self._gradients[j].wait_for_room(MOST_WAITING)

    def put_input(self, i: int, packet: Packet) -> None:
        """Give micro-batch `i` to the first partition."""
        self._values[0].put(i, packet)

    def take_input(self, j: int, i: int) -> Packet:
        """Wait for the input of a cell, and bring it to the partition's device."""
        packets = [self._receive(j, i, self._values[j].take(i))]
        incoming = self._partitions[j].incoming
        if not incoming:
            return packets[0]
        packets += [self._receive(j, i, self._skips.take((route.key, i))) for route in incoming]
        self._parts[j, i] = [len(packet.leaves) for packet in packets]
        return join_packets(packets)

    def put_output(self, j: int, i: int, packet: Packet) -> None:
        """Send the output of a cell on, and what it stashed for other partitions."""
        outgoing = self._partitions[j].outgoing
        if outgoing:
            value, *skips = split_packet(packet)
            packet.leaves.clear()
            packet = value
            for route, skip in zip(outgoing, skips, strict=True):
                self._skips.put((route.key, i), skip)
        self._values[j + 1].put(i, packet)

    def take_output(self, i: int) -> Packet:
        """Wait, as the caller, for the output of micro-batch `i`."""
        packet: Packet = self._values[-1].take(i)
        return packet

    def put_output_gradients(self, i: int, gradients: _Gradients) -> None:
        """Give the gradients of micro-batch i's output to the last partition."""
        self._gradients[-1].put(i, gradients)

    def take_gradients(self, j: int, i: int) -> list[Any]:
        """Wait for the gradients of a cell's output, and bring them to the partition's device."""
        gradients, ready = self._gradients[j + 1].take(i)
        received = self._bring(j, i, gradients, ready)
        for route in self._partitions[j].outgoing:
            gradients, ready = self._skip_gradients.take((route.key, i))
            received += self._bring(j, i, gradients, ready)
        return received

    def put_gradients(self, j: int, i: int, gradients: list[Tensor | None], ready: Events) -> None:
        """Send the gradients of a cell's input back to where its parts came from."""
        parts = self._parts.get((j, i))
        if parts is not None:
            for route, size in zip(self._partitions[j].incoming, parts[1:], strict=True):
                part = gradients[parts[0] : parts[0] + size]
                del gradients[parts[0] : parts[0] + size]
                self._skip_gradients.put((route.key, i), (part, ready))
        self._gradients[j].put(i, (gradients, ready))

    def take_input_gradients(self, i: int) -> _Gradients:
        """Wait, as the caller, for the gradients of micro-batch i's input."""
        gradients: _Gradients = self._gradients[0].take(i)
        return gradients

    def _receive(self, j: int, i: int, packet: Packet) -> Packet:
        leaves = self._bring(j, i, packet.leaves, packet.ready, of_caller=not j)
        return packet._replace(leaves=leaves)

    def _bring(
        self, j: int, i: int, leaves: list[Any], ready: Events, *, of_caller: bool = False
    ) -> list[Any]:
        spans: list[Span] | None = None if self._record is None else []
        received = self._lanes[j].receive(leaves, ready, spans, of_caller=of_caller)
        leaves.clear()
        if self._record is not None:
            for started, ended in spans or ():
                self._record.add(j, COPY_KIND, i, started, ended)
        if self._ledger is not None:
            self._ledger.hold(received, j)
        return received
