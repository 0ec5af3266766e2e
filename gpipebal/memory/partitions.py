"""The walk through a schedule: which moment of a partition has the most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.memory.cell import Cell, Moment, height
from gpipebal.memory.fixed import fixed_memory
from gpipebal.memory.loss import around_loss, loss_of_micro_batch
from gpipebal.memory.waiting import Waiting, number_type
from gpipebal.plan import PeakMemory
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint, check_schedule, order_of
from gpipebal.schedule.actions import KINDS
from gpipebal.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["optimizer_peak", "partition_memory"]

_F, _R, _B = (KINDS.index(kind) for kind in "FRB")


def partition_memory(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str = "gpipe",
    loss_inside: bool | None = None,
    shared_memory: bool = False,
    timeline: Timeline | None = None,
    margin: float = 0.0,
    latest: bool = False,
    gradients_exist: bool = False,
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
        timeline: When the actions of the schedule start and end, which tells what waits for busy
            neighbours; None: everything is taken at once.
        margin: By how much longer than in `timeline` the actions of any one partition may take, as
            a fraction: what waits for it until then counts too.
        latest: Whether everything waits as long as the order of the actions lets it: no clock
            makes more wait. It counts instead of `timeline`.
        gradients_exist: Whether the parameters have gradients before the step, as when those of
            several mini-batches are accumulated. Of parameters that several partitions use, an
            upper bound.

    Returns:
        One `PeakMemory` per partition, in bytes.

    Raises:
        BalanceError: an unknown checkpoint mode, or not one per partition.
        UnsupportedPlanError: an unknown schedule.

    Complexity:
        O(n s + k m log m) for n layers that save s storages each, k partitions and m
        micro-batches; with `latest` O(n s + k m (k + m)).

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
    order = order_of(check_schedule(schedule), len(bounds) - 1, chunks, checkpoint)
    inside = schedule != "gpipe" if loss_inside is None else loss_inside
    loss = loss_of_micro_batch(profile) if inside else None
    cells = [
        Cell(profile, first, end, loss if end == bounds[-1] else None, shared_memory)
        for first, end in pairwise(bounds)
    ]
    waiting = None
    if latest or timeline is not None:
        waiting = Waiting(cells, order, None if latest else timeline, margin, not inside)
    peaks = []
    for j, cell in enumerate(cells):
        own = slice(*order.offsets[j : j + 2].tolist())
        row = order.kinds[own], order.micro_batches[own]
        waits = None if waiting is None else waiting.of_row(j)
        highest = _highest(cell, *row, waits, chunks, gradients_exist)
        peaks.append(
            replace(
                fixed_memory(cell.own_layers),
                gradients=highest.gradients + (cell.ties.summed_apart if gradients_exist else 0),
                activations=highest.activations,
                transient=highest.transient,
                outputs=highest.outputs,
                waiting=highest.waiting,
            )
        )
    return tuple(peaks)


class _Way(NamedTuple):
    """What actions have in common that are walked through alike.

    Attributes:
        kind: ``'F'``, ``'R'`` or ``'B'``.
        again: Whether the micro-batch is recomputed.
        gradients_exist: Whether the parameters have gradients before the action.
    """

    kind: str
    again: bool
    gradients_exist: bool


def _highest(
    cell: Cell,
    kinds: NDArray[np.integer],
    micro_batches: NDArray[np.integer],
    waits: Sequence[int] | None,
    chunks: int,
    gradients_exist: bool,
) -> Moment:
    """Walk through a row of the schedule, and return the moment with the most memory.

    Args:
        cell: What its cells hold and need.
        kinds: The actions of the partition, as places in `KINDS`.
        micro_batches: Their micro-batches.
        waits: What waits while each of them runs; None: nothing.
        chunks: Micro-batches of a mini-batch.
        gradients_exist: Whether the parameters have gradients before the step.
    """
    recomputed = np.zeros(chunks, dtype=bool)
    recomputed[micro_batches[kinds == _R]] = True
    again = recomputed[micro_batches]
    of_new_graph = cell.bytes_of(cell.graph - cell.handed_again) + cell.saved_buffers
    callers = cell.of_caller(chunks)
    # Of losses only the numbers are kept.
    of_output = cell.bytes_of(cell.outputs) if cell.gives_outputs else 0
    in_graph = cell.bytes_of(cell.outputs & cell.graph) if cell.gives_outputs else 0
    target = cell.of_loss(chunks)
    around = None
    if cell.gives_outputs:
        n_recorded = chunks - int(recomputed.sum())
        given = chunks * of_output - n_recorded * in_graph
        around = around_loss(cell, chunks, given, gradients_exist=gradients_exist)
        target = around.target
    # Cells are alike, so one of each kind is walked through.
    backward = kinds == _B
    exist = (np.cumsum(backward) - backward > 0) | gradients_exist
    codes = kinds.astype(np.int64) * 4 + again * 2 + exist
    ways = {
        code: _Way(KINDS[code // 4], bool(code & 2), bool(code & 1))
        for code in np.unique(codes).tolist()
    }
    own = {way: max(_moments(cell, way, chunks), key=height) for way in ways.values()}
    held = {flag: cell.held(again=flag) for flag in (False, True)}
    largest = max([*held.values(), of_new_graph, of_output, *map(sum, own.values())])
    beside = target + callers + max(waits or (0,)) + (around.stays if around else 0)
    numbers = number_type(largest * (chunks + 2) + beside)

    def of_each(value_of: Callable[[_Way], int]) -> NDArray[Any]:
        """Look a number up for each action, by its way."""
        table: NDArray[Any] = np.zeros(4 * len(KINDS), dtype=numbers)
        for code, way in ways.items():
            table[code] = value_of(way)
        return table[codes]

    def before(way: _Way) -> int:
        if way.kind == "F":
            return 0
        return of_new_graph if way.kind == "B" and way.again else held[way.again]

    def after(way: _Way) -> int:
        return {"F": held[way.again], "R": of_new_graph, "B": 0}[way.kind]

    def given_by(way: _Way) -> int:
        """What a forward adds to the outputs; in the caller's hands, and in no graph."""
        if way.kind != "F":
            return 0
        return of_output - (0 if way.again else in_graph)

    # What the other micro-batches hold while an action runs, and what is there behind it.
    less = of_each(before)
    in_flight = callers + np.cumsum(of_each(after) - less)
    activations = in_flight - of_each(after) + of_each(lambda way: own[way].activations)
    made = of_each(given_by)
    outputs = target + np.cumsum(made) - made
    n_forwards = np.cumsum(kinds == _F)
    turn = int(np.searchsorted(n_forwards, chunks)) + 1  # behind the last forward
    if around is not None:
        outputs[turn:] = target + around.stays
    passing: NDArray[Any] = np.zeros(len(kinds), dtype=numbers)
    if waits is not None:
        passing += np.array(waits, dtype=numbers)
    total = of_each(lambda way: sum(own[way]) - own[way].activations)
    total = total + activations + outputs + passing

    def highest(first: int, last: int) -> list[Moment]:
        """Return the first of the highest moments of a stretch, if it has any."""
        if first >= last:
            return []
        most = np.flatnonzero(total[first:last] == total[first:last].max()) + first
        k = int(most[activations[most].argmax()])
        moment = own[ways[int(codes[k])]]
        return [
            moment._replace(
                activations=int(activations[k]), outputs=int(outputs[k]), waiting=int(passing[k])
            )
        ]

    moments = highest(0, turn)
    if around is not None:
        moments.append(
            Moment(
                int(in_flight[turn - 1]),
                cell.all_gradients if gradients_exist else 0,
                outputs=target + around.most,
                # What waits for others' recomputes waits in front of the first backward too.
                waiting=int(passing[turn]) if turn < len(passing) else 0,
            )
        )
    moments += highest(turn, len(kinds))
    outputs_after = target + (around.after if around is not None else 0)
    moments.append(
        Moment(callers, cell.gradients_of_step, optimizer_peak(cell), outputs=outputs_after)
    )
    return max(moments, key=height)


def optimizer_peak(cell: Cell) -> int:
    """Return the bytes that the optimizer's step needs for a moment; 0 if it is not known."""
    peaks = [layer.optimizer_peak_bytes or 0 for layer in cell.own_layers]
    if cell.profile.step.optimizer_together:
        return sum(peaks)
    carried = [layer.optimizer_carried_bytes for layer in cell.own_layers]
    # The first that is stepped finds nothing that is left on its device.
    first = next((k for k, n_bytes in enumerate(peaks) if n_bytes), len(peaks))
    return max(n + (carried[k] if k > first else 0) for k, n in enumerate(peaks))


def _moments(cell: Cell, way: _Way, chunks: int) -> Iterator[Moment]:
    """Walk through one action of one cell, with what this cell holds alone."""
    if way.kind == "B":
        kept = cell.kept_of(chunks, again=way.again)
        return cell.backward(again=way.again, gradients_exist=way.gradients_exist, kept=kept)
    if way.kind == "R":
        return cell.recompute(gradients_exist=way.gradients_exist)
    return cell.forward(records=not way.again, gradients_exist=way.gradients_exist)
