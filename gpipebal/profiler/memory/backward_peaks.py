"""Largest memory of a layer's backward, in the places that the layer can have in a partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import is_out_of_memory
from gpipebal.profiler.memory.layer_run import (
    BackwardRun,
    Given,
    GivenMemory,
    Surroundings,
    largest,
)

__all__ = ["BackwardPeaks", "FrontPeaks", "find_peaks"]

#: What holds the gradients that come in, in the order of `FrontPeaks`.
_GIVEN: tuple[Given, ...] = ("held", "views", "own", "parts")

#: A backward where no gradients of parameters exist, and where they do.
_Pair = tuple[BackwardRun, BackwardRun]


class FrontPeaks(NamedTuple):
    """Backwards of a layer with the same in front of it: a cut, or another layer.

    Attributes:
        last: Of the last layer of a partition: what it is given is held to its end.
        before_views: With a layer behind it that hands back views, or what others hold too.
        before_own: With one that hands back memory which nothing else holds: torch may add to that
            in place.
        before_parts: With one that hands back parts of something larger.
    """

    last: _Pair
    before_views: _Pair
    before_own: _Pair
    before_parts: _Pair

    def moments_held(self, copied: int, *, parted: bool) -> list[list[int]]:
        """Return the moments of the last layer of a partition: without gradients, and with.

        Args:
            copied: Bytes of copies of gradients that are handed through.
            parted: Whether it is given parts of something larger.
        """
        found = []
        for one, parts in zip(self.last, self.before_parts, strict=True):
            moments = one.moments(GivenMemory({}))
            if parted:
                moments += [copied + rest for rest in parts.moments_held()]
            found.append(moments)
        return found

    def moments_before(self, given_own: bool, memory: Sequence[GivenMemory]) -> list[list[int]]:
        """Return those with another layer behind it; arguments as of `GivenGradients`."""
        pair = self.before_own if given_own else self.before_views
        if any(one.is_parted(pair[0].begun) for one in memory):
            pair = self.before_parts
        return [[n for one in memory for n in peak.moments(one)] for peak in pair]


class BackwardPeaks(NamedTuple):
    """Peaks of a layer's backward.

    Attributes:
        first: In the first layer of a partition: the gradients of its inputs are kept, and copied
            if something else holds their memory.
        inside: With another layer in front of it, which is given these gradients as they are; the
            same as `first` if nothing is copied.
        copied_bytes: How much of `first` in the last layer is copies of what is handed through.
        stashed_sum_bytes: How much more it needs if what it is given is stashed too.
        lacks_parts: Whether there was no memory for parts of something larger: `before_parts` is
            then `before_views`.
    """

    first: FrontPeaks
    inside: FrontPeaks
    copied_bytes: int
    stashed_sum_bytes: int
    lacks_parts: bool

    @property
    def held(self) -> BackwardRun:
        """The backward in a partition of this layer alone, where no gradients exist."""
        return self.first.last[0]

    @property
    def new(self) -> int:
        """Bytes where no gradients of parameters exist, in a partition of this layer alone."""
        return self.held.alone

    @property
    def added(self) -> int:
        """The same where gradients exist already."""
        return self.first.last[1].alone

    def hands_back_own(self, given: Mapping[int, bool], all_own: bool) -> dict[int, bool]:
        """Tell for each input's gradient, by place, whether nothing else holds its memory.

        Args:
            given: The same of what it is given for its output, by place.
            all_own: Whether it is so of all that it is given, also for what it stashes.
        """
        views, own = self.first.before_views[0], self.first.before_own[0]
        # In these runs what is handed through is not handed back at all, also if it is a view.
        through = self.held.through
        found = dict.fromkeys((*views.hands_back, *own.hands_back, *through), False)
        found |= (own if all_own else views).hands_back_own
        as_it_came = {place for place, is_own in self.held.hands_back_own.items() if is_own}
        found |= {p: given.get(at, False) for p, (_, at) in through.items() if p in as_it_came}
        return found

    def columns(self, *, given_own: bool, memory: Sequence[GivenMemory]) -> dict[str, Any]:
        """Return the columns of a layer profile; arguments as of `GivenGradients`."""
        parted = self._is_parted(memory)
        held = self.first.moments_held(self.copied_bytes, parted=parted)
        held_inside = self.inside.moments_held(0, parted=parted)
        chained = self.first.moments_before(given_own, memory)
        inside = self.inside.moments_before(given_own, memory)
        kinds = ("backward", "accumulating", "chained", "chained_accumulating")
        found: dict[str, Any] = {}
        for kind, moments in zip(kinds, (*held, *chained), strict=True):
            found[f"{kind}_peak_bytes"] = largest(moments)
            found[f"{kind}_moments"] = tuple(moments)
        copied = _less(held, held_inside)
        return {
            **found,
            "copied_bytes": self.copied_bytes,
            "stashed_sum_bytes": self.stashed_sum_bytes,
            "cut_copied_bytes": max(0, copied - self.copied_bytes),
            "chained_cut_copied_bytes": _less(chained, inside),
        }

    def is_doubtful(self, memory: Sequence[GivenMemory]) -> bool:
        """Tell whether it is given parts, and there was no memory to see what it does with them."""
        return self.lacks_parts and self._is_parted(memory)

    def _is_parted(self, memory: Sequence[GivenMemory]) -> bool:
        return any(one.is_parted(self.first.before_parts[0].begun) for one in memory)


def find_peaks(
    run: Callable[[Surroundings], BackwardRun],
    held: BackwardRun,
    parameters: Iterable[Tensor],
    *,
    finds_inside: bool,
    at_other_rows: BackwardPeaks | None = None,
) -> BackwardPeaks:
    """Run a layer in all places that it can have.

    Where two of these made no difference with another number of rows, they are taken to make none
    with this one.

    Args:
        run: Runs it in given surroundings.
        held: How it ran in a partition of this layer alone.
        parameters: Its parameters. Their gradients are those of `held`; they are dropped.
        finds_inside: Whether to look at it with another layer in front of it, if there something
            is not copied.
        at_other_rows: What was found with another number of rows; None: nothing.

    Complexity:
        Up to eight forwards and backwards besides `held`, and as many again with a layer in front;
        as many as made a difference with other rows.
    """
    through = {at for _, at in held.through.values()}
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    lacks_parts = at_other_rows is not None and at_other_rows.lacks_parts

    def again(
        given: Given, inside: bool, *, keeps: bool = False, stashed: Collection[int] = ()
    ) -> BackwardRun:
        nonlocal lacks_parts
        # With a layer behind it what is handed through is not copied, so it is left out.
        around = Surroundings(given, inside, () if given == "held" else through, stashed)
        found = None
        try:
            found = run(around)
        except ProfileError as error:
            if given != "parts":
                raise
            # Some kernels refuse gradients with gaps, and would in a chain too.
            lacks_parts = lacks_parts or is_out_of_memory(error)
        # The parameters' gradients that a backward has made are none of the next one's.
        if not keeps:
            drop()
        if found is None:  # here the error is gone, and with it all that the failed run had made
            found = run(around._replace(given="views"))
            if not keeps:
                drop()
        return found

    def drop() -> None:
        for parameter in parameters:
            parameter.grad = None

    def with_front(held: BackwardRun, inside: bool, known: FrontPeaks | None) -> FrontPeaks:
        """Find peaks; gradients of parameters are those of `held`."""
        # Where gradients exist, and then where there are none.
        places = [(given, True) for given in _GIVEN] if parameters else []
        places += [(given, False) for given in _GIVEN[1:]]
        found = [held]
        for (given, keeps), like in zip(places, _like_before(known, len(places)), strict=True):
            if not keeps:
                drop()
            found.append(again(given, inside, keeps=keeps) if like is None else found[like])
        drop()
        new = [held, *found[-len(_GIVEN) + 1 :]]
        pairs = zip(new, found[1 : len(_GIVEN) + 1] if parameters else new, strict=True)
        return FrontPeaks(*pairs)

    known = at_other_rows
    first, copied = with_front(held, False, known and known.first), 0
    if through:
        copied = max(0, held.alone - run(Surroundings(without=through)).alone)
        drop()
    inside, more = first, 0
    if held.has_copied and finds_inside:
        inside = with_front(run(Surroundings(inside=True)), True, known and known.inside)
    if held.used_again and finds_inside:
        # The first piece of the gradient is added to what has come before, and not the second.
        for given, (alone, _) in zip(_GIVEN, inside, strict=True):
            stashed = again(given, True, stashed=held.used_again)
            more = max(more, stashed.alone - alone.alone)
    return BackwardPeaks(first, inside, copied, more, lacks_parts)


def _like_before(known: FrontPeaks | None, n_places: int) -> list[int | None]:
    """Return for each place but the first which one before it is like it; None: none is.

    Args:
        known: What was found in these places with other rows; None: nothing is like anything.
        n_places: How many there are.
    """
    if known is None:
        return [None] * n_places
    new, added = zip(*known, strict=True)
    outlines = [run.outline for run in (new[0], *(added if n_places > len(new) else ()), *new[1:])]
    first = [outlines.index(outline) for outline in outlines]
    return [like if like < place else None for place, like in enumerate(first)][1:]


def _less(with_copies: Iterable[list[int]], without: Iterable[list[int]]) -> int:
    """Return the least of what is copied in several ways; nothing if one needs less with copies."""
    pairs = zip(with_copies, without, strict=True)
    return max(0, min(largest(one) - largest(other) for one, other in pairs))
