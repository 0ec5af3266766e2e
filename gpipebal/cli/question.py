"""The question that a plan answers, in words: how many partitions, of what, under which limits."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gpipebal.cli.layer_words import read_layer, read_pins
from gpipebal.cli.typed import LEAST_BYTES
from gpipebal.errors import UsageError
from gpipebal.objectives import OBJECTIVES
from gpipebal.schedule.known import KNOWN_SCHEDULES
from gpipebal.text import either
from gpipebal.units import parse_bytes

if TYPE_CHECKING:
    from gpipebal.plan import Plan
    from gpipebal.profile import Profile

__all__ = [
    *("add_link", "add_question", "asked", "listed", "plan_of", "question_of", "size", "sizes"),
]

_Item = TypeVar("_Item")

#: Words of a question that are arguments of `gpipebal.solve` as they are.
_PLAIN = (
    *("chunks", "checkpoint", "objective", "memory_limit", "reserve", "devices"),
    *("max_layers", "min_layers", "quantile", "method", "time_limit"),
)
#: Words from which other arguments of it are made.
_OTHERS = ("partitions", "balance", "no_cut", "keep_together", "pin", "bandwidth", "latency")
#: Words without a value.
_SWITCHES = ("any_order", "no_overlap", "loss_inside", "gradients_exist")
#: Names of the letters in front of a unit.
_PREFIXES = {
    **{"K": "kilo", "M": "mega", "G": "giga", "T": "tera"},
    **{"Ki": "kibi", "Mi": "mebi", "Gi": "gibi", "Ti": "tebi"},
}
#: Words that can be used with a given balance; all others choose one.
_OF_BALANCE = (
    *("balance", "chunks", "checkpoint", "loss_inside", "gradients_exist", "quantile"),
    *("memory_limit", "reserve", "devices", "bandwidth", "latency", "no_overlap"),
)


def _several_on_each() -> str:
    """Say how many partitions each device has under schedules where it is not one."""
    named: dict[int, list[str]] = {}
    for known in KNOWN_SCHEDULES.values():
        named.setdefault(known.partitions_per_device, []).append(known.name)
    return ", ".join(f"{each} with {either(names)}" for each, names in named.items() if each > 1)


def add_question(command: argparse.ArgumentParser) -> None:
    """Add the words that say what the best plan is."""
    what = command.add_argument_group("plan")
    what.add_argument(
        "--partitions",
        "-n",
        type=int,
        metavar="N",
        help=f"number of partitions: one for each device, or {_several_on_each()}",
    )
    what.add_argument(
        "--chunks",
        type=_chunks,
        metavar="N",
        help="micro-batches per mini-batch (default: the profile's); several numbers, such as "
        "4,8,16: the best of these; auto: the best of all that the profile has costs for",
    )
    what.add_argument(
        "--checkpoint",
        type=lambda text: listed(text, str) if "," in text else text,
        metavar="MODE",
        help="which micro-batches recompute their activations in the backward: never (none), "
        "except_last (all but the last) or always (all) (default: except_last); one mode for each "
        "partition, such as always,never; auto: in each partition the fastest mode that fits",
    )
    what.add_argument(
        "--objective",
        metavar="WHAT",
        help=f"what to minimise: {', '.join(OBJECTIVES)} (default: {OBJECTIVES[0]})",
    )
    what.add_argument(
        "--balance",
        metavar="N,N,...",
        type=lambda text: listed(text, int),
        help="use this balance instead of the best one: the number of layers in each partition",
    )
    what.add_argument(
        "--loss-inside",
        action="store_true",
        help="plan for training with GPipe.step, where the last partition computes the loss of "
        "each micro-batch",
    )
    what.add_argument(
        "--gradients-exist",
        action="store_true",
        help="parameters have gradients before the step, as when those of several mini-batches "
        "are accumulated",
    )
    limits = command.add_argument_group("devices and their limits")
    limits.add_argument(
        "--memory-limit",
        type=sizes,
        metavar="SIZE",
        help="memory of each device, such as 16GiB; or one size for each, such as 16GiB,24GiB",
    )
    limits.add_argument(
        "--reserve",
        type=size,
        metavar="SIZE",
        help="memory kept free on each device (default: none on CPUs; on GPUs 512MiB and 5 %%)",
    )
    limits.add_argument(
        "--speeds",
        dest="devices",
        type=lambda text: listed(text, float),
        metavar="X,X,...",
        help="how fast each device is, compared with that of the profile: 2 for twice as fast",
    )
    limits.add_argument(
        "--any-order", action="store_true", help="let devices change places in the pipeline"
    )
    add_link(limits)
    limits.add_argument(
        "--no-overlap", action="store_true", help="devices cannot compute while they transfer"
    )
    rules = command.add_argument_group("rules about layers, by name or else by index")
    rules.add_argument(
        "--pin",
        action="append",
        metavar="LAYER=J",
        help="put this layer into partition J; may be given several times, like the next two",
    )
    rules.add_argument(
        "--keep-together",
        action="append",
        type=_pair,
        metavar="LAYER,LAYER",
        help="keep all layers from the first to the second in one partition",
    )
    rules.add_argument(
        "--no-cut",
        action="append",
        type=str.strip,
        metavar="LAYER",
        help="do not cut before this layer",
    )
    rules.add_argument("--max-layers", type=int, metavar="N", help="most layers of a partition")
    rules.add_argument("--min-layers", type=int, metavar="N", help="fewest layers of a partition")
    search = command.add_argument_group("search")
    search.add_argument(
        "--quantile",
        type=float,
        metavar="Q",
        help="plan with this upper quantile of the measured times, such as 0.9",
    )
    search.add_argument(
        "--method",
        metavar="NAME",
        help="the algorithm (default: the best for the question; docs/solving.md lists them)",
    )
    search.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop a long search after this time, and say how far the plan may be from the best",
    )


def add_link(command: Any) -> None:
    """Add the words that say how devices are connected, to a parser or a group of one."""
    command.add_argument(
        "--bandwidth",
        type=_bandwidth,
        metavar="SIZE",
        help="bytes per second from one device to the next, such as 12GB (default: transfers take "
        "no time)",
    )
    command.add_argument(
        "--latency",
        type=float,
        metavar="SECONDS",
        help="time that every transfer takes besides that for its bytes",
    )


def asked(options: argparse.Namespace) -> list[str]:
    """Return what was asked for, as the names of `options`, without those that were left out."""
    given = [name for name in (*_PLAIN, *_OTHERS) if getattr(options, name) is not None]
    return given + [name for name in _SWITCHES if getattr(options, name)]


def question_of(profile: Profile, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for, as arguments of `gpipebal.solve`, which checks the rest.

    Raises:
        UsageError: an ambiguous layer, or words one of which makes no sense.
    """
    given = asked(options)
    question = {name: getattr(options, name) for name in given if name in _PLAIN}
    for name in ("any_order", "loss_inside", "gradients_exist"):
        if name in given:
            question[name] = True
    if "pin" in given:
        question["pin"] = read_pins(profile, options.pin)
    if "no_cut" in given:
        question["no_cut"] = [read_layer(profile, "no_cut", word) for word in options.no_cut]
    if "keep_together" in given:
        question["keep_together"] = [
            tuple(read_layer(profile, "keep_together", word) for word in pair)
            for pair in options.keep_together
        ]
    # Errors name layers by their index: this turns them into the words that were typed.
    typed = {*question.get("pin", ()), *question.get("no_cut", ())}
    typed.update(*question.get("keep_together", ()))
    options.typed_layers = {k: name for k, name in enumerate(profile.names) if name in typed}
    if "bandwidth" in given or "latency" in given:
        from math import inf

        from gpipebal.problem import Link

        question["link"] = Link(
            inf if options.bandwidth is None else options.bandwidth,
            options.latency or 0.0,
            overlaps=not options.no_overlap,
        )
    elif options.no_overlap:
        raise UsageError(
            "there are no transfers that could overlap: --no-overlap without --bandwidth "
            "or --latency (expected one of them).\nFix: --bandwidth 12GB, say."
        )
    return question


