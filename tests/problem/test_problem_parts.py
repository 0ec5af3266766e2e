"""Devices, links, memory and rules: what they cost, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import all_bounds
from solvers.whole_cases import rules_of, whole_problems
from solvers.whole_oracle import candidates, keeps_rules

import gpipebal as gb
from gpipebal.errors import BalanceError, KindError
from gpipebal.problem import RULE_NAMES, Device, Link, Links, Memory, Problem, Rules, layer_memory
from gpipebal.solvers import find, split
from gpipebal.solvers.sets.levels import Levels


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_problems(largest=5))
def test_makespan_and_bottleneck_equal_a_simulation(problem: Problem) -> None:
    """The closed forms hold with links as machines, copies that block, devices and mixed modes."""
    for one in list(candidates(problem))[:20]:
        arguments = (one.bounds, one.modes, one.order)
        exact: Any = problem.exact_makespan(*arguments)  # type: ignore[arg-type]
        assert Fraction(exact, problem.scale) == one.makespan
        exact = problem.exact_bottleneck(*arguments)  # type: ignore[arg-type]
        assert Fraction(exact, problem.scale) == one.bottleneck


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_problems(always=False, largest=5))
def test_parts_that_change_nothing_change_nothing(problem: Problem) -> None:
    """Devices of slowness 1, free links, huge limits and no rules give the plain value."""
    if not isinstance(problem.checkpoint, str) or problem.checkpoint == "auto":
        return
    n, n_layers = problem.n_partitions, problem.n_layers
    plain = Problem(
        problem.forward, problem.backward, problem.recompute, n, problem.chunks, problem.checkpoint
    )
    dressed = replace(
        plain,
        devices=[Device(memory_limit=10**9)] * n,
        links=Links([0] * (n_layers - 1), [0] * (n_layers - 1)),
        memory=layer_memory([1] * n_layers, [1] * n_layers, [1] * n_layers, chunks=4),
        rules=Rules(),
    )
    for objective in ("makespan", "bottleneck"):
        with_parts = split(dressed, objective)  # type: ignore[arg-type]
        without = split(plain, objective)  # type: ignore[arg-type]
        assert with_parts.value == without.value
        assert with_parts.method != without.method


def test_blocking_copies_are_charged_to_both_sides() -> None:
    """A copy that does not overlap lengthens the partition before and the one behind."""
    links = Links([3], [5], overlaps=False)
    problem = Problem([10, 20], [30, 40], [0, 0], 2, 2, "never", links=links)
    assert [tuple(part) for part in problem.costs.parts((0, 1, 2))] == [
        (13, 35, 0, 0),
        (23, 45, 0, 0),
    ]


def test_layer_memory_counts_graphs_inputs_and_moments() -> None:
    """Graphs count once per micro-batch, or once beside the inputs; moments do not add up."""
    memory = layer_memory([1, 2], [10, 20], [100, 200], chunks=3, transient=[1000, 500])
    assert list(memory.rows(0, 0, "never")) == [1 + 30 + 1000, 3 + 90 + 1000]
    assert list(memory.rows(1, 0, "except_last")) == [2 + 400 + 20 + 500]
    assert list(memory.rows(1, 0, "always")) == list(memory.rows(1, 0, "except_last"))


def test_layer_memory_of_huge_sizes_is_exact() -> None:
    """Bytes beyond 64 bits are added up as they are."""
    memory = layer_memory([2**70, 1], [0, 0], [0, 0], chunks=2)
    assert list(memory.rows(0, 0, "never")) == [2**70, 2**70 + 1]


def test_memory_labels_tell_which_partitions_are_alike() -> None:
    """By default the first and the last partition differ from those between."""
    rows: Any = lambda first, partition, mode: [0]  # noqa: E731
    assert Memory(rows).labels(4) == (0, 1, 1, 3)
    assert Memory(rows, "all").labels(3) == (0, 0, 0)
    assert Memory(rows, (5, 6)).labels(2) == (5, 6)


def test_equal_modes_are_one_mode() -> None:
    """The same mode for each partition is that mode."""
    assert Problem([1, 1], [1, 1], [1, 1], 2, checkpoint=["never", "never"]).checkpoint == "never"


BASE: dict[str, Any] = {
    "forward": [1, 2, 3],
    "backward": [1, 2, 3],
    "recompute": [1, 2, 3],
    "n_partitions": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": [Device()]}, r"differ in number: len\(devices\)=1 \(expected n_partitions=2"),
        ({"any_order": True}, r"devices may change places, but there are none"),
        (
            {"devices": [Device(memory_limit=5), Device()]},
            r"limit a memory that is not known: memory=None .*devices\[0\]\.memory_limit=5",
        ),
        (
            {"devices": [Device(1, None, [1], [1], [1])] * 2},
            r"times of devices\[0\] are too many or too few: 1 \(expected 3, one per layer",
        ),
        ({"links": Links([1], [1])}, r"forward times of links .*: 1 \(expected 2, one per cut"),
        ({"rules": Rules(no_cut=[3])}, r"no_cut has layer=3 \(expected 0 <= layer < 3\)"),
        ({"rules": Rules(pin={0: 2})}, r"pinned to a partition that does not exist: partition=2"),
        ({"rules": Rules(max_layers=0)}, r"max_layers is too small: max_layers=0"),
        ({"rules": Rules(min_layers=0)}, r"min_layers is too small: min_layers=0"),
        (
            {"memory": Memory(lambda first, partition, mode: [0], (1, 2, 3))},
            r"another number of partitions: len\(alike\)=3",
        ),
        ({"checkpoint": ["never"]}, r"len\(checkpoint\)=1 \(expected 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """Parts of another length, or about what does not exist, are named with what is expected."""
    with pytest.raises(BalanceError, match=f"(?s){message}") as raised:
        Problem(**{**BASE, **changes})
    assert re.search(r"\nFix: .", str(raised.value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules(keep_together=(2, 4)), r"keep_together=\(2, 4\) \(expected pairs"),  # type: ignore[arg-type]
        (lambda: Rules(keep_together=["bd"]), r"keep_together=\('bd',\)"),  # type: ignore[list-item]
        (lambda: Rules(pin=[1]), r"pin=\(1,\)"),  # type: ignore[list-item]
        (lambda: Device(slowness=0), r"slowness of a device is not a factor: slowness=0"),
        (lambda: Device(slowness=float("nan")), r"slowness=nan"),
        (lambda: Device(memory_limit=-1), r"not a number of bytes: memory_limit=-1"),
        (lambda: Device(memory_limit=1.5), r"memory_limit=1\.5"),  # type: ignore[arg-type]
        (lambda: Device(forward=[1]), r"times of a device are incomplete: backward=None"),
        (lambda: Links([-1], [0]), r"forward time of cut 0 is not a time: forward\[0\]=-1"),
        (lambda: Link(bandwidth=0), r"bandwidth is not above 0: bandwidth=0"),
        (lambda: layer_memory([1], [1, 2], [1], chunks=1), r"saved and fixed differ in length"),
        (lambda: layer_memory([1], [-2], [1], chunks=1), r"saved\[0\]=-2"),
        (lambda: layer_memory(iter([1]), [-2], [1], chunks=1), r"saved\[0\]=-2"),  # type: ignore[arg-type]
    ],
)
def test_parts_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    """Numbers that are none of their kind are refused with their name and value."""
    with pytest.raises(BalanceError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Problem(**BASE, devices=[1, 2]), r"devices\[0\] is not a Device"),
        (lambda: Problem(**BASE, devices=3), "devices is not a list"),
        (lambda: Problem(**BASE, links=[1, 1]), "links is not a Links"),
        (lambda: Problem(**BASE, memory=5), "memory is not a Memory"),
        (lambda: Problem(**BASE, rules=[2]), "rules is not a Rules"),
        (lambda: Problem(**{**BASE, "forward": 3}), "forward is not a list"),
        (lambda: Device(1, None, 1.0, 2.0, 1.0), "forward is not a list"),  # type: ignore[arg-type]
        (lambda: Links("12", "34"), "forward is not a list"),  # type: ignore[arg-type]
        (lambda: layer_memory(None, [1], [1], chunks=1), "fixed is not a list"),  # type: ignore[arg-type]
    ],
)
def test_parts_of_another_kind_are_refused(make: Any, message: str) -> None:
    """By their own names, before anything is made of them."""
    with pytest.raises(KindError, match=rf"{message}.*\nFix: ."):
        make()


@pytest.mark.parametrize("kind", [iter, lambda times: pd.Series(times, index=[5, 4, 3])])
def test_times_are_in_the_order_in_which_they_come(kind: Any) -> None:
    """Those of an iterator, and of a column with numbers of its own for its rows."""
    plain = Device(1, None, [1, 2, 3], [1, 2, 3], [1, 2, 3])
    assert Device(1, None, *(kind([1, 2, 3]) for _ in range(3))) == plain
    with pytest.raises(BalanceError, match=r"forward time of layer 1 .*: forward\[1\]=-2"):
        Device(1, None, *(kind([1, -2, 3]) for _ in range(3)))
    sizes = [kind([1, 2, 3]) for _ in range(4)]
    memory = layer_memory(*sizes[:3], chunks=2, transient=sizes[3])
    assert list(memory.rows(0, 0, "never")) == [4, 11, 21]


@pytest.mark.parametrize("yes", [True, 1, np.bool_(True)])
def test_flags_of_any_kind_are_flags(yes: Any) -> None:
    """As arguments of `solve` are; a text is none."""
    assert Link(1.0, overlaps=yes).overlaps is True and Links([1], [1], yes).overlaps is True
    assert Problem(**BASE, devices=[Device()] * 2, any_order=yes).any_order is True
    for make in (lambda: Link(1.0, overlaps="no"), lambda: Links([1], [1], "no")):  # type: ignore[arg-type]
        with pytest.raises(BalanceError, match="overlaps is neither true nor false"):
            make()


def test_modes_left_open_must_be_given_to_evaluate() -> None:
    """What a split costs is not known before its modes are."""
    problem = Problem(**{**BASE, "checkpoint": "auto", "chunks": 2})
    with pytest.raises(BalanceError, match="modes of the partitions are not known"):
        problem.makespan((0, 1, 3))
    assert problem.makespan((0, 1, 3), ["never", "never"]) == 12 + 5 + 5


def test_numpy_parts_become_plain_numbers() -> None:
    """Devices and links take numpy's numbers too."""
    device = Device(np.float32(2), np.int64(7), *(np.ones(2, dtype=int) for _ in range(3)))
    assert device == Device(2.0, 7, [1, 1], [1, 1], [1, 1])
    assert type(device.slowness) is float
    assert type(device.memory_limit) is int


