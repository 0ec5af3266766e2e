"""Costs at any number of rows, from those that were measured.

**Times.** Each is fitted as an overhead plus a time per row, neither negative, to all measured
sizes. A size is weighted by how certain it is: the squared inverse of its spread, which is taken to
be at least `fit.SURE` of the time. Where the fit misses a measured time by more than its spread and
by more than `fit.TOLERANCE` of it, the time is not a line in the rows (for example, because a
kernel changes with the size), and is interpolated between the measured sizes instead.

**Bytes.** A size that is a line in the rows through all measured sizes is exact at every number
of rows; any other is interpolated and rounded up. Storages keep their identity: the sets of the
result are those of the measured sizes, which must be the same. A measured size whose sets differ
from those of the size nearest to the one asked for (because another algorithm was chosen there) is
left out of the bytes, and named in the provenance.

**Peaks** are the largest of several moments, each of which is a line (`moments`). Where a profile
does not tell these, as of losses, they are as `fit.peak_at` says.

**Beyond the measured sizes** a fit goes on as it is, and interpolated values as `fit.interpolate`
says. **One size alone** tells nothing about the overhead: all costs grow in proportion to the rows,
except for buffers and for the gradients of parameters in the peaks of a backward, which stay as
they are.

**Terms of the mini-batch** (gather, the loss over it, the optimizer) do not depend on the rows of a
micro-batch: they are those of the profile, or in proportion to other rows of the mini-batch.

What was done is recorded in ``provenance['at_rows']`` of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import whole_number
from gpipebal.errors import ProfileError
from gpipebal.profile.checks import COUNT_FIELDS
from gpipebal.profile.fit import Counts, count_at, is_rising_line, peak_at, points_around, time_at
from gpipebal.profile.layer import MOMENTS, LayerProfile, StepTerms
from gpipebal.profile.moments import largest_moment

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = ["COUNTS", "FIXED", "TIMES", "at_rows", "target_bytes"]

#: Most rows that a micro-batch can have here.
_MOST_ROWS = 2**31 - 1

#: Times of a layer, and the field that tells how much each varied.
TIMES = {
    "forward_time": "forward_spread",
    "backward_time": "backward_spread",
    "recompute_time": "forward_spread",
    "no_grad_forward_time": "forward_spread",
    "forward_host_time": "forward_spread",
    "backward_host_time": "backward_spread",
    "forward_spread": "forward_spread",
    "backward_spread": "backward_spread",
}
#: Bytes of parameters and of their optimizer, which do not depend on the rows.
_OF_PARAMETERS = (
    *("parameter_bytes", "gradient_bytes"),
    *("optimizer_bytes", "optimizer_peak_bytes", "optimizer_carried_bytes"),
)
#: All other bytes of a layer, and its operations. Those of buffers are among them: what a layer
#: keeps as an attribute may belong to a micro-batch.
COUNTS = tuple(name for name in COUNT_FIELDS if name not in _OF_PARAMETERS)
#: Those that stay as they are with one size alone, and those that include parameters' gradients.
FIXED = ("buffer_bytes", "kept_buffer_bytes", "saved_buffer_bytes")
_WITH_GRADIENTS = (
    "backward_peak_bytes",
    "accumulating_peak_bytes",
    "chained_peak_bytes",
    "chained_accumulating_peak_bytes",
)
_PEAKS = ("forward_peak_bytes", "no_grad_forward_peak_bytes")
#: Those of a backward in pairs: where gradients exist already, and where they do not.
_IN_PAIRS = tuple(zip(_WITH_GRADIENTS[1::2], _WITH_GRADIENTS[::2], strict=True))
#: A measured size of a layer: its rows, and what it costs.
_Size = tuple[int, LayerProfile]


def at_rows(profile: Profile, rows: int, mini_batch_rows: int | None = None) -> Profile:
    """Say what the chain costs at another number of rows; see `Profile.at_rows`."""
    rows, of_mini_batch = _rows("rows", rows), profile.mini_batch_rows
    if mini_batch_rows is not None:
        of_mini_batch = _rows("mini_batch_rows", mini_batch_rows)
    if rows == profile.rows and of_mini_batch == profile.mini_batch_rows:
        return profile
    sizes = sorted((profile, *profile.other_sizes), key=lambda size: size.rows)
    # Of two that are equally near, the larger: its bytes are the safer guess.
    nearest = min(sizes, key=lambda size: (abs(size.rows - rows), -size.rows))
    made, about = (nearest, None) if nearest.rows == rows else _between(sizes, nearest, rows)
    step, storages, without_gradient = _with_whole_terms(made, profile, rows, of_mini_batch)
    return replace(
        made,
        storages=storages,
        without_gradient=without_gradient,
        rows=rows,
        mini_batch_rows=of_mini_batch,
        chunks=max(1, -(-of_mini_batch // rows)),
        step=step,
        other_sizes=(),
        provenance={**nearest.provenance, **({"at_rows": about} if about else {})},
    )


def _between(
    sizes: Sequence[Profile], nearest: Profile, rows: int
) -> tuple[Profile, dict[str, Any]]:
    """Return a profile at rows that were not measured, and how it was made."""
    alike = [size for size in sizes if _sets(size) == _sets(nearest)]
    bad_fits: list[str] = []
    layers = [
        _layer_at(
            layer,
            [(size.rows, size.layers[k]) for size in sizes],
            [(size.rows, size.layers[k]) for size in alike],
            rows,
            bad_fits,
        )
        for k, layer in enumerate(nearest.layers)
    ]
    loss = nearest.step.loss
    if loss is not None:
        known = [(size.rows, size.step.loss) for size in sizes if size.step.loss is not None]
        same = [(size.rows, size.step.loss) for size in alike if size.step.loss is not None]
        if len(same) > 1 or nearest.step.whole_loss is None:
            target = count_at(tuple((r, found.buffer_bytes) for r, found in same), rows)
        else:
            target = target_bytes(nearest, nearest.step.whole_loss, rows)
        loss = replace(_layer_at(loss, known, same, rows, bad_fits), buffer_bytes=target)
    by_rows = _named(nearest) - set(nearest.common_inputs) - nearest.keepers.keys()
    storages = [
        count_at(tuple((size.rows, size.storages[index]) for size in alike), rows)
        if index in by_rows
        else n_bytes
        for index, n_bytes in enumerate(nearest.storages)
    ]
    measured = [size.rows for size in sizes]
    about = {
        "rows": rows,
        "from_rows": measured,
        "method": "fit" if len(sizes) > 1 else "in proportion",
        "extrapolated": not measured[0] <= rows <= measured[-1],
        "interpolated": list(dict.fromkeys(bad_fits)),
        "other_storages_at": [size.rows for size in sizes if size not in alike],
    }
    return replace(
        nearest,
        layers=tuple(layers),
        storages=tuple(storages),
        step=replace(nearest.step, loss=loss),
    ), about


def _layer_at(
    nearest: LayerProfile,
    sizes: Sequence[_Size],
    alike: Sequence[_Size],
    rows: int,
    bad_fits: list[str],
) -> LayerProfile:
    """Return a layer at these rows.

    Args:
        nearest: The layer at the nearest measured size.
        sizes: The layer at all measured sizes, in ascending order of rows.
        alike: Those with the same storages as the nearest.
        rows: Rows to find it at.
        bad_fits: Gets its name if one of its times is not a line in the rows.
    """
    found: dict[str, Any] = {}
    for name, spread in TIMES.items():
        times = [(r, getattr(x, name), getattr(x, spread)) for r, x in sizes]
        if any(time is None for _, time, _ in times):
            found[name] = None
            continue
        found[name], good = time_at(times, rows)
        if not good and not name.endswith("_spread"):
            bad_fits.append(nearest.name)
    by_moments = _by_moments(alike, rows)
    for name in COUNTS:
        if name in by_moments:
            continue
        counts = tuple((r, getattr(x, name)) for r, x in alike)
        unknown = any(count is None for _, count in counts)
        if unknown:
            found[name] = None
        elif len(counts) > 1:
            found[name] = (peak_at if name in _PEAKS else count_at)(counts, rows)
        else:
            found[name] = _in_proportion(name, alike[0], rows)
    if len(alike) > 1 and not by_moments.keys() >= set(_WITH_GRADIENTS):
        found |= _backward_peaks(nearest, alike, rows)
    found |= by_moments
    found |= dict.fromkeys(MOMENTS.values(), ())
    return replace(nearest, **found)


def _backward_peaks(nearest: LayerProfile, alike: Sequence[_Size], rows: int) -> dict[str, int]:
    """Return the peaks of a layer's backward at these rows, as far as they are known.

    With few rows they are at its end, when all gradients of parameters are there and what was saved
    is freed, and fall as the rows grow. With many they are at its beginning, and grow. If the
    measured sizes of one are on both sides, or on the first, the others may turn at the largest.
    """
    points = {name: tuple((r, getattr(x, name)) for r, x in alike) for name in _WITH_GRADIENTS}
    points = {name: each for name, each in points.items() if None not in dict(each).values()}
    turns = not all(map(is_rising_line, points.values()))
    found, fixed = dict[str, int](), nearest.gradient_bytes
    for accumulating, first in _IN_PAIRS:
        for name in {accumulating, first} & points.keys():
            found[name] = peak_at(points[name], rows, fixed * (name == first), turns=turns)
        if {accumulating, first} <= found.keys() and rows > alike[-1][0]:
            # The first backward has no more at any moment, besides the gradients that it makes.
            most = max(fixed + found[accumulating], count_at(points[first], rows))
            found[first] = min(found[first], most)
    return found


def _by_moments(alike: Sequence[_Size], rows: int) -> dict[str, int]:
    """Return those peaks of a layer at these rows whose moments the two nearest sizes tell.

    A size that does not tell them has others: lines through sizes behind it may miss its peak.
    """
    found: dict[str, int] = {}
    beside = points_around([(r, r) for r, _ in alike], rows)
    for name, moments in MOMENTS.items():
        each = [(r, getattr(x, moments), getattr(x, name)) for r, x in alike]
        # Those of a peak that was changed since are not its own.
        known = tuple((r, of) for r, of, peak in each if of and max(of) == peak)
        if len(beside) < 2 or not {r for r, _ in beside} <= {r for r, _ in known}:
            continue
        if len({len(of) for _, of in known}) == 1:
            found[name] = largest_moment(known, rows)
    return found


def _in_proportion(name: str, known: _Size, rows: int) -> int:
    """Scale what one size alone tells, except for what does not depend on the rows."""
    of_rows, layer = known
    n_bytes: int = getattr(layer, name)
    fixed = n_bytes if name in FIXED else 0
    if name in _WITH_GRADIENTS:
        fixed = min(n_bytes, layer.gradient_bytes)
    return fixed + count_at(((of_rows, n_bytes - fixed),), rows)


def _with_whole_terms(
    made: Profile, profile: Profile, rows: int, mini_batch_rows: int
) -> tuple[StepTerms, tuple[int, ...], tuple[int, ...]]:
    """Give a size the terms of the mini-batch: its own, or those of the profile.

    Returns:
        The terms; the size's storages followed by those of the terms; and which of all these have
        no gradient.
    """
    own = made.step
    known = [size for size in (profile, made) if size.step.whole_loss is not None]
    # Prefer one with the same rows to one that has to be scaled.
    known.sort(key=lambda size: (size.mini_batch_rows != mini_batch_rows, size is profile))
    source = known[0] if known else made
    step, storages = source.step, list(made.storages)
    by_micro_batch = _named(source)
    alike = source is made or _sets(source) == _sets(made)
    number: dict[int, int] = {}
    outputs = source.with_gradient(step.gathered)
    gradients = source.gradients_into(source.n_layers - 1)
    for index in dict.fromkeys((*step.gathered, *_sets_of(step.whole_loss))):
        is_output = index in by_micro_batch
        if alike and is_output and rows >= mini_batch_rows:
            # With one micro-batch, its output is that of the mini-batch; several are joined.
            number[index] = index
            continue
        n_bytes = source.storages[index]
        if is_output and index in outputs:
            # Joined, outputs are as large as their gradients: no views of something larger now.
            n_bytes = -(-n_bytes * gradients // (source.gradient_bytes_of(outputs) or 1))
        n_bytes = count_at(((source.mini_batch_rows, n_bytes),), mini_batch_rows)
        number[index] = index if source is made and not is_output else len(storages)
        storages[number[index] : number[index] + 1] = [n_bytes]
    whole = step.whole_loss
    if whole is not None:
        whole = replace(
            _scaled(whole, source.mini_batch_rows, mini_batch_rows),
            saved=tuple(number[index] for index in whole.saved),
            outputs=tuple(number[index] for index in whole.outputs),
        )
        if profile.step.whole_loss is not None:
            target = target_bytes(profile, profile.step.whole_loss, mini_batch_rows)
            whole = replace(whole, buffer_bytes=target)
    gather_time = profile.step.gather_time
    if gather_time is not None:
        gather_time, _ = time_at([(profile.mini_batch_rows, gather_time, 0.0)], mini_batch_rows)
    gathered = tuple(number[index] for index in step.gathered)
    terms = replace(
        profile.step,
        gather_time=gather_time,
        loss=own.loss,
        whole_loss=whole,
        gathered=gathered,
    )
    without = [number[index] for index in source.without_gradient if index in number]
    without_gradient = dict.fromkeys((*made.without_gradient, *without))
    return terms, tuple(storages), tuple(without_gradient)


def _scaled(whole: LayerProfile, rows: int, to_rows: int) -> LayerProfile:
    """Bring the loss over a mini-batch to other rows, in proportion."""
    target = count_at(((rows, whole.buffer_bytes),), to_rows)
    size = [(rows, whole)]
    return replace(_layer_at(whole, size, size, to_rows, []), buffer_bytes=target)


def target_bytes(profile: Profile, whole: LayerProfile, rows: int) -> int:
    """Return the bytes of a target of so many rows.

    What parts of it without rows take is told by the targets of a micro-batch and of the
    mini-batch; if one is not known, the target is in proportion to the rows.

    Args:
        profile: The chain's costs.
        whole: Its loss over the mini-batch.
        rows: The rows.
    """
    known: Counts = ((profile.mini_batch_rows, whole.buffer_bytes),)
    loss = profile.step.loss
    if loss is not None and 0 < profile.rows < profile.mini_batch_rows:
        known = ((profile.rows, loss.buffer_bytes), *known)
    return count_at(known, rows)


def _sets(profile: Profile) -> tuple[Any, ...]:
    """Return which storages the parts of a micro-batch name: structure without sizes."""
    loss = profile.step.loss
    return (
        (profile.inputs, profile.common_inputs),
        tuple(map(_sets_of_layer, profile.layers)),
        profile.skips,
        None if loss is None else (loss.outputs, loss.saved),
    )


def _sets_of_layer(layer: LayerProfile) -> tuple[Any, ...]:
    gradients = layer.gradient_storages, layer.through_gradient_storages
    return layer.outputs, layer.saved, *gradients


def _named(profile: Profile) -> set[int]:
    """Return the storages that exist for every micro-batch, and not only for the mini-batch."""
    found = set(profile.inputs)
    for layer in profile.layers:
        found.update(layer.outputs, layer.saved, layer.gradient_storages or ())
    for skip in profile.skips:
        found.update(skip.storages, skip.gradient_storages or ())
    found.update(_sets_of(profile.step.loss))
    return found


def _sets_of(layer: LayerProfile | None) -> Iterable[int]:
    return () if layer is None else (*layer.outputs, *layer.saved)


def _rows(name: str, rows: object) -> int:
    """Return a number of rows as Python's own, or refuse anything else."""
    number = whole_number(rows)
    if number is None or not 1 <= number <= _MOST_ROWS:
        raise ProfileError(
            f"number of rows is not valid: {name}={rows!r:.60} (expected a whole number, 1 to "
            f"{_MOST_ROWS}).\nFix: {name}=1, or more."
        )
    return number
