"""Rules of thumb, and a plan beside them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, ProfileError, UsageError
from gpipebal.planner import evaluate, solve
from gpipebal.planner.rules_of_thumb import block_split, equal_parameters
from gpipebal.planner.thumb_comparison import RuleTable, compare_rules
from gpipebal.problem import Link, to_balance
from gpipebal.schedule import CHECKPOINT_MODES

costs_lists = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("costs", "n_partitions", "balance"),
    [
        # All excess costs are 0, so that nothing is moved from the start.
        ([1] * 15, 8, [1] * 7 + [8]),
        ([1] * 31, 16, [1] * 15 + [16]),
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([5, 32, 17, 20, 50, 27, 25, 25], 4, [2, 2, 2, 2]),
        ([3], 1, [1]),
    ],
)
def test_block_split_gives_what_torchgpipe_gives(
    costs: list[int], n_partitions: int, balance: list[int]
) -> None:
    """The balances are those that torchgpipe 0.0.7 returns for the same costs."""
    assert to_balance(block_split(costs, n_partitions)) == balance


@settings(max_examples=200, deadline=None)
@given(costs_lists, st.data(), st.sampled_from([1, 2.0**-20, 2.0**20]))
def test_block_split_balances_what_it_sees(
    costs: list[int], data: st.DataObject, unit: Any
) -> None:
    """Without their smallest cost, sums differ by one layer at most; the unit does not matter."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    try:
        bounds = block_split(costs, n_partitions, time_limit=2.0)
    except BalanceError as error:
        assert "(expected" in str(error) and "\nFix: " in str(error)
        return
    assert bounds[0] == 0 and bounds[-1] == len(costs) and min(to_balance(bounds)) >= 1
    excess = [cost - min(costs) for cost in costs]
    sums = [sum(excess[a:b]) for a, b in pairwise(bounds)]
    assert max(sums) - min(sums) <= max(excess)
    assert block_split([unit * cost for cost in costs], n_partitions) == bounds


def test_block_split_says_when_it_has_no_answer() -> None:
    """A partition without layers, an endless walk and a lack of time are errors that say so."""
    with pytest.raises(BalanceError, match="without layers: partition"):
        block_split([21, 38, 21, 28, 37, 50], 5)
    with pytest.raises(BalanceError, match="not within 0 s"):
        block_split([1, 1, 1, 1, 9, 9], 2, time_limit=0.0)
    with pytest.raises(BalanceError, match=r"n_partitions=3 \(expected 1 <= n_partitions <= 2"):
        block_split([1, 2], 3)


def test_equal_parameters_goes_by_bytes() -> None:
    """The bytes of the largest partition are least; without any there is no answer."""
    profile = gb.Profile.from_costs([1.0] * 6, parameter_bytes=[8, 0, 0, 4, 4, 1])
    assert equal_parameters(profile, 3) == (0, 1, 4, 6)
    with pytest.raises(BalanceError, match=r"no layer has parameters"):
        equal_parameters(gb.Profile.from_costs([1.0, 1.0]), 2)


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    data=st.data(),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
    objective=st.sampled_from(["makespan", "bottleneck"]),
)
def test_no_rule_beats_a_proven_plan(
    costs: list[tuple[int, int]], data: st.DataObject, checkpoint: Any, objective: Any
) -> None:
    """Every rule's row is what its balance costs, and none is better than the plan."""
    profile = gb.Profile.from_costs([float(f) for f, _ in costs], [float(b) for _, b in costs])
    n_partitions = data.draw(st.integers(1, len(costs)))
    chunks = data.draw(st.integers(1, 5))
    plan = solve(profile, n_partitions, chunks=chunks, checkpoint=checkpoint, objective=objective)
    table = compare_rules(profile, plan)
    names = ["plan", "equal layers", "equal parameters", "torchgpipe", "least bottleneck"]
    assert [row.rule for row in table.rows] == names
    assert table.row("plan").gap == 0.0 and table.row("plan").makespan == plan.makespan
    assert table.row("equal parameters").balance is None
    for row in table.rows:
        if row.balance is None:
            assert row.refusal
            continue
        costs_of = evaluate(profile, row.balance, chunks=chunks, checkpoint=checkpoint)
        assert (row.makespan, row.bottleneck) == (costs_of.makespan, costs_of.bottleneck)
        assert row.gap is not None and 0.0 <= row.gap < 1.0
        assert row.above_plan is None or row.above_plan >= 0.0
    if objective == "bottleneck":
        assert table.row("least bottleneck").gap == 0.0


