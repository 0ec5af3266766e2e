"""GPipe: a chain of layers, cut into partitions that work side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Never

from torch import Tensor, nn

from gpipebal.errors import PipelineError
from gpipebal.pipeline.layers import chain, planned
from gpipebal.pipeline.layers.collectives import check_order_of_talk
from gpipebal.pipeline.layers.container import Container
from gpipebal.pipeline.layers.deferral import defer_layers
from gpipebal.pipeline.layers.devices import (
    DeviceLike,
    check_threads,
    choose_devices,
    in_order,
    move_layer,
    share_of_cores,
)
from gpipebal.pipeline.layers.own import warn_of_what_stays_behind
from gpipebal.pipeline.layers.runs import check_runs
from gpipebal.pipeline.minibatch.bridge import attach_outputs, give_back
from gpipebal.pipeline.minibatch.inputs import (
    Inputs,
    charge_inputs,
    check_no_transform,
    part_inputs,
)
from gpipebal.pipeline.minibatch.loss import MicroBatchLoss, Reduction
from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.pipeline.process.caller import warn_caller, whole_call
from gpipebal.pipeline.process.forks import check_not_inside, open_in_child
from gpipebal.pipeline.values.parting import paired_gradients
from gpipebal.pipeline.workers.runtime import Runtime, check_shared
from gpipebal.plan import Plan
from gpipebal.problem.bounds import partition_of_layers
from gpipebal.problem.checks import check_flag
from gpipebal.schedule import Checkpoint, make_schedule, modes_of
from gpipebal.skip.layout import find_skips

__all__ = ["GPipe"]

# Two first forwards at once must not make two sets of workers for the same layers.
_starting = open_in_child(threading.RLock())


class GPipe(Container):
    """Run an `nn.Sequential` as a pipeline over several devices, as one differentiable module.

    The mini-batch is divided into micro-batches, and the partitions work on them side by side, in
    the forward and in the backward. Gradients, buffers and state-dict keys are those of the plain
    model run over the same micro-batches.

    The pipeline uses the caller's own layers, moved to their devices. Inputs are moved to the
    first device, outputs stay on the last. `gpipebal.skip` lets layers pass values around others.

    Args:
        module: The chain. Its direct children are the layers.
        balance: Number of layers in each partition; they add up to ``len(module)``.
        devices: One device per partition (`torch.device`, str or int), or a CUDA stream to
            compute on; more are ignored. None: the CUDA devices in order; on a machine with none,
            the CPU for every partition.
        chunks: Micro-batches per mini-batch, 1 or more. A mini-batch of fewer rows gives one
            micro-batch per row.
        checkpoint: Which micro-batches keep only their input, and are recomputed in the
            backward: ``'always'``, ``'except_last'`` or ``'never'``, or a list with one of them
            for each partition. In eval mode none are. In `step` with ``'1f1b'`` a recompute that
            would directly follow its own forward is left out: the last partition has none.
        deferred_batch_norm: Update the running statistics of batch normalisation once per
            mini-batch, from all its rows. The layers concerned are replaced by
            `DeferredBatchNorm`s that share all tensors with the caller's.
        in_dims: Dimension along which each tensor of the input has its rows, as a pytree that is
            a prefix of the input's. None: the tensor has no rows, and every micro-batch gets all
            of it.
        keyword_dims: The same for keyword arguments, by name; 0 for those that are not named.
        out_dims: Dimension along which each tensor of the output has its rows. None: it has
            none, and the micro-batches' tensors are stacked.
        threads_per_partition: Intra-operation threads of each CPU partition; None: its share of
            the cores. CUDA partitions are not affected.
        timeout: Seconds in which some worker must end an action; if none does, the call raises
            an error that says what each is doing, instead of waiting longer. None: wait for ever.

    Attributes:
        balance: Number of layers in each partition.
        devices: Device of each partition.
        chunks: Micro-batches per mini-batch.
        checkpoint: The checkpoint mode, or the modes.
        schedule: Schedule of `step`: ``'gpipe'``, or what the plan says.
        threads_per_partition: Intra-operation threads of a CPU partition.
        timeout: Seconds in which some worker must end an action.
        in_dims, keyword_dims, out_dims: As given.

    Warns:
        UserWarning: `module` has hooks, parameters or buffers of its own, besides its layers'.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, or its skips do not pair up (a TypeError).
        DuplicateLayerError: partitions share a parameter or buffer that they cannot share.
        BalanceError: `balance`, `chunks`, `checkpoint`, `deferred_batch_norm`, `timeout` or a
            number of threads cannot be used (a ValueError).
        DeviceError: a device does not exist, or there are fewer devices than partitions.

    Source:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019; interface of Kim et al., "torchgpipe: On-the-fly Pipeline
        Parallelism for Training Giant Models", 2020. Differs: an explicit schedule, run by one
        worker per partition in both directions.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, [1, 2], chunks=2)
        >>> output = pipe(torch.ones(6, 4))
        >>> output.sum().backward()
        >>> output.shape, pipe[0].weight.grad.shape
        (torch.Size([6, 2]), torch.Size([8, 4]))
    """

    _runtime: Runtime | None
    _planned: planned.Planned | None = None

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[DeviceLike] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        deferred_batch_norm: bool = False,
        in_dims: Any = 0,
        keyword_dims: Mapping[str, Any] | None = None,
        out_dims: Any = 0,
        threads_per_partition: int | None = None,
        timeout: float | None = None,
        **others: Never,
    ) -> None:
        super().__init__()
        chain.check_settings(others, GPipe.__init__.__kwdefaults__ or {})
        self.chunks, self.checkpoint = chunks, checkpoint
        self.schedule, self.timeout = "gpipe", timeout
        layers = chain.layers_of(module)
        warn_of_what_stays_behind(module)
        self.in_dims, self.out_dims = in_dims, out_dims
        self.keyword_dims = chain.check_keyword_dims(
            keyword_dims, next(iter(layers.values()), None)
        )
        find_skips(layers)
        if check_flag("deferred_batch_norm", deferred_batch_norm):
            defer_layers(layers)
        self.balance = chain.check_balance(balance, len(layers))
        check_runs(layers, self.balance)
        modes_of(self.checkpoint, len(self.balance))
        self.devices, self._streams = choose_devices(devices, len(self.balance))
        self.threads_per_partition = (
            share_of_cores(len(self.balance))
            if threads_per_partition is None
            else check_threads("threads_per_partition", threads_per_partition)
        )
        check_shared(layers, self.balance, self.devices)
        self.training = module.training
        for (name, layer), j in zip(layers.items(), partition_of_layers(self.balance), strict=True):
            move_layer(name, layer, self.devices[j])
        # Not add_module: the layers keep their names, whatever this class defines.
        self._modules.update(layers)
        self._runtime = None

    @classmethod
    def from_plan(
        cls,
        module: nn.Module,
        plan: Plan,
        *,
        devices: Iterable[DeviceLike] | None = None,
        deferred_batch_norm: bool = False,
        in_dims: Any = 0,
        keyword_dims: Mapping[str, Any] | None = None,
        out_dims: Any = 0,
        threads_per_partition: int | None = None,
        timeout: float | None = None,
        **others: Never,
    ) -> GPipe:
        """Make the pipeline that a plan describes.

        `step` follows a plan's schedule ``'1f1b'``; calling the pipeline runs all forwards
        before the first backward, whatever the plan says. Layers of the plan's runs are recomputed
        on their own.

        Args:
            module: The model that the plan was made for.
            plan: The plan.
            devices: As for `GPipe`, but in the order in which `solve` was given them.
            deferred_batch_norm: As for `GPipe`.
            in_dims: As for `GPipe`.
            keyword_dims: As for `GPipe`.
            out_dims: As for `GPipe`.
            threads_per_partition: As for `GPipe`.
            timeout: As for `GPipe`.
            others: Not accepted: balance, chunks, checkpoint and schedule are the plan's.

        Warns:
            UserWarning: the partitions will have another number of threads than the layers were
                profiled with, a layer has changed since, or rows lie along another dimension.

        Raises:
            KindError: `plan` is not a Plan, or something is given that it has itself.
            UnsupportedPlanError: the plan has a schedule other than ``'gpipe'`` and ``'1f1b'``.
            BalanceError: the plan's layers are not the module's, or the module has other runs.
            GpipebalError: as for `GPipe`.
        """
        planned.check_plan(plan, module)
        planned.check_plan_settings(plan, others, GPipe.from_plan.__kwdefaults__ or {})
        deferred = check_flag("deferred_batch_norm", deferred_batch_norm)
        pipe = cls(
            planned.with_runs_of(plan, module, deferred),
            plan.balance,
            devices=in_order(devices, plan.devices),
            chunks=plan.chunks,
            checkpoint=plan.checkpoint,
            deferred_batch_norm=deferred and not plan.runs,  # else it is done
            in_dims=in_dims,
            keyword_dims=keyword_dims,
            out_dims=out_dims,
            threads_per_partition=threads_per_partition,
            timeout=timeout,
        )
        pipe.schedule = plan.schedule
        pipe._planned = planned.Planned(plan, pipe.devices)
        for warning in planned.plan_warnings(
            plan, chain.layers_of(module), pipe.threads_per_partition, in_dims, keyword_dims
        ):
            warn_caller(warning)
        return pipe

    @whole_call
    def forward(self, input: Any = chain.NO_INPUT, /, *others: Any, **keywords: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            input: A tensor, or a pytree of tensors, with the same rows. Other leaves go to every
                micro-batch as they are.
            others: Not accepted: give several inputs as one tuple, or by name.
            keywords: Given to the first layer besides its input, divided likewise.

        Returns:
            The output of the last layer, joined over the micro-batches, on the last device. Of a
            leaf that is not a tensor, such as a number, only the first micro-batch's is in it.

        Raises:
            ModelError: several inputs; or the input or a layer's output has no tensor, or tensors
                that differ in rows.
            BalanceError: a dimension in `in_dims`, `keyword_dims` or `out_dims` does not fit.
            PipelineTimeoutError: no worker ended an action within `timeout`.
            BaseException: whatever a layer raised, with its own type and traceback, and notes
                that name partition, phase, micro-batch and layer.
        """
        input = chain.check_one_input(input, others, keywords)
        leaves, inputs = self._parted(input, keywords)
        if not self._modules:
            return input
        mini_batch = self._begin(inputs, "gpipe", None)
        mini_batch.forward()
        return attach_outputs(mini_batch, leaves, self.out_dims)

    @whole_call
    def step(
        self,
        input: Any,
        *others: Any,
        target: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        reduction: Reduction = "mean",
        target_dims: Any = 0,
        schedule: str | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Run a training step inside the pipeline: forwards, losses and backwards.

        Does what ``loss_fn(pipe(input), target).backward()`` does, but the last partition
        computes the loss, one micro-batch at a time. So no partition waits for the whole
        mini-batch between forward and backward, the outputs are never gathered, and schedule
        ``'1f1b'`` is possible: at most ``n_partitions - j`` micro-batches are in flight in
        partition j, so that outputs (the logits of a large vocabulary) exist for about one at a
        time.

        Gradients are added to those of the parameters, and to those of inputs that require one.
        The optimizer is the caller's, as usual. Under `torch.no_grad` only the loss is computed.
        If a layer fails, gradients may have been added in part: clear them before the next step.

        Args:
            input: As for `forward`.
            others: Not accepted: give further arguments by name.
            target: A tensor or a pytree of tensors, divided like the input; None: none.
            loss_fn: Called as ``loss_fn(output, target)``, or ``loss_fn(output)`` without a
                target; returns a tensor with one element, scaled by ``scaler.scale(loss)`` if
                needed. Called twice for a micro-batch that the last partition recomputes: a module
                finds its buffers as they were, and any function can ask `is_recomputing`.
            reduction: ``'mean'`` if `loss_fn` takes the mean over the rows of a micro-batch: the
                micro-batches' losses are weighted by their rows, which gives the mean over the
                mini-batch. ``'sum'`` if it adds up: the micro-batches' losses are added up too. (A
                mean over something other than rows, such as the tokens that are not padding, needs
                a sum that `loss_fn` divides by the mini-batch's number of them.)
            target_dims: Dimension along which each tensor of the target has its rows, as a prefix
                of its pytree; None: every micro-batch gets all of it. Not used without a target.
            schedule: ``'gpipe'`` or ``'1f1b'``; None: the pipeline's own.
            keywords: Keyword arguments for the first layer.

        Returns:
            The loss of the mini-batch as `loss_fn` gave it, without a graph, on the last device.

        Raises:
            UnsupportedPlanError: an unknown schedule.
            PipelineError: the loss needs no gradient.
            ModelError: `loss_fn` is missing, or returned no loss; an argument has no name; and as
                for `forward`.
            BaseException: as for `forward`.

        Source:
            Schedule ``'1f1b'``: see `gpipebal.schedule.one_f_one_b_schedule`.

        Example:
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> pipe = GPipe(model, [1, 2], chunks=2)
            >>> loss = pipe.step(
            ...     torch.ones(6, 4), target=torch.ones(6, 2), loss_fn=nn.functional.mse_loss
            ... )
            >>> loss.shape, loss.requires_grad, pipe[0].weight.grad.shape
            (torch.Size([]), False, torch.Size([8, 4]))
        """
        chain.check_step_input(others)
        leaves, inputs = self._parted(input, {} if keywords is None else keywords, target)
        if not self._modules:
            raise PipelineError("a pipeline without layers has nothing to train.\nFix: add layers.")
        loss = MicroBatchLoss(loss_fn, target, target_dims, inputs.rows, reduction, self)
        mini_batch = self._begin(inputs, self.schedule if schedule is None else schedule, loss)
        received = mini_batch.step()
        loss.check(grad=mini_batch.grad)
        of_inputs = paired_gradients(leaves, received, mini_batch.rows, mini_batch.dims)
        of_target = loss.target.gradients(mini_batch.lanes[-1])
        # In one go: what the input and the target were computed from may be one graph.
        give_back([*of_inputs, *of_target])
        return loss.total(mini_batch.losses)

    def close(self) -> None:
        """End the workers; the next forward starts new ones. Harmless when repeated."""
        runtime = self._runtime
        if runtime is not None:
            runtime.pool.close()
            if self._runtime is runtime:  # perhaps a forward in another thread has started new ones
                self._runtime = None

    def __getstate__(self) -> dict[str, Any]:
        # Threads and streams belong to this object in this process: a copy starts its own.
        streams = [None] * len(self.balance)
        return {**super().__getstate__(), "_runtime": None, "_streams": streams}

    def _parted(
        self, input: Any, keywords: Mapping[str, Any], target: Any = None
    ) -> tuple[list[Any], Inputs]:
        check_no_transform((input, keywords, target), self.parameters())
        charge_inputs(self._ledger, (input, keywords), self.devices)
        return part_inputs(input, keywords, self.in_dims, self.keyword_dims, self.chunks)

    def _begin(self, inputs: Inputs, schedule: str, loss: MicroBatchLoss | None) -> MiniBatch:
        """Make a mini-batch that is ready to run."""
        runtime = self._started()
        checkpoint = self.checkpoint if self.training else "never"
        order = make_schedule(schedule, len(self.balance), len(inputs.micro_batches), checkpoint)
        check_order_of_talk(self, runtime.talkers, order)
        record, inside = None, loss is not None
        planned.warn_of_call(self, in_step=inside)
        if self._recorder is not None:
            record = self._recorder.begin(order, self.balance, checkpoint, inside)
        return MiniBatch(
            runtime, inputs, order, loss, record=record, ledger=self._ledger, timeout=self.timeout
        )

    def _started(self) -> Runtime:
        check_not_inside(_starting)
        with _starting:
            runtime = self._runtime
            if runtime is None or not runtime.can_run(self._modules.values()):
                layers = self.layers_in_place()
                chain.check_number(len(layers), self.balance)
                check_runs(layers, self.balance)
                runtime = Runtime(
                    layers, self.balance, self.devices, self._streams, self.threads_per_partition
                )
                self._runtime = runtime
            elif runtime.has_other_parameters():
                # Others may be tied now. Mini-batches on their way go on with the former ones.
                check_shared(self.layers_in_place(), self.balance, self.devices)
                runtime = runtime.with_other_ties()
                self._runtime = runtime
            return runtime
