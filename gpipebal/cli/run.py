"""``gpipebal run``: the whole job on one model."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

from gpipebal.cli.question import sizes
from gpipebal.cli.words import (
    MAKE_MODEL,
    Commands,
    add_command,
    add_model,
    model_arguments,
    users_own_code,
)
from gpipebal.schedule.known import SCHEDULES
from gpipebal.text import either

__all__ = ["add_run"]


def add_run(commands: Commands) -> None:
    """Add the command to the parser."""
    run = add_command(
        commands,
        "run",
        "profile, balance, train a few steps, and compare with the prediction",
        "Do the whole job on one model, and write profile.json, plan.json, "
        "timeline.json, report.json and plan.png to a folder.",
        """
        gpipebal run resnet101 --partitions 2
        gpipebal run resnet101 --checkpoint never --rows 64 --chunks 16
        gpipebal run resnet101 --try 3
        gpipebal run resnet101 --schedule 1f1b --checkpoint never
        gpipebal run gpt --set layers=4 --set width=128 --set heads=4 --set vocabulary=1000
        gpipebal run my_package.my_module:make_model --memory-limit 16GiB --checkpoint auto
        gpipebal run my_package.my_module:make_model --device cuda:0,cuda:1 --json
        """,
        MAKE_MODEL,
    )
    run.set_defaults(command=_run)
    add_model(run)

    number = partial(run.add_argument, type=int, metavar="N")
    number("--partitions", "-n", help="partitions (default: one for each device; on a CPU 2)")
    run.add_argument(
        "--checkpoint",
        metavar="MODE",
        default="except_last",
        help="which micro-batches recompute their activations in the backward: never (none), "
        "except_last (all but the last) or always (all); auto: in each partition the fastest mode "
        "that fits (default: %(default)s)",
    )
    run.add_argument(
        "--schedule",
        metavar="NAME",
        default="gpipe",
        help=f"{either(SCHEDULES)}: 1f1b needs less memory, and the last partition computes the "
        "loss of each micro-batch (default: %(default)s)",
    )
    run.add_argument(
        "--memory-limit",
        type=sizes,
        metavar="SIZE",
        help="memory of each device, such as 16GiB; or one size for each, such as 16GiB,24GiB",
    )
    number("--steps", default=4, help="training steps to time (default: %(default)s)")
    number(
        "--try",
        dest="attempts",
        default=1,
        help="run each of the N best plans for a few steps, and keep the fastest (default: run "
        "only the best)",
    )
    number(
        "--threads-per-partition",
        help="threads of each partition on a CPU (default: its share of the cores)",
    )
    run.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, or a list with one device for each partition, such as "
        "cuda:0,cuda:1; round-robin when there are fewer (default: %(default)s)",
    )
    run.add_argument(
        "--output",
        "-o",
        metavar="FOLDER",
        default="gpipebal-run",
        help="folder to write to (default: %(default)s)",
    )
    run.add_argument(
        "--json", action="store_true", help="print the report as JSON, and all else to stderr"
    )


def _run(options: argparse.Namespace) -> None:
    from gpipebal.run import FILES, run

    with users_own_code(options):
        report = run(
            options.model,
            partitions=options.partitions,
            chunks=options.chunks,
            rows=options.rows,
            image_size=options.image_size,
            arguments=model_arguments(options),
            checkpoint=options.checkpoint,
            schedule=options.schedule,
            memory_limit=options.memory_limit,
            steps=options.steps,
            attempts=options.attempts,
            threads_per_partition=options.threads_per_partition,
            seed=options.seed,
            device=options.device,
            output=options.output,
            # Each line is written at once, to a pipe or a file too.
            echo=partial(print, flush=True, file=sys.stderr if options.json else None),
        )
    if options.json:
        print(json.dumps(report.to_dict()))
        return
    print(f"\n{report}\n\nFiles in {report.output}: {', '.join(FILES)}")
