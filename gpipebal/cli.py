"""The command line: read the words, call a verb, print a noun.

torch is imported only once a command runs, so that help and errors in the words come at once.
Exit status: 0 done, 1 an exception in the user's own code, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from gpipebal import __version__
from gpipebal.errors import GpipebalError, ProfileError

__all__ = ["main"]

INTERRUPTED = 130
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``gpipebal`` and return its exit status.

    Args:
        arguments: Words of the command line; None: those of the process.

    Example:
        >>> main(["run", "resnet101", "--chunks", "0"])
        2
    """
    with _second_interrupt_ends_at_once():
        try:
            options = _parser().parse_args(arguments)
            options.command(options)
        except GpipebalError as error:
            if _is_users_own(error):
                raise
            _complain(str(error))
            return BAD_INPUT
        except KeyboardInterrupt as interrupt:
            # Python remembers an interrupt that came through exec() or an import, and would end
            # itself with the signal instead of our status; running any code lets it forget.
            exec("")
            notes = "; ".join(getattr(interrupt, "__notes__", ()))
            print(f"\ngpipebal: interrupted. {notes or 'Nothing was written.'}", file=sys.stderr)
            return INTERRUPTED
    return 0


def _run(options: argparse.Namespace) -> None:
    from gpipebal.run import FILES, run

    report = run(
        options.model,
        partitions=options.partitions,
        chunks=options.chunks,
        rows=options.rows,
        image_size=options.image_size,
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpipebal",
        description="Measure every layer of a PyTorch model, cut it over your devices in the "
        "provably best way, run it as a pipeline, and see where time and memory went.",
    )
    parser.add_argument("--version", action="version", version=f"gpipebal {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(verbs)
    return parser


def _add_run(verbs: argparse._SubParsersAction[_Parser]) -> None:
    run = verbs.add_parser(
        "run",
        help="profile, balance, train a few steps, and compare with the prediction",
        description="Do the whole job on one model, and write profile.json, plan.json, "
        "timeline.json, report.json and plan.png to a folder.",
        epilog="examples:\n"
        "  gpipebal run resnet101 --partitions 2\n"
        "  gpipebal run resnet101 --checkpoint never --rows 64 --chunks 16\n"
        "  gpipebal run my_package.my_module:make_model --device cuda:0,cuda:1\n"
        "\n"
        "make_model takes nothing and returns (model, sample), or a mapping with 'model' and\n"
        "'sample' and, if wanted, 'loss_fn', 'target', 'optimizer'. The model is an nn.Sequential\n"
        "of its layers, the sample is a mini-batch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(command=_run)
    run.add_argument(
        "model", metavar="MODEL", help="a built-in model (resnet101), or package.module:function"
    )

    number = partial(run.add_argument, type=int, metavar="N")
    number("--partitions", help="how many (default: the number of CUDA devices, else 2)")
    number("--chunks", default=8, help="micro-batches per mini-batch (default: %(default)s)")
    number("--rows", help="rows of a built-in model's mini-batch (default: 32)")
    number("--image-size", help="height and width of its images in pixels (default: 64)")
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
    number("--seed", default=0, help="seed of parameters and data (default: %(default)s)")
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message}\nFix: see {self.prog} --help.")
        sys.exit(BAD_INPUT)


def _complain(message: str) -> None:
    """Print an error: what is wrong on one line, what to do about it on the next."""
    what, *rest = message.splitlines()
    print(f"gpipebal: error: {what}", file=sys.stderr)
    if rest:
        print(" ".join(line.strip() for line in rest), file=sys.stderr)


def _is_users_own(error: GpipebalError) -> bool:
    """Tell whether a layer, a loss or an optimizer failed: its traceback is what helps then."""
    cause = error.__cause__
    return (
        isinstance(error, ProfileError)
        and cause is not None
        and not (isinstance(cause, GpipebalError))
    )


@contextmanager
def _second_interrupt_ends_at_once() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt, and the second end the process.

    Python runs signal handlers in the main thread between two bytecodes, and that thread may be
    inside a long operation of torch. The number of the signal, though, is written to the wake-up
    file at once, and a thread of its own can act on it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import socket

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        seen = 0
        while numbers := reader.recv(64):
            seen += numbers.count(signal.SIGINT)
            if seen >= 2:
                os.write(2, b"\ngpipebal: stopped at once.\n")
                os._exit(INTERRUPTED)

    watcher = threading.Thread(target=watch, name="gpipebal-interrupts", daemon=True)
    watcher.start()
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    old_file = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_file)
        signal.signal(signal.SIGINT, old_handler)
        writer.close()
        watcher.join()
        reader.close()
