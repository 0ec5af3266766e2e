"""The makespan under limits, where its sum differs from split to split.

With links, or devices of different speed, the makespan has three parts that a split decides: what
is passed once, ``once``, and (chunks - 1) times the largest forward and the largest backward. All
splits are put into a box: both maxima lie between two ends. The least ``once`` under the upper
ends, and the lower ends themselves, bound every makespan in the box from below; the split that
attains this least ``once`` bounds the best one from above. That bound then tightens the box: where
less is left for the two maxima, the upper ends get smaller; with smaller upper ends, the lower ends
get larger; and so on, until the box is empty or no longer changes. A box that no longer changes is
halved. The box with the least bound comes first, so the bound of the whole search is known at any
time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.sets.levels import Step
from gpipebal.solvers.sets.reachability import BestPath, Path, Search, TimeIsUpError

__all__ = ["least_makespan", "least_once"]


class _Box(NamedTuple):
    first: tuple[int, int]
    second: tuple[int, int]


def least_makespan(
    search: Search, repeats: int, deadline: Deadline = NO_DEADLINE
) -> BestPath | None:
    """End the mini-batch as early as possible; None if there is no split.

    Minimises once + repeats * (largest forward + largest backward_phase) over the splits allowed.
    Of splits that are equally good it takes the first that the search meets, always the same.

    Args:
        search: Where to search.
        repeats: Number of micro-batches less one.
        deadline: When it is up, the best split so far is returned, as soon as there is one.

    Complexity:
        A few searches and one table of N K ends for each box; the number of boxes depends on how
        much `once` varies, some to some hundreds.

    Source:
        Own: branch and bound over two thresholds. Alpa (OSDI 2022, section 5.2) enumerates the
        values of one.

    Example:
        >>> from gpipebal.problem import Links, Problem
        >>> from gpipebal.solvers.sets.levels import Levels
        >>> links = Links([9, 0], [9, 0])
        >>> problem = Problem([1, 1, 1], [1, 1, 1], [0] * 3, 2, chunks=2, links=links)
        >>> least_makespan(Search(Levels(problem)), 1).path.bounds
        (0, 2, 3)
    """
    start = search.smallest("load")
    if start.path is None:
        return None
    best = start.path
    value = _makespan(best, repeats)
    bound = repeats * start.value
    search.deadline = deadline
    try:
        tickets = count()
        least = search.smallest("forward").value, search.smallest("backward_phase").value
        path = least_once(search, {})
        assert path is not None
        bound = _once(path) + repeats * max(sum(least), start.value)
        if _makespan(path, repeats) < value:
            best, value = path, _makespan(path, repeats)
        if not repeats:
            return BestPath(value, value, best)
        # No more than this is left for both maxima together in a better split.
        room = (value - 1 - _once(path)) // repeats
        whole = _Box((least[0], room - least[1]), (least[1], room - least[0]))
        boxes = [(bound, next(tickets), whole)]
        while boxes and boxes[0][0] < value:
            bound, _, box = heapq.heappop(boxes)
            search.check_time()
            box, least_there, better = _tighten(search, repeats, box, value, start.value)
            if better is not None:
                best, value = better, _makespan(better, repeats)
            for half in _halves(box):
                heapq.heappush(boxes, (least_there, next(tickets), half))
    except TimeIsUpError:
        return BestPath(value, min(bound, value), best)
    finally:
        search.deadline = NO_DEADLINE
    return BestPath(value, value, best)


def _tighten(
    search: Search, repeats: int, box: _Box, value: int, least_both: int
) -> tuple[_Box, int, Path | None]:
    """Shrink a box to what can be better than the best known makespan.

    Returns:
        The box, empty if nothing in it can; a lower bound of what is in it; and the best split
        that was met on the way, if it is better than `value`.
    """
    better: Path | None = None
    empty = _Box((1, 0), (1, 0))
    while True:
        limits = {"forward": box.first[1], "backward_phase": box.second[1]}
        path = least_once(search, limits)
        if path is None:
            return empty, value, better
        if _makespan(path, repeats) < value:
            better, value = path, _makespan(path, repeats)
        # No more than this is left for both maxima together.
        room = (value - 1 - _once(path)) // repeats
        first = (box.first[0], min(box.first[1], room - box.second[0]))
        second = (box.second[0], min(box.second[1], room - box.first[0]))
        if room < least_both or first[0] > first[1] or second[0] > second[1]:
            return empty, value, better
        found = search.smallest(
            "forward", {"backward_phase": second[1]}, at_least=first[0], at_most=first[1]
        )
        if found.path is None:
            return empty, value, better
        first = (max(first[0], found.value), first[1])
        found = search.smallest(
            "backward_phase", {"forward": first[1]}, at_least=second[0], at_most=second[1]
        )
        if found.path is None:
            return empty, value, better
        second = (max(second[0], found.value), second[1])
        shrunk = _Box(first, second)
        if shrunk == box or _size(shrunk) * 2 > _size(box):
            lower = _once(path) + repeats * max(first[0] + second[0], least_both)
            return shrunk, lower, better
        box = shrunk


def _size(box: _Box) -> int:
    return box.first[1] - box.first[0] + box.second[1] - box.second[0]


def _halves(box: _Box) -> list[_Box]:
    """Halve a box along its longer side; a box of one point is done.

    Example:
        >>> _halves(_Box((0, 5), (1, 2)))
        [_Box(first=(0, 2), second=(1, 2)), _Box(first=(3, 5), second=(1, 2))]
    """
    first, second = box
    if first[0] > first[1] or _size(box) == 0:
        return []
    if first[1] - first[0] >= second[1] - second[0]:
        middle = sum(first) // 2
        return [_Box((first[0], middle), second), _Box((middle + 1, first[1]), second)]
    middle = sum(second) // 2
    return [_Box(first, (second[0], middle)), _Box(first, (middle + 1, second[1]))]


def _once(path: Path) -> int:
    return sum(option.once.of(start, end) for option, start, end in path.runs)


def _makespan(path: Path, repeats: int) -> int:
    return _once(path) + repeats * (path.most("forward") + path.most("backward_phase"))


def least_once(search: Search, limits: Mapping[str, int]) -> Path | None:
    """Find the split that keeps all limits and has the least ``once``; of equal ones the leftmost.

    Complexity:
        O(w) steps for windows of w places in all where most runs are allowed, and up to as many
        more as runs have ends.
    """
    found = search.reachable(limits)
    if found is None:
        return None
    allowed, reached = found
    levels = search.levels
    after: dict[int, dict[int, int]] = {0: {levels.n_layers: 0}}
    choices: list[dict[tuple[int, int], tuple[int, Step]]] = []
    for k in range(levels.n_partitions - 1, -1, -1):  # k: partition
        here: dict[int, dict[int, int]] = {}
        chosen: dict[tuple[int, int], tuple[int, Step]] = {}
        for step in levels.steps[k]:
            search.check_time()
            behind = after.get(step.next_state)
            places = reached[k].get(step.state, 0)
            if not behind or not places:
                continue
            cost = levels.kinds[step.kind][0].once
            # The cheapest ends first: the first one that is allowed is the best.
            ranked = sorted((cost.ends[end] + least, end) for end, least in behind.items())
            masks = allowed[step.kind]
            known = here.setdefault(step.state, {})
            for start in range(levels.n_layers):
                if not places >> start & 1:
                    continue
                ends = masks[start]
                for total, end in ranked:
                    if ends >> end & 1:
                        total -= cost.starts[start]
                        old = known.get(start)
                        if old is None or (total, end) < (old, chosen[step.state, start][0]):
                            known[start] = total
                            chosen[step.state, start] = end, step
                        break
        after = here
        choices.append(chosen)
    return search.follow(choices, limits)
