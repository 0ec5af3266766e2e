"""The costs of layers that are recomputed in runs, where a partition keeps its other graphs.

A *run* is a series of consecutive layers of one partition. Its forward keeps nothing but its input.
When the backward arrives after its last layer, the run's forward is done again and makes its graph,
which the backward then uses up. There are two ways to recompute neighbours. One after the other
keeps what is between them for every micro-batch in flight; both together makes both graphs at once.
Which needs less depends on the chain and on how many micro-batches are in flight.

What a run's layers make again has memory of its own, even if their first outputs still exist: only
the run's input is not made again.

Beside its input a run keeps copies of the buffers that its layers may write to, for every
micro-batch in flight. Its recompute works on copies of these, since it may be done twice.

`torch.utils.checkpoint` stops a recompute when it has all that the backward needs, unless
`torch.utils.checkpoint.set_checkpoint_early_stop(False)` is set. Then the last layer of a run may
not be run whole (a linear layer is not run at all): its time and its output, which count here, are
upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpipebal.memory.layer_peaks import backward_peak, chained_peak, uncopied_peak
from gpipebal.profile import LayerProfile, Profile

__all__ = [
    "InRun",
    "given_to",
    "leaves_input",
    "recomputed_from",
    "uses_skips",
    "with_nothing_saved_before",
    "with_runs",
]


class InRun(NamedTuple):
    """What a layer of a run costs.

    Attributes:
        before_others: If layers of the run come after it.
        as_last: If it is the last one, whose backward the recompute of the run belongs to.
        copies: Bytes of the copies of buffers that a run which ends with it keeps, from before its
            forward on.
    """

    before_others: LayerProfile
    as_last: LayerProfile
    copies: int


def given_to(profile: Profile, layer: int) -> frozenset[int]:
    """Return the storages of a layer's input."""
    return frozenset(profile.layers[layer - 1].outputs if layer else profile.inputs)


def uses_skips(profile: Profile) -> frozenset[int]:
    """Return the layers that cannot be in a run: they would stash or pop a value twice."""
    return frozenset(layer for s in profile.skips for layer in (s.source, s.destination))


def leaves_input(profile: Profile, first: int, layer: int) -> bool:
    """Whether a layer leaves the input of a run as it is, so that the run can use it again.

    A layer whose output lies in memory of that input may have written to it. It has not if it makes
    other outputs too, and the part in that memory has no gradient: a mask that is passed along.

    Args:
        profile: Costs of the layers.
        first: First layer of the run.
        layer: A layer of the run.
    """
    given, outputs = given_to(profile, first), frozenset(profile.layers[layer].outputs)
    both = given & outputs
    return not both or (both != outputs and both <= frozenset(profile.without_gradient))


def recomputed_from(profile: Profile, first: int) -> Iterator[InRun]:
    """Yield what each layer from `first` on costs in a run that begins there."""
    given = given_to(profile, first)
    # What a layer keeps is there before the run.
    made = {storage for storage, keeper in profile.keepers.items() if keeper >= first}
    # What exists again when a layer's recompute is done, and the most since the run's began.
    remade = peak = copies = 0
    for k in range(first, profile.n_layers):
        layer = profile.layers[k]
        live = profile.bytes_of(given_to(profile, k) - given - made)
        peak = max(peak, remade + live + layer.forward_peak_bytes)
        new = frozenset(layer.saved) - given - made
        remade += profile.bytes_of(new) + layer.saved_buffer_bytes
        made |= new
        copies += layer.kept_buffer_bytes
        saved = tuple(given) if k == first else ()
        as_last = _in_run(layer, saved, remade, peak + copies)
        yield InRun(_in_run(layer, saved, remade, 0), as_last, copies)


def _in_run(layer: LayerProfile, saved: tuple[int, ...], remade: int, least: int) -> LayerProfile:
    """Describe a layer whose backward finds `remade` bytes more, and needs `least` before it."""
    launch = layer.backward_host_time
    without = layer.no_grad_forward_peak_bytes
    peaks = [max(least, remade + backward_peak(layer, exist)) for exist in (False, True)]
    # The recompute itself makes no copies that could be spared.
    uncopied, chained = (
        [max(least, remade + peak(layer, exist, inside=False)) for exist in (False, True)]
        for peak in (uncopied_peak, chained_peak)
    )
    return replace(
        layer,
        backward_time=layer.backward_time + layer.recompute_time,
        backward_host_time=None if launch is None else launch + (layer.forward_host_time or 0.0),
        saved=saved,
        forward_peak_bytes=layer.forward_peak_bytes if without is None else without,
        backward_peak_bytes=peaks[0],
        accumulating_peak_bytes=None if layer.accumulating_peak_bytes is None else peaks[1],
        chained_peak_bytes=chained[0],
        chained_accumulating_peak_bytes=chained[1],
        copied_bytes=min(one - other for one, other in zip(peaks, uncopied, strict=True)),
        # With these copies, wherever it is: a bound.
        cut_copied_bytes=0,
        chained_cut_copied_bytes=0,
    )


def with_runs(profile: Profile, runs: Iterable[range]) -> Profile:
    """Return the profile of the same chain with some runs of layers recomputed.

    The recompute is part of the backward, and its memory is part of that of the run's last layer,
    whose backward comes first.

    Args:
        profile: Costs of the layers.
        runs: Places of their layers in the chain.

    Returns:
        A `Profile` without other sizes.

    Example:
        >>> profile = Profile.from_costs([1.0] * 3, saved_bytes=[50, 70, 5], output_bytes=[1, 2, 4])
        >>> changed = with_runs(profile, [range(1, 3)])
        >>> [(changed.bytes_of(layer.saved), layer.backward_time) for layer in changed.layers]
        [(50, 2.0), (1, 3.0), (0, 3.0)]
    """
    layers, storages = list(profile.layers), list(profile.storages)
    for run in runs:
        copies = 0
        for k, costs in zip(run, recomputed_from(profile, run.start), strict=False):
            layers[k] = costs.as_last if k == run[-1] else costs.before_others
            copies = costs.copies
        if copies:
            layers[run.start] = _with_copies(layers[run.start], len(storages), copies)
            storages.append(copies)
    return replace(profile, layers=tuple(layers), storages=tuple(storages), other_sizes=())


def _with_copies(layer: LayerProfile, storage: int, n_bytes: int) -> LayerProfile:
    """Let the first layer of a run keep its copies of buffers, in a storage of their own."""
    return replace(
        layer,
        saved=(*layer.saved, storage),
        forward_peak_bytes=layer.forward_peak_bytes + n_bytes,
    )


def with_nothing_saved_before(profile: Profile, layer: int) -> Profile:
    """Return the profile of the same chain in which the layers before one save nothing.

    In one memory, later partitions need no more with it than with any runs in those layers.
    """
    before = [replace(one, saved=()) for one in profile.layers[:layer]]
    return replace(profile, layers=(*before, *profile.layers[layer:]), other_sizes=())
