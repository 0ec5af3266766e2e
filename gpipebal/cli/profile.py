"""``gpipebal profile``: measure or estimate every layer of a model, and keep it as a file."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING

from gpipebal.cli.words import (
    MAKE_MODEL,
    Commands,
    add_command,
    add_model,
    check_output,
    model_arguments,
    users_own_code,
)

if TYPE_CHECKING:
    from gpipebal.profile import Profile

__all__ = ["add_profile"]


def add_profile(commands: Commands) -> None:
    """Add the command to the parser."""
    profile = add_command(
        commands,
        "profile",
        "measure or estimate time and memory of every layer, and write a profile",
        "Measure time and memory of every layer of a model, for one micro-batch, and "
        "write them to a file that can be planned anywhere.",
        """
        gpipebal profile resnet101 --chunks 8 --output resnet101.json
        gpipebal profile resnet101 --estimate A100 --rows 256 --image-size 224
        gpipebal profile gpt --set layers=96 --set width=12288 --set heads=96 --estimate H100
        gpipebal profile my_package.my_module:make_model --device cuda:0 --json
        """,
        MAKE_MODEL,
    )
    profile.set_defaults(command=_profile)
    add_model(profile)
    number = partial(profile.add_argument, type=int, metavar="N")
    profile.add_argument(
        "--estimate",
        metavar="DEVICE",
        help="estimate for this device (such as A100 or H100) instead of measuring; this needs "
        "neither the device nor memory for what the layers compute",
    )
    profile.add_argument(
        "--device",
        help="where to measure: cpu, cuda:0, ... (default: the first CUDA device, else the CPU)",
    )
    number(
        "--partitions",
        default=2,
        help="on a CPU: how many partitions will work side by side (default: %(default)s)",
    )
    number("--threads", help="on a CPU: threads of each partition (default: its share of cores)")
    profile.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time for repeated measurements, and half of it for a trial as a pipeline on a CPU; "
        "each layer is measured at least once (default: the whole profile takes about as long as "
        "ten training steps)",
    )
    profile.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        default="profile.json",
        help="file to write (default: %(default)s)",
    )
    profile.add_argument("--json", action="store_true", help="print the profile as JSON")


def _profile(options: argparse.Namespace) -> None:
    from gpipebal.tables import profile_table

    check_output(options.output)
    with users_own_code(options):
        profile = _profile_of(options)
        profile.save(options.output)
    if options.json:
        print(json.dumps(profile.to_dict()))
    else:
        print(f"{profile_table(profile)}\n\nWritten to {options.output}")


def _profile_of(options: argparse.Namespace) -> Profile:
    from gpipebal.profiler import profile_model
    from gpipebal.run import load_workload

    workload = load_workload(
        options.model,
        rows=options.rows,
        image_size=options.image_size,
        arguments=model_arguments(options),
        seed=options.seed,
        chunks=options.chunks,
        with_values=options.estimate is None,
    )
    # An estimate refuses a device and threads.
    how = {} if options.estimate is None else {"method": "estimate", "rates": options.estimate}
    return profile_model(
        workload.model,
        workload.sample,
        device=options.device,
        chunks=options.chunks,
        partitions=options.partitions,
        threads=options.threads,
        timeout=options.timeout,
        loss_fn=workload.loss_fn,
        target=workload.target,
        optimizer=workload.make_optimizer,
        **how,
        **workload.parting,
    )
