"""Whether the parts of a problem fit together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import BalanceError
from gpipebal.problem.device import Device
from gpipebal.problem.link import Links
from gpipebal.problem.memory import Memory
from gpipebal.problem.rules import Rules

if TYPE_CHECKING:
    from gpipebal.problem.problem import Problem

__all__ = [
    "check_any_order",
    "check_devices",
    "check_enough_layers",
    "check_lengths",
    "check_links",
    "check_parts",
    "check_total",
]

#: Parts of a problem that are of a class of the same name, and how each is made.
_PARTS: Mapping[type, str] = {
    Links: "links_of(profile, Link(bandwidth=16e9))",
    Memory: "layer_memory(fixed, saved, inputs, chunks=4)",
    Rules: "Rules(no_cut=[2])",
}


def check_lengths(problem: Problem) -> None:
    """Refuse a chain without layers, with times missing, or with too few layers.

    Raises:
        BalanceError: the chain is one of these.
    """
    n_layers = problem.n_layers
    if not n_layers:
        raise BalanceError(
            "chain has no layers: len(forward)=0 (expected 1 or more).\n"
            "Fix: give the forward, backward and recompute time of at least one layer."
        )
    for name in ("backward", "recompute"):
        if len(getattr(problem, name)) != n_layers:
            raise BalanceError(
                f"{name} and forward differ in length: len({name})="
                f"{len(getattr(problem, name))} (expected len(forward)={n_layers}).\n"
                f"Fix: give {n_layers} {name} times, 0 for a layer that has none."
            )
    check_enough_layers("n_partitions", problem.n_partitions, n_layers)


def check_enough_layers(name: str, n_partitions: int, n_layers: int) -> None:
    """Refuse more partitions than layers.

    Args:
        name: What the caller calls the number of partitions.
        n_partitions: The number.
        n_layers: Number of layers.

    Raises:
        BalanceError: there are more.
    """
    if n_partitions > n_layers:
        raise BalanceError(
            f"chain has fewer layers than partitions: {name}={n_partitions} (expected 1 <= {name} "
            f"<= {n_layers}, the number of layers).\n"
            f"Fix: {name}={n_layers}, or more layers: gpipebal.flatten(model)."
        )


def check_any_order(any_order: bool, devices: object) -> None:
    """Refuse to let devices change places where no devices are given.

    Raises:
        BalanceError: none are given.
    """
    if any_order and devices is None:
        raise BalanceError(
            "devices may change places, but there are none: devices=None (expected one per "
            "partition where any_order=True).\nFix: any_order=False, or give devices."
        )


def check_parts(problem: Problem) -> None:
    """Refuse devices, links, memory or rules that do not fit the chain.

    Raises:
        BalanceError: one of them does not fit.
        KindError: one of them is of another kind.
    """
    n_layers, n_partitions = problem.n_layers, problem.n_partitions
    for kind, fix in _PARTS.items():
        name = kind.__name__.lower()
        if getattr(problem, name) is not None:
            check_kind(name, getattr(problem, name), kind, f"{name}={fix}, say")
    if problem.devices is not None:
        check_devices(problem.devices, n_partitions, n_layers)
        limited = [j for j, d in enumerate(problem.devices) if d.memory_limit is not None]
        if limited and problem.memory is None:
            raise BalanceError(
                f"devices limit a memory that is not known: memory=None (expected a Memory, since "
                f"devices[{limited[0]}].memory_limit="
                f"{problem.devices[limited[0]].memory_limit}).\n"
                "Fix: memory=layer_memory(...), or no memory_limit."
            )
    check_any_order(problem.any_order, problem.devices)
    if problem.links is not None:
        check_links(problem.links, n_layers)
    if problem.memory is not None:
        problem.memory.labels(n_partitions)
    if problem.rules is not None:
        problem.rules.check(n_layers, n_partitions)


def check_devices(devices: Sequence[Device], n_partitions: int, n_layers: int) -> None:
    """Refuse devices for other partitions, or with times of their own for other layers.

    Raises:
        BalanceError: there are too many or too few, or one has too many times or too few.
    """
    if len(devices) != n_partitions:
        raise BalanceError(
            f"devices and partitions differ in number: len(devices)={len(devices)} "
            f"(expected n_partitions={n_partitions}).\n"
            "Fix: one device per partition, or devices=None."
        )
    for j, device in enumerate(devices):
        for column in device.times or ():
            _check_length(f"times of devices[{j}]", column, n_layers, "layer")


def check_links(links: Links, n_layers: int) -> None:
    """Refuse links with times for other cuts.

    Raises:
        BalanceError: there are too many or too few.
    """
    for name in ("forward", "backward"):
        column = getattr(links, name)
        _check_length(f"{name} times of links", column, n_layers - 1, "cut")


def check_total(problem: Problem) -> None:
    """Refuse times whose sums are too large for a float.

    Raises:
        BalanceError: a sum is.
    """
    if problem.devices is None and problem.links is None:
        most = sum(sums[-1] for sums in problem.layer_sums)
    else:
        costs = problem.costs
        most = max(sum(sums[-1] for sums in one) for one in costs.types)
        # A copy that does not overlap keeps the sender busy, and then the receiver.
        most += 2 * (sum(costs.send) + sum(costs.give_back))
    # More than a mini-batch takes: micro-batches one after the other, and one more.
    if most * (problem.chunks + 1) > problem.scale * int(sys.float_info.max):
        largest = max(*problem.forward, *problem.backward, *problem.recompute)
        raise BalanceError(
            f"times are too large to be added: largest time={largest!r}, before devices and links "
            f"(expected a makespan below {sys.float_info.max:.3g}).\n"
            "Fix: give the times in a larger unit, such as seconds."
        )


def _check_length(name: str, column: Sequence[float], length: int, what: str) -> None:
    if len(column) != length:
        raise BalanceError(
            f"{name} are too many or too few: {len(column)} (expected {length}, one per {what}).\n"
            f"Fix: give {length} of them, 0 for a {what} that costs nothing."
        )
