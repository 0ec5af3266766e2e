"""Drawn problems with devices, links, memory and rules, small enough for brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hypothesis import strategies as st

from gpipebal.problem import Device, Links, Memory, Problem, Rules, layer_memory
from gpipebal.schedule import CheckpointMode

__all__ = ["memory_of", "rules_of", "whole_problems"]

MODES = ("never", "except_last", "always")


def _column(draw: st.DrawFn, length: int, floats: bool) -> list[Any]:
    """Draw times: many ties, many zeros, a ratio of a thousand million, or floats."""
    kinds: list[st.SearchStrategy[Any]] = [
        st.integers(0, 2),
        st.integers(0, 30),
        st.sampled_from([0, 0, 1, 10**9]),
    ]
    if floats:
        kinds.append(st.floats(0, 1, allow_subnormal=False))
    return draw(st.one_of([st.lists(k, min_size=length, max_size=length) for k in kinds]))


def _memory(draw: st.DrawFn, n_layers: int, n_partitions: int, chunks: int) -> Memory:
    """Draw sums over layers, or a table in which longer runs may need less."""

    def column(largest: int) -> list[int]:
        return draw(st.lists(st.integers(0, largest), min_size=n_layers, max_size=n_layers))

    if draw(st.booleans()):
        return layer_memory(column(4), column(6), column(9), chunks=chunks, transient=column(3))
    table = {mode: [column(20)[: n_layers - start] for start in range(n_layers)] for mode in MODES}
    ends = draw(st.integers(0, 5))

    def peak(first: int, end: int, partition: int, mode: Any) -> int:
        at_end = ends if partition in (0, n_partitions - 1) else 0
        return table[mode][first][end - first - 1] + at_end

    return memory_of(peak, n_layers)


def memory_of(
    peak: Callable[[int, int, int, CheckpointMode], int],
    n_layers: int,
    alike: Literal["all", "between"] = "between",
) -> Memory:
    """Make a memory from a function that is asked about one run at a time."""

    def rows(first: int, partition: int, mode: CheckpointMode) -> list[int]:
        return [peak(first, end, partition, mode) for end in range(first + 1, n_layers + 1)]

    return Memory(rows, alike)


@st.composite
def rules_of(draw: st.DrawFn, n_layers: int, n_partitions: int) -> Rules:
    """Draw rules of all kinds, which may leave no split."""
    layer = st.integers(0, n_layers - 1)
    one, two = sorted((draw(layer), draw(layer)))
    return Rules(
        no_cut=draw(st.lists(layer, max_size=2)),
        keep_together=[(one, two)] if draw(st.booleans()) else [],
        pin=draw(st.dictionaries(layer, st.integers(0, n_partitions - 1), max_size=1)),
        max_layers=draw(st.one_of(st.none(), st.integers(1, n_layers))),
        min_layers=draw(st.one_of(st.none(), st.none(), st.integers(1, n_layers))),
    )


@st.composite
def whole_problems(
    draw: st.DrawFn, *, always: bool = True, floats: bool = True, largest: int = 6
) -> Problem:
    """Draw a problem with any of its parts."""
    n_layers = draw(st.integers(1, largest))
    n_partitions = draw(st.integers(1, min(n_layers, 4)))
    chunks = draw(st.integers(1, 4))
    modes = MODES if always else MODES[:2]
    checkpoint = draw(
        st.one_of(
            st.sampled_from((*modes, "auto")),
            st.lists(st.sampled_from(modes), min_size=n_partitions, max_size=n_partitions),
        )
    )
    memory = _memory(draw, n_layers, n_partitions, chunks) if draw(st.booleans()) else None
    devices = None
    if memory is not None or draw(st.booleans()):
        limits = st.one_of(st.none(), st.integers(5, 60)) if memory else st.none()
        same = draw(st.booleans())
        types = [(draw(st.sampled_from([1, 2, 3, 0.5] if floats else [1, 2, 3])), None)]
        types.append((1, tuple(tuple(_column(draw, n_layers, False)) for _ in range(3))))
        types.append((draw(st.sampled_from([1, 2])), None))
        few = [(*draw(st.sampled_from(types)), draw(limits)) for _ in range(2)]
        devices = []
        for _ in range(n_partitions):
            slowness, times, limit = few[0] if same else draw(st.sampled_from(few))
            devices.append(Device(slowness, limit, *(times or ())))
    links = None
    if draw(st.booleans()):
        there, back = (_column(draw, n_layers - 1, floats) for _ in range(2))
        links = Links(there, back, overlaps=draw(st.booleans()))
    rules = None
    if draw(st.integers(0, 3)) == 0:
        rules = draw(rules_of(n_layers, n_partitions))
    return Problem(
        *(_column(draw, n_layers, floats) for _ in range(3)),
        n_partitions,
        chunks,
        checkpoint,  # type: ignore[arg-type]
        devices=devices,
        any_order=devices is not None and draw(st.booleans()),
        links=links,
        memory=memory,
        rules=rules,
        n_frozen=draw(st.one_of(st.just(0), st.integers(1, n_layers))),
    )
