"""Workers: one thread per partition, each with its device, its stream and its share of the cores.

Who owns what. A pool owns its threads; a thread owns nothing but the task it is running. A task is
handed to all workers at once, under a lock, so that every worker gets the tasks of all mini-batches
in one order: the mini-batch handed out first can always proceed, whatever the others wait for.
Tasks never raise: they keep their failure for the caller.

Idle workers wait for the next task and hold no tensors. They are daemon threads, so a program can
always end. A pool is closed when nothing refers to it any more; then its workers finish what they
were handed. When the interpreter ends, all mini-batches are stopped, and the exit waits for the
cells in progress, because a thread that is still inside torch when the interpreter goes away can
abort the process. It does not wait for a worker that hangs.

Which worker hangs, and which is only slow? A worker that computes uses the processor, which its
thread's clock tells.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import torch

from gpipebal.errors import PipelineError
from gpipebal.pipeline.process.forks import check_not_inside, open_in_child
from gpipebal.pipeline.values.lane import Lane
from gpipebal.pipeline.workers.activity import Activity, timeout_error
from gpipebal.pipeline.workers.inbox import Flag, Stop

__all__ = ["WorkerPool", "given_up_error"]

_Queue = SimpleQueue[Callable[[], None] | None]

#: Seconds of rest after which a worker that should end is taken to hang.
GRACE = 5.0

#: Seconds that threads which have ended get for their destructors when the interpreter ends.
DESTRUCTION = 1.0

#: Seconds that idle threads get to end when their pool is collected.
ENDING = 1.0

#: Seconds after which a wait for the threads of a closed pool checks whether it was given up.
_LOOK_UP = 0.1

#: Share of a processor above which a worker is taken to compute.
_COMPUTING = 0.01

# Starting workers temporarily changes the process's number of threads: one pool at a time.
_starting = open_in_child(threading.RLock())


def given_up_error() -> PipelineError:
    """Return the error of a mini-batch whose workers were given up by one in another thread."""
    return PipelineError(
        "a mini-batch was stopped, because another one, in another thread, gave up the workers of "
        "both: one of them hangs.\nFix: run it again, with new workers."
    )


class WorkerPool:
    """Threads that run tasks, one task at a time each.

    The threads end when the pool is closed, or when nothing refers to it any more: neither a
    pipeline nor a mini-batch whose backward could still come.

    Attributes:
        process: Process that started the threads; a forked child has none of them.
        activities: What each worker is doing.
        threads: The threads.
        is_given_up: Whether a worker hung, so that the pool takes no more tasks and its threads
            are not waited for.
    """

    def __init__(self, lanes: Sequence[Lane], threads: Sequence[int | None]) -> None:
        self.process = os.getpid()
        self.activities = [Activity() for _ in lanes]
        self.is_given_up = False
        self._queues: list[_Queue] = [SimpleQueue() for _ in lanes]
        self._submitting = threading.Lock()
        self.threads: list[threading.Thread] = []
        self._clocks: list[int | None] = [None for _ in lanes]
        self._stops: set[Stop] = set()
        self._awaited: set[Flag] = set()
        self._is_exit = False
        # Before the first thread starts, so that an interrupt leaves none behind.
        self._end = weakref.finalize(self, _end_threads, self._queues, self.threads, self.process)
        # At the end of the interpreter `_end_all` does this.
        self._end.atexit = False
        check_not_inside(_starting)
        with _starting:
            before = torch.get_num_threads()
            started = threading.Barrier(len(lanes) + 1)
            failures: list[BaseException] = []
            try:
                for j, lane in enumerate(lanes):
                    prepare = partial(_prepare, j, lane, threads[j], self._clocks)
                    thread = threading.Thread(
                        target=_work,
                        args=(self._queues[j], prepare, started, failures),
                        name=f"gpipebal-partition-{j}",
                        daemon=True,
                    )
                    thread.start()
                    self.threads.append(thread)
                _known_threads[:] = [
                    *filter(_is_known_to_the_system, _known_threads),
                    *self.threads,
                ]
                started.wait()
            except BaseException:
                # Interrupted, or no more threads can be started: those that wait must stop waiting.
                started.abort()
                raise
            finally:
                # set_num_threads in a worker also sets the number for later threads: put it back.
                torch.set_num_threads(before)
        _pools.add(self)
        if failures:
            self._end()
            raise failures[0]

    @property
    def is_closed(self) -> bool:
        """Whether the pool takes no more tasks, because it was closed."""
        return not self._end.alive

    @contextmanager
    def running(self, stop: Stop) -> Iterator[None]:
        """Let a mini-batch that runs in this block be stopped when the interpreter ends."""
        self._stops.add(stop)
        try:
            yield
        finally:
            self._stops.discard(stop)

    def check_caller(self) -> None:
        """Make sure that the present thread can wait for the workers.

        Raises:
            PipelineError: it is one of them, or in another process.
        """
        if self.process != os.getpid():
            raise PipelineError(
                "a mini-batch that began in the parent process cannot go on in a forked child.\n"
                "Fix: run forward and backward in the same process."
            )
        if threading.current_thread() in self.threads:
            raise PipelineError(
                "a pipeline was called by one of its own layers, which would wait for itself.\n"
                "Fix: do not call a pipeline inside itself, nor inside torch.utils.checkpoint: "
                "GPipe has checkpoint=."
            )

    def submit(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Hand task j to worker j, to all workers at once.

        Args:
            tasks: One per worker. If this is interrupted some may have been handed out.

        Raises:
            PipelineError: the pool is closed, belongs to another process, or is waited for by one
                of its own workers.
        """
        self.check_caller()
        if self._is_exit and threading.current_thread() is not threading.main_thread():
            # A daemon thread that is about to end, perhaps inside torch: see `run_tasks`.
            threading.Event().wait()
        with self._submitting:
            if self.is_given_up:
                raise PipelineError(
                    "a mini-batch that began before a timeout can go no further: its workers were "
                    "given up.\nFix: run the mini-batch again."
                )
            if self.is_closed:
                raise PipelineError(
                    "the pipeline is closed, and a mini-batch that it began can go no further.\n"
                    "Fix: call backward() before close(), or run the mini-batch again."
                )
            for queue, task in zip(self._queues, tasks, strict=True):
                queue.put(task)

    def wait_for(
        self,
        finished: Sequence[Flag],
        timeout: float | None,
        *,
        spare_computing: bool = False,
    ) -> None:
        """Wait until all tasks have ended.

        Args:
            finished: Set by each task when it ends.
            timeout: Seconds without the end of any action after which to give up; None: never.
            spare_computing: Do not give up either while a worker computes.

        Raises:
            PipelineTimeoutError: the workers were given up; the text says what each is doing.
            PipelineError: another mini-batch gave the workers up.
        """
        n_done = sum(activity.n_done for activity in self.activities)
        used = 0.0 if timeout is None else _seconds_used(self._clocks)
        try:
            # Before `is_given_up` is read: from now on giving up wakes this thread. Waking up from
            # time to time would not do: while the interpreter ends a caller must go on sleeping.
            self._awaited.update(finished)
            for flag in finished:
                while not flag.wait(0.0 if self.is_given_up else timeout):
                    if self.is_given_up:  # by another mini-batch
                        raise given_up_error()
                    if timeout is None:
                        continue
                    before, n_done = n_done, sum(activity.n_done for activity in self.activities)
                    used_before, used = used, _seconds_used(self._clocks)
                    computing = used - used_before > _COMPUTING * timeout
                    if n_done == before and not (spare_computing and computing):
                        self.give_up()
                        raise timeout_error(timeout, self.activities, self.threads)
        finally:
            self._awaited.difference_update(finished)

    def give_up(self) -> None:
        """Take no more tasks, and no longer wait for the threads: one of them hangs."""
        try:
            with self._submitting:
                self.is_given_up = True
                # Threads that can still end do so alone; one that hangs cannot be waited for.
                self._end.detach()
                _pools.discard(self)
                _tell_to_end(self._queues)
        finally:
            # Also if an interrupt comes in between: others may wait without a timeout.
            for flag in self._awaited.copy() if self.is_given_up else ():
                flag.wake()

    def close(self) -> None:
        """End the threads, after what they were handed; wait for them. Harmless when repeated.

        Raises:
            PipelineError: called by one of the threads, which would wait for itself.
        """
        if threading.current_thread() in self.threads:
            raise PipelineError(
                "a pipeline was closed by one of its own layers, which would wait for itself.\n"
                "Fix: close it when its call has returned."
            )
        if self.process != os.getpid():
            return
        with self._submitting:
            if self._end.detach() is not None:
                _tell_to_end(self._queues)
        # Without the lock: a mini-batch that waits for a layer that hangs may give up meanwhile.
        for thread in self.threads:
            while thread.is_alive() and not self.is_given_up:
                thread.join(_LOOK_UP)

    def end_at_exit(self) -> None:
        """Stop all mini-batches, and let the threads end; waits for nothing."""
        if self.process == os.getpid() and self._end.detach() is not None:
            self._is_exit = True
            for stop in self._stops.copy():
                stop.is_exit = stop.is_set = True
            _tell_to_end(self._queues)

    def wait_at_exit(self, seconds: float) -> None:
        """Wait for the threads, but not for one that does nothing for so many seconds."""
        waiting = self.threads if self.process == os.getpid() else []
        while waiting:
            used, until = _seconds_used(self._clocks), time.monotonic() + seconds
            for thread in waiting:
                thread.join(max(0.0, until - time.monotonic()))
            waiting = [thread for thread in waiting if thread.is_alive()]
            if _seconds_used(self._clocks) - used <= _COMPUTING * seconds:
                return


