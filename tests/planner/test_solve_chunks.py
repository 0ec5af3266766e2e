"""How many micro-batches: what a number means, and which is best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, ProfileError
from gpipebal.planner import evaluate, solve, top_plans
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Options, ask
from gpipebal.planner.search import best
from gpipebal.planner.search.lower_bounds import lower_bound_of
from gpipebal.problem.chunking import at_chunks, chunk_candidates

ROWS = (1, 4, 16)


def sized(overheads: list[float], slopes: list[float], whole: int = 32) -> gb.Profile:
    """Make a profile at three numbers of rows; times are an overhead and so much per row."""
    n = len(overheads)
    sizes = [
        gb.Profile.from_costs(
            [a + b * rows for a, b in zip(overheads, slopes, strict=True)],
            [2 * (a + b * rows) for a, b in zip(overheads, slopes, strict=True)],
            saved_bytes=[100 * rows] * n,
            output_bytes=[10 * rows] * n,
            parameter_bytes=[50] * n,
            rows=rows,
        )
        for rows in ROWS
    ]
    return replace(sizes[1], other_sizes=(sizes[0], sizes[2]), mini_batch_rows=whole, chunks=8)


def test_several_sizes_part_the_mini_batch() -> None:
    """With other sizes the mini-batch stays: 32 rows in 16 micro-batches are 2 rows each."""
    profile = sized([1.0] * 4, [1.0] * 4)
    plan = solve(profile, 2, chunks=16, checkpoint="never")
    assert (plan.chunks, plan.rows) == (16, 2)
    assert plan.partitions[0].forward_time == 2 * (1 + 2)
    assert plan.notes == (
        "The profile was taken at 1, 4, 16 rows; a micro-batch of 2 rows lies between them.",
    )
    assert solve(profile, 2).notes == solve(profile, 2, chunks=8).notes == ()
    beyond = solve(profile, 2, chunks=1)
    assert "lies beyond them: its costs are extrapolated" in beyond.notes[0]
    assert evaluate(profile, [2, 2], chunks=16, checkpoint="never").makespan == plan.makespan


def test_the_bound_over_several_numbers_is_the_least_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number whose plan leaves a gap may have a better one, whatever was proven for others."""
    found: list[best.Best] = []
    best_of = best.best_of

    def with_a_gap_at_first(posed: Posed) -> best.Best:
        one = best_of(posed)
        found.append(one if found else one._replace(lower_bound=one.lower_bound / 2))
        return found[-1]

    monkeypatch.setattr(best, "best_of", with_a_gap_at_first)
    monkeypatch.setattr(best, "quick_bound_of", lambda posed: 0.0)  # none is left out by its bound
    plan = solve(sized([1.0, 2.0, 1.0, 3.0], [1.0] * 4), 2, chunks=[4, 8, 16])
    assert len(found) == 3
    assert plan.lower_bound == min(one.lower_bound for one in found) < plan.value


def test_one_size_repeats_the_micro_batch() -> None:
    """With one size each micro-batch has its rows, and the plan says that the mini-batch grows."""
    profile = gb.Profile.from_costs([1.0, 1.0], rows=4, chunks=2)
    plan = solve(profile, 2, chunks=6)
    assert (plan.chunks, plan.rows) == (6, 4)
    assert plan.notes == (
        "The profile knows micro-batches of 4 rows only, so each of the 6 has as many, and the "
        "mini-batch 24.",
    )
    assert solve(profile, 2, chunks=2).notes == ()


def test_more_micro_batches_than_rows_are_refused() -> None:
    """A mini-batch of 32 rows cannot be parted into 33, and the fix can."""
    profile = sized([1.0] * 2, [1.0] * 2)
    with pytest.raises(BalanceError, match=r"chunks=33 \(expected at most 32") as raised:
        solve(profile, 2, chunks=33)
    assert "Fix: chunks=32" in str(raised.value)
    assert solve(profile, 2, chunks=32).rows == 1


