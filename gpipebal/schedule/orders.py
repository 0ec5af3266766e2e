"""Any known schedule as columns; with one partition per device no actions are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.schedule.actions import B, F, R, check_count
from gpipebal.schedule.checkpoint import Checkpoint, CheckpointMode, modes_of
from gpipebal.schedule.executed import SCHEDULES
from gpipebal.schedule.names import spelled
from gpipebal.schedule.order import Order
from gpipebal.schedule.studied import STUDIED, check_single, study_schedule
from gpipebal.units import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]

__all__ = [
    "ALL_SCHEDULES",
    "check_known_schedule",
    "counted_modes",
    "order_of",
    "partitions_on_each",
    "recomputes_of",
]

#: Every schedule that can be simulated: those that `GPipe` runs, then the others.
ALL_SCHEDULES = (*SCHEDULES, *STUDIED)


def check_known_schedule(name: object) -> str:
    """Return the name of a schedule that can be simulated, as `ALL_SCHEDULES` has it.

    Capitals, dashes and underscores do not matter; ``'interleaved'`` and ``'zero_bubble'`` mean the
    only known schedule of that family.

    Raises:
        UnsupportedPlanError: there is none of this name.

    Example:
        >>> check_known_schedule("1F1B"), check_known_schedule("zero_bubble")
        ('1f1b', 'zb_h1')
    """
    known = spelled(name)
    if not isinstance(known, str) or known not in ALL_SCHEDULES:
        raise UnsupportedPlanError(
            f"schedule does not exist: schedule={name!r} (expected one of "
            f"{', '.join(map(repr, ALL_SCHEDULES))}).\nFix: schedule='gpipe'."
        )
    return known


def partitions_on_each(schedule: str, n_partitions: int) -> int:
    """Tell how many of a plan's partitions every device has: 2 if interleaved, else 1.

    Raises:
        BalanceError: interleaved partitions that cannot be dealt out evenly.

    Example:
        >>> partitions_on_each("interleaved_1f1b", 8), partitions_on_each("1f1b", 8)
        (2, 1)
    """
    if schedule != "interleaved_1f1b":
        return 1
    if n_partitions % 2:
        raise BalanceError(
            f"partitions cannot be dealt out evenly: {count(n_partitions, 'partition')}, two on "
            "each device with schedule='interleaved_1f1b' (expected an even number).\n"
            f"Fix: {n_partitions + 1} partitions, or schedule='1f1b'."
        )
    return 2


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
        partitions_per_device: How many partitions every device has; None: 2 with
            ``'interleaved_1f1b'``, else 1.

    Raises:
        UnsupportedPlanError: there is none of this name.
        BalanceError: counts or a mode that the schedule cannot have.

    Complexity:
        O(n) for n actions; with one partition per device and whole backwards in numpy.

    Example:
        >>> print(order_of("1f1b", 2, 3).schedule())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    name = check_known_schedule(name)
    if name in STUDIED and name != "gpipe_in_order":
        return Order.of(
            study_schedule(
                name, n_devices, chunks, checkpoint, partitions_per_device=partitions_per_device
            )
        )
    if partitions_per_device is not None:
        check_single(name, partitions_per_device)
    n_devices = check_count("partitions" if name in SCHEDULES else "devices", n_devices)
    chunks = check_count("chunks", chunks)
    modes = modes_of(checkpoint, n_devices)
    # Equal rows are made once: with GPipe those of one mode, with 1F1B those of one mode that run
    # equally many forwards ahead.
    made: dict[tuple[CheckpointMode, int], tuple[Ints, Ints]] = {}
    keys = []
    for j, mode in enumerate(modes):  # j: partition
        ahead = min(chunks, n_devices - 1 - j) if name == "1f1b" else 0
        keys.append((mode, ahead))
        if keys[-1] not in made:
            if name == "1f1b":
                made[keys[-1]] = _one_f_one_b_row(chunks, mode, ahead)
            else:
                made[keys[-1]] = _gpipe_row(chunks, mode, last_first=name == "gpipe")
    rows = [made[key] for key in keys]
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
        O(n_devices) for schedules that `GPipe` runs, else that of `order_of`.

    Example:
        >>> recomputes_of("gpipe", 2, 3, "except_last"), recomputes_of("1f1b", 2, 3, "always")
        ((2, 2), (3, 0))
    """
    name = check_known_schedule(name)
    if name in SCHEDULES and partitions_per_device in (None, 1):
        chunks = check_count("chunks", chunks)
        of_mode = {"never": 0, "except_last": chunks - 1, "always": chunks}
        found = [of_mode[mode] for mode in modes_of(checkpoint, n_devices)]
        if name == "1f1b":
            # Its last partition runs each backward at once; with one micro-batch all of them do.
            found = [n * (chunks > 1) for n in found[:-1]] + [0]
        return tuple(found)
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
