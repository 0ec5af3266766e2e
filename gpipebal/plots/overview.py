"""Overview: one figure of a whole run, and how a figure is saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind, check_path
from gpipebal.errors import UsageError
from gpipebal.files import atomic_path
from gpipebal.plan import Plan
from gpipebal.plots.costs import plot_balance, plot_partitions
from gpipebal.plots.timelines import plot_pair, timeline_height
from gpipebal.profile import Profile
from gpipebal.timeline import Timeline
from gpipebal.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_run", "save_figure"]

#: Inches of the row of layers and partitions, and dots per inch of a saved picture.
_BARS_HEIGHT = 3.9
_DPI = 150


def plot_run(
    profile: Profile, plan: Plan, predicted: Timeline, measured: Timeline | None = None
) -> Figure:
    """Draw layers, partitions and timelines of a run in one figure.

    Above, the costs of each layer in the colour of its partition, and the costs of each partition;
    below, the predicted timeline and, on the same time axis, the measured one.

    Args:
        profile: Costs of the layers.
        plan: How the layers are cut.
        predicted: Simulated timeline of the plan. If its makespan differs from the plan's, as with
            the loss, its caption has both.
        measured: Timeline that a run of the plan recorded; None: not run.

    Raises:
        KindError: an argument is not a Profile, a Plan or a Timeline.
        ProfileError: the plan is of another number of layers than the profile.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> len(plot_run(profile, plan, gb.simulate(plan)).axes)
        3
    """
    from matplotlib.figure import Figure

    check_kind("profile", profile, Profile)
    check_kind("plan", plan, Plan)
    check_kind("predicted", predicted, Timeline)
    if measured is not None:
        check_kind("measured", measured, Timeline)
    timelines = [predicted] if measured is None else [predicted, measured]
    height = timeline_height(*timelines)
    figure = Figure(figsize=(13.0, _BARS_HEIGHT + height + 0.4), layout="constrained")
    grid = figure.add_gridspec(
        2, 2, width_ratios=(2.4, 1), height_ratios=(_BARS_HEIGHT, height), hspace=0.04
    )
    layers = figure.add_subplot(grid[0, 0])
    partitions = figure.add_subplot(grid[0, 1])
    timeline = figure.add_subplot(grid[1, :])
    one_mode = isinstance(plan.checkpoint, str)
    checkpoint = f"checkpoint={plan.checkpoint!r}" if one_mode else "checkpoint by partition"
    figure.suptitle(
        f"{count(plan.n_layers, 'layer')} on {count(plan.n_partitions, 'partition')}, "
        f"{count(plan.chunks, 'micro-batch')} of {count(plan.rows, 'row')}, "
        f"{plan.schedule}, {checkpoint}",
        x=0.01,
        ha="left",
        fontsize=12.5,
    )
    # Gives the axes nearly their final sizes, which decide what fits.
    figure.draw_without_rendering()
    plot_balance(profile, plan, ax=layers)
    plot_partitions(plan, ax=partitions)
    plot_pair(predicted, measured, ax=timeline, planned=plan.makespan)
    return figure


def save_figure(figure: Figure | Axes, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, whole or not at all.

    Args:
        figure: What to write, or axes in it.
        path: File to write; its suffix, such as ``.png``, ``.svg`` or ``.pdf``, is its type.

    Raises:
        UsageError: the suffix is not one that matplotlib can write.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> import tempfile
        >>> from gpipebal.plots import plot_balance
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_figure(plot_balance(profile, plan), f"{folder}/balance.svg")
    """
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    whole = figure.get_figure(root=True) if isinstance(figure, Axes) else figure
    check_kind("figure", whole, Figure, "figure=plot_balance(profile, plan)")
    assert isinstance(whole, Figure)
    suffix = check_path(path).suffix.removeprefix(".").lower()
    known = whole.canvas.get_supported_filetypes()
    if suffix not in known:
        raise UsageError(
            f"picture has a type that cannot be written: suffix={suffix!r} "
            f"(expected one of {', '.join(sorted(known))}).\nFix: end the path in .png."
        )
    from matplotlib import rc_context

    # The same picture is the same file, whenever it is written.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with atomic_path(path) as temporary, rc_context({"svg.hashsalt": "gpipebal"}):
        whole.savefig(temporary, format=suffix, dpi=_DPI, metadata=undated)
