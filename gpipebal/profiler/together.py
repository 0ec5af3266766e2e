"""Rounds in as many threads as the layers bear.

Copies of a layer share what it reaches by functions. In a pipeline only one worker runs the layer,
so it may do with that what a second thread would disturb: give a tensor new memory, advance a
generator, put other weights into a module for a call. Then all rounds run in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import first_line_of, is_out_of_memory
from gpipebal.profiler.doubts import doubts_about_movers
from gpipebal.profiler.replicas.foreign import note_mover
from gpipebal.profiler.replicas.moved import CommonTensors
from gpipebal.profiler.times.rounds import Pace, Subject, Times

__all__ = ["Together", "measure_together"]


class Together(NamedTuple):
    """What was measured.

    Attributes:
        times: Of each size, all threads together; None: there was not enough memory for it.
        side_by_side: Threads that ran rounds at once.
        notes: Why these are fewer than were wanted.
    """

    times: list[Times | None]
    side_by_side: int
    notes: list[str]


def measure_together(
    make: Callable[[int], Sequence[Subject]],
    side_by_side: int,
    names: Sequence[str],
    run: Callable[[Sequence[Sequence[Subject]], Pace], list[Times | None]],
    pace: Pace,
) -> Together:
    """Run rounds side by side; or in one thread, if layers cannot run in several.

    Args:
        make: Makes what a thread sends each size of micro-batch through, given its number.
        side_by_side: Threads.
        names: Names of the layers.
        run: Runs rounds, as `run_side_by_side` does.
        pace: How long to go on.

    Raises:
        ProfileError: a layer failed, and not only because a copy of it ran at the same time.
    """
    subjects = [make(0)]
    if side_by_side == 1:
        return Together(run(subjects, pace), 1, [])
    notes = doubts_about_movers(names)
    if not notes:
        subjects += [make(k) for k in range(1, side_by_side)]
        common = _common(*subjects[:2])
        if common:
            # A round that does not count.
            run(subjects[:1], Pace(lambda _: 0.0, 0, 0, lambda: None))
            for name in common.moved():
                note_mover(name)
            notes = doubts_about_movers(names)
    if not notes:
        try:
            return Together(run(subjects, pace), side_by_side, [])
        except ProfileError as error:
            if is_out_of_memory(error):
                raise
            why = first_line_of(error)
        notes.append(f"measured in one thread, because with a copy in a second one {why}")
    return Together(run(subjects[:1], pace), 1, notes)


def _common(one: Sequence[Subject], other: Sequence[Subject]) -> CommonTensors:
    """Find what two threads have in common: the layers of all sizes are the same."""
    names: list[str] = []
    users: tuple[list[object], list[object]] = [], []
    for chain, copy in (
        (one[0].chain, other[0].chain),
        *((x.loss, y.loss) for x, y in zip(one, other, strict=True)),
    ):
        if chain is not None and copy is not None:
            names += chain.names
            users[0].extend(chain.layers)
            users[1].extend(copy.layers)
    return CommonTensors(names, *users)
