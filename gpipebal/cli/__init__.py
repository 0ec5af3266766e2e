"""The command line: read the words, call a verb, print a noun.

torch is imported only when a command that needs it runs, so that help, errors in the words, and the
commands that need no model are immediate. Each command has a file; `words` has what they share,
`nouns` how files are read and pictures written, `question` how a plan is asked for, `layer_words`
how layers are named, `typed` how errors say what was typed.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence

from gpipebal import __version__
from gpipebal.cli.compare import add_compare
from gpipebal.cli.interrupts import INTERRUPTED, second_interrupt_ends_at_once
from gpipebal.cli.profile import add_profile
from gpipebal.cli.run import add_run
from gpipebal.cli.show import add_show
from gpipebal.cli.simulate import add_simulate
from gpipebal.cli.solve import add_solve
from gpipebal.cli.standard_output import output_escaped
from gpipebal.cli.typed import Typed
from gpipebal.cli.words import (
    BAD_INPUT,
    NO_PLAN,
    Parser,
    complain,
    options_of,
    say,
    with_flags,
    within_reach,
)
from gpipebal.errors import FileFormatError, GpipebalError, InfeasibleError, ProfileError
from gpipebal.files import NO_ROOM

__all__ = ["EXIT_STATUS", "main"]

#: Exit status when the reader of a pipe has gone: the same as of a program ended by SIGPIPE.
NOBODY_READS = 141

EXAMPLES = """\
examples:
  gpipebal run resnet101 --partitions 2
  gpipebal profile resnet101 --chunks 8 -o profile.json
  gpipebal solve profile.json --partitions 4 -o plan.json
  gpipebal simulate plan.json --plot timeline.png
  gpipebal compare profile.json --partitions 4
  gpipebal COMMAND --help"""

EXIT_STATUS = """\
exit status:
  0    done
  1    an exception in the user's own code, with its traceback
  2    bad input: what was asked for does not exist or cannot be read
  3    no plan meets the limits that were given
  130  interrupted
  141  the output is no longer read"""


#: Errors of writing what a command prints: no more room, or an output that is gone.
_NO_OUTPUT = (*NO_ROOM, errno.EBADF, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``gpipebal`` and return its exit status, as `EXIT_STATUS` has it.

    Args:
        arguments: Words of the command line; None: those of the process.

    Raises:
        SystemExit: with the status, after help or the version, or if words mean nothing.
        BaseException: what a user's own code raised.

    Example:
        >>> main(["run", "resnet101", "--chunks", "0"])
        2
    """
    options = argparse.Namespace(flags={})
    if sys.stderr is None:
        # Otherwise progress bars would write to None, and messages would go to standard output.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    with second_interrupt_ends_at_once(), output_escaped():
        try:
            try:
                options = _parser().parse_args(arguments)
                options.command(options)
            finally:
                # Here and not at the exit of Python, where it cannot be caught; help, too, ends
                # with an exception.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except BrokenPipeError:
            _forget_output()
            return NOBODY_READS
        except GpipebalError as error:  # before OSError: a missing file is both
            if _is_users_own(error):
                raise
            is_infeasible = isinstance(error, InfeasibleError)
            flags: Mapping[str, str] = options.flags
            text = within_reach(str(error), flags) if is_infeasible else str(error)
            # An error in a file is not about a word of the command line.
            in_file = isinstance(error, FileFormatError)
            complain(text if in_file else with_flags(text, flags, Typed.of(options)))
            for note in getattr(error, "__notes__", ()):
                say(note)
            return NO_PLAN if is_infeasible else BAD_INPUT
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_OUTPUT:
                raise
            _forget_output()
            complain(
                f"the output cannot be written: {error.strerror}.\nFix: give it another place."
            )
            return BAD_INPUT
        except KeyboardInterrupt as interrupt:
            # Python remembers an interrupt that came through exec() or an import, and would end
            # itself with the signal instead of our status; running any code lets it forget.
            exec("")
            notes = "; ".join(getattr(interrupt, "__notes__", ()))
            say(f"\ngpipebal: interrupted. {notes or 'No file is half-written.'}")
            return INTERRUPTED
    return 0


def _forget_output() -> None:
    """Drop what is still in the buffer, without a complaint at the exit of Python."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_users_own(error: GpipebalError) -> bool:
    """Tell whether a layer, a loss or an optimizer failed: then its traceback helps."""
    cause = error.__cause__
    if not isinstance(error, ProfileError) or cause is None or isinstance(cause, GpipebalError):
        return False
    # Something has run, so torch is there.
    from gpipebal.profiler.chain.failures import is_out_of_memory
    from gpipebal.profiler.estimate.refused import needs_values

    # These say what would fit, and where an estimate cannot follow.
    return not is_out_of_memory(error) and not needs_values(error)


def _parser() -> Parser:
    parser = Parser(
        prog="gpipebal",
        description="Measure every layer of a PyTorch model, split it across your devices with\n"
        "a provably optimal balance, run it as a pipeline, and see where time and\nmemory went.",
        epilog=f"{EXAMPLES}\n\n{EXIT_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpipebal {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_run, add_profile, add_solve, add_simulate, add_compare, add_show):
        add(commands)
    for command in commands.choices.values():
        command.set_defaults(flags=options_of(command))
    return parser
