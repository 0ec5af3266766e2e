"""What a profile says of partitions: their durations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from gpipebal.errors import BalanceError
from gpipebal.profile import LayerProfile, Profile
from gpipebal.simulator.durations import Durations

__all__ = ["durations_of", "weight_shares"]


def _runs(profile: Profile, bounds: Sequence[int]) -> list[tuple[LayerProfile, ...]]:
    """Return the layers of each partition."""
    return [profile.layers[a:b] for a, b in pairwise(bounds)]


def durations_of(
    profile: Profile,
    bounds: Sequence[int],
    *,
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> Durations:
    """Add up the times of the layers of each partition.

    What a profile does not tell is estimated: the weights' part of a backward is half of it in
    layers that have parameters (or whose times alone were given), and nothing in others. Launch
    times are those of one process for all devices, as `GPipe` is.

    Args:
        profile: Costs of the layers for one micro-batch.
        bounds: First layer of each partition, then the number of layers.
        bandwidth: Bytes per second between partitions; None: size does not matter.
        latency: Seconds of every transfer, on top.

    Raises:
        BalanceError: a bandwidth or a latency that is none.

    Example:
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0], output_bytes=[10, 20, 30])
        >>> times = durations_of(profile, (0, 2, 3), bandwidth=10.0)
        >>> times.forward, times.weight_gradient, times.forward_transfer
        ((3.0, 3.0), (3.0, 3.0), (0.0, 2.0))
    """
    if bandwidth is not None and not bandwidth > 0:
        raise BalanceError(
            f"bandwidth is not above 0: bandwidth={bandwidth!r} (expected bytes per second).\n"
            "Fix: bandwidth=None for transfers that take no time."
        )
    if not 0 <= latency < math.inf:
        raise BalanceError(
            f"latency is not a time: latency={latency!r} (expected seconds, 0 or more).\n"
            "Fix: latency=0.0."
        )
    runs = _runs(profile, bounds)
    shares = weight_shares(profile)
    again = None
    if any(layer.no_grad_forward_time is not None for layer in profile.layers):
        again = tuple(
            sum(
                layer.forward_time
                if layer.no_grad_forward_time is None
                else layer.no_grad_forward_time
                for layer in run
            )
            for run in runs
        )
    launches = [
        [getattr(layer, name) for layer in profile.layers]
        for name in ("forward_host_time", "backward_host_time")
    ]
    hosted = any(time is not None for times in launches for time in times)
    forward_launch, backward_launch = (
        tuple(sum(time or 0.0 for time in times[a:b]) for a, b in pairwise(bounds))
        for times in launches
    )
    transfer = None
    if bandwidth is not None or latency:
        cuts = bounds[1:-1]
        crossing = [_crossing(profile, cut) for cut in cuts]
        sent = [profile.bytes_of(one) for one in crossing]
        returned = [
            profile.gradient_bytes_of(one) + (profile.further_gradients(cut - 1) if cut else 0)
            for cut, one in zip(cuts, crossing, strict=True)
        ]
        there, back = (
            [latency + (n_bytes / bandwidth if bandwidth else 0.0) for n_bytes in sizes]
            for sizes in (sent, returned)
        )
        transfer = (0.0, *there), (*back, 0.0)
    return Durations(
        forward=tuple(sum(layer.forward_time for layer in run) for run in runs),
        recompute=tuple(sum(layer.recompute_time for layer in run) for run in runs),
        backward=tuple(sum(layer.backward_time for layer in run) for run in runs),
        no_grad_forward=again,
        weight_gradient=tuple(
            sum(profile.layers[k].backward_time * shares[k] for k in range(a, b))
            for a, b in pairwise(bounds)
        ),
        forward_transfer=None if transfer is None else transfer[0],
        backward_transfer=None if transfer is None else transfer[1],
        forward_launch=forward_launch if hosted else None,
        backward_launch=backward_launch if hosted else None,
    )


def weight_shares(profile: Profile) -> list[float]:
    """Estimate which share of each layer's backward is the gradient of its weights.

    Half of it in layers that have parameters, or whose times alone were given; else nothing.

    Example:
        >>> weight_shares(Profile.from_costs([1.0, 2.0]))
        [0.5, 0.5]
    """

    def learns(layer: LayerProfile) -> bool:
        return bool(layer.parameter_bytes or layer.gradient_bytes) or layer.kind == "Layer"

    return [0.5 if learns(layer) else 0.0 for layer in profile.layers]


def _crossing(profile: Profile, cut: int) -> set[int]:
    """Return the storages that cross the cut before a layer, with those of skip connections."""
    storages = set(profile.layers[cut - 1].outputs if cut else profile.inputs)
    for skip in profile.skips:
        if skip.source < cut <= skip.destination:
            storages.update(skip.storages)
    return storages
