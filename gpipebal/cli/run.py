"""``gpipebal run``: the whole job on one model."""

from __future__ import annotations

import argparse
from functools import partial

from gpipebal.cli.words import MAKE_MODEL, Commands, add_model, model_arguments

__all__ = ["add_run"]


def add_run(commands: Commands) -> None:
    """Add the command to the parser."""
    run = commands.add_parser(
        "run",
        help="profile, balance, train a few steps, and compare with the prediction",
        description="Do the whole job on one model, and write profile.json, plan.json, "
        "timeline.json, report.json and plan.png to a folder.",
        epilog="examples:\n"
        "  gpipebal run resnet101 --partitions 2\n"
        "  gpipebal run resnet101 --checkpoint never --rows 64 --chunks 16\n"
        "  gpipebal run gpt --set layers=4 --set width=128 --set heads=4 --set vocabulary=1000\n"
        "  gpipebal run my_package.my_module:make_model --device cuda:0,cuda:1\n"
        f"\n{MAKE_MODEL}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(command=_run)
    add_model(run)

    number = partial(run.add_argument, type=int, metavar="N")
    number("--partitions", help="how many (default: the number of CUDA devices, else 2)")
    run.add_argument(
        "--checkpoint",
        metavar="MODE",
        default="except_last",
        help="which micro-batches are recomputed instead of kept: always, except_last or never "
        "(default: %(default)s)",
    )
    number("--steps", default=4, help="training steps to time (default: %(default)s)")
    number(
        "--threads-per-partition",
        help="threads of each partition on a CPU (default: its share of the cores)",
    )
    run.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, or a list such as cuda:0,cuda:1; round-robin when there are fewer "
        "devices than partitions (default: %(default)s)",
    )
    run.add_argument(
        "--output",
        metavar="FOLDER",
        default="gpipebal-run",
        help="folder to write to (default: %(default)s)",
    )


def _run(options: argparse.Namespace) -> None:
    from gpipebal.run import FILES, run

    report = run(
        options.model,
        partitions=options.partitions,
        chunks=options.chunks,
        rows=options.rows,
        image_size=options.image_size,
        arguments=model_arguments(options),
        checkpoint=options.checkpoint,
        steps=options.steps,
        threads_per_partition=options.threads_per_partition,
        seed=options.seed,
        device=options.device,
        output=options.output,
        # Into a pipe or a file, too, each line goes when it is said.
        echo=partial(print, flush=True),
    )
    print(f"\n{report}\n\nFiles in {report.output}: {', '.join(FILES)}")
