"""The front door for those who only want the balance: number of layers in each partition."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.argument_kinds import check_kind, is_list, of_array, plain_number
from gpipebal.errors import BalanceError
from gpipebal.planner import solve
from gpipebal.planner.runs.sizes import sizes_of
from gpipebal.problem import Problem
from gpipebal.problem.fits import check_enough_layers
from gpipebal.profile import Profile
from gpipebal.profiler import profile_model
from gpipebal.schedule import check_count
from gpipebal.solvers import split

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

_logger = logging.getLogger("gpipebal")


def balance_by_time(
    module: nn.Module,
    sample: Any,
    partitions: int | None = None,
    *,
    device: torch.device | str | int | None = None,
    chunks: int = 1,
    timeout: float = 1.0,
    keywords: Mapping[str, Any] | None = None,
    in_dims: Any = 0,
    keyword_dims: Mapping[str, Any] | None = None,
) -> list[int]:
    """Balance a model by the measured time of its layers.

    Profiles every layer at the size of one micro-batch, and minimises the largest time of a
    partition, forward plus backward, over all splits into non-empty runs of layers. The result is
    proven optimal for the measured times.

    Args:
        module: An `nn.Sequential`; its children are the layers.
        sample: A mini-batch; a tuple is one input.
        partitions: Number of partitions; None: the number of CUDA devices, or 2 on a machine
            with none (logged).
        device: Where to measure; None: the first CUDA device, or the CPU.
        chunks: Micro-batches that a mini-batch will be divided into.
        timeout: Seconds for the repeats; every layer is measured at least once.
        keywords: Keyword arguments of the first layer.
        in_dims: Dimension along which each tensor of the sample has its rows, as `GPipe` takes it.
        keyword_dims: The same for keyword arguments, by name.

    Returns:
        Number of layers in each partition.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, or `sample` cannot be divided.
        ProfileError: a layer failed.
        BalanceError: more partitions than layers, or a count below 1.
        DeviceError: `device` does not exist.
        KindError: `partitions` is not a number.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> balance = balance_by_time(model, torch.ones(4, 8), 2, timeout=0.1)
        >>> sum(balance), len(balance)
        (3, 2)
    """
    count = _partitions_for(partitions, module)
    values = {"keywords": keywords, "in_dims": in_dims, "keyword_dims": keyword_dims}
    # As many copies of the layers work side by side as there will be partitions.
    profile = _profile_of(module, sample, device, chunks, timeout, partitions=count, **values)
    # For one micro-batch, without recompute, the bottleneck is forward plus backward.
    plan = solve(profile, count, checkpoint="never", objective="bottleneck")
    return plan.balance


def balance_by_size(
    module: nn.Module,
    sample: Any,
    partitions: int | None = None,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
    keywords: Mapping[str, Any] | None = None,
    in_dims: Any = 0,
    keyword_dims: Mapping[str, Any] | None = None,
) -> list[int]:
    """Balance a model by the memory of its layers.

    Minimises the largest size of a partition, where the size of a layer is the bytes of its
    parameters times `param_scale`, plus what it saves for the backward of one mini-batch. A tensor
    that several layers of a partition save counts once in it. To take a schedule and its
    checkpoints into account, use ``solve(profile, partitions, objective='peak_memory')``.

    Args:
        module: An `nn.Sequential`; its children are the layers.
        sample: A mini-batch; a tuple is one input.
        partitions: Number of partitions; None: as for `balance_by_time`.
        chunks: Micro-batches that a mini-batch will be divided into; all are in flight at once.
        param_scale: Bytes held per byte of parameters: 2 for plain SGD (parameter, gradient),
            3 with momentum, 4 for Adam.
        device: Where to measure; None: the first CUDA device, or the CPU.
        keywords: As for `balance_by_time`, like those that follow.
        in_dims: Dimensions of the sample.
        keyword_dims: Dimensions of keyword arguments.

    Returns:
        Number of layers in each partition.

    Raises:
        ModelError, ProfileError, BalanceError, DeviceError: as for `balance_by_time`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> balance = balance_by_size(model, torch.ones(4, 8), 2)
        >>> sum(balance), len(balance)
        (3, 2)
    """
    if not 0 <= plain_number(param_scale) < math.inf:
        raise BalanceError(
            f"param_scale is not a factor: param_scale={param_scale!r} (expected 0 or more, and "
            "finite).\nFix: param_scale=2.0 for plain SGD."
        )
    count = _partitions_for(partitions, module)
    values = {"keywords": keywords, "in_dims": in_dims, "keyword_dims": keyword_dims}
    profile = _profile_of(module, sample, device, chunks, 0.0, **values)
    sizes = sizes_of(profile, param_scale)
    # Of equally good splits the one whose layers' own sizes are spread most evenly.
    alone = [int(sizes.rows(k, 0, "never")[0]) for k in range(profile.n_layers)]
    zeros = [0] * profile.n_layers
    problem = Problem(alone, zeros, zeros, count, checkpoint="never", memory=sizes)
    return split(problem, "peak_memory").balance


def balance_cost(costs: Sequence[float], partitions: int) -> list[int]:
    """Split a list of costs into consecutive parts with the smallest possible largest sum.

    Args:
        costs: One cost per layer, 0 or more, in any unit.
        partitions: Number of parts, 1 to the number of costs; none is empty.

    Returns:
        Number of costs in each part. Among equally good splits the one with the smallest sum of
        squares, then the one with the leftmost cuts.

    Raises:
        BalanceError: more parts than costs, or a cost that is negative or not finite.

    Complexity:
        O(n + p k log n) for n costs, k parts and p probes, about 2 to 18, plus the tie-break.

    Example:
        >>> balance_cost([1, 2, 3, 4], 2)
        [3, 1]
    """
    if not is_list(costs, in_order=True):
        raise BalanceError(
            f"costs are not a list: costs={costs!r:.60} (expected one number for each layer).\n"
            f"Fix: balance_cost([1, 2, 3], {partitions!r:.20})."
        )
    given = list(of_array(costs))
    for k, cost in enumerate(given):
        if not 0 <= plain_number(cost) < math.inf:
            raise BalanceError(
                f"cost of layer {k} is not a cost: costs[{k}]={cost!r:.60} (expected a finite "
                "number of 0 or more).\nFix: give one such number for each layer."
            )
    if not given:
        raise BalanceError(
            "costs are empty (expected one number for each layer).\n"
            "Fix: balance_cost([1, 2, 3], 2)."
        )
    problem = Problem.from_costs(given, 1)
    count = _checked(partitions, problem.n_layers)
    return split(replace(problem, n_partitions=count), "bottleneck").balance


def _profile_of(
    module: nn.Module,
    sample: Any,
    device: torch.device | str | int | None,
    chunks: int,
    timeout: float,
    **more: Any,
) -> Profile:
    """Measure what decides a balance: the layers, at the size of one micro-batch."""
    return profile_model(
        module,
        sample,
        device=device,
        chunks=chunks,
        rows=(),
        timeout=timeout,
        as_pipeline=False,  # a factor for all layers hardly changes how they compare
        **more,
    )


def _partitions_for(partitions: int | None, module: nn.Module) -> int:
    if partitions is None:
        partitions = torch.cuda.device_count()
        if not partitions:
            _logger.warning("no CUDA device: balancing for 2 partitions on the CPU")
            partitions = 2
    elif not isinstance(partitions, Real) and not _is_one_number(partitions):
        # As in other libraries, where it comes first.
        order = "give them in this order: module, sample, partitions"
        check_kind("partitions", partitions, int, order)
    if isinstance(module, nn.Sequential):
        # Said before minutes are spent on measuring.
        return _checked(partitions, len(module))
    return partitions


def _is_one_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _checked(partitions: int, n_layers: int) -> int:
    """Refuse an impossible number of partitions, under the name that the caller knows."""
    n_partitions = check_count("partitions", partitions)
    if n_layers:  # a chain without layers is refused for that
        check_enough_layers("partitions", n_partitions, n_layers)
    return n_partitions
