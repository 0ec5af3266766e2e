"""One mini-batch on its way through the pipeline.

Every cell (micro-batch i in partition j) is a small autograd graph of its own, cut off at detached
inputs; the order of cells is an explicit schedule, not something that autograd works out. Worker j
runs the row of its partition, action by action::

    forward   F(i, j)  take the input from the inbox, run the layers, put the output into j + 1's
    recompute R(i, j)  run the layers again on the kept input, now with a graph
    backward  B(i, j)  take the output's gradient, run the graph, put the input's into j - 1's

Forwards and backwards are two phases, between which the caller computes its loss; or one, if the
last partition computes it, micro-batch by micro-batch.

Who owns what, and what happens on a fault: docs/architecture.md, "The executor".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpipebal.errors import PipelineError
from gpipebal.pipeline.layers.batchnorm import Statistics, gathering
from gpipebal.pipeline.layers.written import StepsInHooks
from gpipebal.pipeline.minibatch.cell import make_cells
from gpipebal.pipeline.minibatch.inputs import Inputs
from gpipebal.pipeline.minibatch.loss import MicroBatchLoss
from gpipebal.pipeline.minibatch.new_gradients import NewGradients
from gpipebal.pipeline.minibatch.routes import Routes
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.recorder import MiniBatchRecord
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.process.modes import no_notes_left
from gpipebal.pipeline.process.process_wide import settings_entered
from gpipebal.pipeline.randomness.randomness import new_seed
from gpipebal.pipeline.values.lane import Events
from gpipebal.pipeline.values.microbatch import Packet
from gpipebal.pipeline.workers.failures import Failures
from gpipebal.pipeline.workers.inbox import InboxClosedError, Stop
from gpipebal.pipeline.workers.runtime import Runtime
from gpipebal.pipeline.workers.tasks import run_tasks
from gpipebal.pipeline.workers.tied import drop_gradients
from gpipebal.pipeline.workers.worker import given_up_error
from gpipebal.schedule import Action, Schedule

__all__ = ["MiniBatch"]


class MiniBatch:
    """The cells of one mini-batch and their way through the phases.

    Args:
        runtime: Partitions of the pipeline, their devices and workers.
        inputs: The input, whose micro-batches this takes away.
        schedule: Order of the actions.
        loss: What the last partition computes after its layers; None: nothing.
        record: Where each action's times go; None: no trace is on.
        ledger: Where live memory is counted; None: it is not metered.
        timeout: Seconds without the end of any action after which the caller gives up; None: never.

    Attributes:
        outputs: After the forward, the output of each micro-batch.
        losses: After a step, the loss of each micro-batch.
        leaves: After the forward, the parameters and the like that each partition had in it.
    """

    def __init__(
        self,
        runtime: Runtime,
        inputs: Inputs,
        schedule: Schedule,
        loss: MicroBatchLoss | None,
        *,
        record: MiniBatchRecord | None,
        ledger: Ledger | None,
        timeout: float | None,
    ) -> None:
        self.runtime = runtime
        self.lanes = runtime.lanes
        self.schedule = schedule
        self.rows, self.dims = inputs.rows, inputs.dims
        self.grad = torch.is_grad_enabled()
        self.state = CallerState.capture(tuple({lane.device.type for lane in self.lanes}))
        self.outputs: list[Packet] = []
        self.losses: list[Tensor | None] = [None] * len(self.rows)
        self.leaves: list[list[Tensor]] = [[] for _ in self.lanes]
        self._loss = loss
        self._record, self._ledger, self._timeout = record, ledger, timeout
        self._statistics = Statistics()
        self._failures = Failures()
        self._stop = Stop()
        self._routes = Routes(runtime.partitions, self.lanes, self._stop, ledger, record)
        self._sums = runtime.tied.sums(grad=self.grad)
        self._spent = not self.grad
        self._seed = new_seed()
        self._cells = make_cells(
            runtime.partitions,
            schedule,
            self._seed,
            grad=self.grad,
            # A leaf that goes to every micro-batch is read again after one of them has run, and a
            # partition may pass it on to the next.
            input_is_shared=None in self.dims and len(self.rows) > 1,
        )
        self._ready = starts = [lane.follow_caller() for lane in self.lanes]
        for i, packet in enumerate(inputs.take(starts[0])):
            self._routes.put_input(i, packet)
        self._target_ready = [*starts[-1], *(loss.target.events() if loss is not None else ())]
        # By partition, what marks the end of the phase that ran last.
        self._done: list[Events] = []
        # Whether the present backward keeps the cells for a further one.
        self._keeps = False
        # Parameters and the like without a gradient, by partition, while backwards run.
        self._new: list[NewGradients] = []
        # What recomputes need unchanged, by partition: the layers' modes and parameters.
        self._conditions: dict[int, Any] = {}

    def forward(self) -> None:
        """Run all forwards; the outputs are then in `outputs`, in the order of micro-batches.

        Raises:
            BaseException: whatever a layer raised, with notes that say where.
        """
        self._run_forward_phase("F")
        for partition, cells in zip(self.runtime.partitions, self._cells, strict=True):
            # In the backward `torch.func.functional_call` may have put back what was there before.
            self.leaves[partition.index] = partition.modules.leaves()
            if any(cell.checkpointed for cell in cells):
                self._conditions[partition.index] = partition.modules.condition()
        self.outputs = [self._routes.take_output(i) for i in range(len(self.rows))]
        for packet in self.outputs:
            self.lanes[-1].give_to_caller(packet.leaves, packet.ready)

    def step(self) -> list[list[Tensor | None]]:
        """Run all forwards, losses and backwards; the losses are then in `losses`.

        Without gradients only the forwards and losses are run.

        Returns:
            For each micro-batch, the gradient of each leaf of its input.

        Raises:
            BaseException: as for `forward`.
        """
        self._spent = True
        if not self.grad:
            self._run_forward_phase("F")
            received: list[list[Tensor | None]] = []
        else:
            self._begin_gradients(parameters=True)
            self._run_forward_phase("FRB")
            received = self._take_input_gradients()
        self.lanes[-1].give_to_caller(self.losses, self._done[-1])
        return received

    def backward(
        self,
        gradients: Sequence[Sequence[Tensor | None]],
        ready: Events,
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
            PipelineError: the cells were used up by an earlier backward.
            BaseException: whatever a recompute or a backward raised.
        """
        if self._spent:
            raise PipelineError(
                "the pipeline's backward ran already, and what it needs is freed (or a forward or "
                "backward failed in the middle).\n"
                "Fix: loss.backward(retain_graph=True) for all but the last backward, or run the "
                "pipeline again."
            )
        self._check_unchanged()
        self._keeps, self._spent = keep, not keep
        self._ready = [lane.follow_caller() for lane in self.lanes]
        for i, leaves in enumerate(gradients):
            self._routes.put_output_gradients(i, (list(leaves), ready))
        self._begin_gradients(parameters=parameters)
        self._run_phase("RB")
        received = self._take_input_gradients()
        if self._spent:
            self._release_cells()
        return received

    def _begin_gradients(self, *, parameters: bool) -> None:
        self._new = [NewGradients() for _ in self.runtime.partitions] if parameters else []
        for sums in self._sums:  # an interrupted backward may have left some
            sums.clear()

    def _take_input_gradients(self) -> list[list[Tensor | None]]:
        found = [self._routes.take_input_gradients(i) for i in range(len(self.rows))]
        for leaves, ready in found:
            self.lanes[0].give_to_caller(leaves, ready)
        self.runtime.tied.add_up(self._sums)
        return [list(leaves) for leaves, _ in found]

    def _run_forward_phase(self, kinds: str) -> None:
        """Run a phase that has the forwards; then update the running statistics of the layers."""
        self._run_phase(kinds)
        self._statistics.commit()

    def _check_unchanged(self) -> None:
        for j, state in self._conditions.items():
            if self.runtime.partitions[j].modules.condition() != state:
                raise PipelineError(
                    f"the checkpointed micro-batches of partition {j} cannot be "
                    "recomputed: since their forward a parameter was written to, replaced or "
                    "frozen, or a layer was switched between train and eval.\n"
                    "Fix: call backward() before the optimizer's step, before eval(), and inside "
                    "the block of torch.func.functional_call; or checkpoint='never'."
                )

    def _run_phase(self, kinds: str) -> None:
        settings = settings_entered(self.state.process_wide)
        with no_notes_left(), settings, self._seed.in_phase():
            self._run_rows(self.schedule.phase(kinds))

    def _run_rows(self, rows: Sequence[Sequence[Action]]) -> None:
        """Let every worker run its row; return when all have, raise when one failed."""
        pool = self.runtime.pool
        self._done = [()] * len(rows)
        tasks = [
            partial(self.state.variables.copy().run, self._run_row, j, row)
            for j, row in enumerate(rows)
        ]
        try:
            run_tasks(
                pool,
                tasks,
                self._stop,
                self._timeout,
                close=self._close,
                release=self._release_cells,
            )
        except BaseException:
            try:
                if pool.is_given_up:
                    self._give_up()
            finally:
                self.runtime.follow_workers()
            raise
        if self._failures:
            self._release_cells()
            self.runtime.follow_workers()
            raise self._failures.take_first(self.schedule)
        for lane, end in zip(self.lanes, self._done, strict=True):
            lane.give_to_caller((), end)

    def _run_row(self, j: int, row: Sequence[Action]) -> None:
        lane, activity = self.lanes[j], self.runtime.pool.activities[j]
        loss, ledger = self._loss_in(j), self._ledger
        run = {"F": self._run_forward, "R": self._run_recompute, "B": self._run_backward}
        action = row[0]
        try:
            lane.wait_for(self._ready[j])
            with (
                ledger.watch(j) if ledger else nullcontext(),
                gathering(self._statistics),
            ):
                steps = StepsInHooks(
                    self.runtime.partitions[j].modules,
                    *([loss.modules] if loss is not None else ()),
                )
                for action in row:
                    activity.wait_for(action)
                    if action.kind == "B":
                        steps.begin()
                    run[action.kind](action)
                    if action.kind == "B" and action is not row[-1]:
                        steps.check()
                    activity.end()
            self._done[j] = lane.mark(() if loss is None else self.losses)
        except InboxClosedError:
            if not self._stop.is_set:  # no other worker failed, which would tell why
                self._failures.add(action, given_up_error())
                self._close()
        except BaseException as error:
            # Perhaps because what was found out about a layer no longer holds.
            self._cells[j][action.micro_batch].forget_facts()
            self._failures.add(action, error)
            self._close()
        finally:
            activity.rest()

    def _run_forward(self, action: Action) -> None:
        j, _, i = action
        lane, loss = self.lanes[j], self._loss_in(j)
        self._routes.wait_for_room(j, "F")
        packet = self._routes.take_input(j, i)
        started = self._begin(action)
        tail = None if loss is None else loss.of(i, lane, self._target_ready, self._meet)
        output = self._cells[j][i].forward(packet, self.state, tail)
        del packet  # memory that it shares with the output is the receiver's to free
        self._end(action, started)
        if loss is None:
            self._routes.put_output(j, i, output._replace(ready=lane.mark(output.leaves)))
        else:
            self.losses[i] = loss.take(output)

    def _run_recompute(self, action: Action) -> None:
        j, _, i = action
        # A recompute waits for nothing, so a failed mini-batch has to be noticed here.
        self._stop.check()
        started = self._begin(action)
        self._cells[j][i].recompute(self.state, keep=self._keeps)
        self._end(action, started)

    def _run_backward(self, action: Action) -> None:
        j, _, i = action
        lane, loss = self.lanes[j], self._loss_in(j)
        self._routes.wait_for_room(j, "B")
        if loss is None:
            gradients = self._routes.take_gradients(j, i)
        else:
            self._stop.check()
            gradients = [loss.gradient(i, self.losses[i])]
        new = self._new[j] if self._new else None
        if new is not None and not new.has_begun:
            new.begin(self.leaves[j] or self.runtime.partitions[j].modules.leaves())
        started = self._begin(action)
        with self.runtime.tied.collecting(self._sums[j]):
            received = self._cells[j][i].backward(
                gradients, self.state, keep=self._keeps, parameters=new is not None
            )
        of_target = () if loss is None else loss.target.keep_gradients(i)
        if new is not None:
            new.part_from([*gradients, *received, *of_target])
        # They may share memory with what was received, which is the receiver's from now on.
        del gradients
        self._end(action, started)
        self._routes.put_gradients(j, i, received, lane.mark())

    def _loss_in(self, j: int) -> MicroBatchLoss | None:
        return self._loss if j == len(self.lanes) - 1 else None

    def _begin(self, action: Action) -> Any:
        j = action.partition
        self.runtime.pool.activities[j].run(self.runtime.partitions[j])
        return None if self._record is None else self.lanes[j].clock()

    def _end(self, action: Action, started: Any) -> None:
        if self._record is not None:
            self._record.add(*action, started, self.lanes[action.partition].clock())

    def _meet(self, leaves: Sequence[Tensor]) -> None:
        """Take in the parameters, or the like, that the loss of a micro-batch uses by itself."""
        self.runtime.tied.tie(len(self.lanes) - 1, leaves)
        if self._new:
            self._new[-1].add(leaves)

    def _close(self) -> None:
        self._spent = True
        self._stop.is_set = True
        self._routes.close()

    def _give_up(self) -> None:
        threads = self.runtime.pool.threads
        if self._loss is not None:
            self._loss.give_back()
            drop_gradients(self._loss.modules.leaves(), threads)
        for partition in self.runtime.partitions:
            partition.give_up()
            drop_gradients(partition.modules.leaves(), threads)

    def _release_cells(self) -> None:
        for row in self._cells:
            for cell in row:
                cell.release()
