"""The highest of a few moments, for all runs of layers at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.cell import Cell
from gpipebal.memory.layer_peaks import (
    backward_peak,
    copied,
    uncopied_peak,
)
from gpipebal.memory.loss import around_loss
from gpipebal.planner.runs.ends import RunEnds
from gpipebal.planner.runs.forward_peaks import forward_peaks
from gpipebal.planner.runs.gradient_tables import GradientTables
from gpipebal.planner.runs.highest import highest_before
from gpipebal.planner.runs.moments import RowMoment
from gpipebal.planner.runs.storage_tables import StorageTables
from gpipebal.planner.runs.tie_tables import TieTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["RunPeaks"]


class RunPeaks:
    """Tables of the runs from some layers, and the peaks of moments that follow from them.

    Rows are first layers, columns ends from 1 to the number of layers: column 0 is end 1.

    Args:
        tables: What the runs hold.
        chunks: Micro-batches of a mini-batch.
        largest: No sum of bytes exceeds it.
    """

    def __init__(self, tables: StorageTables, chunks: int, largest: int) -> None:
        self._tables, self._chunks = tables, chunks
        chain = tables.chain
        #: The entry where a table has no moment: below every sum of bytes, whatever is added to it.
        self._none = -2 * max(largest, 1)
        self._shared = chain.shared_memory
        self._chain, self._profile = chain, chain.profile
        self._n = chain.profile.n_layers
        self._ends, self._column, self._at_ends = tables.ends, tables.column, tables.at_ends
        self.firsts = tables.firsts
        self._ties = TieTables(self._profile, self.firsts, tables.kind)
        gradients = [layer.gradient_bytes for layer in chain.layers]
        self._gradient_sums = self._column([0, *gradients]).cumsum()
        self._all_gradients = (
            self._gradient_sums[self._ends][None, :] - self._gradient_sums[self.firsts][:, None]
        ) - self._ties.counted_again
        self._fixed = self._fixed_bytes()
        #: Outputs for the next partition, by end; and what runs stash for later ones.
        sizes = [self._profile.bytes_of(layer.outputs) for layer in self._profile.layers]
        self._given, self._stashed = self._handed_on(sizes, chain.skip_bytes)
        #: Gradients that the backward of each layer is given.
        self._flowing = [self._profile.gradients_into(k) for k in range(self._n)]
        self._started = self._at_ends(tables.of_skips(chain.skip_gradient_bytes, popped=False))
        self._started[:, :-1] += self._column(self._flowing[: self._n - 1])
        self._returned, self._least_popped, self._popped = self._returned_bytes()
        self._idle = self._idle_runs()
        self._passed = self._passed_bytes()
        self._gradients = GradientTables(chain, self.firsts, tables.kind)
        self._run_ends = RunEnds(tables, self._idle[:, -1], chunks)
        kept = self._column([0, *(layer.kept_buffer_bytes for layer in chain.layers)]).cumsum()
        #: Copies of buffers that a cell keeps for its recompute.
        self._kept_buffers = kept[self._ends][None, :] - kept[self.firsts][:, None]
        self._graphs = self._at_ends(tables.kept)
        if chain.loss is not None:
            self._graphs[:, -1] -= ~self._idle[:, -1] * tables.in_graphs(chain.loss.outputs)
        self._handed = self._at_ends(tables.handed)
        self._forwards = cache(partial(forward_peaks, tables, self._none))
        self._known: dict[tuple[str, bool, bool], Table] = {}

    def _handed_on(self, outputs: Sequence[int], skips: Sequence[int]) -> tuple[Table, Table]:
        """Return the outputs of runs, by their ends, and the skip connections that they stash.

        Args:
            outputs: Bytes of each layer's output.
            skips: Bytes of each skip connection.
        """
        stashed = self._at_ends(self._tables.of_skips(skips, popped=False))
        return self._column([*outputs[:-1], 0]), stashed

    @cached_property
    def _surely_handed_on(self) -> tuple[Table, Table]:
        """The same without what the cells may have anyway, in their graph or their input."""
        chain, profile = self._chain, self._profile
        seen = {*profile.inputs, *profile.keepers}

        def new(storages: Iterable[int], end: int) -> int:
            """Return the bytes of what was never seen before, and not saved before an end."""
            own = {s for s in storages if s not in seen and chain.saved_at.get(s, [end])[0] >= end}
            return profile.bytes_of(own)

        stashed_by: dict[int, list[int]] = defaultdict(list)
        for number, skip in enumerate(profile.skips):
            stashed_by[skip.source].append(number)
        outputs, skips = [], [0] * len(profile.skips)
        for k, layer in enumerate(profile.layers):
            outputs.append(new(layer.outputs, k + 1))
            own = [(number, profile.skips[number]) for number in stashed_by.get(k, ())]
            for number, skip in own:
                skips[number] = new(set(skip.storages) - set(layer.outputs), skip.destination)
            seen.update(layer.outputs, *(skip.storages for _, skip in own))
        return self._handed_on(outputs, skips)

    def _fixed_bytes(self) -> Table:
        """Return parameters, buffers and optimizer state of each run."""
        layers = self._profile.layers
        plain = self._column([0, *(la.parameter_bytes + la.buffer_bytes for la in layers)]).cumsum()
        state = self._column([0, *(la.optimizer_bytes or 0 for la in layers)]).cumsum()
        unknown = np.array([0, *(la.optimizer_bytes is None for la in layers)]).cumsum()
        firsts, ends = self.firsts[:, None], np.arange(1, self._n + 1)[None, :]
        # State that is not known for one layer is not counted for the run.
        known = unknown[ends] == unknown[firsts]
        return plain[ends] - plain[firsts] + np.where(known, state[ends] - state[firsts], 0)

    def _returned_bytes(self) -> tuple[Table, Table, Table]:
        """Return what a micro-batch leaves for the partition before, and for earlier ones.

        These are gradients of the run's input, and of skip connections that it pops: those that go
        where something can be trained, wherever the cuts are, and those that may.
        """
        chain = self._chain
        trained = np.cumsum([0, *(bool(la.gradient_bytes) for la in chain.layers)]) > 0
        before = trained[self.firsts][:, None]
        gradients = self._column([0, *self._flowing])[self.firsts][:, None]
        popped = chain.skip_gradient_bytes
        pairs = zip(chain.profile.skips, popped, strict=True)
        surely = [n_bytes * bool(trained[skip.source + 1]) for skip, n_bytes in pairs]
        least, most = (
            self._at_ends(self._tables.of_skips(sizes, popped=True)) for sizes in (surely, popped)
        )
        return np.where(before, gradients, 0), least, np.where(before, most, 0)

    @cached_property
    def _in_others(self) -> tuple[Table, Table]:
        """Bytes of the value and of the skip connections that runs are given from earlier ones.

        A storage that comes as both counts twice.
        """
        values = [self._profile.bytes_of(layer.outputs) for layer in self._profile.layers]
        value = self._column([0, *values])[self.firsts][:, None]
        return value, self._at_ends(self._tables.of_skips(self._chain.skip_bytes, popped=True))

    def _passed_bytes(self) -> Table:
        """Bound what earlier partitions keep of each input, where the run itself does not.

        A run that receives no gradient keeps nothing of its input, any other run all that has a
        gradient.
        """
        not_kept = self._at_ends(self._tables.not_kept)
        given = sum(self._in_others)
        return np.where(self._idle, given, not_kept) if self._shared else 0 * not_kept

    def _idle_runs(self) -> Table:
        """Return the runs that receive no gradient."""
        idle = np.zeros((len(self.firsts), self._n), dtype=bool)
        for end in range(1, self._n + (self._chain.loss is None)):
            something, gradient = self._chain.passes_on_from[end]
            idle[:, end - 1] = (self.firsts <= something) & (self.firsts > gradient)
        return idle

    def peaks(self, moments: Sequence[RowMoment], *, most: bool, gradients_exist: bool) -> Table:
        """Return the highest of the moments of each run.

        Args:
            moments: The moments of a row.
            most: Whether earlier partitions hold as much as they may of what waits for them.
            gradients_exist: Whether the parameters have gradients before the step.
        """
        given, stashed = self._given, self._stashed
        returned, popped = self._returned, self._popped
        if not most:
            (given, stashed), popped = self._surely_handed_on, self._least_popped
        if most and self._shared:
            # In one memory, graphs of earlier partitions may need the tensors themselves.
            value, skips = self._in_others
            returned, popped = returned + value, popped + skips
        tables_of_waiting = {
            "n_given": given,
            "n_stashed": stashed,
            "n_returned": returned,
            "n_popped": popped,
            "n_passed": self._passed,
        }
        # Most chains have no skips, and most partitions a memory of their own.
        waiting = {name: table for name, table in tables_of_waiting.items() if table.any()}
        chain = self._chain
        graphs = np.where(self._idle, 0, self._graphs - self._handed)
        tables = self._tables
        received = self._at_ends(tables.received - tables.passing)
        inputs = np.where(self._idle, 0, received + self._kept_buffers)
        outputs = self._outputs(moments, gradients_exist)
        highest: Table | None = None
        for moment in moments:
            recomputed, exist = moment.recomputed, moment.gradients_exist
            total = moment.n_graphs * graphs + moment.n_inputs * inputs
            for name, table in waiting.items():
                if number := getattr(moment, name):
                    total += number * table
            if moment.kind != "L":
                total += self._own(moment.kind, recomputed, exist)
                total[:, -1] += outputs(moment)
            else:
                total[:, :-1] = self._none
                total[:, -1] += outputs(moment)
                if exist:
                    total[:, -1] += self._all_gradients[:, -1]
            highest = total if highest is None else np.maximum(highest, total)
        assert highest is not None
        if chain.loss is not None:
            highest[:, -1] += self._chunks * chain.loss.buffer_bytes + chain.loss.parameter_bytes
        highest += self._fixed
        if gradients_exist:
            highest += self._ties.summed_apart
        highest[self.firsts == 0] += self._profile.input_bytes(self._chunks)
        return highest

    def _outputs(self, moments: Sequence[RowMoment], gradients_exist: bool) -> Any:
        """Return a function for the outputs that exist during a moment of the last partition."""
        if self._chain.loss is not None:
            return lambda moment: 0
        profile, n = self._profile, self._n
        outputs = frozenset(profile.layers[-1].outputs)
        # Which of them exist all the time depends on where a run begins.
        others = self._chain.others_until
        places = sorted({0, *(k + 1 for s, k in others.items() if s in outputs and k + 1 < n)})
        at = np.searchsorted(places, self.firsts, side="right") - 1
        cells = [Cell(profile, first, n, None, self._shared) for first in places]
        sizes = self._column([cell.bytes_of(outputs) for cell in cells])
        size, is_held = sizes[at], ~self._idle[:, -1]
        in_graph = is_held * self._tables.in_graphs(outputs)
        in_input = is_held * self._tables.in_inputs(outputs, kept=self._chunks == 1)

        def given_by(moment: RowMoment) -> Table:
            """Return what the outputs add to the cells that wait."""
            done = moment.n_graphs + moment.n_inputs
            return done * size - moment.n_graphs * in_graph - moment.n_inputs * in_input

        given = given_by(next(moment for moment in moments if moment.kind == "L"))
        ways = list(zip(at.tolist(), given.tolist(), strict=True))
        found = {
            (k, n_bytes): around_loss(
                cells[k], self._chunks, n_bytes, gradients_exist=gradients_exist
            )
            for k, n_bytes in set(ways)
        }
        around = [found[way] for way in ways]
        most, stays, always, after = map(self._column, zip(*around, strict=True))

        def beside(moment: RowMoment) -> Table:
            if moment.kind == "L":
                return always + most
            if moment.kind == "O":
                return always + after
            if moment.forwards_done:
                return always + stays
            return always + given_by(moment)

        return beside

    def _own(self, kind: str, recomputed: bool, exist: bool) -> Table:
        """Return the most that the micro-batch at work has at one time."""
        key = (kind, recomputed, exist)
        if key not in self._known:
            if kind == "B":
                found = self._backward(recomputed, exist)
            elif kind == "O":
                found = self._all_gradients - self._ties.others + self._optimizer_peaks()
            else:
                found = self._forward(kind == "R" or not recomputed, exist)
                if kind == "F" and recomputed and self._idle.any():
                    found = np.where(self._idle, self._forward(True, exist), found)
                if recomputed:
                    found = found + self._kept_buffers
                if kind == "R":
                    found = found - self._at_ends(self._tables.passing)
            if kind in "BR":
                found = np.where(self._idle, self._all_gradients if exist else 0, found)
            self._known[key] = found
        return self._known[key]

    def _optimizer_peaks(self) -> Table:
        """Return what the optimizer's step needs temporarily, as far as it is known."""
        peaks = self._column([layer.optimizer_peak_bytes or 0 for layer in self._profile.layers])
        step = self._profile.step
        if step.optimizer_together:
            return self._sums(peaks)
        carried = self._column([la.optimizer_carried_bytes for la in self._profile.layers])
        # The first layer that is stepped, for the runs from each layer on.
        first = np.where(peaks > 0, np.arange(self._n), self._n)
        first = np.minimum.accumulate(first[::-1])[::-1][self.firsts]
        behind = np.arange(self._n)[None, :] > first[:, None]
        needs = self._tables.from_first(
            peaks[None, :] + np.where(behind, carried[None, :], 0), self._none
        )
        groups = [self._sums(self._column(group)) for group in step.optimizer_groups]
        return reduce(np.maximum, groups, np.maximum.accumulate(needs, axis=1))

    def _sums(self, column: Table) -> Table:
        sums = np.concatenate([column[:1] * 0, column.cumsum()])
        return sums[1:][None, :] - sums[self.firsts][:, None]

    def _forward(self, records: bool, exist: bool) -> Table:
        found = self._forwards(records)
        return found + self._all_gradients if exist else found

    def _backward(self, recomputed: bool, exist: bool) -> Table:
        ends, made = self._ends, self._gradient_sums
        _, changes = self._tables.backward
        inner = self._tables.from_first(self._inner_needs(recomputed, exist), self._none)
        last = self._last_needs(recomputed, exist)
        every = [
            *changes,
            *self._ties.changes(exist),
            *self._gradients.changes(exist),
            *self._run_ends.changes(recomputed=recomputed, exist=exist),
        ]
        # Every layer but the last of the run; in a run of one layer there is none.
        before = highest_before(inner, ends - 1, every, self._none)
        highest = np.maximum(before, last) + self._started
        return highest + (self._all_gradients if exist else made[ends])

    def _inner_needs(self, recomputed: bool, exist: bool) -> Table:
        """Return what each layer's backward finds and needs, in runs that go on after it.

        Gradients of parameters that do not exist yet are counted from the end of the run on.
        """
        kept, _ = self._tables.backward
        needs = kept + (self._gradients.peaks(exist) + self._gradients.living)
        if recomputed:
            needs = needs + self._saved_buffers[:, 1:]
        if not exist:
            # In addition to the first of a parameter's gradients there is a sum, or a copy.
            needs = needs - self._gradient_sums[1:] + self._ties.copies(len(self._chain.layers))
        return needs

    def _last_needs(self, recomputed: bool, exist: bool) -> Table:
        """Return the same for the last layer of the run to each end."""
        tables, ends, layers = self._tables, self._ends, self._chain.layers
        peaks = self._column([backward_peak(layer, exist) for layer in layers])
        needs = self._at_ends(tables.kept) + peaks[ends - 1] + self._gradients.sums
        needs = needs - self._copies_not_made(exist)
        needs = needs - (self._at_ends(tables.passing_kept) if recomputed else self._handed)
        if recomputed:
            needs = needs + self._at_ends(self._saved_buffers)
        if not exist:
            tied = self._ties.copies(len(layers))[:, ends - 1]
            needs = needs - self._gradient_sums[ends] + tied
        return needs

    @cached_property
    def _saved_buffers(self) -> Table:
        """Copies of buffers that the graph of a recompute keeps, up to each end, 0 first."""
        saved = self._column([0, *(la.saved_buffer_bytes for la in self._chain.layers)]).cumsum()
        copies: Table = saved[None, :] - saved[self.firsts][:, None]
        return copies

    def _copies_not_made(self, exist: bool) -> Table:
        """Return how much of the peak of each run's last layer is copies that it does not make.

        What is handed through is copied only where it goes through the whole run, and gradients
        that share memory only by a layer that is given what the run is given.
        """
        layers, ends = self._chain.layers, self._ends
        copies = self._column([copied(layer, exist) for layer in layers])
        passes = np.array([not set(la.outputs).isdisjoint(la.handed_through) for la in layers])
        passes[self._n :] = False  # the loss
        is_all = passes[None, :] & (np.arange(len(layers))[None, :] == self.firsts[:, None])
        missing = np.where(is_all, 0, copies)[:, ends - 1]
        for k, layer in enumerate(layers):
            cut = uncopied_peak(layer, exist, inside=False)
            cut -= uncopied_peak(layer, exist, inside=True)
            if cut:
                not_made = cut - self._gradients.copied_at_cut(k, cut)
                missing[:, ends - 1 == k] += not_made[:, None]
        for first, end in self._chain.runs_that_hand_through():  # copied at their beginning
            missing[self.firsts == first, end - 1] -= copies[first]
        return missing
