"""GPipe: a chain of layers, cut into partitions that work side by side."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import (
    ModelError,
    PipelineError,
    UnsupportedPlanError,
)
from gpipebal.pipeline.batchnorm import convert_deferred_batch_norm
from gpipebal.pipeline.bridge import attach_outputs
from gpipebal.pipeline.chain import check_balance, check_plan_names, layers_of, plan_warnings
from gpipebal.pipeline.devices import check_threads, choose_devices, move_layer, share_of_cores
from gpipebal.pipeline.lane import make_lane
from gpipebal.pipeline.ledger import Ledger
from gpipebal.pipeline.microbatch import flatten, scatter_leaves, unflatten
from gpipebal.pipeline.minibatch import MiniBatch
from gpipebal.pipeline.partition import Partition
from gpipebal.pipeline.recorder import Recorder
from gpipebal.pipeline.worker import WorkerPool
from gpipebal.plan import Plan
from gpipebal.schedule import CheckpointMode, check_checkpoint, check_count

__all__ = ["GPipe"]

# Kept beside the layers, which are registered under their own names: a layer may have one of
# these names too.
_SETTINGS = frozenset({"chunks", "checkpoint", "balance", "devices", "threads_per_partition"})


# Two first forwards at once must not make two sets of workers for the same layers.
_starting = threading.Lock()


class GPipe(nn.Module):
    """Run an `nn.Sequential` as a pipeline over several devices, as one differentiable module.

    The mini-batch is parted along dim 0 into micro-batches, which the partitions work on side by
    side, in the forward and in the backward. Gradients, buffers and state-dict keys are those of
    the plain model run over the same micro-batches.

    The pipeline uses the caller's own layers, moved to their devices. Inputs are moved to the
    first device, outputs stay on the last.

    Args:
        module: The chain. Its direct children are the layers.
        balance: Number of layers in each partition; they add up to ``len(module)``.
        devices: One device per partition (`torch.device`, str or int); more are ignored. None:
            the CUDA devices in order; on a machine with none, the CPU for every partition.
        chunks: Micro-batches per mini-batch, 1 or more. A mini-batch of fewer rows gives one
            micro-batch per row.
        checkpoint: Which micro-batches keep only their input, and are recomputed in the
            backward: ``'always'``, ``'except_last'`` or ``'never'``. In eval mode none are.
        deferred_batch_norm: Update the running statistics of batch normalisation once per
            mini-batch, with the figures of all its rows. The layers concerned are replaced by
            `DeferredBatchNorm`s that share everything with the caller's.
        threads_per_partition: Intra-operation threads of each CPU partition; None: its share of
            the cores. CUDA partitions are left alone.

    Attributes:
        balance: Number of layers in each partition.
        devices: Device of each partition.
        chunks: Micro-batches per mini-batch.
        checkpoint: The checkpoint mode.
        threads_per_partition: Intra-operation threads of a CPU partition.

    Raises:
        ModelError: `module` is not an `nn.Sequential` (a TypeError).
        DuplicateLayerError: a layer stands twice in the chain, or two layers share a parameter.
        BalanceError: `balance`, `chunks` or `checkpoint` cannot be used (a ValueError).
        DeviceError: a device does not exist, or there are fewer devices than partitions.

    Source:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019; interface of Kim et al., "torchgpipe: On-the-fly Pipeline
        Parallelism for Training Giant Models", 2020. Differs: an explicit schedule, run by one
        worker per partition in both directions.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, [1, 2], chunks=2)
        >>> output = pipe(torch.ones(6, 4))
        >>> output.sum().backward()
        >>> output.shape, pipe[0].weight.grad.shape
        (torch.Size([6, 2]), torch.Size([8, 4]))
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: CheckpointMode
    threads_per_partition: int

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
        threads_per_partition: int | None = None,
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.checkpoint = checkpoint
        layers = layers_of(module)
        if deferred_batch_norm:
            for name, layer in layers.items():
                layers[name] = convert_deferred_batch_norm(layer)
        self.balance = check_balance(balance, len(layers))
        self.devices = choose_devices(devices, len(self.balance))
        self.threads_per_partition = (
            share_of_cores(len(self.balance))
            if threads_per_partition is None
            else check_threads("threads_per_partition", threads_per_partition)
        )
        self.training = module.training
        names = iter(layers)
        for size, device in zip(self.balance, self.devices, strict=True):
            for _ in range(size):
                name = next(names)
                move_layer(name, layers[name], device)
                # Not add_module: the layers keep their names, whatever this class defines.
                self._modules[name] = layers[name]
        self._runtime: _Runtime | None = None
        self._recorder: Recorder | None = None
        self._ledger: Ledger | None = None

    @classmethod
    def from_plan(
        cls,
        module: nn.Module,
        plan: Plan,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        deferred_batch_norm: bool = False,
        threads_per_partition: int | None = None,
    ) -> GPipe:
        """Make the pipeline that a plan describes.

        Args:
            module: The model that the plan was made for.
            plan: The plan.
            devices: As for `GPipe`.
            deferred_batch_norm: As for `GPipe`.
            threads_per_partition: As for `GPipe`.

        Warns:
            UserWarning: the partitions will have other threads than the layers were profiled
                with, or a layer has changed since.

        Raises:
            UnsupportedPlanError: the plan has a schedule other than ``'gpipe'``.
            BalanceError: the plan's layers are not the module's.
        """
        if plan.schedule != "gpipe":
            raise UnsupportedPlanError(
                f"GPipe cannot run this plan: schedule={plan.schedule!r} (expected 'gpipe').\n"
                "Fix: solve(..., schedule='gpipe')."
            )
        check_plan_names(plan, list(layers_of(module)))
        pipe = cls(
            module,
            plan.balance,
            devices=devices,
            chunks=plan.chunks,
            checkpoint=plan.checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            threads_per_partition=threads_per_partition,
        )
        for warning in plan_warnings(plan, layers_of(module), pipe.threads_per_partition):
            warnings.warn(warning, stacklevel=2)
        return pipe

    def forward(self, input: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            input: A tensor, or a pytree of tensors, with the same rows along dim 0. Other leaves
                go to every micro-batch as they are.

        Returns:
            The output of the last layer, joined over the micro-batches, on the last device.

        Raises:
            ModelError: the input or a layer's output has no tensor, or tensors that differ in
                rows.
            BaseException: whatever a layer raised, with its own type and traceback, and notes
                that name partition, phase, micro-batch and layer.
        """
        inputs, structure = flatten(input)
        micro_batches = scatter_leaves(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in inputs], self.chunks
        )
        if not self._modules:
            return input
        grad = torch.is_grad_enabled()
        runtime = self._started()
        mini_batch = MiniBatch(
            runtime.partitions,
            runtime.lanes,
            runtime.pool,
            micro_batches,
            structure,
            [grad and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs],
            self.checkpoint if self.training else "never",
            grad=grad,
            record=self._recorder.begin(len(self.balance)) if self._recorder else None,
            ledger=self._ledger,
        )
        # The mini-batch cuts what it needs from these; keeping them would keep their memory.
        del micro_batches
        mini_batch.forward()
        output_structure = mini_batch.outputs[0].structure
        return unflatten(attach_outputs(mini_batch, inputs), output_structure)

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The layers of each partition as an `nn.Sequential`: a view, made anew each time."""
        views, layers = [], iter(self._modules.items())
        for size in self.balance:
            views.append(nn.Sequential(OrderedDict(next(layers) for _ in range(size))))  # type: ignore[misc]
        return tuple(views)

    def close(self) -> None:
        """End the workers; the next forward starts new ones. Harmless when repeated."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.pool.close()

    def start_recording(self, recorder: Recorder) -> None:
        """Let `trace` watch the coming mini-batches."""
        if self._recorder is not None:
            raise PipelineError(
                "this pipeline is traced already.\nFix: use the recorder of the outer trace."
            )
        self._recorder = recorder

    def stop_recording(self) -> None:
        """End what `start_recording` began."""
        self._recorder = None

    def start_metering(self, ledger: Ledger) -> None:
        """Let `measure_memory` watch the coming mini-batches."""
        if self._ledger is not None:
            raise PipelineError(
                "this pipeline is metered already.\nFix: use the meter of the outer block."
            )
        self._ledger = ledger

    def stop_metering(self) -> None:
        """End what `start_metering` began."""
        self._ledger = None

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for layer in self._modules.values() if layer is not None])

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "chunks":
            value = check_count(name, value)
        elif name == "checkpoint":
            check_checkpoint(value)
        elif name in _SETTINGS and name in self.__dict__:
            raise PipelineError(
                f"{name} of a pipeline cannot be changed: {name}={value!r}.\n"
                f"Fix: make another pipeline of the same layers, GPipe(..., {name}=...)."
            )
        if name in _SETTINGS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Threads and streams belong to this object in this process: a copy starts its own.
        return {**self.__dict__, "_runtime": None, "_recorder": None, "_ledger": None}

    def extra_repr(self) -> str:
        """Show the settings beside the layers."""
        return f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"

    def cuda(self, device: Any = None) -> GPipe:
        """Refuse: each partition has its own device."""
        raise _moving_denied()

    def cpu(self) -> GPipe:
        """Refuse: each partition has its own device."""
        raise _moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype of the parameters; refuse to move them to another device."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            raise _moving_denied()
        super().to(*args, **kwargs)
        return self

    def _started(self) -> _Runtime:
        with _starting:
            runtime = self._runtime
            if (
                runtime is None
                or runtime.pool.process != os.getpid()
                # A layer was replaced since.
                or runtime.layers != list(self._modules.values())
            ):
                _check_number(len(self._modules), self.balance)
                runtime = _Runtime(self)
                self._runtime = runtime
            return runtime


class _Runtime:
    """What a pipeline needs to run and cannot copy: partitions' facts, streams, threads."""

    def __init__(self, pipe: GPipe) -> None:
        names, layers = list(pipe._modules), list(pipe)
        self.layers = layers
        self.partitions: list[Partition] = []
        first = 0
        for j, (size, device) in enumerate(zip(pipe.balance, pipe.devices, strict=True)):
            end = first + size
            self.partitions.append(Partition(j, names[first:end], layers[first:end], first, device))
            first = end
        self.lanes = [make_lane(device) for device in pipe.devices]
        threads = [
            pipe.threads_per_partition if device.type == "cpu" else None for device in pipe.devices
        ]
        self.pool = WorkerPool(self.lanes, threads)


def _check_number(n_layers: int, balance: list[int]) -> None:
    if n_layers != sum(balance):
        raise PipelineError(
            f"layers were added to or taken from a pipeline: it has {n_layers} (expected "
            f"{sum(balance)}, the sum of its balance).\n"
            "Fix: change the nn.Sequential, and make another pipeline of it."
        )


def _moving_denied() -> ModelError:
    return ModelError(
        "a pipeline cannot be moved: each partition lives on its own device.\n"
        "Fix: give the devices when making it, GPipe(..., devices=[...])."
    )
