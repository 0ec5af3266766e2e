"""A profile's costs for a number of micro-batches, at the rows that each of them then has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import BalanceError, ProfileError
from gpipebal.plan import Plan
from gpipebal.profile import Profile
from gpipebal.units import count

__all__ = [
    "as_planned",
    "at_chunks",
    "check_planned",
    "chunk_candidates",
    "other_layers",
    "other_names",
]


def as_planned(profile: Profile, plan: Plan) -> Profile:
    """Return the costs that a plan was made from, at its one number of rows.

    Args:
        profile: The profile that was planned; or, for a plan of a grid, the profile of which each
            replica was given its share of the rows.
        plan: The plan.

    Example:
        >>> from gpipebal.planner import solve
        >>> profile = Profile.from_costs([3.0], rows=2, chunks=4)
        >>> as_planned(profile, solve(profile, 1, chunks=8)).chunks
        4
    """
    found = None
    if plan.chunks <= profile.mini_batch_rows or not profile.other_sizes:
        found = at_chunks(profile, plan.chunks)[0]
    if found is None or found.rows != plan.rows:
        share = plan.mini_batch_rows or plan.rows * plan.chunks
        found = replace(profile.at_rows(plan.rows, mini_batch_rows=share), chunks=plan.chunks)
    return replace(found, other_sizes=())


def check_planned(profile: Profile, plan: Plan) -> None:
    """Refuse a plan of other layers than a profile's.

    Raises:
        BalanceError: the plan has other layers, or layers that have changed.
        KindError: `profile` is not a Profile, or `plan` no Plan.

    Example:
        >>> from gpipebal.planner import solve
        >>> one, other = (Profile.from_costs([3.0], names=[name]) for name in "ab")
        >>> check_planned(one, solve(other, 1))
        Traceback (most recent call last):
        gpipebal.errors.BalanceError: plan is of another chain: its layer 0 is 'b' (expected 'a').
        Fix: give the profile that the plan was made from.
    """
    check_kind("profile", profile, Profile)
    check_kind("plan", plan, Plan)
    what = other_layers(profile, plan)
    if what:
        raise BalanceError(
            f"plan is of another chain: {what}.\nFix: give the profile that the plan was made from."
        )


def other_layers(profile: Profile, plan: Plan) -> str:
    """Say how the layers of a plan differ from a profile's; empty if they are the same."""
    prints = [one for part in plan.partitions for one in part.fingerprints]
    known = [layer.fingerprint for layer in profile.layers]
    what = other_names(plan.names, profile.names)
    if what or prints == known:
        return what
    k = next(k for k, one in enumerate(known) if prints[k : k + 1] != [one])
    return f"its layer {k}, {plan.names[k]!r}, has another fingerprint than the profile's"


def other_names(names: Sequence[str], expected: Sequence[str]) -> str:
    """Say how names of layers differ from those expected; empty if they do not.

    Example:
        >>> other_names(["a", "c"], ["a", "b"])
        "its layer 1 is 'c' (expected 'b')"
    """
    if len(names) != len(expected):
        return f"it has {count(len(names), 'layer')} (expected {len(expected)})"
    for k, (name, wanted) in enumerate(zip(names, expected, strict=True)):
        if name != wanted:
            return f"its layer {k} is {name!r} (expected {wanted!r})"
    return ""


def at_chunks(profile: Profile, chunks: int | None) -> tuple[Profile, tuple[str, ...]]:
    """Return a profile's costs for a number of micro-batches, and what a reader should know.

    If the profile was taken at several numbers of rows, its mini-batch stays as it is, and is
    divided into that many micro-batches, of ``ceil(mini_batch_rows / chunks)`` rows at most. If it
    was taken at one number of rows only, the cost of other micro-batches is not known: each one
    has the profile's rows, and the mini-batch grows with their number.

    Args:
        profile: Costs for one micro-batch.
        chunks: Micro-batches per mini-batch; None: the profile's.

    Raises:
        BalanceError: the mini-batch has fewer rows than `chunks`.

    Example:
        >>> small = Profile.from_costs([3.0], rows=2, chunks=4)
        >>> both = replace(small, other_sizes=(Profile.from_costs([5.0], rows=4),))
        >>> at_chunks(both, 2)[0].layers[0].forward_time, at_chunks(small, 2)[0].rows
        (5.0, 2)
    """
    if chunks is None or chunks == profile.chunks:
        return profile, ()
    if not profile.other_sizes:
        note = (
            f"The profile knows micro-batches of {count(profile.rows, 'row')} only, so each of "
            f"the {chunks} has as many, and the mini-batch {chunks * profile.rows}."
        )
        return profile, (note,) if profile.mini_batch_rows != chunks * profile.rows else ()
    if chunks > profile.mini_batch_rows:
        raise BalanceError(
            f"chunks are more than the mini-batch has rows: chunks={chunks} (expected at most "
            f"{profile.mini_batch_rows}, the rows of the mini-batch that was profiled).\n"
            f"Fix: chunks={profile.mini_batch_rows}, or profile a larger sample."
        )
    rows = -(-profile.mini_batch_rows // chunks)
    sized = profile.at_rows(rows)
    if sized.chunks != chunks:
        sized = replace(sized, chunks=chunks)
    about = sized.provenance.get("at_rows")
    notes: list[str] = []
    if isinstance(about, dict):
        measured = sorted({profile.rows, *(other.rows for other in profile.other_sizes)})
        known = ", ".join(map(str, measured))
        how = (
            "lies beyond them: its costs are extrapolated"
            if about.get("extrapolated")
            else "lies between them"
        )
        size = count(rows, "row")
        notes.append(f"The profile was taken at {known} rows; a micro-batch of {size} {how}.")
    return sized, tuple(notes)


def chunk_candidates(profile: Profile) -> list[int]:
    """List the numbers of micro-batches worth trying, in ascending order.

    One for each number of rows that a micro-batch can have within the sizes that were profiled:
    the smallest one, as more would only make micro-batches that are not full.

    Raises:
        ProfileError: the profile has one size only, so that it does not tell what others cost.

    Example:
        >>> sizes = [Profile.from_costs([1.0], rows=rows) for rows in (1, 4, 8)]
        >>> whole = replace(sizes[2], other_sizes=(sizes[0], sizes[1]), mini_batch_rows=8)
        >>> chunk_candidates(whole)
        [1, 2, 3, 4, 8]
    """
    sizes = sorted({profile.rows, *(other.rows for other in profile.other_sizes)})
    if len(sizes) < 2:
        raise ProfileError(
            "profile does not tell what other micro-batches cost: it knows one size, "
            f"rows={profile.rows} (expected two or more where their number is open).\n"
            "Fix: profile_model(model, sample, chunks=..., rows=None), which measures several, or "
            "chunks=None."
        )
    whole = profile.mini_batch_rows
    found: dict[int, int] = {}
    for chunks in range(1, whole + 1):
        rows = -(-whole // chunks)
        if sizes[0] <= rows <= sizes[-1]:
            found.setdefault(rows, chunks)
        elif rows < sizes[0]:
            break
    # The profile's own always counts: it was measured.
    found.setdefault(profile.rows, profile.chunks)
    return sorted(set(found.values()))
