"""Costs: time and memory of layers and partitions, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gpipebal.argument_kinds import check_kind, is_word
from gpipebal.errors import ProfileError, UsageError
from gpipebal.plan import Plan
from gpipebal.plots.axes import (
    FONT_SIZE,
    LINE_HEIGHT,
    add_headline,
    axes_or_new,
    dashed,
    fits,
    ink_of,
    label_indices,
    label_layers,
    note,
    points,
)
from gpipebal.plots.header import HEADER, draw_header
from gpipebal.plots.style import (
    FINE,
    Colour,
    kind_entries,
    kind_style,
    partition_colours,
    readable_on,
    scale_bytes,
    scale_seconds,
)
from gpipebal.profile import Profile
from gpipebal.timeline import KIND_NAMES
from gpipebal.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["plot_balance", "plot_partitions", "plot_profile"]

Quantity = Literal["time", "memory"]

#: Points between a number and the line of the mean.
_CLEAR = 3.0

_TIME_LABELS = {**{kind: KIND_NAMES[kind] for kind in "FRB"}, "C": "transfer"}
_MEMORY_LABELS = {"F": "parameters and state", "B": "saved for backward"}
_EMPTY = {"time": "all times are 0", "memory": "no parameters and nothing saved in this profile"}


def plot_profile(profile: Profile, *, ax: Axes | None = None, by: Quantity = "time") -> Axes:
    """Draw one bar per layer: its time, or its memory, for one micro-batch.

    Args:
        profile: Costs of the layers.
        ax: Axes to draw on; None: a new figure.
        by: ``'time'``: forward and backward. ``'memory'``: what stays for the whole step
            (parameters, gradients, buffers, optimizer state), and what is saved for the backward
            of one micro-batch. A bar has all that its layer saves; the title counts a tensor that
            several layers save only once.

    Raises:
        KindError: `profile` is not a Profile.
        UsageError: `by` is neither.

    Example:
        >>> from gpipebal import Profile
        >>> plot_profile(Profile.from_costs([3.0, 1.0, 4.0])).get_ylabel()
        'time [s]'
    """
    check_kind("profile", profile, Profile)
    own = ax is None
    ax = axes_or_new(ax, 9.0, 3.6)
    kinds = _layer_costs(profile, by, recomputes=False)
    colours = partition_colours(1) * profile.n_layers
    entries = _draw_bars(ax, kinds, colours, by)
    label_layers(ax, profile.names, grow=own)
    if by == "time":
        text = f"{format_seconds(sum(map(sum, kinds.values())))} in sum"
    else:
        # A storage that several layers save counts once.
        saved = profile.bytes_of({index for layer in profile.layers for index in layer.saved})
        # So does a gradient of a parameter that several layers have.
        twice = sum(tie.gradient_bytes * (len(tie.layers) - 1) for tie in profile.ties)
        text = f"{format_bytes(sum(kinds['F']) - twice + saved)} together"
    what = f"{count(profile.n_layers, 'layer')}, micro-batch of {count(profile.rows, 'row')}"
    add_headline(ax, f"{what}: {text}", entries)
    return ax


def plot_balance(
    profile: Profile, plan: Plan, *, ax: Axes | None = None, by: Quantity = "time"
) -> Axes:
    """Draw one bar per layer in the colour of its partition, with borders and totals.

    Args:
        profile: Costs of the layers.
        plan: How the layers are cut; a plan of the same layers.
        ax: Axes to draw on; None: a new figure.
        by: ``'time'``: forward, recompute (where the plan recomputes) and backward; totals are
            seconds of a partition for one micro-batch, and its bars add up to them: where the plan
            has other times than the profile (for other devices, quantiles or recomputed layers),
            each layer has its share of the partition's time. ``'memory'``: what stays for the
            whole step and what is saved for one micro-batch; totals are the predicted peaks, which
            count more than that, and tensors that layers share only once; where the plan knows no
            peaks, they are what stays for the whole step.

    Raises:
        KindError: `profile` is not a Profile, or `plan` not a Plan.
        ProfileError: the plan is of other layers.
        UsageError: `by` is neither.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> plot_balance(profile, plan).get_xlabel()
        'layer'
    """
    check_kind("profile", profile, Profile)
    check_kind("plan", plan, Plan)
    _check_same_layers(profile, plan)
    own = ax is None
    ax = axes_or_new(ax, 10.0, 4.0)
    hues = partition_colours(plan.n_partitions)
    colours = [hues[j] for j, n_layers in enumerate(plan.balance) for _ in range(n_layers)]
    if profile.rows != plan.rows:
        profile = profile.at_rows(plan.rows)
    kinds = _layer_costs(profile, by, recomputes=plan.has_recomputes)
    if by == "time":
        kinds = {kind: _as_planned(kind, times, plan) for kind, times in kinds.items()}
    entries = _draw_bars(ax, kinds, colours, by)
    label_layers(ax, profile.names, grow=own)
    if by == "time":
        title = "Layers and their partitions: time for one micro-batch"
        totals = [format_seconds(plan.micro_batch_time(j)) for j in range(plan.n_partitions)]
    else:
        # Under a schedule that only other software runs, peaks are not known.
        above = "model memory" if plan.peak_bytes is None else "peak"
        title = f"Layers and their partitions: memory, and the {above} of each partition"
        totals = [format_bytes(part.memory.total) for part in plan.partitions]
    draw_header(ax, plan.balance, hues, totals)
    add_headline(ax, title, entries, below=HEADER)
    return ax


def _check_same_layers(profile: Profile, plan: Plan) -> None:
    if plan.names != profile.names:
        pairs = zip(plan.names, profile.names, strict=False)
        differ = (f"{a!r} and {b!r}" for a, b in pairs if a != b)
        what = next(differ, f"{plan.n_layers} and {profile.n_layers} layers")
        raise ProfileError(
            f"plan and profile are of different models: {what} (expected the same layers).\n"
            "Fix: give the profile that the plan was made from."
        )


def _as_planned(kind: str, times: Sequence[float], plan: Plan) -> list[float]:
    """Return each layer's share of the time that the plan counts for its partition."""
    name = {"F": "forward_time", "R": "recompute_time", "B": "backward_time"}[kind]
    found: list[float] = []
    for part, again in zip(plan.partitions, plan.recomputed, strict=True):
        own = times[len(found) : len(found) + len(part.layers)]
        whole = getattr(part, name) if kind != "R" or again else 0.0
        total = sum(own)
        found += [time / total * whole if total else whole / len(own) for time in own]
    return found