def plan_of(profile: Profile, options: argparse.Namespace, *, schedule: str | None = None) -> Plan:
    """Find the best plan of a profile, or say what the balance that was given costs.

    Args:
        profile: Costs of the layers.
        options: The words of `add_question`.
        schedule: Schedule that it is planned for; None: GPipe's.

    Raises:
        UsageError: neither partitions nor a balance were given, or a balance with words about
            the search for one.
        GpipebalError: as `gpipebal.solve` and `gpipebal.planner.evaluate` raise.
    """
    from gpipebal.planner import evaluate, solve
    from gpipebal.planner.quantiles import at_quantile

    question = question_of(profile, options)
    if schedule is not None:
        question["schedule"] = schedule
    if options.balance is not None:
        others = [name for name in asked(options) if name not in _OF_BALANCE]
        chunks = question.get("chunks")
        if others or not (chunks is None or isinstance(chunks, int)):
            flag = options.flags[others[0] if others else "chunks"]
            raise UsageError(
                f"a balance leaves nothing to choose: {flag} with --balance (expected one of "
                f"them).\nFix: leave {flag} out."
            )
        quantile = question.pop("quantile", None)
        if quantile is not None:
            profile = at_quantile(profile, quantile)
        return evaluate(profile, options.balance, **question)
    if options.partitions is None:
        raise UsageError(
            "number of partitions is not given: a profile can be cut into 1.."
            f"{profile.n_layers} (expected --partitions N, or --balance N,N,...).\n"
            "Fix: --partitions 2."
        )
    return solve(profile, options.partitions, **question)


