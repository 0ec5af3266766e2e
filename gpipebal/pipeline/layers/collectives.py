"""Layers that talk to other processes, and processes that each have a pipeline.

What one process sends, the others must receive in the same order. Within a partition that is so: it
runs its micro-batches in the order of the schedule. Between partitions no order is kept, so two
partitions that talk in one group of processes would mix up each other's numbers, or wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpipebal.errors import ModelError, PipelineError
from gpipebal.problem.bounds import partition_of_layers
from gpipebal.schedule import Action, Schedule

__all__ = ["Talker", "check_order_of_talk", "find_talkers"]

_AVERAGE = (
    "average the gradients yourself after the backward: docs/guide/training.md, 'A pipeline in "
    "each of several processes', shows how"
)


class Talker(NamedTuple):
    """A module in a layer that may talk to other processes: replicated, or a normalisation."""

    name: str
    partition: int
    module: DistributedDataParallel | nn.SyncBatchNorm


def find_talkers(layers: Mapping[str, nn.Module], balance: Sequence[int]) -> list[Talker]:
    """Find the modules that are known to talk to other processes.

    Args:
        layers: The layers, by name.
        balance: Layers of each partition.
    """
    of_layer = partition_of_layers(balance)
    return [
        Talker(name, j, module)
        for (name, layer), j in zip(layers.items(), of_layer, strict=True)
        for module in layer.modules()
        if isinstance(module, (DistributedDataParallel, nn.SyncBatchNorm))
    ]


def check_order_of_talk(pipe: nn.Module, talkers: Sequence[Talker], order: Schedule) -> None:
    """Refuse a mini-batch that other processes would not follow, as far as that can be told.

    Args:
        pipe: The pipeline.
        talkers: Its modules that talk to other processes.
        order: What each partition will do.

    Raises:
        ModelError: a layer is averaged by DistributedDataParallel while several graphs of it wait
            for their backward; or two partitions talk in one group of processes.
        PipelineError: DistributedDataParallel is around the pipeline, and there are several
            micro-batches.
    """
    _check_not_replicated(pipe, order)
    if not talkers or not (dist.is_available() and dist.is_initialized()):
        return
    # With one micro-batch and no recompute, one partition works after the other.
    in_turn = order.chunks == 1 and not any(order.phase("R"))
    groups: dict[int, Talker] = {}
    for talker in talkers:
        name, j, module = talker
        if not module.training or _size(module.process_group) == 1:
            continue
        if isinstance(module, DistributedDataParallel):
            if not _averages(module):
                continue
            if _most_graphs(order.rows[j]) > 1:
                raise ModelError(
                    f"layer {name!r} is wrapped by DistributedDataParallel, and several of its "
                    "micro-batches wait for their backward, of which it averages one.\n"
                    f"Fix: give the layer without it, and {_AVERAGE}; or checkpoint='always'."
                )
        other = groups.setdefault(id(module.process_group or dist.group.WORLD), talker)
        if other.partition != j and not in_turn:
            raise ModelError(
                f"two partitions talk to other processes in one group: layer {other.name!r} of "
                f"partition {other.partition} and layer {name!r} of partition {j}, and which one "
                "comes first differs from process to process.\nFix: a group for each partition, "
                "from torch.distributed.new_group() to the layers' process_group; or a balance "
                "that has them in one partition."
            )


def _most_graphs(row: Sequence[Action]) -> int:
    """Return how many micro-batches of a partition have a graph at one time, at most."""
    again = {action.micro_batch for action in row if action.kind == "R"}
    now = most = 0
    for action in row:
        now += action.kind == "R" or (action.kind == "F" and action.micro_batch not in again)
        now -= action.kind == "B"
        most = max(most, now)
    return most


def _check_not_replicated(pipe: nn.Module, order: Schedule) -> None:
    """Refuse to run inside DistributedDataParallel, which expects one gradient per parameter."""
    # Private, and the only way to know; where a version of torch lacks it, torch raises by itself.
    around: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or order.chunks == 1 or not around.training:
        return
    if not _averages(around):
        return
    # A group of one process sends nothing, but counts gradients, unless it knows their number.
    if around.static_graph and _size(around.process_group) == 1:
        return
    own = {id(parameter) for parameter in pipe.parameters()}
    ignored = getattr(around, "parameters_to_ignore", ())
    if any(
        id(parameter) in own and parameter.requires_grad and name not in ignored
        for name, parameter in around.module.named_parameters()
    ):
        raise PipelineError(
            "DistributedDataParallel is around a pipeline with several micro-batches: "
            f"chunks={order.chunks}. Each of them gives every parameter a gradient, and it "
            f"counts on one.\nFix: call the pipeline without it, and {_AVERAGE}."
        )


def _averages(module: DistributedDataParallel) -> bool:
    """Tell whether a backward of what runs now will be averaged."""
    return torch.is_grad_enabled() and bool(module.require_backward_grad_sync)


def _size(group: Any) -> int:
    return dist.get_world_size(group)
