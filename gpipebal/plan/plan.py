"""The plan itself: balance, predicted costs and certificate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import check_index, check_kind, check_list, plain_number
from gpipebal.errors import BalanceError
from gpipebal.files import read_noun, write_record
from gpipebal.html import plan_html
from gpipebal.plan.checks import check_consistent, check_plan, check_schedule_known
from gpipebal.plan.parts import PartitionPlan, read_part, read_run
from gpipebal.plan.text import above_mean, explanation, plan_text
from gpipebal.records import (
    damaged,
    fields_of,
    object_of,
    path_in,
    text_of,
    tuple_of,
    without_header,
)
from gpipebal.schedule import (
    KNOWN_SCHEDULES,
    SCHEDULES,
    Checkpoint,
    CheckpointMode,
    is_checkpointed,
    modes_of,
    partitions_on_each,
    recomputes_of,
)
from gpipebal.text import short_repr

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Plan"]

FORMAT = "gpipebal-plan"
VERSION = 8


@dataclass(frozen=True)
class Plan:
    """A balance with its predicted costs and its certificate.

    Attributes:
        partitions: One `PartitionPlan` per partition.
        chunks: Micro-batches per mini-batch.
        rows: Rows of the largest micro-batch.
        mini_batch_rows: Rows of the mini-batch, as many as `chunks` full micro-batches have, or
            fewer; None: not known.
        checkpoint: Which micro-batches are recomputed: one mode, or a tuple with one for each
            partition; see `modes`.
        schedule: Name of the schedule, such as ``'gpipe'``.
        objective: What was minimised: ``'makespan'``, ``'bottleneck'``, ``'peak_memory'``, or
            ``'cost'`` for costs that a function of the caller's gave.
        value: The objective's value of this plan: seconds, bytes, or what that function gave.
        lower_bound: A proven bound that no plan of the same problem can beat, in the same unit.
            If the balance was given, the balance is part of the problem.
        status: ``'optimal'`` where a search has proven that the value equals `lower_bound`, else
            ``'feasible'``.
        method: The algorithm that found it, or ``'given'``.
        makespan: Predicted seconds from the first forward to the last backward, without the
            loss.
        bottleneck: The largest time of a partition for one micro-batch, in seconds: forward,
            plus recompute under its mode, plus backward, plus copies that keep its device busy;
            or the time of a link, forwards and backwards, if that is longer and copies overlap.
        step_time: Predicted seconds of a training step: forwards, gather, loss, backwards,
            optimizer; None when a part of it was not measured. Unlike in the makespan, forwards
            without a graph have their own, mostly shorter times in it, where they were measured.
        pause_time: Seconds of gather and loss, between the phases; None if not measured, or if
            the schedule has no phases.
        optimizer_time: Seconds of the optimizer; None if not measured.
        loss_inside: Whether the last partition computes the loss of each micro-batch, as in
            `GPipe.step`, or the caller computes that of the mini-batch. Step time and memory depend
            on it.
        equal_split_value: The objective's value of the split into equally many layers; None: the
            caller's costs do not allow it, or rules forbid it and so its costs were not asked for.
        shared_memory: Whether neighbouring partitions share one memory (one CPU), so that the
            tensor at a cut exists once.
        gradients_exist: Whether its memory is that of a step before which the parameters have
            gradients already.
        device_order: Which of the devices that the plan was made for runs each partition, as
            indices; empty: in order.
        overlaps: Whether transfers between partitions run at the same time as the devices' work.
        runs: Layers inside partitions that are recomputed together, as ranges of places in the
            chain, in order. The times of backwards include those of the recomputes.
        sensitivity: For each cut, how much the value grows if the cut is moved by one layer to the
            left, and to the right, with the same modes and devices; None: there is no such plan,
            or it breaks a limit or a rule. Memory includes what may wait in the changed plan; only
            in very large plans are limits checked with the least that may wait in any, because the
            other would take longer than the search. Empty: not worked out.
        notes: What a reader should know about how the plan was made, in sentences.
        provenance: Where the costs come from: the profile's own provenance.

    Raises:
        BalanceError: counts or checkpoint modes that make no sense.
        ProfileError: an invalid time, size or text, or an optimum without a proof.
        KindError: partitions, runs, notes or an order of devices that are not a list of such.

    Example:
        >>> from gpipebal import Profile, solve
        >>> plan = solve(Profile.from_costs([3, 1, 4], chunks=4), 2, checkpoint="never")
        >>> plan.balance, plan.makespan, plan.status
        ([2, 1], 60.0, 'optimal')
        >>> [part.forward_time for part in plan.partitions]
        [4.0, 4.0]
    """

    partitions: tuple[PartitionPlan, ...]
    chunks: int
    rows: int
    checkpoint: Checkpoint
    schedule: str
    objective: str
    value: float
    lower_bound: float
    status: str
    method: str
    makespan: float
    bottleneck: float
    step_time: float | None = None
    pause_time: float | None = None
    loss_inside: bool = False
    equal_split_value: float | None = None
    shared_memory: bool = False
    gradients_exist: bool = False
    device_order: tuple[int, ...] = ()
    overlaps: bool = True
    runs: tuple[range, ...] = ()
    sensitivity: tuple[tuple[float | None, float | None], ...] = ()
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    mini_batch_rows: int | None = None
    optimizer_time: float | None = None

    def __post_init__(self) -> None:
        # As a file has them. The only way to normalise fields of a frozen dataclass.
        fix = "give the partitions of another plan"
        parts = check_list("partitions", self.partitions, PartitionPlan, fix)
        object.__setattr__(self, "partitions", parts)
        if isinstance(self.checkpoint, list):
            object.__setattr__(self, "checkpoint", tuple(self.checkpoint))
        for name in ("device_order", "notes"):
            object.__setattr__(self, name, tuple_of(getattr(self, name), name))
        runs = tuple(
            run if isinstance(run, range) else read_run(run, path_in("runs", k))
            for k, run in enumerate(tuple_of(self.runs, "runs"))
        )
        object.__setattr__(self, "runs", runs)
        moves = tuple(
            tuple_of(pair, path_in("sensitivity", k))
            for k, pair in enumerate(tuple_of(self.sensitivity, "sensitivity"))
        )
        object.__setattr__(self, "sensitivity", moves)
        check_plan(self)

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.partitions)

    @property
    def n_devices(self) -> int:
        """Number of devices: fewer than partitions where devices have several of them."""
        return self.n_partitions // partitions_on_each(self.schedule, self.n_partitions)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return sum(self.balance)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(name for partition in self.partitions for name in partition.layers)

    @property
    def balance(self) -> list[int]:
        """Number of layers in each partition, as a new list."""
        return [len(partition.layers) for partition in self.partitions]

    @property
    def gap(self) -> float:
        """How far the value can be from the optimum, as a fraction of the value."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0

    @property
    def imbalance(self) -> float:
        """Largest time of a partition's work for one micro-batch over the mean; 1.0 is perfect."""
        return above_mean([self.micro_batch_time(j) for j in range(self.n_partitions)])

    @property
    def modes(self) -> tuple[CheckpointMode, ...]:
        """Checkpoint mode of each partition."""
        return modes_of(self.checkpoint, self.n_partitions)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """How many micro-batches each partition recomputes.

        It is the schedule that says so: ``'1f1b'`` leaves some recomputes out.
        """
        if self.schedule in KNOWN_SCHEDULES:
            return recomputes_of(
                self.schedule,
                self.n_devices,
                self.chunks,
                self.checkpoint,
                partitions_per_device=self.n_partitions // self.n_devices,
            )
        return tuple(
            sum(is_checkpointed(mode, i, self.chunks) for i in range(self.chunks))
            for mode in self.modes
        )

    @property
    def has_recomputes(self) -> bool:
        """Whether any micro-batch is recomputed."""
        return any(self.recomputed)

    def with_bound(self, lower_bound: float) -> Plan:
        """Return the same plan with another bound, which no plan's value is below.

        Raises:
            KindError: it is not a number.
            BalanceError: it is negative, or NaN.
        """
        check_kind("lower_bound", lower_bound, Real, "lower_bound=0.0, say")
        number = plain_number(lower_bound)
        if not number >= 0:
            raise BalanceError(
                f"lower_bound is not a bound: lower_bound={lower_bound!r:.60} (expected 0 or "
                "more).\nFix: lower_bound=0.0 if nothing is known."
            )
        bound = min(number, self.value)
        status = "optimal" if bound >= self.value else "feasible"
        return replace(self, lower_bound=bound, status=status)

    def micro_batch_time(self, partition: int) -> float:
        """Seconds that a partition works for one micro-batch under its mode."""
        partition = check_index("partition", partition, self.n_partitions)
        part = self.partitions[partition]
        recompute_time = part.recompute_time if self.recomputed[partition] else 0.0
        return part.forward_time + recompute_time + part.backward_time

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all devices' time inside the predicted makespan; copies count as idle."""
        busy = sum(
            self.chunks * (part.forward_time + part.backward_time)
            + recomputed * part.recompute_time
            for part, recomputed in zip(self.partitions, self.recomputed, strict=True)
        )
        space = self.n_devices * self.makespan
        # Rounding can give a device that is always busy a negative idle time.
        return max(0.0, (space - busy) / space) if space else 0.0

    @property
    def devices(self) -> tuple[int, ...]:
        """Which device runs each partition, as an index; several on each go round the devices."""
        return self.device_order or tuple(j % self.n_devices for j in range(self.n_partitions))

    @property
    def places(self) -> tuple[int, ...]:
        """Which of the devices and limits given for each partition each one has, as an index."""
        return self.device_order or tuple(range(self.n_partitions))

    @property
    def peak_bytes(self) -> int | None:
        """Largest peak memory of a partition; None: not known, under a schedule only torch runs."""
        if self.schedule not in SCHEDULES:
            return None
        return max(part.memory.total for part in self.partitions)

    @property
    def gain(self) -> float | None:
        """How far the value lies below that of the split into equally many layers, as a fraction.

        Negative if it lies above; None if that is not known or 0.
        """
        equal = self.equal_split_value
        return None if not equal else 1 - self.value / equal

    def explain(self) -> str:
        """Say in plain words what the plan is, why, how sure that is, and where it is tight."""
        return explanation(self)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per partition: times in seconds for one micro-batch, sizes in bytes.

        ``layers`` is their number, ``first`` and ``last`` are names. ``time`` is that of
        `micro_batch_time`; ``recomputed`` counts micro-batches. Each part of the peak memory has a
        column that ends with ``_bytes``, and ``peak_bytes`` is their sum: under a schedule that
        only torch runs, of the model alone.
        """
        import pandas as pd

        lines = []
        for j, part in enumerate(self.partitions):
            own = asdict(part)
            del own["fingerprints"]
            names, parts = own.pop("layers"), own.pop("memory")
            lines.append(
                {
                    "partition": j,
                    "device": self.devices[j],
                    "layers": len(names),
                    "first": names[0],
                    "last": names[-1],
                    "checkpoint": self.modes[j],
                    "recomputed": self.recomputed[j],
                    "time": self.micro_batch_time(j),
                    **own,
                    **{f"{name}_bytes": size for name, size in parts.items()},
                    "peak_bytes": part.memory.total,
                }
            )
        return pd.DataFrame(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        runs = [[run.start, run.stop] for run in self.runs]
        return {"format": FORMAT, "version": VERSION, **asdict(self), "runs": runs}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` returned.

        Raises:
            FileFormatError: a field is missing or unknown, or has a value it cannot have.
        """
        try:
            content = without_header(record, FORMAT, VERSION)
            content = fields_of(content, "", cls, also=cls.__dataclass_fields__)
            parts = tuple_of(content["partitions"], "partitions")
            content["partitions"] = tuple(
                read_part(part, path_in("partitions", j)) for j, part in enumerate(parts)
            )
            for name in ("schedule", "objective", "method"):
                text_of(content[name], name)
            content["provenance"] = deepcopy(object_of(content["provenance"], "provenance"))
            plan = cls(**content)
            check_schedule_known(plan)
            check_consistent(plan)
            return plan
        except (TypeError, ValueError) as error:
            raise damaged("plan", error, "solve again.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, whole or not at all."""
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: the file cannot be read, is damaged, or is of another version.
            MissingFileError: the file does not exist (a FileFormatError).
        """
        return read_noun(path, FORMAT, VERSION, cls.from_dict)

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        return plan_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        return plan_text(self)
