"""What the commands share: how words are read, and how errors are said."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn, TypeAlias

__all__ = ["BAD_INPUT", "MAKE_MODEL", "Commands", "Parser", "add_model", "complain"]

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
    command.add_argument(
        "model", metavar="MODEL", help="a built-in model (resnet101), or package.module:function"
    )
    for name, default, text in (
        ("--chunks", 8, "micro-batches per mini-batch (default: %(default)s)"),
        ("--rows", None, "rows of a built-in model's mini-batch (default: 32)"),
        ("--image-size", None, "height and width of its images in pixels (default: 64)"),
        ("--seed", 0, "seed of parameters and data (default: %(default)s)"),
    ):
        command.add_argument(name, type=int, metavar="N", default=default, help=text)


#: What a user's own function returns, for the help of commands.
MAKE_MODEL = (
    "make_model takes nothing and returns (model, sample), or a mapping with 'model' and\n"
    "'sample' and, if wanted, 'loss_fn', 'target', 'optimizer'. The model is an nn.Sequential\n"
    "of its layers, the sample is a mini-batch."
)
