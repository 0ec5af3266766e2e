"""Layers that talk to other processes, and processes that each have a pipeline.

What one process sends, the others must receive in the same order. Within a partition that is so: it
runs its micro-batches in the order of the schedule. Between partitions nobody keeps an order, so
those of one group of processes would mix up each other's numbers, or wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpipebal.errors import ModelError, PipelineError

__all__ = ["check_collectives", "check_not_replicated"]

_AVERAGE = (
    "for parameter in pipe.parameters(): torch.distributed.all_reduce(parameter.grad), divided by "
    "the number of processes, behind the backward"
)


def check_collectives(layers: Mapping[str, nn.Module], balance: Sequence[int]) -> None:
    """Refuse layers that other processes would not follow, as far as they can be told.

    Args:
        layers: The layers, by name.
        balance: Layers of each partition.

    Raises:
        ModelError: a layer averages its gradients with those of other processes by
            DistributedDataParallel; or two partitions have synchronised batch normalisations of
            one group.
    """
    if not _is_one_of_several():
        return
    of_layer = [j for j, size in enumerate(balance) for _ in range(size)]
    groups: dict[int, tuple[str, int]] = {}
    for (name, layer), j in zip(layers.items(), of_layer, strict=True):
        for module in layer.modules():
            if isinstance(module, DistributedDataParallel) and _size(module.process_group) > 1:
                raise ModelError(
                    f"layer {name!r} is wrapped by DistributedDataParallel, which averages the "
                    "gradients of one micro-batch and leaves the others out.\n"
                    f"Fix: give the layer without it, and average yourself: {_AVERAGE}."
                )
            if isinstance(module, nn.SyncBatchNorm) and _size(module.process_group) > 1:
                group = module.process_group or dist.group.WORLD
                other, k = groups.setdefault(id(group), (name, j))
                if k != j:
                    raise ModelError(
                        f"two partitions talk to other processes in one group: layer {other!r} of "
                        f"partition {k} and layer {name!r} of partition {j} are synchronised batch "
                        "normalisations, and which one comes first differs from process to "
                        "process.\nFix: a group for each partition, from "
                        "torch.distributed.new_group() to SyncBatchNorm(..., process_group=group); "
                        "or a balance that has them in one partition."
                    )


def check_not_replicated(pipe: nn.Module, chunks: int) -> None:
    """Refuse to run inside of DistributedDataParallel with more than one micro-batch.

    It counts on one gradient for each parameter, and gets one for every micro-batch. Where it is
    told to leave gradients alone, by `no_sync`, or there are none, it may stand around a pipeline.

    Raises:
        PipelineError: it is so.
    """
    # Private, and the only way to be told; where a torch has no such thing, it raises itself.
    around: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or chunks == 1 or not torch.is_grad_enabled():
        return
    if not around.require_backward_grad_sync or _size(around.process_group) == 1:
        return
    if any(module is pipe for module in around.modules()):
        raise PipelineError(
            "DistributedDataParallel is around a pipeline with several micro-batches: "
            f"chunks={chunks}. It takes the gradient of the first one for all.\n"
            f"Fix: call the pipeline without it, and average yourself: {_AVERAGE}."
        )


def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _size(group: Any) -> int:
    return dist.get_world_size(group)
