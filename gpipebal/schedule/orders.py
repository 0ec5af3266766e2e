"""Any known schedule as columns.

A schedule is defined by its rows, which its maker in the table of known schedules makes. For a few,
whose rows follow a simple rule, the columns are made without them (`COLUMNS`), and recomputes are
counted without either (`RECOMPUTES`): these are shortcuts only, and every other schedule is read
from its rows. A test compares the two for all schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.schedule.actions import MOST_IN_COLUMNS, B, F, R, check_count, check_size
from gpipebal.schedule.checkpoint import Checkpoint, CheckpointMode, modes_of
from gpipebal.schedule.known import KNOWN_SCHEDULES, check_known_schedule
from gpipebal.schedule.order import Order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]

__all__ = ["counted_modes", "order_of", "recomputes_of"]

#: Makes kinds and micro-batches of the rows of partitions with these modes.
RowsMaker = Callable[[int, tuple[CheckpointMode, ...]], "list[tuple[Ints, Ints]]"]


def order_of(
    name: str,
    n_devices: int,
    chunks: int,
    checkpoint: Checkpoint = "never",
    *,
    partitions_per_device: int | None = None,
) -> Order:
    """Order a mini-batch by any known schedule, as columns.

    Args:
        name: One of `ALL_SCHEDULES`; see `check_known_schedule`.
        n_devices: Number of devices.
        chunks: Number of micro-batches.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.
        partitions_per_device: How many partitions every device has; None: as many as the schedule
            is meant for, 2 with ``'interleaved_1f1b'``, for example.

    Raises:
        UnsupportedPlanError: there is none of this name.
        BalanceError: counts or a mode that the schedule cannot have.

    Complexity:
        O(n) for n actions; in numpy for those of `COLUMNS`.

    Example:
        >>> print(order_of("1f1b", 2, 3).schedule())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    name = check_known_schedule(name)
    known = KNOWN_SCHEDULES[name]
    if name not in COLUMNS:
        return Order.of(known.schedule(n_devices, chunks, checkpoint, partitions_per_device))
    if partitions_per_device is not None:
        known.check_single(partitions_per_device)
    n_devices = check_count("partitions" if known.is_ours else "devices", n_devices)
    chunks = check_count("chunks", chunks)
    check_size(n_devices, chunks, MOST_IN_COLUMNS)
    modes = modes_of(checkpoint, n_devices)
    rows = COLUMNS[name](chunks, modes)
    lengths = [len(kinds) for kinds, _ in rows]
    return Order(
        name=name,
        offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        partitions=np.repeat(np.arange(n_devices, dtype=np.int32), lengths),
        kinds=np.concatenate([kinds for kinds, _ in rows]),
        micro_batches=np.concatenate([micro_batches for _, micro_batches in rows]),
        devices=np.arange(n_devices, dtype=np.int32),
        modes=modes,
    )


def recomputes_of(
    name: str,
    n_devices: int,
    chunks: int,
    checkpoint: Checkpoint,
    *,
    partitions_per_device: int | None = None,
) -> tuple[int, ...]:
    """Count the micro-batches that each partition recomputes.

    This depends on the schedule: a recompute that would follow its own forward is left out.

    Args:
        name: As for `order_of`, like the others.
        n_devices: Number of devices.
        chunks: Number of micro-batches.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.
        partitions_per_device: How many partitions every device has.

    Raises:
        UnsupportedPlanError: there is none of this name.
        BalanceError: counts or a mode that the schedule cannot have.

    Complexity:
        O(n_devices) for those of `RECOMPUTES`, else that of `order_of`.

    Example:
        >>> recomputes_of("gpipe", 2, 3, "except_last"), recomputes_of("1f1b", 2, 3, "always")
        ((2, 2), (3, 0))
    """
    name = check_known_schedule(name)
    if name in RECOMPUTES and partitions_per_device in (None, 1):
        of_what = "partitions" if KNOWN_SCHEDULES[name].is_ours else "devices"
        n_devices, chunks = check_count(of_what, n_devices), check_count("chunks", chunks)
        of_mode = {"never": 0, "except_last": chunks - 1, "always": chunks}
        found = [of_mode[mode] for mode in modes_of(checkpoint, n_devices)]
        return RECOMPUTES[name](found, chunks)
    order = order_of(
        name, n_devices, chunks, checkpoint, partitions_per_device=partitions_per_device
    )
    again = order.partitions[order.kinds == R]
    return tuple(np.bincount(again, minlength=order.n_partitions).tolist())


