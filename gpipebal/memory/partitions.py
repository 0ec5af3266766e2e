"""The walk through a schedule: which moment of a partition has the most memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import BalanceError
from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import (
    AroundLoss,
    around_loss,
    is_loss_inside,
    loss_of_micro_batch,
    new_output,
)
from gpipebal.memory.moment import Moment, height
from gpipebal.memory.waiting import Waiting, number_type
from gpipebal.plan import PeakMemory
from gpipebal.plan.checks import check_chunks
from gpipebal.problem.bounds import check_bounds
from gpipebal.problem.checks import check_flag
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint, Order, check_schedule, order_of
from gpipebal.schedule.actions import KINDS, B, F, R
from gpipebal.timeline import Timeline
from gpipebal.units import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["cells_of", "memory_of_cell", "memory_of_cells", "optimizer_peak", "partition_memory"]


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
    gradients_exist: bool = False,
) -> tuple[PeakMemory, ...]:
    """Predict the peak memory of every partition in a training step.

    Args:
        profile: Costs for one micro-batch.
        bounds: First layer of each partition, then the number of layers.
        chunks: Micro-batches per mini-batch.
        checkpoint: Which micro-batches are recomputed: one mode, or one for each partition.
        schedule: One of those that `GPipe` runs, `gpipebal.schedule.SCHEDULES`.
        loss_inside: Whether the last partition computes the loss, micro-batch by micro-batch, as
            in `GPipe.step`, or the caller does; None: the caller with ``'gpipe'``, and the last
            partition with all others.
        shared_memory: Whether all partitions live in one memory.
        timeline: When the actions of the schedule start and end, which tells what waits for busy
            neighbours; of as many partitions and micro-batches. None: everything waits as long as
            the order of the actions and `GPipe` let it, so that no timing makes more wait.
        gradients_exist: Whether the parameters have gradients before the step, as when those of
            several mini-batches are accumulated. For parameters that several partitions use, the
            result is then an upper bound.

    Returns:
        One `PeakMemory` per partition, in bytes.

    Raises:
        KindError: `profile` or `timeline` is of another kind, or `bounds` is not a list.
        BalanceError: `bounds` are not those of partitions of this chain, a count or flag that makes
            no sense, an unknown checkpoint mode, or not one per partition; or a timeline of another
            step.
        UnsupportedPlanError: an unknown schedule.

    Complexity:
        O(n s + k m log m) for n layers that save s storages each, k partitions and m
        micro-batches; without a timeline O(k m) more for every cut that a skip connection goes
        past.

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
    check_kind("profile", profile, Profile)
    bounds, chunks = check_bounds("bounds", bounds, profile.n_layers), check_chunks(chunks)
    shared_memory = check_flag("shared_memory", shared_memory)
    gradients_exist = check_flag("gradients_exist", gradients_exist)
    if timeline is not None:
        check_kind("timeline", timeline, Timeline)
        _check_timeline(timeline, len(bounds) - 1, chunks)
    schedule = check_schedule(schedule)
    order = order_of(schedule, len(bounds) - 1, chunks, checkpoint)
    inside = is_loss_inside(schedule, loss_inside)
    cells = cells_of(profile, bounds, inside, shared_memory)
    return memory_of_cells(cells, order, timeline, gradients_exist=gradients_exist)


def memory_of_cells(
    cells: Sequence[Cell], order: Order, timeline: Timeline | None = None, *, gradients_exist: bool
) -> tuple[PeakMemory, ...]:
    """Predict the peak memory of partitions whose cells are known; see `partition_memory`."""
    waiting = Waiting(cells, order, timeline, pause=cells[-1].loss is None)
    return tuple(
        _peak_of_row(cell, order, j, waiting, gradients_exist) for j, cell in enumerate(cells)
    )


def memory_of_cell(
    cells: Sequence[Cell], order: Order, j: int, *, gradients_exist: bool
) -> PeakMemory:
    """Predict the peak memory of partition j alone, whatever times its actions take.

    Of later partitions only their ends and the loss count.
    """
    waiting = Waiting(cells, order, None, pause=cells[-1].loss is None)
    return _peak_of_row(cells[j], order, j, waiting, gradients_exist)


def _peak_of_row(
    cell: Cell, order: Order, j: int, waiting: Waiting, gradients_exist: bool
) -> PeakMemory:
    """Walk through row j of an order; return the highest moment."""
    chunks = 1 + int(order.micro_batches.max(initial=0))
    own = slice(*order.offsets[j : j + 2].tolist())
    row = order.kinds[own], order.micro_batches[own]
    moments = _highest_moments(cell, *row, waiting.of_row(j), chunks, gradients_exist)
    highest = max(moments, key=height)
    return replace(
        cell.fixed,
        gradients=highest.gradients + (cell.ties.summed_apart if gradients_exist else 0),
        activations=highest.activations,
        transient=highest.transient,
        outputs=highest.outputs,
        waiting=highest.waiting,
    )


def _check_timeline(timeline: Timeline, n_partitions: int, chunks: int) -> None:
    """Refuse a timeline of another step: a measured one may have fewer micro-batches."""
    forwards = timeline.table.of_kind("F")
    found = timeline.n_partitions, 1 + int(timeline.table.micro_batches[forwards].max(initial=-1))
    if found != (n_partitions, chunks):
        raise BalanceError(
            f"timeline is of another step: {count(found[0], 'partition')} and "
            f"{count(found[1], 'micro-batch')} (expected {n_partitions} and {chunks}).\n"
            f"Fix: give the timeline of these partitions, and chunks={found[1]} if a mini-batch "
            "has so many."
        )


