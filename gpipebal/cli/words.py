"""What the commands share: how words are read, and how errors are said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from gpipebal.errors import UsageError
from gpipebal.models.catalogue import CATALOGUE

__all__ = [
    "BAD_INPUT",
    "MAKE_MODEL",
    "Commands",
    "Parser",
    "add_model",
    "complain",
    "model_arguments",
]

#: Exit status of a command that was asked for what cannot be.
BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, where help is, and end with the status of bad input."""
        complain(f"{message}\nFix: see {self.prog} --help.")
        sys.exit(BAD_INPUT)


#: What commands are added to.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def complain(message: str) -> None:
    """Print an error: what is wrong on one line, what to do about it on the next."""
    what, *rest = message.splitlines()
    print(f"gpipebal: error: {what}", file=sys.stderr)
    if rest:
        print(" ".join(line.strip() for line in rest), file=sys.stderr)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the words that choose a model, its data and the micro-batches."""
    names = ", ".join(CATALOGUE)
    command.add_argument(
        "model", metavar="MODEL", help=f"a built-in model ({names}), or package.module:function"
    )
    command.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an argument of a built-in model, listed below; may be given several times",
    )
    for name, default, text in (
        ("--chunks", 8, "micro-batches per mini-batch (default: %(default)s)"),
        ("--rows", None, "rows of a built-in model's mini-batch (default: 32)"),
        ("--image-size", None, "height and width of its images in pixels (default: 64)"),
        ("--seed", 0, "seed of parameters and data (default: %(default)s)"),
    ):
        command.add_argument(name, type=int, metavar="N", default=default, help=text)


def model_arguments(options: argparse.Namespace) -> Mapping[str, Any]:
    """Read the words of ``--set``, for `gpipebal.run.load_workload`.

    Raises:
        UsageError: a word is no ``NAME=VALUE``, or not what the built-in model can be built from.
    """
    words: dict[str, str] = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise UsageError(
                f"argument of the model is not readable: --set {word} (expected NAME=VALUE).\n"
                "Fix: --set layers=2, say."
            )
        words[name] = value
    if options.model not in CATALOGUE:
        return words
    from gpipebal.models.arguments import read_arguments

    return read_arguments(options.model, words)


def _models() -> str:
    """List the built-in models with their arguments, for the help of commands."""
    lines = ["built-in models, and what --set changes:"]
    for model, described in CATALOGUE.items():
        lines.append(f"  {model}: {described.about}")
        for name, argument in described.arguments.items():
            default: object = argument.default
            if isinstance(default, bool):
                default = "yes" if default else "no"
            lines.append(f"    {f'{name}={default}':<18} {argument.meaning}")
    return "\n".join(lines)


#: What a MODEL can be, for the help of commands.
MAKE_MODEL = (
    "make_model takes nothing and returns (model, sample), or a mapping with 'model' and\n"
    "'sample' and, if wanted, 'loss_fn', 'target', 'optimizer'. The model is an nn.Sequential\n"
    "of its layers, the sample is a mini-batch.\n\n" + _models()
)
