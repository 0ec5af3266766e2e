"""``gpipebal solve``: from a profile to a plan."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpipebal.cli.nouns import check_files, load_noun, say_written
from gpipebal.cli.question import add_question, plan_of, question_of
from gpipebal.cli.standard_output import libraries_on_standard_error
from gpipebal.cli.words import Commands, add_command
from gpipebal.errors import UsageError
from gpipebal.schedule.known import KNOWN_SCHEDULES
from gpipebal.text import either

if TYPE_CHECKING:
    from gpipebal.planner import LayerRecompute
    from gpipebal.profile import Profile

__all__ = ["add_solve"]


def add_solve(commands: Commands) -> None:
    """Add the command to the parser."""
    solve = add_command(
        commands,
        "solve",
        "find the best balance of a profiled model, and write a plan",
        "Find the best balance of a profiled model, prove that it is the best, and print the plan. "
        "This needs neither the model nor a device.",
        """
        gpipebal solve profile.json --partitions 4
        gpipebal solve profile.json -n 8 --chunks 32 --checkpoint always -o plan.json
        gpipebal solve profile.json -n 4 --memory-limit 16GiB --checkpoint auto --chunks auto
        gpipebal solve profile.json -n 4 --speeds 1,1,2,2 --any-order --bandwidth 12GB
        gpipebal solve profile.json -n 4 --memory-limit 16GiB --recompute-layers
        gpipebal solve profile.json -n 4 --schedule 1f1b --checkpoint never
        gpipebal solve profile.json -n 4 --explain --plot plan.png
        gpipebal solve profile.json --balance 120,250
        gpipebal solve profile.json -n 4 --json | jq .makespan
        """,
    )
    solve.set_defaults(command=_solve)
    solve.add_argument("profile", metavar="PROFILE", help="a file that gpipebal profile wrote")
    add_question(solve)
    solve.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"schedule to plan for: {either(KNOWN_SCHEDULES)} (default: gpipe)",
    )
    solve.add_argument(
        "--recompute-layers",
        action="store_true",
        help="plan without checkpoints (or with those of --checkpoint), then choose single layers "
        "to recompute where the memory limit requires it; GPipe.from_plan does so",
    )
    solve.add_argument("--output", "-o", metavar="FILE", help="write the plan to this file")
    solve.add_argument(
        "--plot", metavar="FILE", help="draw layers, partitions and timeline: .png, .svg or .pdf"
    )
    solve.add_argument("--explain", action="store_true", help="explain the plan in sentences")
    solve.add_argument(
        "--json", action="store_true", help="print the plan as JSON, as --output writes it"
    )


def _solve(options: argparse.Namespace) -> None:
    from gpipebal.profile import Profile

    if options.json and options.explain:
        raise UsageError(
            "sentences are not JSON: --explain with --json (expected one of them).\n"
            "Fix: leave --json out; --output writes the same JSON to a file."
        )
    check_files(options, options.profile)
    profile = load_noun(options.profile, "profile")
    assert isinstance(profile, Profile)
    with libraries_on_standard_error():
        chosen = _with_runs(profile, options) if options.recompute_layers else None
        plan = chosen.plan if chosen else plan_of(profile, options, schedule=options.schedule)
    if options.output is not None:
        plan.save(options.output)
    if options.plot is not None:
        from gpipebal.plots import plot_run, save_figure
        from gpipebal.simulator import simulate

        save_figure(plot_run(profile, plan, simulate(plan)), options.plot)
    if options.json:
        print(json.dumps(plan.to_dict()))
        return
    found = chosen or plan
    print(found)
    if options.explain:
        print(f"\n{found.explain()}")
    say_written(options)


def _with_runs(profile: Profile, options: argparse.Namespace) -> LayerRecompute:
    """Find the best balance without a limit, then the layers to recompute to meet the limit."""
    from gpipebal.planner import recompute_layers
    from gpipebal.planner.quantiles import at_quantile

    if options.memory_limit is None:
        raise UsageError(
            "nothing limits the memory: --recompute-layers without --memory-limit (expected "
            "both).\nFix: --memory-limit 16GiB, say."
        )
    question = question_of(profile, options)
    limits = {
        "memory_limit": question.pop("memory_limit"),
        "reserve": question.pop("reserve", None),
    }
    free = {**vars(options), **dict.fromkeys(limits), "checkpoint": options.checkpoint or "never"}
    plan = plan_of(profile, argparse.Namespace(**free), schedule=options.schedule)
    if options.quantile is not None:
        profile = at_quantile(profile, options.quantile)
    known = {name: question.get(name) for name in ("devices", "link", "time_limit")}
    return recompute_layers(profile, plan, **limits, **known)
