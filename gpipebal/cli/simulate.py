"""``gpipebal simulate``: from a plan, or a profile, to a predicted timeline."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import TYPE_CHECKING

from gpipebal.cli.nouns import check_files, load_noun, say_written
from gpipebal.cli.question import add_question, asked, plan_of
from gpipebal.cli.standard_output import libraries_on_standard_error
from gpipebal.cli.words import Commands, add_command
from gpipebal.errors import BalanceError, UsageError
from gpipebal.schedule.known import KNOWN_SCHEDULES
from gpipebal.text import either
from gpipebal.units import format_seconds

if TYPE_CHECKING:
    from gpipebal.plan import Plan
    from gpipebal.profile import Profile

__all__ = ["add_simulate"]

#: Columns to the left of the time axis: names of the rows.
_BESIDE = 16
#: Columns of the narrowest drawing.
_NARROWEST = 20
#: Columns of the widest: more than any terminal has, or a reader scrolls through.
_WIDEST = 10_000


def add_simulate(commands: Commands) -> None:
    """Add the command to the parser."""
    simulate = add_command(
        commands,
        "simulate",
        "predict when each device works, under any schedule",
        "Predict the timeline of one mini-batch, and draw it: of a plan, or of the best plan for a "
        "profile. This needs neither the model nor a device.",
        """
        gpipebal simulate plan.json
        gpipebal simulate plan.json --schedule zb_h1 --plot timeline.png
        gpipebal simulate plan.json -o timeline.json
        gpipebal simulate profile.json -n 4 --chunks 16 --schedule 1f1b --checkpoint never
        gpipebal simulate profile.json --balance 100,270 --json
        """,
        "A file written with --output opens in https://ui.perfetto.dev. Made from a profile, it\n"
        "also shows how much memory every device holds over time.",
    )
    simulate.set_defaults(command=_simulate)
    simulate.add_argument(
        "file", metavar="FILE", help="a plan; or a profile, with --partitions or --balance"
    )
    add_question(simulate)
    simulate.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"schedule to simulate: {either(KNOWN_SCHEDULES)}; a profile is also planned for it "
        "(default: the plan's; for a profile gpipe)",
    )
    simulate.add_argument(
        "--no-loss",
        action="store_true",
        help="leave out the pause for the loss between forwards and backwards",
    )
    simulate.add_argument(
        "--no-detail",
        action="store_true",
        help="join actions of one kind that follow each other without a pause, and leave out "
        "memory over time: a smaller file for a large pipeline",
    )
    simulate.add_argument(
        "--width",
        type=int,
        metavar="N",
        help=f"columns of the drawing, {_NARROWEST} to {_WIDEST} (default: those of the terminal)",
    )
    simulate.add_argument(
        "--output", "-o", metavar="FILE", help="write the timeline to this file, a Chrome trace"
    )
    simulate.add_argument("--plot", metavar="FILE", help="draw it: .png, .svg or .pdf")
    simulate.add_argument("--json", action="store_true", help="print the timeline as JSON")


def _simulate(options: argparse.Namespace) -> None:
    from gpipebal.profile import Profile
    from gpipebal.schedule import check_known_schedule
    from gpipebal.simulator import held_of, memory_over_time, simulate
    from gpipebal.timeline import Timeline, outline

    check_files(options, options.file)
    if options.width is not None:
        _check_width(options.width)
        if options.json:
            raise UsageError(
                "JSON is not a drawing of some width: --width with --json (expected one of them).\n"
                "Fix: leave --width out."
            )
    noun = load_noun(options.file, "plan", "profile")
    assert not isinstance(noun, Timeline)
    schedule = options.schedule and check_known_schedule(options.schedule)
    if isinstance(noun, Profile):
        plan = _planned(noun, options, schedule)
    else:
        _refuse_question(options)
        plan = noun
    # Only a schedule with two phases has a time between them.
    inside = plan.loss_inside or (schedule or plan.schedule) != "gpipe"
    pause = None if inside or options.no_loss else plan.pause_time
    try:
        whole = simulate(plan, schedule, pause=pause)
    except BalanceError as error:
        if isinstance(noun, Profile) or schedule is None:
            raise
        raise _needs_a_new_plan(error, schedule) from error
    timeline = outline(whole) if options.no_detail else whole
    if options.output is not None:
        memory = []
        if isinstance(noun, Profile) and not options.no_detail:  # a plan does not tell sizes
            held = held_of(noun, plan, loss_inside=inside)
            memory = [memory_over_time(whole, held)]
        timeline.save(options.output, memory=memory)
    if options.plot is not None:
        from gpipebal.plots import plot_timeline, save_figure

        save_figure(plot_timeline(timeline), options.plot)
    if options.json:
        print(json.dumps(timeline.to_dict()))
        return
    width = options.width
    if width is None:
        width = shutil.get_terminal_size().columns - _BESIDE
    print(timeline.text_gantt(min(_WIDEST, max(_NARROWEST, width))))
    if pause:
        print(f"with a pause of {format_seconds(pause)} for the loss (--no-loss leaves it out)")
    say_written(options)


def _planned(profile: Profile, options: argparse.Namespace, schedule: str | None) -> Plan:
    """Return the plan that a profile gives for a schedule."""
    from gpipebal.schedule import SCHEDULES

    limit = next((n for n in ("memory_limit", "reserve") if n in asked(options)), None)
    if options.balance is not None and limit is not None:
        flag = options.flags[limit]
        raise UsageError(
            f"a limit changes no timeline: {flag} with --balance (expected one of them).\n"
            f"Fix: leave {flag} out; gpipebal solve --balance shows peaks and limits."
        )
    # A given balance is the same under a schedule that only the simulator knows.
    is_planned = options.balance is None or schedule in SCHEDULES
    with libraries_on_standard_error():
        return plan_of(profile, options, schedule=schedule if is_planned else None)


def _refuse_question(options: argparse.Namespace) -> None:
    """Refuse words that ask for a plan, where there is one."""
    given = asked(options)
    if given:
        flag = options.flags[given[0]]
        raise UsageError(
            f"the plan is made already: {flag} with a plan (expected a profile).\n"
            f"Fix: leave {flag} out, or name the profile that the plan was made from."
        )


def _check_width(width: int) -> None:
    """Refuse a drawing with too few columns to read, or too many to print.

    Raises:
        UsageError: the width is not in the range.
    """
    if _NARROWEST <= width <= _WIDEST:
        return
    what, nearest = ("narrow", _NARROWEST) if width < _NARROWEST else ("wide", _WIDEST)
    raise UsageError(
        f"drawing is too {what}: --width {width} (expected {_NARROWEST}..{_WIDEST}).\n"
        f"Fix: --width {nearest}."
    )


def _needs_a_new_plan(error: BalanceError, schedule: str) -> BalanceError:
    """Return the error for a plan that does not fit a schedule, which says how to make one."""
    what, _, fix = str(error).partition("\nFix: ")
    return BalanceError(
        f"{what}\nFix: a new plan, by gpipebal solve PROFILE --schedule {schedule} with "
        f"{fix or 'other counts.'}"
    )
