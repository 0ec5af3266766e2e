"""Workers: one thread per partition, each with its device, its stream and its share of the cores.

Who owns what. A pool owns its threads; a thread owns nothing but the task it is running. A task is
handed to all workers at once, under a lock, so that every worker gets the tasks of all mini-batches
in one order: the mini-batch handed out first can always go on, whatever the others wait for.
Tasks never raise: they keep their failure for the caller.

Idle workers wait for the next task and hold no tensors. They are daemon threads, so a program can
always end; a pool is closed when nobody holds it any more or the interpreter ends, and closing
waits for the cell in progress, because a thread that is still inside torch when the interpreter
goes away can abort the process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from gpipebal.errors import PipelineError
from gpipebal.pipeline.activity import Activity, timeout_error
from gpipebal.pipeline.lane import Lane

__all__ = ["WorkerPool"]

_Queue = SimpleQueue[Callable[[], None] | None]

# Starting workers changes the process's number of threads for a moment: one pool at a time.
_starting = threading.Lock()


class WorkerPool:
    """Threads that run tasks, one task at a time each.

    The threads end when the pool is closed, or when nobody holds it any more: neither a pipeline
    nor a mini-batch whose backward could still come.

    Attributes:
        process: Process that started the threads; a forked child has none of them.
        activities: What each worker is doing.
        is_given_up: Whether a worker hung, so that the pool takes no more tasks and nobody waits
            for its threads.
    """

    def __init__(self, lanes: Sequence[Lane], threads: Sequence[int | None]) -> None:
        self.process = os.getpid()
        self.activities = [Activity() for _ in lanes]
        self.is_given_up = False
        self._queues: list[_Queue] = [SimpleQueue() for _ in lanes]
        self._submitting = threading.Lock()
        self._threads: list[threading.Thread] = []
        with _starting:
            before = torch.get_num_threads()
            started = threading.Barrier(len(lanes) + 1)
            failures: list[BaseException] = []
            try:
                for j, lane in enumerate(lanes):
                    thread = threading.Thread(
                        target=_work,
                        args=(self._queues[j], lane, threads[j], started, failures),
                        name=f"gpipebal-partition-{j}",
                        daemon=True,
                    )
                    thread.start()
                    self._threads.append(thread)
                started.wait()
            except BaseException:
                # Interrupted, or no more threads to be had: those that wait must not wait on.
                started.abort()
                raise
            finally:
                # set_num_threads in a worker also sets what later threads start with: put it back.
                torch.set_num_threads(before)
        # At exit too: a finalizer runs when the interpreter ends, if it has not run before.
        self._end = weakref.finalize(self, _end_threads, self._queues, self._threads, self.process)
        if failures:
            self._end()
            raise failures[0]

    def submit(self, tasks: Sequence[Callable[[], None]], n_submitted: list[int]) -> None:
        """Hand task j to worker j, to all workers in one go.

        Args:
            tasks: One per worker.
            n_submitted: Its only element counts the tasks handed out, also if this is interrupted.

        Raises:
            PipelineError: the pool is closed, belongs to another process, or is waited for by one
                of its own workers.
        """
        if self.process != os.getpid():
            raise PipelineError(
                "a mini-batch that began in the parent process cannot go on in a forked child.\n"
                "Fix: run forward and backward in the same process."
            )
        if threading.current_thread() in self._threads:
            raise PipelineError(
                "a pipeline was called by one of its own layers, which would wait for itself.\n"
                "Fix: do not call a pipeline inside itself, nor inside torch.utils.checkpoint: "
                "GPipe has checkpoint=."
            )
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
                n_submitted[0] += 1

    def wait_for(self, finished: Sequence[threading.Event], timeout: float | None) -> None:
        """Wait until all tasks have ended.

        Args:
            finished: Set by each task when it ends.
            timeout: Seconds without the end of any action after which to give up; None: never.

        Raises:
            PipelineTimeoutError: given up; the text says what every worker is doing.
        """
        n_done = sum(activity.n_done for activity in self.activities)
        for event in finished:
            while not event.wait(timeout):
                before, n_done = n_done, sum(activity.n_done for activity in self.activities)
                if n_done == before:
                    assert timeout is not None
                    self.give_up()
                    raise timeout_error(timeout, self.activities, self._threads)

    def give_up(self) -> None:
        """Take no more tasks, and wait for the threads no more: one of them hangs."""
        with self._submitting:
            self.is_given_up = True
            # Those that still can end by themselves; the one that hangs cannot be waited for.
            self._end.detach()
            for queue in self._queues:
                queue.put(None)

    def close(self) -> None:
        """End the threads, after what they were handed; wait for them. Harmless when repeated.

        Raises:
            PipelineError: one of the threads calls it, which would wait for itself.
        """
        if threading.current_thread() in self._threads:
            raise PipelineError(
                "a pipeline was closed by one of its own layers, which would wait for itself.\n"
                "Fix: close it when its call has returned."
            )
        with self._submitting:
            self._end()


def _end_threads(
    queues: Sequence[_Queue], threads: Sequence[threading.Thread], process: int
) -> None:
    if process != os.getpid():
        return
    for queue in queues:
        queue.put(None)
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
) -> None:
    try:
        if threads is not None:
            # A thread takes over the process's number at its first use of it, and would undo
            # ours if that came later: asking is a use.
            torch.get_num_threads()
            torch.set_num_threads(threads)
        # With this the engine runs every node of a cell's backward in this thread, CUDA nodes
        # too: no other thread is waited for, so no two workers can wait for each other's device
        # thread.
        torch.autograd.set_multithreading_enabled(False)
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
