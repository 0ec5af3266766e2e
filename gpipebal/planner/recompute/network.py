"""A partition as a network: which of its layers to recompute, as the knapsack's question.

Nodes are places between layers. What a step adds to what is held depends on what is held already,
because layers share storages. So a node also knows which of the storages that matter after it are
held. A step is a layer whose graph is kept, or a run of layers that is recomputed.

`gpipebal.memory` walks through a partition in four ways: forwards and backwards, with and without
existing gradients. What a moment of such a walk needs has three parts: what is held up to there,
what the layer itself needs, and a rest that does not depend on what is recomputed. The rest is
taken from a walk through the partition as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice, takewhile

from gpipebal.memory.cell import Cell, Storages
from gpipebal.memory.layer_peaks import first_forward_peak
from gpipebal.memory.loss import AroundLoss, around_loss
from gpipebal.memory.partitions import optimizer_peak
from gpipebal.memory.recomputed_runs import (
    InRun,
    given_to,
    leaves_input,
    recomputed_from,
    uses_skips,
)
from gpipebal.planner.runs.moments import RowMoment
from gpipebal.profile import LayerProfile
from gpipebal.solvers.knapsack.network import Arc, Ceiling, Network

__all__ = ["partition_network"]

#: Walks: a kind of action, and whether gradients exist.
_WALKS = (("F", False), ("F", True), ("B", False), ("B", True))
_Node = tuple[int, Storages]


def partition_network(
    cell: Cell,
    moments: Sequence[RowMoment],
    chunks: int,
    costs: Sequence[int],
    *,
    gradients_exist: bool = False,
) -> Network:
    """List all ways to recompute layers of one partition.

    Args:
        cell: The memory of the partition's cells if nothing is recomputed.
        moments: Those of its row of the schedule, without recomputes, that can be the highest.
        chunks: Micro-batches of a mini-batch.
        costs: The cost of recomputing each layer of the partition, a whole number.
        gradients_exist: Whether the parameters have gradients before the step.

    Returns:
        The network; a step's name is the run that it recomputes, or None. Its peaks do not include
        what may wait for busy neighbours.

    Complexity:
        O(n^2 s) for n layers and s sets of shared storages that can be held at one place.
    """
    parts = _Parts(cell, chunks, costs)
    n_layers = len(cell.layers)
    arcs: dict[Hashable, list[Arc]] = {}
    nodes: list[dict[_Node, None]] = [{} for _ in range(n_layers + 1)]
    nodes[0][0, frozenset()] = None
    for place in range(n_layers):
        for node in nodes[place]:
            arcs[node] = []
            for end, arc in parts.steps(node):
                arcs[node].append(arc)
                nodes[end[0]][end] = None
    return Network(
        arcs,
        {
            end: _ceilings(cell, moments, chunks, parts.held(end), gradients_exist)
            for end in nodes[n_layers]
        },
        held=cell.bytes_of(cell.entering - cell.handed),
        n_walks=len(_WALKS),
    )


class _Parts:
    """The steps through one partition; see `partition_network`."""

    def __init__(self, cell: Cell, chunks: int, costs: Sequence[int]) -> None:
        self._cell, self._costs, self._kept = cell, costs, cell.kept_of(chunks)
        self._rests = [self._rest(*walk) for walk in _WALKS]
        self._given = [given_to(cell.profile, cell.first + k) for k in range(len(cell.layers))]
        self._runs = self._find_runs()
        self._matters = self._what_matters()

    def _rest(self, kind: str, gradients_exist: bool) -> list[int]:
        """Return for each layer what a moment needs besides what is held and the layer's own."""
        cell = self._cell
        if kind == "F":
            moments = list(cell.forward(records=True, gradients_exist=gradients_exist))
            copies = [cell.copies_until(k) for k in range(len(moments))]
            return [moment.gradients + n for moment, n in zip(moments, copies, strict=True)]
        moments = list(cell.backward(recomputed=False, gradients_exist=gradients_exist))[::-1]
        return [
            sum(moment) - moment.activations - cell.backward_peak(k, layer, gradients_exist)
            for k, (moment, layer) in enumerate(zip(moments, cell.layers, strict=True))
        ]

    def _find_runs(self) -> list[list[InRun]]:
        """Return for each place the layers that may be in a run that begins there."""
        cell = self._cell
        barred = uses_skips(cell.profile)
        found: list[list[InRun]] = []
        for first in range(cell.first, cell.end):
            may_be_in = (
                layer not in barred and leaves_input(cell.profile, first, layer)
                for layer in range(first, cell.end)
            )
            longest = sum(1 for _ in takewhile(bool, may_be_in))
            found.append(list(islice(recomputed_from(cell.profile, first), longest)))
        return [*found, *([] for _ in cell.layers[len(found) :])]

    def _what_matters(self) -> list[Storages]:
        """Return for each place the storages that matter after it if they are held."""
        cell = self._cell
        matters = (cell.received - cell.entering) | cell.handed | cell.outputs
        found = [matters]
        for k in reversed(range(len(cell.layers))):
            matters = matters.union(cell.layers[k].saved, self._given[k], cell.alive[k])
            found.append(matters)
        return found[::-1]

    def held(self, node: _Node) -> Storages:
        """Return the storages that are known to be held at a node."""
        return self._cell.entering | node[1]

    def steps(self, node: _Node) -> Iterator[tuple[_Node, Arc]]:
        """Yield the steps from a node, each with the node that it leads to."""
        place, _ = node
        cell = self._cell
        layer = cell.layers[place]
        held = self.held(node)
        saved = frozenset(layer.saved)
        forward = self._forward(place, layer, held)
        backward = self._backward(place, layer, self._bytes(saved - held), held | saved)
        yield self._step(node, place + 1, saved, 0, (*forward, *backward))
        forward = backward = (0, 0)
        cost = 0
        given = self._given[place]
        added = self._bytes(given - held)
        before, more = held, 0
        for k, costs in enumerate(self._runs[place], start=place):
            forward = _higher(forward, self._forward(k, costs.as_last, before, more))
            # The backward of the run's last layer is the first.
            there = held | given
            last = _higher(backward, self._backward(k, costs.as_last, added, there))
            backward = _higher(backward, self._backward(k, costs.before_others, added, there))
            before, more = held | given, added
            cost += self._costs[k]
            run = range(cell.first + place, cell.first + k + 1)
            yield self._step(node, k + 1, given, cost, (*forward, *last), run, costs.copies)

    def _forward(
        self, k: int, layer: LayerProfile, held: Storages, added: int = 0
    ) -> tuple[int, int]:
        """Return what a forward needs at one layer beyond what the step finds.

        Args:
            k: The layer's place.
            layer: Its costs.
            held: Storages that are held before it.
            added: Bytes of those that the step added.
        """
        cell, (without, exist) = self._cell, self._rests[:2]
        peak = layer.forward_peak_bytes
        if not k:
            peak = first_forward_peak(cell.profile, cell.first, layer, records=True)
        needed = added + self._beyond(held) + peak
        needed += cell.bytes_of(cell.alive[k] - (cell.received | held))
        return without[k] + needed, exist[k] + needed

    def _backward(self, k: int, layer: LayerProfile, added: int, held: Storages) -> tuple[int, int]:
        """Return the same for a backward, where the step added `added` bytes up to this layer.

        Includes outputs that the caller keeps all the time, whether or not a graph will hold them.
        """
        added += self._cell.bytes_of(self._kept - held)
        without, exist = (
            rest[k] + added + self._cell.backward_peak(k, layer, gradients_exist)
            for rest, (_, gradients_exist) in zip(self._rests[2:], _WALKS[2:], strict=True)
        )
        return without, exist

    def _beyond(self, held: Storages) -> int:
        """Return the bytes that a forward holds and the cell does not, or is not charged with."""
        cell = self._cell
        return cell.bytes_of((cell.received - held) | (cell.handed & held))

    def _bytes(self, storages: Storages) -> int:
        """Add up storages that a cell is charged with."""
        return self._cell.bytes_of(storages - self._cell.handed)

    def _step(
        self,
        node: _Node,
        end: int,
        saved: Storages,
        cost: int,
        peaks: Sequence[int],
        run: range | None = None,
        copies: int = 0,
    ) -> tuple[_Node, Arc]:
        held = self.held(node)
        known = (held | saved) - self._cell.entering
        there = (end, known & self._matters[end])
        # Copies of buffers are there from the beginning of the step on.
        kept = self._bytes(saved - held) + copies
        return there, Arc(there, cost, kept, tuple(peak + copies for peak in peaks), run)


