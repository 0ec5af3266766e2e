"""Workers: one thread per partition, each with its device, its stream and its share of the cores.

Who owns what. A pool owns its threads; a thread owns nothing but the task it is running. A task is
handed to all workers at once, under a lock, so that every worker gets the tasks of all mini-batches
in one order: the mini-batch handed out first can always go on, whatever the others wait for.
Tasks never raise: they keep their failure for the caller.

Idle workers wait for the next task and hold no tensors. They are daemon threads, so a program can
always end. A pool is closed when nobody holds it any more; then its workers end what they were
handed. When the interpreter ends, all mini-batches are stopped, and the end waits for the cells in
progress, because a thread that is still inside torch when the interpreter goes away can abort the
process. It does not wait for a worker that hangs.

Who hangs, and who only needs long? A worker that computes uses the processor, which its thread's
clock tells.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import torch

from gpipebal.errors import PipelineError
from gpipebal.pipeline.activity import Activity, timeout_error
from gpipebal.pipeline.inbox import Flag, Stop
from gpipebal.pipeline.lane import Lane

__all__ = ["WorkerPool", "given_up_error"]

_Queue = SimpleQueue[Callable[[], None] | None]

#: Seconds of rest after which a worker that should end is taken to hang.
GRACE = 5.0

#: Seconds that the threads which have ended get at the end of the interpreter for destructors.
DESTRUCTION = 1.0

#: Share of a processor from which a worker is taken to compute.
_COMPUTING = 0.01

# Starting workers changes the process's number of threads for a moment: one pool at a time.
_starting = threading.Lock()


def given_up_error() -> PipelineError:
    """Return what a mini-batch raises whose workers another one, of another thread, gave up."""
    return PipelineError(
        "a mini-batch was stopped, because another one, in another thread, gave up the workers of "
        "both: one of them hangs.\nFix: run it again, with new workers."
    )


class WorkerPool:
    """Threads that run tasks, one task at a time each.

    The threads end when the pool is closed, or when nobody holds it any more: neither a pipeline
    nor a mini-batch whose backward could still come.

    Attributes:
        process: Process that started the threads; a forked child has none of them.
        activities: What each worker is doing.
        threads: The threads.
        is_given_up: Whether a worker hung, so that the pool takes no more tasks and nobody waits
            for its threads.
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
        # Before there is a thread, so that an interrupt leaves none behind.
        self._end = weakref.finalize(self, _end_threads, self._queues, self.threads, self.process)
        # The end of the interpreter has its own rules.
        self._end.atexit = False
        with _starting:
            before = torch.get_num_threads()
            started = threading.Barrier(len(lanes) + 1)
            failures: list[BaseException] = []
            try:
                for j, lane in enumerate(lanes):
                    thread = threading.Thread(
                        target=_work,
                        args=(
                            self._queues[j],
                            lane,
                            threads[j],
                            started,
                            failures,
                            self._clocks,
                            j,
                        ),
                        name=f"gpipebal-partition-{j}",
                        daemon=True,
                    )
                    thread.start()
                    self.threads.append(thread)
                _started[:] = [*filter(_is_known_to_the_system, _started), *self.threads]
                started.wait()
            except BaseException:
                # Interrupted, or no more threads to be had: those that wait must not wait on.
                started.abort()
                raise
            finally:
                # set_num_threads in a worker also sets what later threads start with: put it back.
                torch.set_num_threads(before)
        _pools.add(self)
        if failures:
            self._end()
            raise failures[0]

    @contextmanager
    def running(self, stop: Stop) -> Iterator[None]:
        """Let a mini-batch that runs in this block be stopped when the interpreter ends."""
        self._stops.add(stop)
        try:
            yield
        finally:
            self._stops.discard(stop)

    def check_caller(self) -> None:
        """Raise PipelineError in one of the pool's own threads, which would wait for itself."""
        if threading.current_thread() in self.threads:
            raise PipelineError(
                "a pipeline was called by one of its own layers, which would wait for itself.\n"
                "Fix: do not call a pipeline inside itself, nor inside torch.utils.checkpoint: "
                "GPipe has checkpoint=."
            )

    def submit(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Hand task j to worker j, to all workers in one go.

        Args:
            tasks: One per worker. If this is interrupted some may have been handed out.

        Raises:
            PipelineError: the pool is closed, belongs to another process, or is waited for by one
                of its own workers.
        """
        if self.process != os.getpid():
            raise PipelineError(
                "a mini-batch that began in the parent process cannot go on in a forked child.\n"
                "Fix: run forward and backward in the same process."
            )
        self.check_caller()
        if self._is_exit and threading.current_thread() is not threading.main_thread():
            # A daemon thread, with a moment left, and perhaps inside torch: see MiniBatch.
            threading.Event().wait()
        with self._submitting:
            if self.is_given_up:
                raise PipelineError(
                    "a mini-batch that began before a timeout can go no further: its workers were "
                    "given up.\nFix: run the mini-batch again."
                )
            if not self._end.alive:
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
            PipelineTimeoutError: given up; the text says what every worker is doing.
            PipelineError: another mini-batch gave the workers up.
        """
        n_done = sum(activity.n_done for activity in self.activities)
        used = 0.0 if timeout is None else _seconds_used(self._clocks)
        try:
            # Before it is asked who gave up: from then on that wakes us. Waking by the clock would
            # not do: while the interpreter ends a caller must sleep on.
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
        """Take no more tasks, and wait for the threads no more: one of them hangs."""
        try:
            with self._submitting:
                self.is_given_up = True
                # Those that still can end by themselves; the one that hangs cannot be waited for.
                self._end.detach()
                _pools.discard(self)
                for queue in self._queues:
                    queue.put(None)
        finally:
            # Also if an interrupt comes in between: others may wait without a timeout.
            for flag in self._awaited.copy() if self.is_given_up else ():
                flag.wake()

    def close(self) -> None:
        """End the threads, after what they were handed; wait for them. Harmless when repeated.

        Raises:
            PipelineError: one of the threads calls it, which would wait for itself.
        """
        if threading.current_thread() in self.threads:
            raise PipelineError(
                "a pipeline was closed by one of its own layers, which would wait for itself.\n"
                "Fix: close it when its call has returned."
            )
        with self._submitting:
            self._end()

    def end_at_exit(self) -> None:
        """Stop all mini-batches, and let the threads end; waits for nothing."""
        if self.process == os.getpid() and self._end.detach() is not None:
            self._is_exit = True
            for stop in self._stops.copy():
                stop.set_at_exit()
            for queue in self._queues:
                queue.put(None)

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


#: Those whose threads the end of the interpreter waits for.
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


#: Threads of this process that the system may still know.
_started: list[threading.Thread] = []


def _is_known_to_the_system(thread: threading.Thread) -> bool:
    """Tell whether a thread is there, perhaps only to run destructors; where that can be asked."""
    return thread.is_alive() or os.path.exists(f"/proc/self/task/{thread.native_id}")


@atexit.register
def _end_all() -> None:
    pools = list(_pools)
    for pool in pools:
        pool.end_at_exit()
    until = time.monotonic() + GRACE
    for pool in pools:
        # Those that rest do so side by side, those that compute take what they need.
        pool.wait_at_exit(max(1.0, until - time.monotonic()))
    # What a failed backward has left in autograd's queue of a thread is destroyed when Python is
    # through with the thread, and needs an interpreter that is not ending.
    until = time.monotonic() + DESTRUCTION
    for thread in _started:
        while not thread.is_alive() and _is_known_to_the_system(thread):
            if time.monotonic() > until:
                return
            time.sleep(0.001)


def _seconds_used(clocks: Sequence[int | None]) -> float:
    """Add up the processor time of threads; of one that has ended, or has no clock, none."""
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
    try:
        for queue in queues:
            queue.put(None)
    except BaseException:
        # Interrupted between two of them. Whom it tells twice has ended by then.
        for queue in queues:
            queue.put(None)
        raise
    for thread in threads:
        # A pool can be collected, and so ended, by one of its own threads.
        if thread is not threading.current_thread():
            thread.join()


def _work(
    queue: _Queue,
    lane: Lane,
    threads: int | None,
    started: threading.Barrier,
    failures: list[BaseException],
    clocks: list[int | None],
    j: int,
) -> None:
    try:
        if hasattr(time, "pthread_getcpuclockid"):
            with suppress(OSError):
                clocks[j] = time.pthread_getcpuclockid(threading.get_ident())
        if threads is not None:
            # A thread takes over the process's number at its first use of it, and would undo
            # ours if that came later: asking is a use.
            torch.get_num_threads()
            torch.set_num_threads(threads)
        # With this the engine runs every node of a cell's backward in this thread, CUDA nodes
        # too: no other thread is waited for, so no two workers can wait for each other's device
        # thread.
        torch.autograd.set_multithreading_enabled(False)
        # Nor one cast of a parameter in the graphs of two cells, see CallerState: also where a
        # layer turns autocast on by itself.
        torch.set_autocast_cache_enabled(False)
        lane.enter_thread()
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