@pytest.mark.parametrize(
    "cost", [None, lambda start, end, j: float(end - start)], ids=["times", "own cost"]
)
def test_no_cut_before_the_first_layer_changes_nothing(cost: Any) -> None:
    """There is no cut anyway, whatever is minimised."""
    profile = gb.Profile.from_costs([1.0, 2.0, 4.0], rows=2, chunks=2)
    balances = [gb.solve(profile, 2, cost=cost, no_cut=given).balance for given in ((), (0,))]
    assert balances[0] == balances[1]
    grids = [gb.solve_grid(profile, 4, no_cut=given).rows for given in ((), (0,))]
    found = [[(row.replicas, row.time, row.plan and row.plan.balance) for row in g] for g in grids]
    assert found[0] == found[1]


def test_rules_are_stated_with_all_pins() -> None:
    """Those of one layer to two partitions too, which explain why there is no split."""
    assert Rules(pin={1: 0, 2: 1}).stated() == ["pin={1: 0, 2: 1}"]
    assert Rules(pin=[(1, 0), (1, 1)]).stated() == ["pin=[(1, 0), (1, 1)]"]


def test_a_partition_is_allowed_if_every_rule_is_kept() -> None:
    """Each rule refuses by itself."""
    rules = Rules(no_cut=[1], keep_together=[(3, 5)], pin={2: 1}, max_layers=4)
    every = [(a, b, j) for a in range(7) for b in range(a + 1, 8) for j in range(2)]
    kept = {one for one in every if rules.allows(*one)}
    assert (0, 2, 0) in kept and (2, 6, 1) in kept
    for refused in [(1, 2, 0), (4, 6, 0), (5, 6, 0), (0, 3, 0), (0, 2, 1), (2, 7, 1)]:
        assert refused not in kept


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_all_forms_of_the_rules_agree(data: st.DataObject) -> None:
    """What one run may hold, and what solvers look up for all runs at once, allow the same splits.

    An oracle says which splits these are. What has no split at all has none for solvers either.
    """
    n_layers = data.draw(st.integers(1, 7))
    n_partitions = data.draw(st.integers(1, min(n_layers, 4)))
    rules = data.draw(rules_of(n_layers, n_partitions))
    problem = Problem(*[[1] * n_layers] * 3, n_partitions, rules=rules)
    levels = Levels(problem)
    every = list(all_bounds(n_layers, n_partitions))
    by_sets = [
        bounds
        for bounds in every
        if all(levels.places[j] >> bound & 1 for j, bound in enumerate(bounds))
        and all(
            levels.kinds[step.kind][0].fits[start] >> end & 1
            for (start, end), (step,) in zip(pairwise(bounds), levels.steps, strict=True)
        )
    ]
    assert by_sets == [bounds for bounds in every if rules.keeps(bounds)]
    assert by_sets == [bounds for bounds in every if keeps_rules(problem, bounds)]
    assert (find(problem, "bottleneck") is None) == (not by_sets)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_there_are_no_more_partitions_than_rules_allow(data: st.DataObject) -> None:
    """The bound is met where no rule says what partitions may not have too much of."""
    n_layers = data.draw(st.integers(1, 7))
    rules = data.draw(rules_of(n_layers, 1))
    free = replace(rules, pin=(), max_layers=None)
    most = {
        one: max(
            [n for n in range(1, n_layers + 1) if any(map(one.keeps, all_bounds(n_layers, n)))]
            or [1]
        )
        for one in (rules, free)
    }
    assert most[free] == free.most_partitions(n_layers)
    assert most[rules] <= rules.most_partitions(n_layers)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_loosened_rules_are_the_closest_that_work(data: st.DataObject) -> None:
    """Each rule is dropped, or its limit changed by as little as possible."""
    n_layers = data.draw(st.integers(1, 7))
    n_partitions = data.draw(st.integers(1, min(n_layers, 4)))
    rules = data.draw(rules_of(n_layers, n_partitions))
    every = list(all_bounds(n_layers, n_partitions))

    def works(rules: Rules) -> bool:
        return any(map(rules.keeps, every))

    if works(rules):
        return
    found = {words: other for _, words, other in rules.loosened(n_layers, works)}
    none: Any = {name: getattr(Rules(), name) for name in RULE_NAMES}
    expected = {
        f"without {name}": replace(rules, **{name: none[name]})
        for name in RULE_NAMES
        if getattr(rules, name) != none[name]
    }
    if rules.max_layers is not None:
        working = [m for m in range(1, n_layers) if works(replace(rules, max_layers=m))]
        expected |= {f"max_layers={m}": replace(rules, max_layers=m) for m in working[:1]}
    if rules.min_layers is not None:
        working = [m for m in range(2, n_layers + 1) if works(replace(rules, min_layers=m))]
        expected |= {f"min_layers={m}": replace(rules, min_layers=m) for m in working[-1:]}
    assert found == expected
