"""``gpipebal show``: print what a file of gpipebal holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpipebal.cli.nouns import check_files, load_noun, say_written
from gpipebal.cli.words import Commands, add_command
from gpipebal.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpipebal.cli.nouns import Noun

__all__ = ["add_show"]

#: Layers of a profile that are printed unless another number is asked for.
_MOST_LAYERS = 30


def add_show(commands: Commands) -> None:
    """Add the command to the parser."""
    show = add_command(
        commands,
        "show",
        "print or draw a profile, plan or timeline",
        "Print what a file holds: a profile (the layers and what they cost), a plan "
        "(the partitions), or a timeline (when each device worked).",
        """
        gpipebal show profile.json
        gpipebal show profile.json --layers 400
        gpipebal show profile.json --plot profile.png
        gpipebal show gpipebal-run/plan.json gpipebal-run/timeline.json
        gpipebal show plan.json --json | python -m json.tool
        """,
    )
    show.set_defaults(command=_show)
    show.add_argument("files", metavar="FILE", nargs="+", help="a profile, plan or timeline")
    show.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help=f"layers of a profile to print, the slowest ones (default: {_MOST_LAYERS})",
    )
    show.add_argument("--plot", metavar="FILE", help="draw it: .png, .svg or .pdf; of one file")
    show.add_argument(
        "--json", action="store_true", help="print the content as JSON, one line for each file"
    )


def _show(options: argparse.Namespace) -> None:
    from gpipebal.schedule import check_count

    if options.layers is not None:
        check_count("layers", options.layers)
    check_files(options, *options.files)
    if options.plot is not None and len(options.files) > 1:
        raise UsageError(
            f"there is one picture for several files: --plot {options.plot} with "
            f"{len(options.files)} files (expected one file).\nFix: show them one by one, or "
            "gpipebal compare --plot."
        )
    # All are read before the first is printed: a bad one is reported at once.
    nouns = [load_noun(path) for path in options.files]
    if options.layers is not None:
        _check_layers(nouns, options)
    for k, noun in enumerate(nouns):
        if options.json:
            print(json.dumps(noun.to_dict()))
        else:
            print(("\n" if k else "") + _text(noun, options.layers or _MOST_LAYERS))
    if options.plot is not None:
        from gpipebal.plots import save_figure

        save_figure(_draw(nouns[0]), options.plot)
    if not options.json:
        say_written(options)


def _check_layers(nouns: Sequence[Noun], options: argparse.Namespace) -> None:
    """Refuse a number of layers where no layers are counted.

    Raises:
        UsageError: no file is a profile, or all of it is printed.
    """
    from gpipebal.profile import Profile

    if options.json or not any(isinstance(noun, Profile) for noun in nouns):
        what = "--json, which prints all" if options.json else "no profile"
        raise UsageError(
            f"there are no layers to choose: --layers {options.layers} with {what} (expected the "
            "table of a profile).\nFix: leave --layers out."
        )


def _text(noun: Noun, n_layers: int) -> str:
    from gpipebal.profile import Profile
    from gpipebal.tables import profile_table

    return profile_table(noun, n_layers) if isinstance(noun, Profile) else str(noun)


def _draw(noun: Noun) -> Axes:
    from gpipebal.plan import Plan
    from gpipebal.plots import plot_partitions, plot_profile, plot_timeline
    from gpipebal.profile import Profile

    if isinstance(noun, Profile):
        return plot_profile(noun)
    return plot_partitions(noun) if isinstance(noun, Plan) else plot_timeline(noun)