def test_candidates_are_within_what_was_measured() -> None:
    """Every number of rows from 1 to 16 once, with the fewest micro-batches."""
    profile = sized([1.0] * 2, [1.0] * 2)
    candidates = chunk_candidates(profile)
    assert candidates == [2, 3, 4, 5, 6, 7, 8, 11, 16, 32]
    assert [-(-32 // m) for m in candidates] == [16, 11, 8, 7, 6, 5, 4, 3, 2, 1]
    with pytest.raises(ProfileError, match="knows one size, rows=1") as raised:
        solve(gb.Profile.from_costs([1.0]), 1, chunks="auto")
    assert "Fix: profile_model(model, sample, chunks=..., rows=None)" in str(raised.value)
    with pytest.raises(ProfileError, match="knows one size"):
        solve(gb.Profile.from_costs([1.0]), 1, chunks=[1, 2])


times = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.sampled_from([0.125, 0.5, 1.0])),
    min_size=2,
    max_size=5,
)


@settings(max_examples=10, deadline=None)
@given(
    times,
    st.integers(1, 3),
    st.sampled_from(["never", "except_last", "always", "auto"]),
    st.none() | st.integers(800, 3000),
    st.none() | st.just([1.0, 0.5, 2.0]),
)
def test_auto_is_the_best_of_all_candidates(
    costs: list[tuple[float, float]], n: int, checkpoint: Any, limit: int | None, speeds: Any
) -> None:
    """Trying every candidate by itself finds nothing better, and bounds cut off nothing good."""
    profile = sized([a for a, _ in costs], [b for _, b in costs])
    n = min(n, profile.n_layers)
    options: Any = {"checkpoint": checkpoint, "memory_limit": limit}
    options["devices"] = None if speeds is None else speeds[:n]
    plans = []
    for chunks in chunk_candidates(profile):
        try:
            plans.append(solve(profile, n, chunks=chunks, **options))
        except gb.GpipebalError:
            continue
    if not plans:
        with pytest.raises(gb.GpipebalError, match="Fix: "):
            solve(profile, n, chunks="auto", **options)
        return
    found = solve(profile, n, chunks="auto", **options)
    assert found.value == min(plan.value for plan in plans)
    assert found.lower_bound <= min(plan.lower_bound for plan in plans)
    question = ask(profile, n, Options(chunks="auto", **options))
    for plan in plans:
        posed = pose(question, plan.chunks)
        bound = lower_bound_of(posed.problem)
        assert bound <= plan.lower_bound * (1 + 1e-12)


def test_a_choice_of_numbers_is_kept_to() -> None:
    """Of the numbers that were given the best is taken; next best plans have other numbers too."""
    profile = sized([1.0] * 4, [0.25] * 4)
    plan = solve(profile, 2, chunks=[2, 32])
    assert plan.chunks in (2, 32)
    assert plan.value == min(solve(profile, 2, chunks=m).value for m in (2, 32))
    plans = top_plans(profile, 4, 2, chunks=[2, 4, 8])
    assert [p.value for p in plans] == sorted(p.value for p in plans)
    assert len({(p.chunks, *p.balance) for p in plans}) == 4
    every = [p for m in (2, 4, 8) for p in top_plans(profile, 4, 2, chunks=m)]
    assert [p.value for p in plans] == sorted(p.value for p in every)[:4]


def test_a_profile_of_several_sizes_keeps_its_identity() -> None:
    """At its own number of micro-batches a profile is itself."""
    profile = sized([1.0] * 2, [1.0] * 2)
    assert at_chunks(profile, None) == at_chunks(profile, 8) == (profile, ())


def test_a_mini_batch_that_grows_has_full_micro_batches() -> None:
    """One note says that it does; none says that some have fewer rows."""
    for rows, chunks in ((1, 8), (2, 5)):
        profile = gb.Profile.from_costs([3.0, 1.0, 4.0], rows=rows, chunks=4)
        notes = " ".join(gb.solve(profile, 3, chunks=chunks).notes)
        assert f"the mini-batch {rows * chunks}" in notes and "has micro-batches of" not in notes
    uneven = replace(gb.Profile.from_costs([3.0, 1.0, 4.0], rows=4, chunks=4), mini_batch_rows=13)
    assert "has micro-batches of 4 and of 3 rows" in " ".join(gb.solve(uneven, 3).notes)
