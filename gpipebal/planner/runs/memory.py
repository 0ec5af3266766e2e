"""The peak memory of every run of layers at once, in the form that solvers use.

The same figures as `gpipebal.memory.partition_memory`, which walks through one partition: a test
compares the two for all runs of many chains. A walk through a row of the schedule becomes a short
list of *moments* that can be the highest, each a sum of tables over all runs: what the other
micro-batches hold, and the most that the one at work needs.

Most of what waits for other partitions is known for a run by itself. Some is not: over how many
partitions a skip connection goes depends on the cuts between, and what earlier partitions in the
same memory hold depends on their modes; and an output that waits may be in the graph of its
micro-batch anyway. So peaks are bounded from below or from above, whatever the other partitions
are. The bounds differ where a skip connection may go past a partition, where partitions share a
memory, and sometimes where a forward is the highest moment; elsewhere they are the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.planner.runs.chain import LayerChain
from gpipebal.planner.runs.moments import RowMoment, moments_of
from gpipebal.planner.runs.peaks import RunPeaks
from gpipebal.planner.runs.storage_tables import StorageTables
from gpipebal.problem import Memory
from gpipebal.profile import LayerProfile, Profile
from gpipebal.schedule import (
    CHECKPOINT_MODES,
    CheckpointMode,
    check_schedule,
    make_schedule,
    order_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["KnownMemory", "RunMemory"]

#: Most entries of one table: longer chains are done in several pieces.
_MOST_ENTRIES = 2**20

#: Most bytes of peaks that are kept for further questions.
_MOST_KNOWN = 2**29


class KnownMemory:
    """Memory of all runs of one chain's layers, worked out once for all questions about it.

    The most recent ones are kept, as many as fit into some hundred MiB, and one in any case.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Memory, RunMemory]] = {}

    def of(self, profile: Profile, **asked: Any) -> Memory:
        """Return what a `RunMemory` tells, or told earlier.

        Args:
            profile: The chain, at any of its numbers of rows.
            asked: As for `RunMemory`.

        Example:
            >>> profile, known = Profile.from_costs([1.0, 1.0]), KnownMemory()
            >>> asked = {"chunks": 4, "loss_inside": True, "shared_memory": False}
            >>> known.of(profile, **asked) is known.of(profile, **asked)
            True
        """
        key = (profile.rows, *sorted(asked.items()))
        found = self._known.pop(key, None)
        for _, runs in self._known.values():
            runs.forget_tables()
        if found is None:
            runs = RunMemory(profile, **asked)
            found = runs.memory, runs
        self._known[key] = found
        total = sum(runs.n_bytes for _, runs in self._known.values())
        for oldest in list(self._known)[:-1]:
            if total <= _MOST_KNOWN:
                break
            total -= self._known.pop(oldest)[1].n_bytes
        return found[0]