def plot_partitions(plan: Plan, *, ax: Axes | None = None) -> Axes:
    """Draw one bar per partition, its time for one micro-batch, against their mean.

    With a perfect balance every bar ends at the mean; the longest one is the bottleneck. Transfers
    are drawn on top, where the plan counts them; between GPUs they overlap with the work. Mean and
    imbalance are those of the bars, so they include transfers; `Plan.imbalance` is that of the work
    alone.

    Args:
        plan: Gives the times of the partitions.
        ax: Axes to draw on; None: a new figure.

    Raises:
        KindError: `plan` is not a Plan.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> plot_partitions(plan).get_xlabel()
        'partition'
    """
    check_kind("plan", plan, Plan)
    n = plan.n_partitions
    ax = axes_or_new(ax, min(12.0, max(4.5, 1.5 + 0.5 * n)), 3.6)
    kinds = {"F": [part.forward_time for part in plan.partitions]}
    if plan.has_recomputes:
        kinds["R"] = [
            part.recompute_time if again else 0.0
            for part, again in zip(plan.partitions, plan.recomputed, strict=True)
        ]
    kinds["B"] = [part.backward_time for part in plan.partitions]
    transfers = [part.receive_time + part.return_time for part in plan.partitions]
    if any(transfers):
        kinds["C"] = transfers
    colours = partition_colours(n)
    entries = _draw_bars(ax, kinds, colours, "time")
    totals = [sum(times) for times in zip(*kinds.values(), strict=True)]
    factor, _ = scale_seconds(max(totals))
    mean = sum(totals) / n
    ink = ink_of(ax)
    line = ax.axhline(mean / factor, **dashed(ax, ink, 1.0))
    line.set_label("mean")
    _write_totals(ax, kinds, colours, totals, mean)
    label_indices(ax, n)
    ax.set_xlabel("partition")
    imbalance = max(totals) / mean if mean else 1.0
    title = f"Partitions: mean {format_seconds(mean)}, imbalance {imbalance:.3f}"
    add_headline(ax, title, [*entries, line])
    return ax


