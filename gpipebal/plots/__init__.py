"""Plots: profiles, plans and timelines as pictures.

Hue is the partition: the same one in all pictures of up to seven partitions, and in all of as many
if there are more. Shade is the kind of work: full colour for forward, hatched for recompute, light
for backward. Every function draws on the axes that it is given, or on a new figure, and returns the
axes (`plot_run` draws several, and returns the figure). Nothing here uses pyplot, so importing and
drawing change no global state; ``ax.figure`` shows itself in a notebook and `save_figure` writes it
to a file. A figure of your own should have ``layout="constrained"``, or titles and names around the
axes may be cut off.
"""

from __future__ import annotations

from gpipebal.plots.chunks import plot_chunks
from gpipebal.plots.costs import plot_balance, plot_partitions, plot_profile
from gpipebal.plots.memory import plot_memory
from gpipebal.plots.overview import plot_run, save_figure
from gpipebal.plots.schedules import plot_schedules
from gpipebal.plots.style import partition_colours
from gpipebal.plots.timelines import plot_timeline, plot_timelines

__all__ = [
    "partition_colours",
    "plot_balance",
    "plot_chunks",
    "plot_memory",
    "plot_partitions",
    "plot_profile",
    "plot_run",
    "plot_schedules",
    "plot_timeline",
    "plot_timelines",
    "save_figure",
]
