"""What the workers of a pipeline are doing, for a caller who waits for them in vain."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from gpipebal.errors import PipelineTimeoutError
from gpipebal.pipeline.process.forks import open_in_child
from gpipebal.pipeline.workers.partition import Partition
from gpipebal.schedule import Action
from gpipebal.schedule.actions import ACTION_NAMES

__all__ = ["Activity", "timeout_error", "where"]

#: Held while a thread looks at the stacks of all threads.
_looking = open_in_child(threading.Lock())

#: Lines of a worker's stack that an error shows.
_FRAMES = 4


def where(action: Action) -> str:
    """Say in words which cell an action works on, and in which phase."""
    return (
        f"in partition {action.partition}, {ACTION_NAMES[action.kind]} of "
        f"micro-batch {action.micro_batch}"
    )


class Activity:
    """What one worker is doing; written by the worker, read by whoever waits for it.

    Attributes:
        n_done: Actions that it has ended, of all mini-batches.
    """

    def __init__(self) -> None:
        self.n_done = 0
        self._action: Action | None = None
        self._partition: Partition | None = None
        self._waiting = True
        self._since = time.perf_counter()

    def wait_for(self, action: Action) -> None:
        """Note that the worker waits for what an action needs."""
        self._action, self._waiting, self._since = action, True, time.perf_counter()

    def run(self, partition: Partition) -> None:
        """Note that it runs the action that it waited for."""
        self._partition, self._waiting, self._since = partition, False, time.perf_counter()

    def end(self) -> None:
        """Note that the action has ended."""
        self.n_done += 1

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._action = self._partition = None
        self._waiting, self._since = True, time.perf_counter()

    def describe(self, j: int) -> str:
        """Say what worker `j` is doing, and for how long."""
        seconds = time.perf_counter() - self._since
        action, partition = self._action, self._partition
        if action is None:
            return f"partition {j} has nothing to do, for {seconds:.1f} s"
        cell = f"{ACTION_NAMES[action.kind]} of micro-batch {action.micro_batch}"
        if self._waiting:
            return f"partition {j} waits to start the {cell}, for {seconds:.1f} s"
        layer = ""
        if action.kind != "B" and partition is not None and partition.names:
            k, names = partition.running, partition.names
            layer = f" in layer {names[k]!r}" if k < len(names) else " in the loss"
        return f"partition {j} runs the {cell}{layer}, for {seconds:.1f} s"


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of every thread.

    Python before 3.12 looks at threads under a lock of its own, and collects garbage meanwhile:
    destructors and callbacks then let other threads run, and one that wants the lock too, here or
    to start a thread, would wait for ever with all others. So no garbage is collected.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def timeout_error(
    timeout: float, activities: Sequence[Activity], threads: Sequence[threading.Thread]
) -> PipelineTimeoutError:
    """Say what every worker is doing, with the innermost calls of those that run."""
    frames = _current_frames()
    lines = []
    for j, (activity, thread) in enumerate(zip(activities, threads, strict=True)):
        lines.append(activity.describe(j))
        frame = frames.pop(thread.ident or 0, None)
        if " runs " in lines[-1] and frame is not None:
            lines += "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip().splitlines()
    # One of them is this function's own: a circle that would keep the mini-batch.
    del frames
    return PipelineTimeoutError(
        f"no worker of the pipeline ended an action: timeout={timeout} s (expected one to end in "
        "that time).\n" + "\n".join(lines) + "\n"
        "Fix: look at what the running worker is doing; if it only needs longer, give a longer "
        "timeout. The next mini-batch gets new workers; one that hangs is left running."
    )