class RunMemory:
    """The peak memory of every run of layers.

    The peak of a run depends on its first and last layer, and on the row of the schedule that its
    partition has. Under ``'gpipe'`` all rows are alike; under ``'1f1b'`` earlier partitions have
    more micro-batches in flight.

    Args:
        profile: Costs of the layers for one micro-batch.
        chunks: Micro-batches of a mini-batch.
        loss_inside: Whether the last partition computes the loss of each micro-batch.
        shared_memory: Whether all partitions live in one memory.
        most: Whether peaks are bounded from above, whatever the other partitions are like; if not,
            they are bounded from below.
        schedule: One of those that `GPipe` runs, `gpipebal.schedule.SCHEDULES`.
        n_partitions: Number of partitions; under ``'gpipe'`` it matters for skip connections only.
        gradients_exist: Whether the parameters have gradients before the step.

    Raises:
        UnsupportedPlanError: another schedule.

    Complexity:
        O(N^2) in numpy for N layers and each mode, of which there are few; in addition O(N^2) for
        every skip connection and every use of a tied parameter, and O(N l) for every cut where
        values are passed on that l layers have handed through. Where partitions share a memory,
        O(N^2) for every cut where a storage is passed on that a layer before the last one saves.
        All of this for every row that is unlike the others: under ``'gpipe'`` one, under
        ``'1f1b'`` every partition's.

    Example:
        >>> profile = Profile.from_costs([1.0, 1.0], saved_bytes=[100, 10], output_bytes=[8, 2])
        >>> runs = RunMemory(profile, chunks=4, loss_inside=True, shared_memory=False)
        >>> runs.rows(0, 0, "never").tolist(), runs.rows(0, 0, "except_last").tolist()
        ([416, 456], [116, 120])
    """

    def __init__(
        self,
        profile: Profile,
        *,
        chunks: int,
        loss_inside: bool,
        shared_memory: bool,
        most: bool = True,
        schedule: str = "gpipe",
        n_partitions: int = 1,
        gradients_exist: bool = False,
    ) -> None:
        self._profile, self._chunks = profile, chunks
        self._most = most
        self._schedule, self._n_partitions = check_schedule(schedule), n_partitions
        #: A label for the row of each partition: equal ones have equal peaks.
        self._labels = self._find_labels()
        self._gradients_exist = gradients_exist
        loss = loss_of_micro_batch(profile) if loss_inside else None
        self._chain = LayerChain(profile, loss, shared_memory)
        #: No sum exceeds it.
        self._largest = self._largest_sum()
        self._kind = np.int64 if self._largest < 2**60 else object
        self._tables: RunPeaks | None = None
        self._peaks: dict[tuple[CheckpointMode, int], list[Table]] = {}

    @property
    def memory(self) -> Memory:
        """The peaks in the form that solvers use."""
        return Memory(self.rows, alike="all" if self._labels is None else self._labels)

    @property
    def n_bytes(self) -> int:
        """Bytes of the peaks that are known."""
        return sum(row.nbytes for rows in self._peaks.values() for row in rows)

    def forget_tables(self) -> None:
        """Keep the peaks that are known, and drop the tables that others would be made from."""
        self._tables = None

    def rows(self, first: int, partition: int, mode: CheckpointMode) -> Any:
        """Return the peaks of the runs from a layer on; see `gpipebal.problem.Memory`."""
        label = 0 if self._labels is None else self._labels[partition]
        key = (mode, label)
        if key not in self._peaks:
            self._peaks[key] = self._all_rows(mode, label)
        return self._peaks[key][first]

    def _find_labels(self) -> tuple[int, ...] | None:
        """Label the partitions by their rows; None: all rows are alike.

        Under 1F1B a label is the number of forwards that a partition runs before it alternates;
        under a schedule without such a rule, it is the first partition with that row, whatever the
        mode.
        """
        n, chunks = self._n_partitions, self._chunks
        if self._schedule == "gpipe":
            return None
        if self._schedule == "1f1b":
            return tuple(min(chunks, n - 1 - j) for j in range(n))
        rows = [make_schedule(self._schedule, n, chunks, mode).rows for mode in CHECKPOINT_MODES]
        first: dict[tuple[tuple[tuple[str, int], ...], ...], int] = {}
        return tuple(
            first.setdefault(tuple(tuple(action[1:] for action in row[j]) for row in rows), j)
            for j in range(n)
        )

    def _moments(self, mode: CheckpointMode, label: int) -> list[RowMoment]:
        """Return the moments of the rows with a label that can be the highest."""
        n_partitions, partition, ahead = self._n_partitions, label, None
        in_phases = self._schedule == "gpipe"
        if in_phases:
            n_partitions = 1
        elif self._schedule == "1f1b":
            n_partitions, partition, ahead = label + 1, 0, label + 1
        return moments_of(
            order_of(self._schedule, n_partitions, self._chunks, mode),
            partition,
            loss_inside=self._chain.loss is not None,
            most=self._most,
            in_phases=in_phases,
            ahead=ahead,
            hops=max(1, self._n_partitions - 1),
            held=self._chain.shared_memory,
            gradients_exist=self._gradients_exist,
        )

    def _largest_sum(self) -> int:
        """Bound all sums from above."""
        profile, flow = self._profile, self._profile.gradient_flow
        names = [each.name for each in fields(LayerProfile) if each.name.endswith("_bytes")]
        whole = profile.step.whole_loss
        layers = [*self._chain.layers, *([] if whole is None else [whole])]
        one = sum(getattr(layer, name) or 0 for layer in layers for name in names)
        for found in (flow.memory, flow.copies, flow.sums):
            one += sum(each.n_bytes for each in found)
        one += 4 * (sum(profile.storages) + sum(self._chain.skip_bytes))
        return one * (3 * self._chunks + 8)

    def _all_rows(self, mode: CheckpointMode, label: int) -> list[Table]:
        moments = self._moments(mode, label)
        rows: list[Table] = []
        for piece in self._pieces():
            peaks = piece.peaks(moments, most=self._most, gradients_exist=self._gradients_exist)
            # Copies, so that the rest of the tables is not kept.
            rows += [peaks[row, first:].copy() for row, first in enumerate(piece.firsts.tolist())]
        return rows

    def _pieces(self) -> Iterator[RunPeaks]:
        """Yield tables of all runs, some first layers at a time; those of short chains are kept."""
        if self._tables is not None:
            yield self._tables
            return
        firsts = range(self._profile.n_layers)
        n_rows = max(1, _MOST_ENTRIES // (len(self._chain.layers) + 1))
        for low in firsts[::n_rows]:
            tables = StorageTables(self._chain, firsts[low : low + n_rows], self._kind)
            piece = RunPeaks(tables, self._chunks, self._largest)
            if len(firsts) <= n_rows:
                self._tables = piece
            yield piece