#: Pools whose threads the end of the interpreter waits for.
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


#: Threads of this process that the system may still know.
_known_threads: list[threading.Thread] = []


def _is_known_to_the_system(thread: threading.Thread) -> bool:
    """Tell whether a thread exists, perhaps only to run destructors; where the system tells."""
    return thread.is_alive() or os.path.exists(f"/proc/self/task/{thread.native_id}")


@atexit.register
def _end_all() -> None:
    pools = list(_pools)
    for pool in pools:
        pool.end_at_exit()
    until = time.monotonic() + GRACE
    for pool in pools:
        # Idle workers share one wait, those that compute get the time they need.
        pool.wait_at_exit(max(1.0, until - time.monotonic()))
    # What a failed backward has left in autograd's queue of a thread is destroyed after Python has
    # finished with the thread, and that needs an interpreter that is not ending.
    until = time.monotonic() + DESTRUCTION
    for thread in _known_threads:
        while not thread.is_alive() and _is_known_to_the_system(thread):
            if time.monotonic() > until:
                return
            time.sleep(0.001)


def _seconds_used(clocks: Sequence[int | None]) -> float:
    """Add up the processor time of threads; one that has ended, or has no clock, counts as 0."""
    total = 0.0
    for clock in clocks:
        if clock is not None:
            with suppress(OSError):
                total += time.clock_gettime(clock)
    return total


