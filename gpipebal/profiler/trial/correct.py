"""Correct a profile by the results of a trial of it as a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpipebal.profile import AloneShares, LayerProfile, Profile, TurnTimes
from gpipebal.profiler.chain.failures import first_line_of
from gpipebal.profiler.replicas.moved import moves_what_others_reach
from gpipebal.profiler.setting import available_memory
from gpipebal.profiler.trial.findings import Trial
from gpipebal.profiler.trial.traces import MOST_FACTOR, sums_of_layers
from gpipebal.profiler.trial.trial import (
    MOST_TRIAL_CHUNKS,
    Setting,
    chunks_in_time,
    run_trial,
)

__all__ = ["correct", "try_out"]

#: A factor further from 1 than this is reported.
NOTABLE = 0.1


def try_out(
    profile: Profile,
    setting_of: Callable[[int], Setting],
    n_partitions: int,
    chunks: int,
    seconds: float,
) -> Profile:
    """Run a profile's layers as a pipeline for a while, and correct it by the result.

    Args:
        profile: What was measured, layer by layer.
        setting_of: Makes the setting of a trial with a number of micro-batches.
        n_partitions: Partitions of the trial.
        chunks: Micro-batches of a mini-batch; the trial has as many of them as the memory holds,
            and as there is time for.
        seconds: About how long.

    Returns:
        The corrected profile; or one that says why there was no trial.
    """
    fitting = chunks_that_fit(profile, min(chunks, MOST_TRIAL_CHUNKS))
    if not fitting:
        return _with_flag(profile, "not tried as a pipeline: there is not enough memory")
    try:
        setting = setting_of(chunks_in_time(profile, n_partitions, fitting, seconds))
        if setting.n_partitions > 1 and moves_what_others_reach(setting.layers):
            why = "layers that may share a tensor which gets new memory belong in one partition"
            return _with_flag(profile, f"not tried as a pipeline: {why}")
        return correct(profile, run_trial(profile, setting, seconds))
    except Exception as error:
        # What the executor refuses can be profiled all the same.
        return _with_flag(profile, f"not tried as a pipeline: {first_line_of(error)}")


def chunks_that_fit(profile: Profile, chunks: int) -> int:
    """Return how many micro-batches in flight are likely to fit the free memory: `chunks` at most.

    What layers need for a moment is not added up: half of the memory is left for it.
    """
    saved = {storage for layer in profile.layers for storage in layer.saved}
    of_one = max(1, profile.bytes_of(saved))
    fixed = sum(layer.gradient_bytes for layer in profile.layers)
    return max(0, min(chunks, (available_memory() // 2 - fixed) // of_one))


def correct(profile: Profile, trial: Trial) -> Profile:
    """Give a profile the times that its layers have in partitions; and its other sizes too."""
    factors = trial.factors
    side_by_side = None
    if trial.alone is not None:
        side_by_side = AloneShares(len(trial.balance), **trial.alone)
    step = replace(
        profile.step,
        overhead_time=trial.overhead_time,
        inside_overhead_time=trial.inside_overhead_time,
        cell_overhead_time=trial.cell_overhead_time,
        side_by_side=side_by_side,
        turns=_turns(profile, trial),
    )
    told = {
        "balance": trial.balance,
        "chunks": trial.chunks,
        "rounds": trial.rounds,
        "factors": factors,
        "alone": trial.alone,
        "turns": trial.turns,
        "scaled": "times of layers; at other sizes too, which were not tried",
        "not_scaled": "times of the loss, and of the host",
    }
    flags = list(profile.provenance.get("flags", []))
    flags += [
        f"corrected: {name.replace('_', ' ')}s in partitions took {_words(factor)} of their layers'"
        for name, factor in factors.items()
        if abs(factor - 1) > NOTABLE
    ]

    def corrected(size: Profile) -> Profile:
        return replace(size, layers=tuple(_scaled(layer, factors) for layer in size.layers))

    return replace(
        corrected(profile),
        step=step,
        other_sizes=tuple(corrected(other) for other in profile.other_sizes),
        provenance={**profile.provenance, "trial": told, "flags": flags},
    )


def _turns(profile: Profile, trial: Trial) -> TurnTimes | None:
    """Take what turns cost in seconds: they hardly depend on the rows."""
    if trial.turns is None:
        return None
    sums = sums_of_layers(profile, (profile.n_layers,))
    seconds = {}
    for name, factor in trial.turns.items():
        kind = name.removeprefix("first_")
        seconds[name] = (factor - 1) * trial.factors[kind] * sums[kind][0]
    return TurnTimes(**seconds)


def _words(factor: float) -> str:
    """Write a factor; one at the end of the plausible range may have been beyond it."""
    if factor >= MOST_FACTOR:
        return f"{factor:.2f} or more"
    return f"{factor:.2f} or less" if factor <= 1 / MOST_FACTOR else f"{factor:.2f}"


def _with_flag(profile: Profile, flag: str) -> Profile:
    """Add a flag to a profile."""
    flags = [*profile.provenance.get("flags", []), flag]
    return replace(profile, provenance={**profile.provenance, "flags": flags})


def _scaled(layer: LayerProfile, factors: dict[str, float]) -> LayerProfile:
    known = layer.no_grad_forward_time
    return replace(
        layer,
        forward_time=layer.forward_time * factors["forward"],
        forward_spread=layer.forward_spread * factors["forward"],
        backward_time=layer.backward_time * factors["backward"],
        backward_spread=layer.backward_spread * factors["backward"],
        recompute_time=layer.recompute_time * factors["recompute"],
        no_grad_forward_time=None if known is None else known * factors["no_grad_forward"],
    )