def _write_totals(
    ax: Axes,
    kinds: Mapping[str, Sequence[float]],
    colours: Sequence[Colour],
    totals: Sequence[float],
    mean: float,
) -> None:
    """Write the totals of partitions above their bars, if all fit, clear of the mean line.

    Where the line would strike a number out, the number goes into the bar; if the bar has no room
    for it, or changes from dark to light behind it, the number goes above the line.
    """
    texts = [format_seconds(total) for total in totals]
    width, height = points(ax)
    if not max(totals) or not all(fits(text, width / len(texts)) for text in texts):
        return
    factor, _ = scale_seconds(max(totals))
    per_second = height / ax.get_ylim()[1] / factor
    need = LINE_HEIGHT * FONT_SIZE + _CLEAR
    for j, (text, total) in enumerate(zip(texts, totals, strict=True)):
        to_line = (mean - total) * per_second
        rise, va, inks = 2.0, "bottom", set()
        if -_CLEAR < to_line < need + rise:
            # If the line nearly touches the bar, the number is just above the line.
            is_high = to_line > _CLEAR and total * per_second >= need
            parts = {kind: seconds[j] * per_second for kind, seconds in kinds.items()}
            inks = _inks(parts, colours[j], need, ink_of(ax)) if is_high else set()
            rise, va = (
                (-_CLEAR, "top") if len(inks) == 1 else (max(rise, to_line + _CLEAR), "bottom")
            )
        ax.annotate(
            text,
            (j, total / factor),
            xytext=(0, rise),
            textcoords="offset points",
            ha="center",
            va=va,
            size=FONT_SIZE,
            color=inks.pop() if va == "top" else None,
        )


def _inks(parts: dict[str, float], colour: Colour, depth: float, ink: Any) -> set[str]:
    """Return the ink colours that can be read on the parts of a bar near its top."""
    found = set()
    for kind, height in reversed(parts.items()):
        if depth > 0 and height:
            found.add(readable_on(kind_style(colour, kind, ink=ink)["facecolor"]))
        depth -= height
    return found


def _layer_costs(profile: Profile, by: str, *, recomputes: bool) -> dict[str, Sequence[float]]:
    """Return what each layer costs, by kind, in the order in which the bars are stacked."""
    if is_word(by, "time"):
        kinds: dict[str, Sequence[float]] = {"F": [layer.forward_time for layer in profile.layers]}
        if recomputes:
            kinds["R"] = [layer.recompute_time for layer in profile.layers]
        kinds["B"] = [layer.backward_time for layer in profile.layers]
        return kinds
    if is_word(by, "memory"):
        kept = [
            layer.parameter_bytes
            + layer.gradient_bytes
            + layer.buffer_bytes
            + (layer.optimizer_bytes or 0)
            for layer in profile.layers
        ]
        return {"F": kept, "B": [profile.bytes_of(layer.saved) for layer in profile.layers]}
    raise UsageError(
        f"quantity does not exist: by={by!r} (expected 'time' or 'memory').\nFix: by='time'."
    )


def _draw_bars(
    ax: Axes,
    kinds: Mapping[str, Sequence[float]],
    colours: Sequence[Colour],
    by: Quantity,
) -> list[Artist]:
    """Draw one stacked bar per item, at 0, 1, ..., set limits and unit, return the legend."""
    n_items = len(colours)
    totals = [sum(values) for values in zip(*kinds.values(), strict=True)]
    factor, unit = (scale_seconds if by == "time" else scale_bytes)(max(totals))
    bottoms = [0.0] * n_items
    fine = points(ax)[0] / n_items < FINE
    width = 1.0 if fine else 0.82
    for kind, values in kinds.items():
        heights = [value / factor for value in values]
        styles = [kind_style(colour, kind, fine=fine, ink=ink_of(ax)) for colour in colours]
        ax.bar(
            range(n_items),
            heights,
            width,
            bottoms,
            color=[style["facecolor"] for style in styles],
            edgecolor=[style["edgecolor"] for style in styles],
            linewidth=0.0,
            hatch=styles[0].get("hatch"),
        )
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    ax.set_xlim(-0.5, n_items - 0.5)
    ax.set_ylim(0, 1.12 * max(bottoms) or 1.0)
    ax.set_ylabel(f"{by} [{unit}]")
    if not max(totals):
        ax.set_yticks([0])
        note(ax, _EMPTY[by])
    labels = _TIME_LABELS if by == "time" else _MEMORY_LABELS
    return kind_entries({kind: labels[kind] for kind in kinds}, fine=fine, ink=ink_of(ax))