def small_table() -> RuleTable:
    """Return a table of numbers that can be checked by hand."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4)
    return compare_rules(profile, solve(profile, 2, checkpoint="never"))


def test_the_table_is_printed_and_a_frame() -> None:
    """Printed, it has a line per rule; as a frame, a row."""
    table = small_table()
    lines = str(table).splitlines()
    assert lines[0] == "objective makespan, 4 micro-batches, schedule 'gpipe'"
    assert lines[2].split()[:3] == ["plan", "84.0", "s"]
    assert lines[-1] == "equal parameters: no layer has parameters: sum(parameter_bytes)=0."
    frame = table.to_frame()
    balances = {tuple(row.balance) for row in table.rows if row.balance is not None}
    assert set(frame.groupby("balance").groups) == balances
    assert list(frame["rule"]) == [row.rule for row in table.rows]
    assert frame.loc[0, "makespan"] == table.row("plan").makespan
    assert hash(table) == hash(small_table()) and table == small_table()
    with pytest.raises(UsageError, match=r"rule='magic' \(expected 'plan', "):
        table.row("magic")


def test_a_rule_below_the_plan_is_explained() -> None:
    """It breaks what the plan keeps: a reader would take the plan for a bad one."""
    profile = gb.Profile.from_costs([1.0] * 6, parameter_bytes=[30, 0, 0, 0, 0, 0], chunks=4)
    within = compare_rules(profile, solve(profile, 2, checkpoint="never", max_layers=3))
    assert "below the plan" not in str(within)
    pinned = compare_rules(profile, solve(profile, 2, checkpoint="never", pin={1: 1}))
    assert (pinned.row("equal layers").above_plan or 0.0) < 0.0
    assert str(pinned).endswith(
        "A rule below the plan breaks a limit or a rule about layers that the plan keeps, unless "
        "the plan's balance was given."
    )


def test_other_schedules_and_modes_are_kept() -> None:
    """Under 1F1B with a mode per partition, all rows are of that schedule and those modes."""
    profile = gb.Profile.from_costs([3.0, 1.0, 1.0, 1.0], chunks=6)
    plan = evaluate(profile, [1, 3], checkpoint=("always", "never"), schedule="1f1b")
    table = compare_rules(profile, plan)
    other = evaluate(profile, [2, 2], checkpoint=("always", "never"), schedule="1f1b")
    row = table.row("equal layers")
    assert (row.balance, row.makespan) == ([2, 2], other.makespan)
    # The bound of a balance that was given says nothing about others.
    assert row.gap is None and table.row("plan").gap == plan.gap


def test_devices_and_links_count_if_they_are_given_again() -> None:
    """With the same devices and link the rows have their costs; without them it is refused."""
    profile = gb.Profile.from_costs([1.0] * 6, output_bytes=[10] * 6, chunks=4)
    around: dict[str, Any] = {"devices": [1, 2], "link": Link(bandwidth=10.0, overlaps=False)}
    plan = solve(profile, 2, checkpoint="never", **around)
    table = compare_rules(profile, plan, **around)
    assert table.row("plan").makespan == plan.makespan
    assert table.row("equal layers").balance == [3, 3]
    # Partition 0: 3 + 1 s forward, 6 + 1 s back; partition 1 half of 3 and 6, and 1 s each.
    assert table.row("equal layers").makespan == (4 + 2.5 + 7 + 4) + 3 * (4 + 7)
    with pytest.raises(ProfileError, match=r"plan has other costs than the profile.*\n?.*Fix: "):
        compare_rules(profile, plan)


def test_a_plan_of_another_chain_is_refused() -> None:
    """A profile with other layers cannot say what the plan's would cost."""
    plan = solve(gb.Profile.from_costs([1.0] * 3), 2)
    with pytest.raises(ProfileError, match=r"it has 3 layers \(expected 4\)"):
        compare_rules(gb.Profile.from_costs([1.0] * 4), plan)
    with pytest.raises(ProfileError, match=r"its layer 2 is '2' \(expected 'x'\)"):
        compare_rules(gb.Profile.from_costs([1.0] * 3, names=["0", "1", "x"]), plan)


def test_other_micro_batches_are_those_of_the_plan() -> None:
    """A plan with smaller micro-batches than the profile's own is compared at their rows."""
    sizes = [gb.Profile.from_costs([r * 1.0] * 4, rows=r, chunks=16 // r) for r in (2, 4, 8)]
    profile = gb.Profile(
        **{**vars(sizes[1]), "other_sizes": (sizes[0], sizes[2])}  # type: ignore[arg-type]
    )
    plan = solve(profile, 2, chunks=8)
    assert plan.rows == 2
    table = compare_rules(profile, plan)
    assert table.row("plan").makespan == table.row("equal layers").makespan == plan.makespan