def _end_threads(
    queues: Sequence[_Queue], threads: Sequence[threading.Thread], process: int
) -> None:
    if process != os.getpid():
        return
    _tell_to_end(queues)
    until = time.monotonic() + ENDING
    for thread in threads:
        # A pool can be collected, and so ended, by one of its own threads.
        if thread is not threading.current_thread():
            # Not for ever: garbage is collected anywhere, also inside of `threading.enumerate`, and
            # threads need its lock to end.
            thread.join(max(0.0, until - time.monotonic()))


def _tell_to_end(queues: Sequence[_Queue]) -> None:
    try:
        for queue in queues:
            queue.put(None)
    except BaseException:
        # Interrupted between two of them. A worker that is told twice has ended by then.
        for queue in queues:
            queue.put(None)
        raise


def _prepare(j: int, lane: Lane, threads: int | None, clocks: list[int | None]) -> None:
    """Prepare the thread of worker `j`, which calls this, and note its clock."""
    if hasattr(time, "pthread_getcpuclockid"):
        with suppress(OSError):
            clocks[j] = time.pthread_getcpuclockid(threading.get_ident())
    if threads is not None:
        # A thread adopts the process's number at its first use of it, and would undo ours if that
        # came later: reading it counts as a use.
        torch.get_num_threads()
        torch.set_num_threads(threads)
    # With this the engine runs every node of a cell's backward in this thread, CUDA nodes too: no
    # other thread is waited for, so no two workers can wait for each other's device thread.
    torch.autograd.set_multithreading_enabled(False)
    # Nor may the graphs of two cells share a cast of a parameter, see CallerState: also where a
    # layer turns autocast on by itself.
    torch.set_autocast_cache_enabled(False)
    lane.enter_thread()


def _work(
    queue: _Queue,
    prepare: Callable[[], None],
    started: threading.Barrier,
    failures: list[BaseException],
) -> None:
    try:
        prepare()
    except BaseException as error:
        failures.append(error)
    try:
        started.wait()
    except threading.BrokenBarrierError:
        return  # the pool was not made
    while True:
        task = queue.get()
        if task is None:
            return
        task()
        # An idle worker must not keep the last mini-batch's tensors alive.
        del task
