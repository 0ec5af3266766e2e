"""One mini-batch on its way through the pipeline.

Every cell (micro-batch i in partition j) is a small autograd graph of its own, cut off at detached
inputs; the order of cells is an explicit schedule, not something that autograd works out. Worker j
runs the row of its partition, action by action::

    forward   F(i, j)  take the input from the inbox, run the layers, put the output into j + 1's
    recompute R(i, j)  run the layers again on the kept input, now with a graph
    backward  B(i, j)  take the output's gradient, run the graph, put the input's into j - 1's

Who owns what. A cell is touched only by the worker of its partition, between phases by nobody. A
packet belongs to whoever took it out of an inbox. The mini-batch belongs to the caller, and lives
as long as the caller's graph of the output does. The only shared states are the inboxes and the
failure list, each behind a lock.

What happens on a fault. The first failure closes all inboxes: a worker that waits gives up, one
that computes ends its cell and stops before the next. The caller waits until all have stopped,
then raises the failure that comes first in schedule order, with its own type and traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.batchnorm import Statistics, gathering
from gpipebal.pipeline.caller import CallerState
from gpipebal.pipeline.cell import Cell
from gpipebal.pipeline.inbox import Inbox, InboxClosedError, Stop
from gpipebal.pipeline.lane import Lane
from gpipebal.pipeline.ledger import Ledger
from gpipebal.pipeline.microbatch import Packet, count_rows
from gpipebal.pipeline.partition import Partition
from gpipebal.pipeline.randomness import draw_seed
from gpipebal.pipeline.recorder import MiniBatchRecord
from gpipebal.pipeline.worker import WorkerPool
from gpipebal.schedule import Action, CheckpointMode, gpipe_schedule, is_checkpointed

__all__ = ["MiniBatch"]


class MiniBatch:
    """The cells of one mini-batch and their way through both phases.

    Args:
        partitions: Partitions of the pipeline.
        lanes: Their devices and streams.
        pool: Their workers.
        micro_batches: Leaves of each micro-batch of the input, cut off from autograd.
        structure: Pytree of the input.
        needs_gradient: Which leaves of the input need a gradient.
        checkpoint: Which micro-batches are recomputed.
        grad: Whether a backward can follow.
        record: Where each action's times go; None when nobody traces.
        ledger: Where live memory is counted; None when nobody meters.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        lanes: Sequence[Lane],
        pool: WorkerPool,
        micro_batches: Sequence[Sequence[Any]],
        structure: Any,
        needs_gradient: Sequence[bool],
        checkpoint: CheckpointMode,
        *,
        grad: bool,
        record: MiniBatchRecord | None,
        ledger: Ledger | None,
    ) -> None:
        self.chunks = len(micro_batches)
        self.rows = [count_rows(leaves) for leaves in micro_batches]
        self.n_partitions = len(partitions)
        self.grad = grad
        self.state = CallerState.capture(tuple({lane.device.type for lane in lanes}))
        self.schedule = gpipe_schedule(self.n_partitions, self.chunks, checkpoint)
        self.lanes = lanes
        self.record = record
        self._ledger = ledger
        self._statistics = Statistics()
        self.outputs: list[Packet] = []
        self._pool = pool
        self._failures: list[tuple[Action, BaseException]] = []
        self._failing = threading.Lock()
        self._seed = 0
        self._inputs = [
            Packet(list(leaves), structure, list(needs_gradient)) for leaves in micro_batches
        ]
        self._cells = [
            [
                Cell(
                    partition,
                    mode,
                    micro_batch=i,
                    grad=grad,
                    checkpointed=grad and is_checkpointed(checkpoint, i, self.chunks),
                )
                for i in range(self.chunks)
            ]
            for partition, mode in [(partition, partition.mode()) for partition in partitions]
        ]
        self._stop = Stop()
        self._watch_all = False
        self._inboxes: list[Inbox] = []
        self._returns: list[Inbox] = []
        self._spent = not grad

    def forward(self) -> None:
        """Run all forwards; the outputs stand in `outputs`, in the order of micro-batches.

        Raises:
            BaseException: whatever a layer raised, noted with partition, layer, micro-batch
                and phase.
        """
        self._inboxes = [Inbox(self._stop) for _ in range(self.n_partitions + 1)]
        drawn_from = torch.default_generator.get_state()
        self._seed = draw_seed()
        drawn_to = torch.default_generator.get_state()
        starts = [lane.follow_caller() for lane in self.lanes]
        for i, packet in enumerate(self._inputs):
            self._inboxes[0].put(i, packet._replace(ready=starts[0]))
        self._inputs = []
        try:
            self._run_phase("F", starts)
        finally:
            drew = any(cell.drew for row in self._cells for cell in row)
            unseen = not torch.equal(torch.default_generator.get_state(), drawn_to)
            if not drew and not unseen:
                # A model without randomness leaves the caller's generator as it found it.
                torch.default_generator.set_state(drawn_from)
        if unseen:
            # Somebody drew from the process's generator: another thread of the program, or a
            # layer that is not watched because it did not draw before. Look at the layers anew
            # in the next mini-batch, and in this one's recomputes.
            self._watch_all = True
            for row in self._cells:
                row[0].forget_facts()
        for lane, end in zip(self.lanes, self._ends, strict=True):
            lane.give_to_caller((), end)
        self._statistics.commit()
        last = self._inboxes[-1]
        self.outputs = [last.take(i) for i in range(self.chunks)]
        for packet in self.outputs:
            self.lanes[-1].give_to_caller(packet.leaves, packet.ready)
        self._inboxes = []

    def backward(
        self,
        gradients: Sequence[Sequence[Tensor | None]],
        ready: Any,
        *,
        keep: bool,
        parameters: bool,
    ) -> list[list[Tensor | None]]:
        """Run all recomputes and backwards.

        Args:
            gradients: For each micro-batch, the gradient of each leaf of its output.
            ready: What the last lane waits for before it reads them.
            keep: Keep the cells, so that a second backward can follow.
            parameters: Add to the parameters' gradients; without it only the input's are found.

        Returns:
            For each micro-batch, the gradient of each leaf of its input.

        Raises:
            RuntimeError: the cells are spent by an earlier backward.
            BaseException: whatever a recompute or a backward raised.
        """
        if self._spent:
            raise RuntimeError(
                "the pipeline's backward ran already, and what it needs is freed (or a forward or "
                "backward failed in the middle).\n"
                "Fix: loss.backward(retain_graph=True) for all but the last backward, or run the "
                "pipeline again."
            )
        self._spent = not keep
        self._returns = [Inbox(self._stop) for _ in range(self.n_partitions + 1)]
        starts = [lane.follow_caller() for lane in self.lanes]
        for i, leaves in enumerate(gradients):
            self._returns[self.n_partitions].put(i, (list(leaves), ready))
        for row in self._cells:
            for cell in row:
                cell.begin_backward(keep=keep, parameters=parameters)
        self._run_phase("RB", starts)
        first = self._returns[0]
        received = [first.take(i) for i in range(self.chunks)]
        self._returns = []
        if self._spent:
            self._release_cells()
        for leaves, ready in received:
            self.lanes[0].give_to_caller(leaves, ready)
        for lane, end in zip(self.lanes, self._ends, strict=True):
            lane.give_to_caller((), end)
        return [leaves for leaves, _ in received]

    def _run_phase(self, kinds: str, starts: Sequence[Any]) -> None:
        """Let every worker run its row; return when all have, raise when one failed."""
        rows = self.schedule.phase(kinds)
        self._ends: list[Any] = [None] * self.n_partitions
        finished = [threading.Event() for _ in rows]

        def task_of(j: int) -> Callable[[], None]:
            variables = self.state.variables.copy()

            def task() -> None:
                try:
                    variables.run(self._run_row, j, rows[j], starts[j])
                finally:
                    finished[j].set()

            return task

        n_submitted = [0]
        try:
            self._pool.submit([task_of(j) for j in range(self.n_partitions)], n_submitted)
            for event in finished:
                event.wait()
        except BaseException:
            # Interrupted: let the cells in progress end. A second interrupt ends this wait too,
            # and leaves the workers to stop on their own, and the cells to them.
            self._close_inboxes()
            for event in finished[: n_submitted[0]]:
                event.wait()
            self._release_cells()
            raise
        if self._failures:
            self._release_cells()
            raise self._first_failure()

    def _run_row(self, j: int, row: Sequence[Action], start: Any) -> None:
        lane = self.lanes[j]
        action = row[0]
        try:
            lane.wait_for(start)
            with (
                self._ledger.watch(j) if self._ledger else nullcontext(),
                gathering(self._statistics),
            ):
                for action in row:
                    self._run_action(action)
            self._ends[j] = lane.mark()
        except InboxClosedError:
            pass  # another worker failed, and tells why
        except BaseException as error:
            error.add_note(_where(action))
            with self._failing:
                self._failures.append((action, error))
            self._close_inboxes()

    def _run_action(self, action: Action) -> None:
        j, i = action.partition, action.micro_batch
        cell, lane = self._cells[j][i], self.lanes[j]
        if action.kind == "F":
            packet = self._inboxes[j].take(i)
            leaves = self._receive(lane, j, packet.leaves, packet.ready)
            started = self._clock(lane)
            output = cell.forward(packet._replace(leaves=leaves), self.state, self._seed)
            self._tell(action, lane, started)
            self._inboxes[j + 1].put(i, output._replace(ready=lane.mark()))
        elif action.kind == "R":
            # A recompute waits for nobody, so a failed mini-batch has to be noticed here.
            self._stop.check()
            started = self._clock(lane)
            cell.recompute(self.state, self._seed, watch_all=self._watch_all)
            self._tell(action, lane, started)
        else:
            gradients, ready = self._returns[j + 1].take(i)
            gradients = self._receive(lane, j, gradients, ready)
            started = self._clock(lane)
            received = cell.backward(gradients)
            self._tell(action, lane, started)
            self._returns[j].put(i, (received, lane.mark()))

    def _receive(self, lane: Lane, j: int, leaves: Sequence[Any], ready: Any) -> list[Any]:
        received = lane.receive(leaves, ready)
        if self._ledger is not None:
            self._ledger.hold(received, j)
        return received

    def _clock(self, lane: Lane) -> Any:
        return lane.clock() if self.record is not None else None

    def _tell(self, action: Action, lane: Lane, started: Any) -> None:
        if self.record is not None:
            self.record.add(action, started, lane.clock())

    def _close_inboxes(self) -> None:
        self._spent = True
        self._stop.is_set = True
        for inbox in (*self._inboxes, *self._returns):
            inbox.wake()

    def _release_cells(self) -> None:
        for row in self._cells:
            for cell in row:
                cell.release()

    def _first_failure(self) -> BaseException:
        order = {action: k for k, action in enumerate(self._by_clock())}
        failures = sorted(self._failures, key=lambda failure: order[failure[0]])
        error = failures[0][1]
        for action, other in failures[1:]:
            error.add_note(f"also failed: {_where(action)}: {type(other).__name__}: {other}")
        self._failures = []
        return error

    def _by_clock(self) -> list[Action]:
        # An action's place in the schedule: the clock cycle in which it would run if every
        # action took one cycle, then its partition.
        n = self.n_partitions
        return sorted(
            (action for row in self.schedule.rows for action in row),
            key=lambda a: (
                a.kind != "F",
                a.micro_batch + a.partition
                if a.kind == "F"
                else (self.chunks - 1 - a.micro_batch) + (n - 1 - a.partition),
                a.partition if a.kind == "F" else -a.partition,
                a.kind == "B",
            ),
        )


_PHASES = {"F": "forward", "R": "recompute", "B": "backward"}


def _where(action: Action) -> str:
    return (
        f"in partition {action.partition}, {_PHASES[action.kind]} of "
        f"micro-batch {action.micro_batch}"
    )