def _ceilings(
    cell: Cell,
    moments: Sequence[RowMoment],
    chunks: int,
    held: Storages,
    gradients_exist: bool,
) -> list[Ceiling]:
    """Return the peaks of a step whose cells hold these storages at their ends."""
    fixed = cell.fixed.total + cell.of_caller(chunks)
    fixed += cell.ties.summed_apart if gradients_exist else 0
    # A loss inside passes nothing on, and its output is not counted while it waits.
    less = 0 if cell.loss is None else cell.bytes_of((cell.outputs & held) - cell.handed)
    output, around = 0, AroundLoss(0, 0, always=cell.of_loss(chunks), after=0)
    if cell.gives_outputs:
        output = cell.bytes_of(cell.outputs - held)
        around = around_loss(cell, chunks, chunks * output, gradients_exist=gradients_exist)
    kept = cell.bytes_of(cell.kept_of(chunks) - held)
    found = []
    for moment in moments:
        kind, exist, times = moment.kind, moment.gradients_exist, moment.n_graphs
        walk, beside = None, fixed + around.always - times * less
        if kind == "L":
            beside += around.most + (cell.all_gradients if exist else 0)
        elif kind == "O":
            beside += around.after + cell.gradients_of_step + optimizer_peak(cell)
        else:
            walk = _WALKS.index((kind, exist))
            beside += around.stays if moment.forwards_done else times * output
            # Walks through backwards include what the caller keeps.
            beside -= kept if kind == "B" else 0
        found.append(Ceiling(walk, times, beside))
    return found


def _higher(one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
