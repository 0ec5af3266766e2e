"""The walk through a schedule: which moment of a partition has the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpipebal.memory.cell import Cell, Moment, height
from gpipebal.memory.loss import around_loss, loss_of_micro_batch
from gpipebal.memory.waiting import Waiting
from gpipebal.plan import PeakMemory
from gpipebal.profile import Profile
from gpipebal.schedule import Action, Checkpoint, make_schedule
from gpipebal.timeline import Timeline

__all__ = ["partition_memory"]


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
    latest: bool = False,
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
        latest: Whether everything waits as long as the order of the actions lets it: no clock
            makes more wait. It counts instead of `timeline`.

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
    order = make_schedule(schedule, len(bounds) - 1, chunks, checkpoint)
    inside = schedule != "gpipe" if loss_inside is None else loss_inside
    loss = loss_of_micro_batch(profile) if inside else None
    cells = [
        Cell(profile, first, end, loss if end == bounds[-1] else None, shared_memory)
        for first, end in pairwise(bounds)
    ]
    waiting = None
    if latest or timeline is not None:
        waiting = Waiting(cells, order, None if latest else timeline)
    peaks = []
    for j, cell in enumerate(cells):
        row = order.rows[j]
        waits = [0] * len(row) if waiting is None else waiting.of_row(j)
        highest = _highest(cell, row, waits, chunks)
        layers = profile.layers[cell.first : cell.end]
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
                waiting=highest.waiting,
            )
        )
    return tuple(peaks)


def _highest(cell: Cell, row: Sequence[Action], waits: Sequence[int], chunks: int) -> Moment:
    """Walk through a row of the schedule, and return the moment with the most memory.

    Args:
        cell: What its cells hold and need.
        row: The actions of the partition.
        waits: What waits while each of them runs.
        chunks: Micro-batches of a mini-batch.
    """
    recomputed = {action.micro_batch for action in row if action.kind == "R"}
    of_new_graph = cell.bytes_of(cell.graph)
    in_flight = chunks * cell.profile.bytes_of(cell.callers)
    # The last partition's outputs are kept for the caller; of losses only the numbers.
    keeps = cell.is_last and cell.loss is None
    of_output = cell.profile.bytes_of(cell.outputs) if keeps else 0
    in_graph = cell.profile.bytes_of(cell.outputs & cell.graph) if keeps else 0
    target = 0 if cell.loss is None else chunks * cell.loss.buffer_bytes
    around = None
    if cell.is_last and cell.loss is None:
        n_recorded = chunks - len(recomputed)
        around = around_loss(cell, chunks, chunks * of_output - n_recorded * in_graph)
        target = around.target
    outputs = 0
    moments: list[Moment] = []
    found: dict[tuple[str, bool, bool], Moment] = {}
    n_forwards = 0
    gradients_exist = False
    for (_, kind, i), waiting in zip(row, waits, strict=True):
        again = i in recomputed
        before, after = {
            "F": (0, cell.held(again=again)),
            "R": (cell.held(again=True), of_new_graph),
            "B": (of_new_graph if again else cell.held(again=False), 0),
        }[kind]
        key = (kind, again, gradients_exist)
        if key not in found:
            # Cells are alike, so one of each kind is walked through.
            found[key] = max(_moments(cell, *key), key=height)
        own = found[key]
        others = in_flight - before
        moments.append(
            own._replace(
                activations=others + own.activations, outputs=target + outputs, waiting=waiting
            )
        )
        in_flight = others + after
        gradients_exist = gradients_exist or kind == "B"
        if kind == "F":
            n_forwards += 1
            outputs += of_output if again else of_output - in_graph
            if around is not None and n_forwards == chunks:
                moments.append(Moment(in_flight, outputs=target + around.most))
                outputs = around.stays
    moments.append(Moment(in_flight, cell.all_gradients, _optimizer_peak(cell), outputs=target))
    return max(moments, key=height)


def _optimizer_peak(cell: Cell) -> int:
    """Return the bytes that the optimizer's step needs for a moment; 0 if it is not known."""
    peaks = [
        layer.optimizer_peak_bytes or 0 for layer in cell.profile.layers[cell.first : cell.end]
    ]
    return sum(peaks) if cell.profile.step.optimizer_together else max(peaks)


def _moments(cell: Cell, kind: str, again: bool, gradients_exist: bool) -> list[Moment]:
    """Walk through one action of one cell, with what this cell holds alone."""
    if kind == "B":
        return list(cell.backward(again=again, gradients_exist=gradients_exist))
    records = kind == "R" or not again
    return list(cell.forward(records=records, gradients_exist=gradients_exist))