def cells_of(
    profile: Profile, bounds: Sequence[int], loss_inside: bool, shared_memory: bool
) -> list[Cell]:
    """Describe the cells of each partition; see `partition_memory`."""
    loss = loss_of_micro_batch(profile) if loss_inside else None
    return [
        Cell(profile, first, end, loss if end == bounds[-1] else None, shared_memory)
        for first, end in pairwise(bounds)
    ]


def _highest_moments(
    cell: Cell,
    kinds: NDArray[np.integer],
    micro_batches: NDArray[np.integer],
    waits: Sequence[int],
    chunks: int,
    gradients_exist: bool,
) -> Iterator[Moment]:
    """Yield the highest moments of a row up to the last forward, between the phases, and after.

    Cells are alike, so of all actions that do the same only one is walked through.

    Args:
        cell: What the partition's cells hold and need.
        kinds: The actions of the partition, as places in `KINDS`.
        micro_batches: Their micro-batches.
        waits: Bytes that wait while each of them runs.
        chunks: Micro-batches of a mini-batch.
        gradients_exist: Whether the parameters have gradients before the step.
    """
    again = np.zeros(chunks, dtype=bool)
    again[micro_batches[kinds == R]] = True
    backward = kinds == B
    exist = (np.cumsum(backward) - backward > 0) | gradients_exist
    codes = 4 * kinds.astype(np.int64) + 2 * again[micro_batches] + exist
    found, way_of = np.unique(codes, return_inverse=True)
    # A kind; whether the micro-batch is recomputed; whether gradients exist before the action.
    ways = [(KINDS[code // 4], bool(code & 2), bool(code & 1)) for code in found.tolist()]
    own = [cell.highest(*way, chunks) for way in ways]
    # What the micro-batch of an action holds before and after it.
    held = {flag: cell.held(recomputed=flag) for flag in (False, True)}
    new_graph = cell.bytes_of(cell.graph - cell.handed_recomputed) + cell.saved_buffers
    graphs = {False: held[False], True: new_graph}
    before = [{"F": 0, "R": held[flag], "B": graphs[flag]}[kind] for kind, flag, _ in ways]
    after = [{"F": held[flag], "R": new_graph, "B": 0}[kind] for kind, flag, _ in ways]
    # What forwards add to those outputs of the caller's that no cell has, and the loss to these;
    # of losses inside only the numbers are kept.
    output = {flag: new_output(cell, chunks, recomputed=flag) for flag in (False, True)}
    given = [output[flag] if kind == "F" else 0 for kind, flag, _ in ways]
    around = AroundLoss(0, 0, always=cell.of_loss(chunks), after=0)
    if cell.gives_outputs:
        n_again = int(again.sum())
        n_bytes = n_again * output[True] + (chunks - n_again) * output[False]
        around = around_loss(cell, chunks, n_bytes, gradients_exist=gradients_exist)
    callers = cell.of_caller(chunks)
    largest = max(*held.values(), *output.values(), new_graph, *map(sum, own))
    beside = around.always + around.stays + callers + max(waits)
    numbers = number_type(largest * (chunks + 2) + beside)

    def of_each(values: Sequence[int]) -> NDArray[Any]:
        """Look a number up for each action, by its way."""
        of_actions: NDArray[Any] = np.array(values, dtype=numbers)[way_of]
        return of_actions

    left, made = of_each(after), of_each(given)
    in_flight = callers + np.cumsum(left - of_each(before))
    activations = in_flight - left + of_each([moment.activations for moment in own])
    # The place after the last forward.
    turn = int(np.searchsorted(np.cumsum(kinds == F), chunks)) + 1
    outputs = around.always + np.cumsum(made) - made
    outputs[turn:] = around.always + around.stays
    waiting: NDArray[Any] = np.array(waits, dtype=numbers)
    more = of_each([sum(moment) - moment.activations for moment in own])
    total = more + activations + outputs + waiting

    def highest(first: int, last: int) -> Iterator[Moment]:
        """Yield the first of the highest moments of a stretch of actions, if it has any."""
        if first < last:
            most = np.flatnonzero(total[first:last] == total[first:last].max()) + first
            k = int(most[activations[most].argmax()])
            yield own[way_of[k]]._replace(
                activations=int(activations[k]), outputs=int(outputs[k]), waiting=int(waiting[k])
            )

    yield from highest(0, turn)
    if cell.gives_outputs:
        yield Moment(
            int(in_flight[turn - 1]),
            cell.all_gradients if gradients_exist else 0,
            outputs=around.always + around.most,
            # What waits for others' recomputes waits before the first backward too.
            waiting=int(waiting[turn]) if turn < len(waiting) else 0,
        )
    yield from highest(turn, len(total))
    # When the optimizer steps.
    yield Moment(
        callers,
        cell.gradients_of_step,
        optimizer_peak(cell),
        outputs=around.always + around.after,
    )


def optimizer_peak(cell: Cell) -> int:
    """Return the bytes that the optimizer's step needs temporarily; 0 if they are not known."""
    peaks = [layer.optimizer_peak_bytes or 0 for layer in cell.own_layers]
    if cell.profile.step.optimizer_together:
        return sum(peaks)
    carried = [layer.optimizer_carried_bytes for layer in cell.own_layers]
    # The first layer that is stepped finds nothing left over on its device.
    first = next((k for k, n_bytes in enumerate(peaks) if n_bytes), len(peaks))
    in_turn = max(n + (carried[k] if k > first else 0) for k, n in enumerate(peaks))
    groups = cell.profile.step.optimizer_groups
    return max((in_turn, *(sum(group[cell.first : cell.end]) for group in groups)))
