"""`compare_rules`: a plan compared with what rules of thumb make of the same chain."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind, check_options, plain_number, row_of
from gpipebal.errors import BalanceError, ProfileError
from gpipebal.objectives import Objective
from gpipebal.plan import Plan
from gpipebal.planner.assemble import equal_split
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import plan_of_way
from gpipebal.planner.posing import Posed, posed_as
from gpipebal.planner.quantiles import at_quantile
from gpipebal.planner.question import Options
from gpipebal.planner.rules_of_thumb import block_split, equal_parameters
from gpipebal.problem import Problem, to_balance, to_bounds
from gpipebal.problem.chunking import other_layers
from gpipebal.profile import Profile
from gpipebal.schedule import counted_modes
from gpipebal.solvers import split
from gpipebal.text import aligned
from gpipebal.units import count, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from typing import Unpack

    import pandas as pd

__all__ = ["RuleRow", "RuleTable", "compare_rules"]

#: A balance with more partitions than this is cut short where it is printed.
_LONGEST_BALANCE = 8


@dataclass(frozen=True)
class RuleRow:
    """What one way to cut the chain would cost.

    Attributes:
        rule: ``'plan'``, or the name of the rule.
        balance: Layers of each partition; None: the rule has no answer.
        makespan: Predicted seconds from the first forward to the last backward.
        bottleneck: Largest time of a partition for one micro-batch, in seconds.
        peak_bytes: Largest predicted peak memory of a partition; None: not known.
        above_plan: How much more than the plan it costs, in the plan's objective, as a fraction;
            None: the objective is a function that the caller gave.
        gap: How far it can be from the optimum, as a fraction, by the plan's bound; None: the
            bound does not hold for it, because it breaks limits that the plan keeps, or because
            the plan's balance was given, so that its bound is about that balance alone.
        refusal: Why the rule has no answer; empty if it has one.
    """

    rule: str
    balance: list[int] | None = field(default=None, hash=False)
    makespan: float | None = None
    bottleneck: float | None = None
    peak_bytes: int | None = None
    above_plan: float | None = None
    gap: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class RuleTable:
    """A plan compared with rules of thumb; printed, it is a table.

    Attributes:
        rows: The plan first, then the rules.
        objective: What the plan minimises.
        lower_bound: The plan's proven bound on it.
        chunks: Number of micro-batches.
        schedule: Name of the schedule.
    """

    rows: tuple[RuleRow, ...]
    objective: str
    lower_bound: float
    chunks: int
    schedule: str

    def row(self, rule: str) -> RuleRow:
        """Return the row of a rule.

        Raises:
            UsageError: there is none.
        """
        return row_of(self.rows, "rule", rule)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per rule: seconds, bytes, fractions; and balances as tuples."""
        import pandas as pd

        frame = pd.DataFrame([asdict(row) for row in self.rows])
        return frame.assign(balance=frame["balance"].map(tuple, na_action="ignore"))

    def __str__(self) -> str:
        header = ["rule", "makespan", "bottleneck", "peak memory", "above the plan", "gap"]
        lines = [[*header, "balance"]]
        notes = []
        for row in self.rows:
            if row.balance is None:
                lines.append([row.rule, *["-"] * 5, ""])
                notes.append(f"{row.rule}: {row.refusal}")
                continue
            lines.append(
                [
                    row.rule,
                    _text(row.makespan, format_seconds),
                    _text(row.bottleneck, format_seconds),
                    _text(row.peak_bytes, format_bytes),
                    _text(row.above_plan, format_percent),
                    _text(row.gap, format_percent),
                    _shortened(row.balance),
                ]
            )
        if any(row.gap is None and (row.above_plan or 0.0) < 0.0 for row in self.rows):
            notes.append(
                "A rule below the plan breaks a limit or a rule about layers that the plan "
                "keeps, unless the plan's balance was given."
            )
        title = (
            f"objective {self.objective}, {count(self.chunks, 'micro-batch')}, schedule "
            f"{self.schedule!r}"
        )
        return "\n".join([title, *aligned(lines, left=(0, len(header))), *notes])


