"""Tasks: one for each worker, run to their end, or stopped together.

What happens when the caller's wait ends early (an interrupt, or no action ends within the timeout):
the mini-batch is closed, so that workers end the action that they are in and begin no other; the
caller waits for that, and a worker which then rests for `GRACE` seconds is taken to hang, and all
are given up. A second interrupt ends this wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpipebal.errors import PipelineError
from gpipebal.pipeline.workers.inbox import Flag, Stop
from gpipebal.pipeline.workers.worker import GRACE, WorkerPool

__all__ = ["run_tasks"]


def run_tasks(
    pool: WorkerPool,
    tasks: Sequence[Callable[[], None]],
    stop: Stop,
    timeout: float | None,
    *,
    close: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """Let every worker run its task; return when all have ended.

    Args:
        pool: The workers.
        tasks: One for each; they never raise.
        stop: Whether the mini-batch that they belong to has been stopped.
        timeout: Seconds without the end of any action after which to give up; None: never.
        close: Stops the mini-batch: workers that wait give up, others begin no further action.
        release: Lets go of what a stopped mini-batch holds, once no worker touches it any more.

    Raises:
        PipelineTimeoutError: no action ended in time; the workers were given up.
        PipelineError: another mini-batch gave the workers up.
        BaseException: what interrupted the caller; the workers may have been given up.
    """
    begun, finished = [False] * len(tasks), [Flag() for _ in tasks]

    def flagged(j: int) -> Callable[[], None]:
        def run() -> None:
            try:
                begun[j] = True
                tasks[j]()
            finally:
                # Woken while the interpreter ends, a caller would be killed inside torch.
                if not stop.is_exit:
                    finished[j].set()

        return run

    try:
        with pool.running(stop):
            pool.submit([flagged(j) for j in range(len(tasks))])
            pool.wait_for(finished, timeout)
    except BaseException:
        try:
            close()
            if not pool.is_given_up:
                # A worker that has not begun by now finds it stopped, and does nothing.
                running = [flag for flag, it in zip(finished, begun, strict=True) if it]
                pool.wait_for(running, GRACE, spare_computing=True)
                release()
        except PipelineError:
            pass  # the interrupt is what the caller gets to see
        except BaseException:
            pool.give_up()
            raise
        raise
