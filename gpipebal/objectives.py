"""What can be minimised: one table, from which all others take names and words.

An objective that is in the table but unknown somewhere fails there, by `typing.assert_never` or a
missing key: nothing takes it for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from gpipebal.errors import BalanceError
from gpipebal.units import format_bytes, format_seconds

__all__ = [
    "MINIMISED",
    "OBJECTIVES",
    "Minimised",
    "Objective",
    "Quantity",
    "TimeObjective",
    "check_objective",
]

#: Objectives that are times of partitions.
TimeObjective = Literal["makespan", "bottleneck"]

#: An objective of `gpipebal.solve`.
Objective = Literal[TimeObjective, "peak_memory"]
#: All objectives, the default first.
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

#: What a plan may have minimised, an objective or costs that a function of the caller's gave.
Quantity = Literal[Objective, "cost"]


@dataclass(frozen=True)
class Minimised:
    """What a plan makes as small as possible.

    Attributes:
        meaning: What it is, in a sentence.
        text_of: Writes a value for people.
        compares_chunks: Whether plans with different numbers of micro-batches can be compared by
            it.
    """

    meaning: str
    text_of: Callable[[float], str]
    compares_chunks: bool


#: What can be minimised, by name.
MINIMISED: Mapping[str, Minimised] = MappingProxyType(
    {
        "makespan": Minimised(
            "the time from the first forward to the last backward of a mini-batch",
            format_seconds,
            compares_chunks=True,
        ),
        "bottleneck": Minimised(
            "the time of the slowest partition for one micro-batch",
            format_seconds,
            compares_chunks=False,
        ),
        "peak_memory": Minimised(
            "the largest peak memory of a partition",
            format_bytes,
            compares_chunks=True,
        ),
        "cost": Minimised(
            "the largest cost of a partition",
            "{:.6g}".format,
            compares_chunks=False,
        ),
    }
)


def check_objective(objective: object) -> None:
    """Refuse an objective that does not exist.

    Raises:
        BalanceError: it does not exist.
    """
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise BalanceError(
            f"objective does not exist: objective={objective!r:.60} "
            f"(expected one of {', '.join(map(repr, OBJECTIVES))}).\n"
            f"Fix: objective={OBJECTIVES[0]!r}."
        )
