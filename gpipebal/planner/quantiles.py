"""Upper quantiles of the measured times, in place of medians."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType

from gpipebal.argument_kinds import check_kind, plain_number
from gpipebal.errors import BalanceError
from gpipebal.profile import LayerProfile, Profile

__all__ = ["at_quantile", "quantile_of"]

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
#: The quantile of times as they are measured.
_MEDIAN = 0.5


def at_quantile(profile: Profile, quantile: float) -> Profile:
    """Take an upper quantile of every time, as the measured spread suggests it.

    The spread is an interquartile range; the distribution is taken to be normal. Layers are rarely
    slow all at once, so the sum over many layers is more cautious than the quantile says. The loss
    counts as a layer; the gather and the optimizer have no spread, and keep their times.

    Args:
        profile: Costs with spreads; layers without any keep their times. Whether its times are
            medians or another quantile already makes no difference.
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
    if not _MEDIAN <= number < 1:
        raise BalanceError(
            f"quantile is out of range: quantile={quantile!r:.60} (expected 0.5 <= quantile < 1).\n"
            "Fix: quantile=0.9, or quantile=None for medians."
        )
    # What the times lie above their medians already does not count twice.
    taken = NormalDist().inv_cdf(quantile_of(profile))
    return _shifted(profile, (NormalDist().inv_cdf(number) - taken) / _RANGE, number)


def quantile_of(profile: Profile) -> float:
    """Return the quantile that a profile's times are: 0.5, or what `at_quantile` was asked for.

    Example:
        >>> quantile_of(at_quantile(Profile.from_costs([1.0]), 0.9))
        0.9
    """
    taken = profile.provenance.get("quantile")  # of a file, it may be anything
    return taken if isinstance(taken, float) and _MEDIAN <= taken < 1 else _MEDIAN


def _shifted(profile: Profile, share: float, quantile: float) -> Profile:
    """Add a share of each spread to its time, at all sizes of micro-batches."""

    def shifted(layer: LayerProfile) -> LayerProfile:
        times = {
            # Between sizes that were measured a spread may be more than its time is above 0.
            name: max(getattr(layer, name) + share * getattr(layer, spread), 0.0)
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
        other_sizes=tuple(_shifted(other, share, quantile) for other in profile.other_sizes),
        provenance={**profile.provenance, "quantile": quantile},
    )
