"""The noun that `recompute_layers` returns: which layers are recomputed, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpipebal.argument_kinds import check_index
from gpipebal.plan import Plan
from gpipebal.plan.text import layer_range
from gpipebal.text import aligned
from gpipebal.units import count, format_bytes, format_percent, format_seconds

__all__ = ["LayerRecompute"]


@dataclass(frozen=True)
class LayerRecompute:
    """Layers to recompute inside the partitions of a plan.

    Attributes:
        runs: Layers that are recomputed together, as ranges of places in the chain, in order.
        plan: A plan that has these runs: modes, times and memory are predicted, and the times of
            backwards include those of the recomputes.
        before: The same plan without any run.
        recompute_times: Seconds that each partition takes to recompute its runs, for one
            micro-batch.
        lower_bounds: A proven bound on each of these, over all runs with which the partition fits.
    """

    runs: tuple[range, ...]
    plan: Plan
    before: Plan
    recompute_times: tuple[float, ...]
    lower_bounds: tuple[float, ...]

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each run."""
        names = self.plan.names
        return tuple(names[run.start : run.stop] for run in self.runs)

    @property
    def value(self) -> float:
        """Seconds that all partitions together take to recompute runs, for one micro-batch."""
        return sum(self.recompute_times)

    @property
    def lower_bound(self) -> float:
        """A proven bound on `value`."""
        return sum(self.lower_bounds)

    @property
    def gap(self) -> float:
        """How far the value can be from the optimum, as a fraction of the value."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0

    @property
    def status(self) -> str:
        """``'optimal'`` if value and bound meet, else ``'feasible'``."""
        return "optimal" if self.recompute_times == self.lower_bounds else "feasible"

    def runs_of(self, partition: int) -> tuple[range, ...]:
        """Return the runs of one partition."""
        partition = check_index("partition", partition, self.plan.n_partitions)
        first = sum(self.plan.balance[:partition])
        end = first + self.plan.balance[partition]
        return tuple(run for run in self.runs if first <= run.start < end)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values: each run as its first layer and the one after its last."""
        return {
            "runs": [[run.start, run.stop] for run in self.runs],
            "layer_names": [list(names) for names in self.layer_names],
            "recompute_times": list(self.recompute_times),
            "lower_bounds": list(self.lower_bounds),
            "status": self.status,
            "plan": self.plan.to_dict(),
            "before": self.before.to_dict(),
        }

    def explain(self) -> str:
        """Say in plain words what is recomputed, why, and what it costs."""
        return "\n".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        before, after = self.before, self.plan
        if not self.runs:
            yield "Nothing has to be recomputed inside a partition: all fit as they are."
        for j, (old, new) in enumerate(zip(before.partitions, after.partitions, strict=True)):
            limit = new.memory_limit
            if not self.runs_of(j) or limit is None:
                continue
            mode = "" if before.modes[j] == after.modes[j] else f" with {before.modes[j]!r}"
            yield (
                f"Partition {j} needs {format_bytes(old.memory.total)}{mode} and may use "
                f"{format_bytes(limit)}: it recomputes {self._words(j)}, needs "
                f"{format_bytes(new.memory.total)}, and takes "
                f"{format_seconds(self.recompute_times[j])} more for each micro-batch."
            )
        if self.status == "optimal":
            yield "No other runs with which the partitions fit take less time: proven."
        else:
            yield f"Other runs may take up to {format_percent(self.gap)} less time to recompute."
        time = format_seconds(after.makespan)
        yield f"The makespan is {time}, and {format_seconds(before.makespan)} without any run."

    def _words(self, partition: int) -> str:
        names, runs = self.plan.names, self.runs_of(partition)
        return ", ".join(layer_range(names[run.start : run.stop]) for run in runs)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        header = ["partition", "recomputed", "", "time", "peak memory", "limit"]
        rows = [header]
        for j, part in enumerate(self.plan.partitions):
            layers = sum(map(len, self.runs_of(j)))
            limit = part.memory_limit
            rows.append(
                [
                    str(j),
                    f"{layers} of {count(len(part.layers), 'layer')}",
                    self._words(j),
                    format_seconds(self.recompute_times[j]),
                    format_bytes(part.memory.total),
                    "-" if limit is None else format_bytes(limit),
                ]
            )
        proof = "proven least" if self.status == "optimal" else f"within {format_percent(self.gap)}"
        headline = (
            f"{count(sum(map(len, self.runs)), 'layer')} recomputed in "
            f"{count(len(self.runs), 'run')}: {format_seconds(self.value)} for each micro-batch "
            f"({proof}); makespan {format_seconds(self.plan.makespan)}, "
            f"{format_seconds(self.before.makespan)} without"
        )
        return "\n".join([headline, *aligned(rows, left=(2,))])
