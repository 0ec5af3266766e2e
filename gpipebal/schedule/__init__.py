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
any that its files contain, `torch_csv`). `SCHEDULES` and `make_schedule` know only the first,
`ALL_SCHEDULES` and `order_of` know both.
"""

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
from gpipebal.schedule.executed import (
    SCHEDULES,
    check_schedule,
    gpipe_schedule,
    make_schedule,
    one_f_one_b_schedule,
)
from gpipebal.schedule.order import Order
from gpipebal.schedule.orders import (
    ALL_SCHEDULES,
    check_known_schedule,
    counted_modes,
    order_of,
    partitions_on_each,
    recomputes_of,
)
from gpipebal.schedule.studied import (
    RUN_BY_TORCH,
    STUDIED,
    gpipe_in_order_schedule,
    interleaved_schedule,
    study_schedule,
    zero_bubble_schedule,
)
from gpipebal.schedule.torch_csv import read_torch_csv, write_torch_csv

__all__ = [
    "ALL_SCHEDULES",
    "CHECKPOINT_MODES",
    "RUN_BY_TORCH",
    "SCHEDULES",
    "STUDIED",
    "Action",
    "Checkpoint",
    "CheckpointMode",
    "Kind",
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
    "make_schedule",
    "modes_of",
    "one_f_one_b_schedule",
    "order_of",
    "partitions_on_each",
    "read_torch_csv",
    "recomputes_of",
    "study_schedule",
    "with_recomputes",
    "write_torch_csv",
    "zero_bubble_schedule",
]
