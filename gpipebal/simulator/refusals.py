"""Refusals: what is wrong with a schedule that cannot be placed, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import NoReturn

import numpy as np

from gpipebal.argument_kinds import whole_number
from gpipebal.errors import BalanceError
from gpipebal.schedule import Action, Kind, Order, Schedule
from gpipebal.schedule.actions import ACTION_NAMES, F

__all__ = ["check_phases", "check_rows", "refuse"]

#: An action as a plain tuple: equal to it, with the same hash, and several times faster to make.
_Cell = tuple[int, Kind, int]


def check_rows(schedule: Schedule) -> None:
    """Verify that every action is known and occurs once, in the row of its own device.

    Raises:
        BalanceError: devices that are not those of the rows; an action that is unknown, occurs
            twice or in another partition's row, or half of a backward without the other half.
    """
    seen: set[_Cell] = set()
    placement = schedule.placement
    if set(placement) != set(range(schedule.n_devices)):
        raise BalanceError(
            f"schedule has other devices than rows: devices={placement!r:.60} (expected each of "
            f"0..{schedule.n_devices - 1}, once or several times).\n"
            "Fix: for each partition the row that its actions stand in, and no row without one."
        )
    for d, row in enumerate(schedule.rows):  # d: device
        for action in row:
            j, kind, i = action  # j: partition, i: micro-batch
            wrong = None
            if not isinstance(kind, str) or kind not in ACTION_NAMES:
                wrong = f"is of an unknown kind (expected one of {', '.join(ACTION_NAMES)})"
            elif not type(i) is type(j) is int and None in map(whole_number, (i, j)):
                wrong = "has a number that is not whole (expected ints)"
            elif not 0 <= i < 2**31:
                wrong = f"has an impossible micro-batch (expected 0..{2**31 - 1})"
            elif schedule.devices is None and j != d:
                wrong = f"stands in row {d} (expected row {j})"
            elif not 0 <= j < len(placement):
                wrong = f"is of an unknown partition (expected 0..{len(placement) - 1})"
            elif placement[j] != d:
                wrong = f"stands in row {d} (expected row {placement[j]})"
            elif action in seen:
                wrong = "stands there twice (expected once)"
            elif kind in "BI" and (j, "I" if kind == "B" else "B", i) in seen:
                wrong = "is a backward whole and in parts (expected B, or I and W)"
            if wrong:
                raise BalanceError(
                    f"schedule has a misplaced action: {action} {wrong}.\n"
                    "Fix: make the rows as gpipe_schedule does."
                )
            seen.add(action)
    for j, kind, i in seen:
        if kind == "I" and (j, "W", i) not in seen:
            raise BalanceError(
                f"schedule leaves out gradients: {j}I{i} has no {j}W{i} (expected both parts of "
                f"every backward).\nFix: add {j}W{i} to its row, or make {j}I{i} {j}B{i}."
            )
        if kind == "W" and (j, "B", i) in seen:
            raise BalanceError(
                f"schedule has gradients twice: {j}W{i} beside {j}B{i}, which is both parts "
                f"(expected B, or I and W).\nFix: leave out {j}W{i}, or make {j}B{i} {j}I{i}."
            )


def check_phases(order: Order) -> None:
    """Refuse a forward after a backward: with a pause each would wait for the other.

    Raises:
        BalanceError: there is one.
    """
    is_forward = order.kinds == F
    after = is_forward.copy()
    after[1:] &= ~is_forward[:-1]
    after[order.offsets[:-1][np.diff(order.offsets) > 0]] = False  # the first of a row
    if after.any():
        place = int(after.argmax())
        d = int(np.searchsorted(order.offsets, place, side="right")) - 1  # d: device
        row, k = order.row(d), place - int(order.offsets[d])
        raise BalanceError(
            f"schedule can never finish with a pause: {row[k]} stands after {row[k - 1]}, "
            "which waits for the last forward (expected all forwards first).\n"
            "Fix: pause=None."
        )


def refuse(schedule: Schedule, *, late: bool) -> NoReturn:
    """Go through a schedule that can never finish, and say what waits for what.

    Raises:
        BalanceError: always.
    """
    n_partitions = schedule.n_partitions
    actions: set[_Cell] = {action for row in schedule.rows for action in row}
    positions = [0] * schedule.n_devices
    done: set[_Cell] = set()
    waiting: dict[_Cell, list[int]] = {}
    ready = deque(range(schedule.n_devices))
    while ready:
        d = ready.popleft()  # d: device
        row = schedule.rows[d]
        while positions[d] < len(row):
            action = row[positions[d]]
            needs = _needs(action, n_partitions, actions, late=late)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(d)
                break
            done.add(action)
            positions[d] += 1
            ready.extend(waiting.pop(action, ()))
    waits = {
        (need in actions, schedule.rows[d][positions[d]]): Action(*need)
        for need, devices in waiting.items()
        for d in devices
    }
    # Name an action whose need does not exist rather than one that waits for that action.
    exists, action = min(waits)
    need = waits[exists, action]
    why = "which never gets its turn" if exists else "which stands in no row"
    fix = "order every row as gpipe_schedule does." if exists else f"add {need} to its row."
    raise BalanceError(
        f"schedule can never finish: {action} waits for {need}, {why} (expected every action "
        f"after what it needs).\nFix: {fix}"
    )


def _needs(action: _Cell, n_partitions: int, actions: Set[_Cell], *, late: bool) -> list[_Cell]:
    """List what must have ended before an action starts, besides the action before it."""
    j, kind, i = action  # j: partition, i: micro-batch
    if kind == "F":
        return [(j - 1, "F", i)] if j > 0 else []
    if kind == "W":
        return [(j, "I", i)]
    needs: list[_Cell] = [(j, "F", i)]
    if kind in "BI" and (j, "R", i) in actions:
        needs.append((j, "R", i))
    if (kind in "BI" or late) and j < n_partitions - 1:
        in_parts = (j + 1, "I", i) in actions
        needs.append((j + 1, "I" if in_parts else "B", i))
    return needs
