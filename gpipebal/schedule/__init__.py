"""Schedules: in which order each device works, without times.

An action is one forward, recompute or backward, written as partition, kind, micro-batch: ``1F3`` is
the forward of micro-batch 3 in partition 1, ``1R3`` its recompute, ``1B3`` its backward; where a
backward is done in two parts, ``1I3`` is the gradient of the input and ``1W3`` that of the weights.
A schedule is one ordered row of actions per device. It is plain data: the simulator places
durations on it, the executor's workers run it, and tests compare it with a drawing::

    # GPipe, 3 partitions, 4 micro-batches, one clock each, except_last: R and B take a clock.
    # 0F0 0F1 0F2 0F3 ... 0B3 0R2 0B2 0R1 0B1 0R0 0B0

There are schedules that `GPipe` runs (`executed`: one partition per device, whole backwards), and
schedules that can only be studied here and are run by torch.distributed.pipelining (`studied`, and
any that its files contain, `torch_csv`). `KNOWN_SCHEDULES` has a record of each. `SCHEDULES` and
`make_schedule` know only the first, `ALL_SCHEDULES` and `order_of` know both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpipebal.schedule.actions import Action, Kind, Schedule, check_count
from gpipebal.schedule.checkpoint import (
    CHECKPOINT_MODES,
    Checkpoint,
    CheckpointMode,
    check_checkpoint,
    is_checkpointed,
    modes_of,
    with_recomputes,
)
from gpipebal.schedule.executed import MOST_WAITING, gpipe_schedule, one_f_one_b_schedule
from gpipebal.schedule.known import (
    ALL_SCHEDULES,
    KNOWN_SCHEDULES,
    SCHEDULES,
    KnownSchedule,
    check_known_schedule,
    check_schedule,
    make_schedule,
    partitions_on_each,
    shares_devices,
)
from gpipebal.schedule.studied import (
    gpipe_in_order_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    zero_bubble_schedule,
)

if TYPE_CHECKING:
    from gpipebal.schedule.order import Order
    from gpipebal.schedule.orders import counted_modes, order_of, recomputes_of
    from gpipebal.schedule.torch_csv import read_torch_csv, write_torch_csv

__all__ = [
    "ALL_SCHEDULES",
    "CHECKPOINT_MODES",
    "KNOWN_SCHEDULES",
    "MOST_WAITING",
    "SCHEDULES",
    "Action",
    "Checkpoint",
    "CheckpointMode",
    "Kind",
    "KnownSchedule",
    "Order",
    "Schedule",
    "check_checkpoint",
    "check_count",
    "check_known_schedule",
    "check_schedule",
    "counted_modes",
    "gpipe_in_order_schedule",
    "gpipe_schedule",
    "interleaved_schedule",
    "is_checkpointed",
    "looped_bfs_schedule",
    "make_schedule",
    "modes_of",
    "one_f_one_b_schedule",
    "order_of",
    "partitions_on_each",
    "read_torch_csv",
    "recomputes_of",
    "shares_devices",
    "with_recomputes",
    "write_torch_csv",
    "zero_bubble_schedule",
]

#: What needs numpy, or is rarely needed, by where it is: the names of schedules need neither.
_LATER = {
    "Order": "order",
    "counted_modes": "orders",
    "order_of": "orders",
    "read_torch_csv": "torch_csv",
    "recomputes_of": "orders",
    "write_torch_csv": "torch_csv",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(f"gpipebal.schedule.{_LATER[name]}"), name)
        # Kept, so that the next use does not call this function again.
        globals()[name] = value
        return value
    raise AttributeError(f"module 'gpipebal.schedule' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
