"""The command line: read the words, call a verb, print a noun.

torch is imported only once a command runs that needs it, so that help, errors in the words, and
`gpipebal show` come at once. One command a file; `words` is what they share.
Exit status: 0 done, 1 an exception in the user's own code, 2 bad input, 130 interrupted, 141 nobody
reads the output any more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpipebal import __version__
from gpipebal.cli.interrupts import INTERRUPTED, second_interrupt_ends_at_once
from gpipebal.cli.profile import add_profile
from gpipebal.cli.run import add_run
from gpipebal.cli.show import add_show
from gpipebal.cli.words import BAD_INPUT, Parser, complain
from gpipebal.errors import GpipebalError, ProfileError

__all__ = ["main"]

#: Exit status when the reader of a pipe has gone: that of a program that the signal ended.
NOBODY_READS = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``gpipebal`` and return its exit status.

    Args:
        arguments: Words of the command line; None: those of the process.

    Example:
        >>> main(["run", "resnet101", "--chunks", "0"])
        2
    """
    with second_interrupt_ends_at_once():
        try:
            options = _parser().parse_args(arguments)
            options.command(options)
            # Here and not at the exit of Python, where nobody can catch it.
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still in the buffer goes nowhere, without a complaint.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NOBODY_READS
        except GpipebalError as error:
            if _is_users_own(error):
                raise
            complain(str(error))
            return BAD_INPUT
        except KeyboardInterrupt as interrupt:
            # Python remembers an interrupt that came through exec() or an import, and would end
            # itself with the signal instead of our status; running any code lets it forget.
            exec("")
            notes = "; ".join(getattr(interrupt, "__notes__", ()))
            print(f"\ngpipebal: interrupted. {notes or 'Nothing was written.'}", file=sys.stderr)
            return INTERRUPTED
    return 0


def _is_users_own(error: GpipebalError) -> bool:
    """Tell whether a layer, a loss or an optimizer failed: its traceback is what helps then."""
    cause = error.__cause__
    return (
        isinstance(error, ProfileError)
        and cause is not None
        and not (isinstance(cause, GpipebalError))
    )


def _parser() -> Parser:
    parser = Parser(
        prog="gpipebal",
        description="Measure every layer of a PyTorch model, cut it over your devices in the "
        "provably best way, run it as a pipeline, and see where time and memory went.",
    )
    parser.add_argument("--version", action="version", version=f"gpipebal {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_run(commands)
    add_profile(commands)
    add_show(commands)
    return parser
