"""Durations of partitions, from a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import mul

from gpipebal.argument_kinds import check_kind, check_list
from gpipebal.problem import Device, Links
from gpipebal.problem.bounds import check_bounds
from gpipebal.problem.fits import check_devices, check_links
from gpipebal.profile import LayerProfile, Profile
from gpipebal.simulator.durations import Durations

__all__ = ["durations_of", "weight_shares"]


def durations_of(
    profile: Profile,
    bounds: Sequence[int],
    *,
    devices: Sequence[Device] | None = None,
    links: Links | None = None,
    loss: LayerProfile | None = None,
) -> Durations:
    """Add up the times of the layers of each partition.

    What a profile does not have is estimated: the weights' part of a backward is half of it in
    layers that train parameters (or for which only times were given), and nothing in others. Launch
    times are those of one process for all devices, as with `GPipe`; there are none if the profile
    has no host times, because devices need no host, or are the host.

    Args:
        profile: Costs of the layers for one micro-batch.
        bounds: First layer of each partition, then the number of layers.
        devices: The device of each partition; None: all as the profile's.
        links: What a transfer over each cut takes, see `gpipebal.problem.links_of`; None: nothing.
        loss: A loss that the last partition computes after its layers.

    Raises:
        BalanceError: bounds, devices or links do not fit the chain.

    Example:
        >>> from gpipebal.problem import Link, links_of
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0], output_bytes=[10, 20, 30])
        >>> times = durations_of(profile, (0, 2, 3), links=links_of(profile, Link(10.0)))
        >>> times.forward, times.weight_gradient, times.forward_transfer
        ((3.0, 3.0), (3.0, 3.0), (0.0, 2.0))
    """
    check_kind("profile", profile, Profile)
    bounds = check_bounds("bounds", bounds, profile.n_layers)
    if devices is not None:
        devices = check_list("devices", devices, Device)
        check_devices(devices, len(bounds) - 1, profile.n_layers)
    if links is not None:
        check_kind("links", links, Links, "links=links_of(profile, link)")
        check_links(links, profile.n_layers)
    if loss is not None:
        check_kind("loss", loss, LayerProfile, "loss=profile.step.loss")
    runs = list(pairwise(bounds))
    behind = [() for _ in runs[1:]] + [() if loss is None else (loss,)]

    def add(
        name: str, time_of: Callable[[LayerProfile], float], shares: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        sums = []
        for j, (start, end) in enumerate(runs):
            device = None if devices is None else devices[j]
            own = None if device is None else getattr(device, name)
            times = list(map(time_of, profile.layers[start:end]) if own is None else own[start:end])
            if shares is None:
                times += map(time_of, behind[j])
            else:
                times = list(map(mul, times, shares[start:end]))  # a loss has no weights
            total = math.fsum(times)
            sums.append(total if device is None else total * device.slowness)
        return tuple(sums)

    def launch(name: str) -> tuple[float, ...] | None:
        layers = [
            (*profile.layers[start:end], *more)
            for (start, end), more in zip(runs, behind, strict=True)
        ]
        times = [[getattr(layer, name) for layer in run] for run in layers]
        if all(time is None for run in times for time in run):
            return None
        return tuple(math.fsum(time or 0.0 for time in run) for run in times)

    to, back = None, None
    if links is not None:
        to = (0.0, *(float(links.forward[cut - 1]) for cut in bounds[1:-1]))
        back = (*(float(links.backward[cut - 1]) for cut in bounds[1:-1]), 0.0)
    # Nothing is recomputed, and nothing launched for it, where outputs need no gradient.
    recomputes = [end > profile.n_frozen for end in bounds[1:]]
    launches = launch("forward_host_time")
    return Durations(
        forward=add("forward", lambda layer: layer.forward_time),
        recompute=tuple(map(mul, add("recompute", lambda layer: layer.recompute_time), recomputes)),
        backward=add("backward", lambda layer: layer.backward_time),
        no_grad_forward=add("forward", _time_without_graph),
        weight_gradient=add("backward", lambda layer: layer.backward_time, weight_shares(profile)),
        forward_transfer=to,
        backward_transfer=back,
        forward_launch=launches,
        backward_launch=launch("backward_host_time"),
        recompute_launch=None if launches is None else tuple(map(mul, launches, recomputes)),
    )


def weight_shares(profile: Profile) -> list[float]:
    """Estimate which share of each layer's backward is the gradient of its weights.

    Half of it in layers that train parameters, or for which only times were given; else nothing.

    Example:
        >>> weight_shares(Profile.from_costs([1.0, 2.0]))
        [0.5, 0.5]
    """
    check_kind("profile", profile, Profile)

    def learns(layer: LayerProfile) -> bool:
        return bool(layer.gradient_bytes) or layer.kind == "Layer"

    return [0.5 if learns(layer) else 0.0 for layer in profile.layers]


def _time_without_graph(layer: LayerProfile) -> float:
    known = layer.no_grad_forward_time
    return layer.forward_time if known is None else known