def compare_rules(
    profile: Profile, plan: Plan, *, patience: float = 2.0, **options: Unpack[Options]
) -> RuleTable:
    """Compare a plan with the balances that rules of thumb make of the same chain.

    Every rule cuts the chain into as many partitions as the plan has. What its balance costs is
    predicted with the plan's micro-batches, checkpoint modes, schedule and order of devices,
    whether or not it keeps the plan's limits and rules about cuts. The rules of thumb:

    * ``'equal layers'``: every partition has equally many layers;
    * ``'equal parameters'``: the largest partition has as few bytes of parameters as possible;
    * ``'torchgpipe'``: the rule of torchgpipe's ``balance_by_time``, see
      `gpipebal.planner.rules_of_thumb.block_split`, for forward + backward of each layer;
    * ``'least bottleneck'``: the slowest partition is as fast as possible, on equal devices without
      links. This is the best balance only if nothing but the steady state counts.

    Args:
        profile: The costs from which the plan was made.
        plan: The plan.
        patience: Seconds after which to give up on torchgpipe's rule, which is slow on long
            chains.
        options: The `devices`, `link` and `quantile` that `solve` was given, if any.

    Returns:
        A table, the plan first. A rule without an answer is in it, with the reason.

    Raises:
        ProfileError: the profile is of another chain than the plan, or the plan has other costs.
        BalanceError: options that make no sense, or a plan with runs of layers that are recomputed.
        KindError: `profile` is not a Profile, `plan` is not a Plan, or an option does not exist.

    Example:
        >>> from gpipebal.planner import solve
        >>> profile = Profile.from_costs([1.0] * 9 + [5.0], chunks=8)
        >>> table = compare_rules(profile, solve(profile, 3, checkpoint="never"))
        >>> [(row.rule, row.balance, row.makespan) for row in table.rows[:2]]
        [('plan', [4, 5, 1], 147.0), ('equal layers', [4, 3, 3], 189.0)]
    """
    check_kind("profile", profile, Profile)
    check_kind("plan", plan, Plan)
    check_options(options, ("devices", "link", "quantile"), "compare_rules")
    seconds = min(plain_number(patience), sys.float_info.max)
    if not seconds >= 0:
        raise BalanceError(
            f"patience is not a time: patience={patience!r:.60} (expected seconds, 0 or more).\n"
            "Fix: patience=2.0."
        )
    if what := other_layers(profile, plan):
        raise ProfileError(
            f"plan is of another chain than the profile: {what}.\n"
            "Fix: give the profile that the plan was made of."
        )
    if plan.runs:
        raise BalanceError(
            "plan recomputes layers by themselves, and no rule does: "
            f"plan.runs has {count(len(plan.runs), 'run')} (expected none).\n"
            "Fix: compare the plan that the runs were chosen for, `before` of what "
            "recompute_layers gave."
        )
    posed = _posed_at_quantile(plan, profile, options)
    profile = posed.question.profile

    def costs_of(balance: Sequence[int]) -> Plan:
        return plan_of_way(posed, Way.of(plan)._replace(bounds=to_bounds(balance)))

    again = costs_of(plan.balance).makespan
    if not math.isclose(again, plan.makespan, rel_tol=1e-9):
        raise ProfileError(
            f"plan has other costs than the profile: plan.makespan={plan.makespan!r} (expected "
            f"{again!r}).\nFix: give the profile that the plan was made of, and the devices, link "
            "and quantile that solve was given."
        )
    n_partitions = plan.n_partitions
    times = [layer.forward_time + layer.backward_time for layer in profile.layers]
    problem = Problem(
        **profile.layer_times,
        n_partitions=n_partitions,
        chunks=plan.chunks,
        checkpoint=counted_modes(plan.modes, plan.recomputed),
        n_frozen=profile.n_frozen,
    )
    rules: dict[str, Callable[[], Sequence[int]]] = {
        "equal layers": lambda: equal_split(plan.n_layers, n_partitions),
        "equal parameters": lambda: equal_parameters(profile, n_partitions),
        "torchgpipe": lambda: block_split(times, n_partitions, time_limit=seconds),
        "least bottleneck": lambda: split(problem, "bottleneck").bounds,
    }
    rows = [_row("plan", plan, plan)]
    for name, bounds_of in rules.items():
        try:
            balance = to_balance(bounds_of())
        except BalanceError as error:
            reason = str(error).partition(" (expected")[0]
            rows.append(RuleRow(name, refusal=f"{reason}."))
            continue
        rows.append(_row(name, costs_of(balance), plan))
    return RuleTable(tuple(rows), plan.objective, plan.lower_bound, plan.chunks, plan.schedule)


def _posed_at_quantile(plan: Plan, profile: Profile, options: Options) -> Posed:
    """Pose the question what balances cost, at the quantile that the plan was made with."""
    quantile = options.get("quantile")
    if quantile is not None:
        # Taken before the rows of micro-batches are chosen, as in `solve`.
        profile = at_quantile(profile, quantile)
    # What `_row` needs of other objectives, every plan tells.
    asked: Objective = "bottleneck" if plan.objective == "bottleneck" else "makespan"
    return posed_as(plan, profile, {**options, "objective": asked})


def _row(rule: str, costs: Plan, plan: Plan) -> RuleRow:
    values: dict[str, float | None] = {
        "makespan": costs.makespan,
        "bottleneck": costs.bottleneck,
        "peak_memory": costs.peak_bytes,
        "cost": None,
    }
    value = plan.value if costs is plan else values[plan.objective]
    gap = above = None
    if value is not None:
        above = value / plan.value - 1 if plan.value else None
        if value >= plan.lower_bound and (plan.method != "given" or costs is plan):
            gap = (value - plan.lower_bound) / value if value else 0.0
    return RuleRow(
        rule=rule,
        balance=costs.balance,
        makespan=costs.makespan,
        bottleneck=costs.bottleneck,
        peak_bytes=costs.peak_bytes,
        above_plan=above,
        gap=gap,
    )


def _text(value: float | None, text_of: Callable[[float], str]) -> str:
    return "-" if value is None else text_of(value)


def _shortened(balance: list[int]) -> str:
    if len(balance) <= _LONGEST_BALANCE:
        return str(balance)
    shown = ", ".join(map(str, balance[: _LONGEST_BALANCE - 1]))
    return f"[{shown}, ... {balance[-1]}]"
