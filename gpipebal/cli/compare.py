"""``gpipebal compare``: plans, timelines or schedules side by side."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpipebal.cli.nouns import check_files, load_noun, say_written
from gpipebal.cli.question import add_link
from gpipebal.cli.words import Commands, add_command
from gpipebal.errors import UsageError

if TYPE_CHECKING:
    from gpipebal.plan import Plan
    from gpipebal.profile import Profile
    from gpipebal.timeline import Timeline

__all__ = ["add_compare"]


def add_compare(commands: Commands) -> None:
    """Add the command to the parser."""
    compare = add_command(
        commands,
        "compare",
        "set plans, timelines or schedules side by side",
        "Show plans and timelines of one model side by side, each relative to the first. A plan "
        "and a measured timeline show the prediction next to the measurement; if the profile of "
        "the plan is given too, the prediction is that of a whole training step. One profile "
        "alone: all known schedules side by side.",
        """
        cd gpipebal-run && gpipebal compare profile.json plan.json timeline.json
        gpipebal compare plan.json other-plan.json --plot both.png
        gpipebal compare profile.json --partitions 8 --chunks 32
        gpipebal compare profile.json -n 4 --bandwidth 12GB --json
        """,
        "The table of schedules counts the time that a device loses when it switches\n"
        "between forwards and backwards, as measured on a CPU, unless transfers take\n"
        "time; solve and simulate do not count it.",
    )
    compare.set_defaults(command=_compare)
    compare.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="plans and timelines, and their profile; or one profile",
    )
    of_profile = compare.add_argument_group("with one profile")
    of_profile.add_argument("--partitions", "-n", type=int, metavar="N", help="number of devices")
    of_profile.add_argument(
        "--chunks", type=int, metavar="N", help="micro-batches (default: the profile's)"
    )
    of_profile.add_argument(
        "--checkpoint",
        metavar="MODE",
        help="which micro-batches recompute their activations, under every schedule: never "
        "(none), except_last (all but the last) or always (all) (default: never)",
    )
    add_link(of_profile)
    compare.add_argument(
        "--plot", metavar="FILE", help="draw the timelines on one time axis: .png, .svg or .pdf"
    )
    compare.add_argument("--json", action="store_true", help="print the table as JSON")


_OF_PROFILE = ("chunks", "checkpoint", "bandwidth", "latency")


def _compare(options: argparse.Namespace) -> None:
    from gpipebal.profile import Profile

    check_files(options, *options.files)
    nouns = [load_noun(path) for path in options.files]
    profiles = [noun for noun in nouns if isinstance(noun, Profile)]
    others = [
        (path, noun)
        for path, noun in zip(options.files, nouns, strict=True)
        if not isinstance(noun, Profile)
    ]
    if others and len(profiles) < 2:
        asked = [n for n in ("partitions", *_OF_PROFILE) if getattr(options, n) is not None]
        if asked:
            raise UsageError(
                f"plans and timelines are made already: --{asked[0]} (expected one profile).\n"
                f"Fix: leave --{asked[0]} out."
            )
        _compare_nouns(others, profiles[0] if profiles else None, options)
    elif len(nouns) > 1:
        raise UsageError(
            f"profiles are not compared with each other: {len(profiles)} profiles (expected one, "
            "alone or with plans and timelines).\nFix: gpipebal solve makes a plan of a profile."
        )
    else:
        _compare_schedules(profiles[0], options)
    if not options.json:
        say_written(options)


def _compare_nouns(
    nouns: Sequence[tuple[str, Plan | Timeline]],
    profile: Profile | None,
    options: argparse.Namespace,
) -> None:
    from gpipebal.side_by_side import set_side_by_side

    names = _names([path for path, _ in nouns])
    by_name = {name: noun for name, (_, noun) in zip(names, nouns, strict=True)}
    found = set_side_by_side(by_name, profile)
    if options.plot is not None:
        from gpipebal.plots import plot_timelines, save_figure

        save_figure(plot_timelines(found.timelines), options.plot)
    print(json.dumps(found.to_dict()) if options.json else found)


def _compare_schedules(profile: Profile, options: argparse.Namespace) -> None:
    from gpipebal.schedule_comparison import compare_schedules

    if options.partitions is None:
        raise UsageError(
            "number of devices is not given (expected --partitions N with a profile).\n"
            "Fix: --partitions 2."
        )
    given = {name: getattr(options, name) for name in _OF_PROFILE}
    table = compare_schedules(
        profile,
        options.partitions,
        **{name: value for name, value in given.items() if value is not None},
    )
    if options.plot is not None:
        from gpipebal.plots import plot_schedules, save_figure

        save_figure(plot_schedules(table), options.plot)
    print(json.dumps(asdict(table)) if options.json else table)


def _names(paths: Sequence[str]) -> list[str]:
    """Name files by as much of their paths as tells them apart; a repeated file by number."""
    names = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    if len(set(names)) < len(names):
        names = [os.path.splitext(path)[0] for path in paths]
    if len(set(names)) < len(names):
        names = [f"{k}: {name}" for k, name in enumerate(names)]
    return names
