"""What the commands share: how words are read, and how errors are reported."""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

from gpipebal.cli.standard_output import libraries_on_standard_error
from gpipebal.cli.typed import NOTHING, SIZES, Typed, size_word
from gpipebal.errors import UsageError
from gpipebal.files import why_not_writable
from gpipebal.models.catalogue import CATALOGUE, read_word

__all__ = [
    "BAD_INPUT",
    "MAKE_MODEL",
    "NO_PLAN",
    "Commands",
    "Parser",
    "add_command",
    "add_model",
    "check_output",
    "complain",
    "model_arguments",
    "options_of",
    "say",
    "users_own_code",
    "with_flags",
    "within_reach",
]

#: Exit status of a command that was asked for something impossible.
BAD_INPUT = 2

#: Exit status when the question is valid but has no answer: no plan meets the limits.
NO_PLAN = 3

#: Columns of the help texts.
WIDTH = 80

#: Options by the names that errors use for them, where these differ from the options' own.
_OTHER_NAMES = {"n_partitions": "partitions", "n_devices": "partitions", "rates": "estimate"}

#: What errors advise that only Python can do, and its equivalent on the command line.
_ONLY_IN_PYTHON = {
    "profile.names lists all layers": "gpipebal show lists the layers",
    "a Device, a Profile, or its speed as a number above 0": "its speed, a number above 0",
    "one limit per device, None for no limit; or": "one limit per device, or",
    "Fix: in devices=, the": "Fix: --speeds with the",
    "or give devices.": "or --speeds with one number for each partition.",
    "Fix: 1 for one as fast as": "Fix: in --speeds, 1 for one as fast as",
    "profile_model(model, sample, method='estimate') needs": "gpipebal profile MODEL --estimate "
    "A100, say, needs",
    "profile_model(model, sample, method='measure')": "measure, without --estimate",
    "simulated by gpipebal.simulate": "simulated by gpipebal simulate",
    "no meaning with method='estimate':": "no meaning with --estimate:",
    "; rates= names the device": "; --estimate names the device",
    ", or DeviceRates(name, {'float32': 1e13}, bandwidth=1e12) with your own figures.": ".",
    "profile_model(model, sample, chunks=..., rows=None), which": "gpipebal profile, which",
    "with one_at_a_time=True, or ": "",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse words that this command does not know, where it is known which command that is."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            words = [word.lstrip("-").split("=")[0] for word in unknown if word.startswith("-")]
            # Without the dashes, which all have: they would make any two short words alike. One
            # word of several is enough, such as "limit" of --time-limit.
            names: dict[str, list[str]] = {}
            for flag in flags:
                for part in {flag, *(part for part in flag.split("-") if len(part) > 3)}:
                    names.setdefault(part, []).append(f"--{flag}")
            found = [one for word in words for one in get_close_matches(word, names, 1, 0.7)]
            near = [flag for one in found for flag in names[one]]
            hint = f" (perhaps {' and '.join(dict.fromkeys(near))})" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to find help, and end with the status of bad input."""
        complain(f"{message}\nFix: see {self.prog} --help.")
        sys.exit(BAD_INPUT)


#: What commands are added to.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_command(
    commands: Commands, name: str, text: str, description: str, examples: str, more: str = ""
) -> Parser:
    """Add a command whose help ends with lines that can be copied.

    Args:
        commands: What the command is added to.
        name: Its name.
        text: What it does, in the list of all commands.
        description: The same, longer.
        examples: Command lines, one a line.
        more: Text below the examples.
    """
    epilog = "examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().split("\n"))
    return commands.add_parser(
        name,
        help=text,
        # The formatter leaves all lines as they are, for the examples: so this is wrapped here.
        description=textwrap.fill(description, WIDTH),
        epilog=f"{epilog}\n\n{more}".rstrip() + "\n\nexit status: gpipebal --help lists them all.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def complain(message: str) -> None:
    """Print an error: what is wrong on one line, what to do about it on the next."""
    what, *rest = message.splitlines()
    lines = [f"gpipebal: error: {what}"]
    if rest:
        lines.append(" ".join(line.strip() for line in rest))
    say("\n".join(lines))


def say(text: str) -> None:
    """Print to standard error; where that is impossible, the exit status has to suffice."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def options_of(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long options of a command by their names in Python."""
    flags = {
        action.dest: word
        for action in command._actions
        for word in action.option_strings
        if word.startswith("--") and action.dest != "help"
    }
    return {**flags, **{name: flags[own] for name, own in _OTHER_NAMES.items() if own in flags}}


def with_flags(text: str, flags: Mapping[str, str], typed: Typed = NOTHING) -> str:
    """Say in an error which option it is about, instead of an argument in Python.

    Args:
        text: The error.
        flags: Options by their names in Python.
        typed: What was typed, so that the error uses the same words.

    Example:
        >>> with_flags("it is too small: chunks=0 (expected 1 or more).", {"chunks": "--chunks"})
        'it is too small: --chunks 0 (expected 1 or more).'
        >>> with_flags("it is none: devices[1]=-2.0 (expected more).", {"devices": "--speeds"})
        'it is none: --speeds -2 at position 2 (expected more).'
    """
    if not flags:
        return text
    for python, words in _ONLY_IN_PYTHON.items():
        text = text.replace(python, words)
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    alone = rf"(?<![\w.\-])({names})"
    value = r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|[^\s,;()]*[^\s,;().:]"
    text = re.sub(
        rf"{alone}\[(\d+)\](?!\.\w)(?:=({value}))?",
        lambda m: _at_position(
            flags[m[1]], int(m[2]), m[3] and _word(m[1], m[3].strip("'"), typed)
        ),
        text,
    )
    text = re.sub(rf"{alone}=({value})", lambda m: _as_words(m[1], flags[m[1]], m[2], typed), text)
    rules = "|".join(name for name in _rule_names() if name in flags)
    if rules:
        left_out = rf"(?:(?<=\bwithout )|(?<=\band ))(?:{rules})\b"
        subject = rf"(?<![\w.\-])(?:{rules})(?= has )"
        text = re.sub(f"{left_out}|{subject}", lambda m: flags[m[0]], text)
    return _in_passing(text, flags, typed)


def _rule_names() -> tuple[str, ...]:
    """Name the rules about layers, which errors name without a value too."""
    from gpipebal.problem import RULE_NAMES  # imports numpy, which --help does not need

    return RULE_NAMES


def _in_passing(text: str, flags: Mapping[str, str], typed: Typed) -> str:
    """Put names that an error uses without a value into the words of the command line."""
    names = "|".join(map(re.escape, flags))
    text = re.sub(rf"\blen\(({names})\)=(\d+)", lambda m: f"{m[2]} in {flags[m[1]]}", text)
    text = re.sub(rf"\bleave ({names}) out\b", lambda m: f"leave {flags[m[1]]} out", text)
    names = "|".join(re.escape(name) for name in flags if "_" in name)
    if names:
        alone = rf"(?<![\w.\-'\"(])({names})(?![\w=\[(]|\.\w)"
        text = re.sub(
            rf"{alone}(?: of (\d+))?",
            lambda m: flags[m[1]] + (f" of {_word(m[1], m[2], typed)}" if m[2] else ""),
            text,
        )
    return re.sub(
        r"\blayer (\d+)\b(?!\.\d)",
        lambda m: f"layer {typed.layers[int(m[1])]!r}" if int(m[1]) in typed.layers else m[0],
        text,
    )


def _at_position(flag: str, index: int, value: str | None) -> str:
    """Name one of several values of an option."""
    return f"{flag}{'' if value is None else f' {_quoted(value)}'} at position {index + 1}"


def within_reach(text: str, flags: Mapping[str, str]) -> str:
    r"""Leave out of an error's advice the changes for which a command has no option.

    Example:
        >>> within_reach("too large.\nFix: reserve=0; or chunks=8.", {"chunks": "--chunks"})
        'too large.\nFix: chunks=8.'
    """
    what, fix, advice = text.partition("\nFix: ")
    if not fix:
        return text
    changes = advice.removesuffix(".").split("; or ")
    kept = [one for one in changes if all(n in flags for n in re.findall(r"(?<![\w.])(\w+)=", one))]
    kept = kept or ["a smaller model, or fewer rows in a mini-batch"]
    return f"{what}{fix}{'; or '.join(kept)}."


def _as_words(name: str, flag: str, value: str, typed: Typed) -> str:
    if value in ("None", "False"):
        return f"no {flag}"
    if value == "True":
        return flag
    if name in _rule_names() and value[0] in "[({":
        return _rule_as_words(flag, value, typed)
    if value[0] in "[(":
        # A list is written without spaces, so that it is one word.
        items = re.sub(r"[\s'\"]", "", value[1:-1]).rstrip(",").split(",")
        return f"{flag} {','.join(_word(name, item, typed) for item in items)}"
    word = _word(name, value.strip("'"), typed)
    return f"{flag} {_quoted(word)}"


def _quoted(word: str) -> str:
    """Quote a word that a shell would not take for one."""
    return repr(word) if not word or " " in word else word


def _word(name: str, value: str, typed: Typed) -> str:
    """Write a value as it would be typed."""
    if name in SIZES and value.isdecimal():
        return size_word(name, int(value), typed)
    # Numbers are read as floats; a whole one is not typed with a decimal point.
    return value[:-2] if re.fullmatch(r"-?\d+\.0", value) else value


def _rule_as_words(flag: str, value: str, typed: Typed) -> str:
    """Write a rule about several layers with the option once for each."""
    names = typed.layers
    try:
        items = ast.literal_eval(value)
        if isinstance(items, dict):
            words = [f"{names.get(layer, layer)}={place}" for layer, place in items.items()]
        else:
            words = [
                ",".join(str(names.get(layer, layer)) for layer in one)
                if isinstance(one, (list, tuple))
                else str(names.get(one, one))
                for one in items
            ]
    except (SyntaxError, TypeError, ValueError):
        return f"{flag} {value}"  # cut off, or not a Python literal
    return " ".join(f"{flag} {word}" for word in words) or f"no {flag}"


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
        help="an argument of the model: of a built-in one, as listed below, or a keyword argument "
        "of your function; may be given several times",
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
        UsageError: a word is not ``NAME=VALUE``.
    """
    arguments = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise UsageError(
                f"argument of the model is not readable: --set {word} (expected NAME=VALUE).\n"
                f"Fix: --set {name or 'layers'}=2, say."
            )
        arguments[name] = read_word(value)
    return arguments


@contextmanager
def users_own_code(options: argparse.Namespace) -> Iterator[None]:
    """Keep the command and the user's own code, which runs in the block, out of each other's way.

    It reads no words of ours: a parser in it would refuse them. And with ``--json`` whatever it
    prints is not the result.
    """
    ours, sys.argv = sys.argv, [options.model]
    try:
        with libraries_on_standard_error() if options.json else nullcontext():
            yield
    finally:
        sys.argv = ours


def check_output(path: str | None, option: str = "--output") -> None:
    """Refuse a file that cannot be written before an hour is spent on its content.

    Raises:
        UsageError: it is a folder, or its folder does not exist or cannot be written to.
    """
    if path is None:
        return
    reason = why_not_writable(path)
    if reason is not None:
        raise UsageError(
            f"file cannot be written: {option} {_quoted(path)} ({reason}).\n"
            f"Fix: name a file in a folder that you may write to with {option}."
        )


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
    "make_model is a function of yours. Each --set becomes a keyword argument: a number,\n"
    "yes or no, or a text. It returns (model, sample), where the model is an nn.Sequential\n"
    "of its layers and the sample is a mini-batch; or a mapping with 'model' and 'sample'\n"
    "and, if wanted, 'loss_fn', 'target' and 'optimizer'. The mapping may also have\n"
    "'keywords' for the first layer and, if rows are not along dim 0, 'in_dims',\n"
    "'keyword_dims', 'out_dims' and 'target_dims'.\n\n" + _models()
)
