"""The options of `solve_grid`: those of `solve` that hold for any number of partitions."""

from __future__ import annotations

from typing import Any

from gpipebal.argument_kinds import check_options, is_word, of_array
from gpipebal.errors import BalanceError
from gpipebal.plan.checks import check_chunks
from gpipebal.planner.question import Options, ask
from gpipebal.problem import RULE_NAMES
from gpipebal.problem.checks import check_flag
from gpipebal.profile import Profile
from gpipebal.schedule import check_known_schedule

__all__ = ["check_applies", "checked_options"]

#: Options of `solve` that are about single partitions, whose number differs from row to row.
_REFUSED = ("partitions", "devices", "any_order", "pin", "cost", "rules")
#: Options that have one value for all partitions.
_ONE_FOR_ALL = ("memory_limit", "checkpoint")
#: Options that have to be what they are by default.
_FIXED = {"schedule": "gpipe", "objective": "makespan"}


def check_applies(options: Options) -> None:
    """Refuse options that do not exist, or that a grid cannot have.

    Raises:
        BalanceError: one that is about single partitions, or has to be what it is by default.
        KindError: one that does not exist.
    """
    given: dict[str, Any] = {**options}
    for name in _REFUSED:
        value = given.get(name)
        # That devices may not change places (False) asks for nothing.
        if value is None or (name == "any_order" and not check_flag(name, value)):
            continue
        call = f"partitions, {name}=..." if name != "partitions" else repr(value)
        raise BalanceError(
            f"option does not apply to a grid: {name}={value!r:.60} (expected none: the number of "
            "partitions is another one each time).\n"
            f"Fix: leave it out, or solve(profile, {call}) for one number."
        )
    known = [name for name in Options.__annotations__ if name not in _REFUSED]
    check_options([name for name in given if name not in _REFUSED], known, "solve_grid")
    for name in _ONE_FOR_ALL:
        value = of_array(given.get(name))
        if isinstance(value, (list, tuple)):
            raise BalanceError(
                f"option is one for all partitions of a grid: {name}={value!r} (expected one "
                "value: the number of partitions is another one each time).\n"
                f"Fix: {name}={value[0] if value else None!r}."
            )
    for name, value in _FIXED.items():
        asked = given.get(name, value)
        if name == "schedule":
            asked = check_known_schedule(asked)
        if not is_word(asked, value):
            raise BalanceError(
                f"option does not apply to a grid: {name}={given[name]!r:.60} (expected "
                f"{value!r}).\n"
                f"Fix: {name}={value!r}."
            )


def checked_options(profile: Profile, options: Options) -> Options:
    """Refuse values that `solve` refuses, once; return options that can be used many times.

    Raises:
        BalanceError: a value that makes no sense.
        ProfileError: the profile does not tell what one asks for.
    """
    chunks: Any = of_array(options.get("chunks"))
    first = chunks[:1] if isinstance(chunks, (list, tuple, range)) else chunks
    question = ask(profile, 1, {**options, "chunks": None if is_word(first, "auto") else first})
    if isinstance(chunks, (list, tuple, range)):
        chunks = tuple(map(check_chunks, chunks))
    # Rules that are given as iterators can be gone through only once.
    others: Any = {name: value for name, value in options.items() if name not in RULE_NAMES}
    return {**others, "chunks": chunks, "rules": question.rules}