def counted_modes(
    modes: Sequence[CheckpointMode], recomputes: Sequence[int]
) -> tuple[CheckpointMode, ...]:
    """Return modes as they take effect in a schedule: ``'never'`` where it recomputes nothing.

    Args:
        modes: Mode of each partition.
        recomputes: What `recomputes_of` returns for each.

    Example:
        >>> counted_modes(("always", "always"), (3, 0))
        ('always', 'never')
    """
    return tuple(mode if count else "never" for mode, count in zip(modes, recomputes, strict=True))


def _gpipe_rows(
    chunks: int, modes: tuple[CheckpointMode, ...], *, last_first: bool
) -> list[tuple[Ints, Ints]]:
    """Return kinds and micro-batches of the rows of GPipe; rows of one mode are equal."""
    made = {mode: _gpipe_row(chunks, mode, last_first=last_first) for mode in set(modes)}
    return [made[mode] for mode in modes]


def _one_f_one_b_rows(chunks: int, modes: tuple[CheckpointMode, ...]) -> list[tuple[Ints, Ints]]:
    """Return kinds and micro-batches of the rows of 1F1B.

    Equal rows are made once: those of one mode that run equally many forwards ahead.
    """
    keys = [(mode, min(chunks, len(modes) - 1 - j)) for j, mode in enumerate(modes)]
    made = {(mode, ahead): _one_f_one_b_row(chunks, mode, ahead) for mode, ahead in set(keys)}
    return [made[key] for key in keys]


def _gpipe_row(chunks: int, mode: CheckpointMode, *, last_first: bool) -> tuple[Ints, Ints]:
    """Return kinds and micro-batches of a row of GPipe."""
    forward = np.arange(chunks, dtype=np.int32)
    back = forward[::-1] if last_first else forward
    repeats = 1 + _recomputed(chunks, mode)[back]
    micro_batches = np.repeat(back, repeats)
    kinds = np.full(len(micro_batches), R, dtype=np.uint8)
    kinds[np.cumsum(repeats) - 1] = B
    return (
        np.concatenate((np.full(chunks, F, dtype=np.uint8), kinds)),
        np.concatenate((forward, micro_batches)),
    )


def _one_f_one_b_row(chunks: int, mode: CheckpointMode, ahead: int) -> tuple[Ints, Ints]:
    """Return kinds and micro-batches of a row of 1F1B that runs some forwards ahead."""
    each = np.arange(chunks, dtype=np.int32)
    # Without other forwards between, a recompute would follow its own, and is left out.
    between = ahead > 0 and chunks > 1
    recomputed = _recomputed(chunks, mode) if between else np.zeros(chunks, dtype=np.int64)
    # How many recomputes come before the backward with this number.
    before = np.concatenate(([0], np.cumsum(recomputed)))
    # The place of an action is the number of actions before it.
    backward_at = np.minimum(chunks, ahead + each + 1) + each + before[1:]
    n_backwards = np.maximum(0, each - ahead)
    forward_at = each + n_backwards + before[n_backwards]
    recompute_at = (backward_at - 1)[recomputed > 0]
    length = 2 * chunks + int(before[-1])
    kinds = np.empty(length, dtype=np.uint8)
    micro_batches = np.empty(length, dtype=np.int32)
    for kind, places, which in (
        (F, forward_at, each),
        (R, recompute_at, each[recomputed > 0]),
        (B, backward_at, each),
    ):
        kinds[places] = kind
        micro_batches[places] = which
    return kinds, micro_batches


def _recomputed(chunks: int, mode: CheckpointMode) -> NDArray[np.int64]:
    """Return 1 for every micro-batch that is recomputed, else 0."""
    marks = np.full(chunks, int(mode != "never"), dtype=np.int64)
    if mode == "except_last":
        marks[-1] = 0
    return marks


#: The schedules whose columns can be made without rows. An order of these has `modes`.
COLUMNS: dict[str, RowsMaker] = {
    "gpipe": partial(_gpipe_rows, last_first=True),
    "gpipe_in_order": partial(_gpipe_rows, last_first=False),
    "1f1b": _one_f_one_b_rows,
}

#: The schedules whose recomputes can be counted without an order: from those that the mode of each
#: partition asks for, and the number of micro-batches. The last partition of 1F1B runs each
#: backward right after its forward, and with one micro-batch all of them do.
RECOMPUTES: dict[str, Callable[[Sequence[int], int], tuple[int, ...]]] = {
    "gpipe": lambda asked, chunks: tuple(asked),
    "gpipe_in_order": lambda asked, chunks: tuple(asked),
    "1f1b": lambda asked, chunks: (*(n * (chunks > 1) for n in asked[:-1]), 0),
}
