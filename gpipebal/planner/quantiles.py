"""Upper quantiles of the measured times, in place of medians."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import plain_number
from gpipebal.profile import LayerProfile, Profile

__all__ = ["at_quantile"]

#: The spread of each time.
_SPREADS: Mapping[str, str] = MappingProxyType(
    {
        "forward_time": "forward_spread",
        "backward_time": "backward_spread",
        "recompute_time": "forward_spread",
        "no_grad_forward_time": "forward_spread",
    }
)
#: Interquartile range of a normal distribution whose standard deviation is 1.
_RANGE = 2 * NormalDist().inv_cdf(0.75)


def at_quantile(profile: Profile, quantile: float) -> Profile:
    """Take an upper quantile of every time, as the measured spread suggests it.

    The spread is an interquartile range; the distribution is taken to be normal. Layers are rarely
    slow all at once, so the sum over many layers is more cautious than the quantile says. The loss
    counts as a layer; the gather and the optimizer have no spread, and keep their times.

    Args:
        profile: Costs with spreads; layers without any keep their times.
        quantile: 0.5, the median, to below 1.

    Raises:
        BalanceError: the quantile is below 0.5, or not below 1.

    Example:
        >>> from dataclasses import replace
        >>> profile = Profile.from_costs([1.0])
        >>> shaky = replace(profile, layers=(replace(profile.layers[0], forward_spread=0.2),))
        >>> at_quantile(shaky, 0.75).layers[0].forward_time
        1.1
    """
    check_kind("profile", profile, Profile)
    number = plain_number(quantile)
    if not 0.5 <= number < 1:
        raise BalanceError(
            f"quantile is out of range: quantile={quantile!r:.60} (expected 0.5 <= quantile < 1).\n"
            "Fix: quantile=0.9, or quantile=None for medians."
        )
    share = NormalDist().inv_cdf(number) / _RANGE

    def shifted(layer: LayerProfile) -> LayerProfile:
        times = {
            name: getattr(layer, name) + share * getattr(layer, spread)
            for name, spread in _SPREADS.items()
            if getattr(layer, name) is not None
        }
        return replace(layer, **times)

    step = profile.step
    loss, whole_loss = (
        None if one is None else shifted(one) for one in (step.loss, step.whole_loss)
    )
    return replace(
        profile,
        layers=tuple(map(shifted, profile.layers)),
        step=replace(step, loss=loss, whole_loss=whole_loss),
        other_sizes=tuple(at_quantile(other, number) for other in profile.other_sizes),
        provenance={**profile.provenance, "quantile": number},
    )
