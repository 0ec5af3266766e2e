"""Schedules as the CSV files of torch.distributed.pipelining.

A file has one line per device and one cell per action, ``2F0`` for example; an empty cell is a time
of waiting and says nothing about the order. torch writes two forms: the computations alone, or
between them also the moves of tensors and parameters (``1SEND_F0``, ``2UNSHARD``). Both are read;
moves are left out, because durations of transfers are given to the simulator itself. A cell
``(0F3;5B1)OVERLAP_F_B`` is a forward and a backward at once, and is read as one after the other.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from gpipebal.argument_kinds import check_kind, check_path
from gpipebal.errors import FileFormatError, MissingFileError, UnsupportedPlanError
from gpipebal.files import atomic_path
from gpipebal.schedule.actions import Action, Kind, Schedule

__all__ = ["read_torch_csv", "write_torch_csv"]

_CELL = re.compile(r"(\d{1,9})(F|B|I|W)(\d{1,9})")
_MOVE = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d{0,9}")
_BOTH = re.compile(r"\((.*)\)OVERLAP_F_B")

Place = tuple[int, int]


def read_torch_csv(source: str | os.PathLike[str], name: str | None = None) -> Schedule:
    r"""Read a schedule from a file that torch.distributed.pipelining wrote or would read.

    Args:
        source: Path of the file; or its text, if that has a comma or a line break.
        name: Name of the schedule; None: the file's, without its suffix, or ``'csv'``.

    Returns:
        The schedule; the lines tell the device of each partition. It has no recomputes, because
        torch has no action for them: add them with `with_recomputes`.

    Raises:
        FileFormatError: no text, a cell that is not an action, a partition in two lines or in none.
        MissingFileError: the file does not exist (a FileFormatError).

    Source:
        ``_PipelineScheduleRuntime._load_csv`` of torch 2.13, formats ``compute_only`` and
        ``compute_comms``.

    Example:
        >>> schedule = read_torch_csv("0F0,2F0,2B0,0B0\n1F0,,1B0\n")
        >>> print(schedule, schedule.placement)
        0F0 2F0 2B0 0B0
        1F0 1B0 (0, 1, 0)
    """
    text, name = _text_of(source, name)
    rows: list[tuple[Action, ...]] = []
    homes: dict[int, Place] = {}
    for d, line in enumerate(_lines(text)):  # d: device
        row: list[Action] = []
        for column, cell in enumerate(line):
            place = (d, column)
            for action in _actions(cell.strip(), place):
                before = homes.setdefault(action.partition, place)
                if before[0] != d:
                    raise _refuse(
                        place,
                        f"partition {action.partition} stands in line {before[0] + 1} already: "
                        f"cell={cell.strip()!r} (expected one line for each partition)",
                    )
                row.append(action)
        rows.append(tuple(row))
    while rows and not rows[-1]:
        rows.pop()
    if () in rows:
        empty = rows.index(())
        raise _refuse((empty, 0), f"device {empty} does nothing (expected one line per device)")
    if not homes:
        raise FileFormatError(
            f"schedule {name!r} has no actions (expected one line per device, with cells such as "
            "0F0).\nFix: write the file with write_torch_csv, or with torch's _dump_csv."
        )
    if len(homes) <= max(homes):
        missing = next(j for j in range(len(homes) + 1) if j not in homes)
        raise FileFormatError(
            f"schedule {name!r} leaves out a partition: partition {missing} is in no line, but "
            f"partition {max(homes)} is (expected all of 0..{max(homes)}).\n"
            "Fix: number the partitions from 0, without gaps."
        )
    devices = tuple(homes[j][0] for j in range(len(homes)))
    plain = devices == tuple(range(len(rows)))
    return Schedule(name, tuple(rows), None if plain else devices)


def write_torch_csv(
    schedule: Schedule, path: str | os.PathLike[str] | None = None, *, late: bool = False
) -> str:
    r"""Write a schedule as torch.distributed.pipelining reads it, the computations alone.

    Args:
        schedule: What to write.
        path: File to write; None: no file, only the text is returned.
        late: Leave recomputes out, to run them inside the backwards with torch.utils.checkpoint,
            which begins only when the gradient has arrived.

    Returns:
        The text.

    Raises:
        UnsupportedPlanError: the schedule has recomputes, for which torch has no action.
        FileFormatError: `path` is something other than an ordinary file.

    Example:
        >>> row = (Action(0, "F", 0), Action(0, "R", 0), Action(0, "B", 0))
        >>> write_torch_csv(Schedule("mine", (row,)), late=True)
        '0F0,0B0\n'
    """
    check_kind("schedule", schedule, Schedule, "schedule=make_schedule('gpipe', 2, 4, 'never')")
    rows = schedule.rows if not late else schedule.phase("FBIW")
    for row in rows:
        for action in row:
            if action.kind == "R":
                raise UnsupportedPlanError(
                    f"torch.distributed.pipelining has no recomputes: action={action} (expected "
                    "F, B, I and W).\nFix: late=True, and wrap the layers in "
                    "torch.utils.checkpoint; or a schedule with checkpoint='never'."
                )
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    if path is not None:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return text


def _lines(text: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise FileFormatError(
            f"schedule is not CSV: {error} (expected one line per device, with cells such as 0F0)."
            "\nFix: write the file with write_torch_csv, or with torch's _dump_csv."
        ) from error


def _text_of(source: str | os.PathLike[str], name: str | None) -> tuple[str, str]:
    """Return the text and the name of the schedule."""
    if isinstance(source, str) and re.search(r"[,\n]", source):
        return source, name or "csv"
    path = check_path(source)
    try:
        return path.read_text(encoding="utf-8-sig"), name or path.stem
    except (OSError, UnicodeDecodeError) as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileFormatError
        raise kind(
            f"schedule cannot be read: {path}: {error}.\nFix: give the path of a text file."
        ) from error


def _actions(cell: str, place: Place) -> Iterable[Action]:
    """Return the computations of a cell."""
    if not cell or _MOVE.fullmatch(cell):
        return ()
    both = _BOTH.fullmatch(cell)
    parts: Sequence[str] = both[1].split(";") if both else (cell,)
    found = []
    for part in parts:
        match = _CELL.fullmatch(part.strip())
        if match is None:
            raise _refuse(
                place,
                f"cell is not an action: cell={cell[:40]!r} (expected one such as 2F0 or 1B3)",
            )
        partition, kind, micro_batch = match.groups()
        found.append(Action(int(partition), cast(Kind, kind), int(micro_batch)))
    return found


def _refuse(place: Place, what: str) -> FileFormatError:
    line, column = place
    return FileFormatError(
        f"schedule is damaged in line {line + 1}, cell {column + 1}: {what}.\n"
        "Fix: write the file with write_torch_csv, or with torch's _dump_csv."
    )