def listed(text: str, kind: Callable[[str], _Item]) -> list[_Item]:
    """Read a list of values with commas between them; brackets around it do no harm.

    Example:
        >>> listed("3,1", int), listed("[3, 1]", int)
        ([3, 1], [3, 1])
    """
    try:
        return [kind(item.strip()) for item in text.strip().strip("[]()").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list (expected values with commas between, such as 3,1,2)"
        ) from None


def _chunks(text: str) -> int | str | list[int]:
    if text == "auto":
        return text
    found = listed(text, int)
    return found[0] if len(found) == 1 else found


def sizes(text: str) -> str | list[str]:
    """Read a size or several; 60 without a unit is not taken for 60 bytes."""
    return [size(one) for one in listed(text, str)] if "," in text else size(text)


def size(text: str) -> str:
    """Read a size; refuse one without a unit that is too few bytes for a device."""
    _check_unit(text, "bytes", "GiB")
    return text


def _check_unit(text: str, what: str, unit: str) -> None:
    """Refuse a number that was typed without its unit."""
    number = text.strip()
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) and 0 < float(number) < LEAST_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit, and is too small for {what} (expected {number}{unit}, say; or "
            f"{number}B)"
        )


def _pair(text: str) -> tuple[str, str]:
    first, comma, last = text.partition(",")
    if not comma or "," in last:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of layers (expected FIRST,LAST)")
    return first.strip(), last.strip()


def _bandwidth(text: str) -> float:
    _check_unit(text, "bytes per second", "GB")
    try:
        return float(text)
    except ValueError:
        pass
    word = text.strip().removesuffix("/s").strip()
    bits = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b", word, re.IGNORECASE)
    if bits is not None and word.endswith("b"):
        _refuse_bits(text, *bits.groups())
    try:
        return float(parse_bytes(word))
    except UsageError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a bandwidth (expected bytes per second, such as 12GB or 12e9)"
        ) from None


def _refuse_bits(text: str, number: str, prefix: str) -> NoReturn:
    """Refuse a unit whose small b may stand for bits: networks are measured in these."""
    prefix = prefix[0].upper() + prefix[1:].lower()
    unit = prefix if prefix != "K" else "k"
    eighth = f"{float(number) / 8:.6g}"
    raise argparse.ArgumentTypeError(
        f"{text!r} may be bits or bytes (expected {number}{unit}B/s, or {eighth}{unit}B/s for "
        f"{number} {_PREFIXES[prefix]}bits)"
    )
