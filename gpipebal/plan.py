"""Plan: how a chain of layers is cut over devices, what that will cost, and how sure that is.

A plan embeds everything that it was made from (times and memory of each partition, layer names,
fingerprints), so that it can be simulated, drawn and run without the profile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from gpipebal.errors import BalanceError, FileFormatError, ProfileError
from gpipebal.files import read_noun, text_of, tuple_of, without_header, write_record
from gpipebal.schedule import (
    SCHEDULES,
    Checkpoint,
    CheckpointMode,
    check_count,
    is_checkpointed,
    make_schedule,
    modes_of,
)
from gpipebal.units import format_bytes, format_percent, format_seconds

__all__ = ["PartitionPlan", "PeakMemory", "Plan"]

FORMAT = "gpipebal-plan"
VERSION = 2
#: More micro-batches than this are a mistake, and their schedule would fill the memory.
MOST_CHUNKS = 2**20


@dataclass(frozen=True)
class PeakMemory:
    """Parts of the peak memory of one partition, in bytes, at one moment; `total` is their sum.

    Attributes:
        parameters: Parameters.
        gradients: Gradients of the parameters.
        buffers: Buffers.
        optimizer: Optimizer state; None when it is not known, and then not counted.
        activations: What the micro-batches in flight keep for their backward.
        transient: Largest memory of one cell beyond all that.
        outputs: On the last partition, what is there of the outputs, the target, the loss and
            their gradients.
        waiting: What it has made and a busy neighbour has not taken yet. It depends on the clock:
            this much waits in the simulated timeline.
    """

    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    optimizer: int | None = None
    activations: int = 0
    transient: int = 0
    outputs: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        """Peak bytes."""
        known = (self.parameters, self.gradients, self.buffers, self.optimizer or 0)
        return sum(known) + self.activations + self.transient + self.outputs + self.waiting


@dataclass(frozen=True)
class PartitionPlan:
    """One partition: a run of layers, and its costs for one micro-batch.

    Attributes:
        layers: Names of its layers, in order; never empty.
        fingerprints: Short hashes of its layers, to notice a changed model.
        forward_time: Seconds of its forward.
        backward_time: Seconds of its backward, without recompute.
        recompute_time: Seconds of its recompute, whether or not the mode uses it.
        memory: Its predicted peak memory.
    """

    layers: tuple[str, ...]
    fingerprints: tuple[str, ...]
    forward_time: float
    backward_time: float
    recompute_time: float
    memory: PeakMemory = field(default_factory=PeakMemory)


@dataclass(frozen=True)
class Plan:
    """A balance with its predicted costs and its certificate.

    Attributes:
        partitions: One `PartitionPlan` per partition.
        chunks: Micro-batches per mini-batch.
        rows: Rows of the largest micro-batch.
        checkpoint: Which micro-batches are recomputed: one mode, or a tuple with one for each
            partition; see `modes`.
        schedule: Name of the schedule, such as ``'gpipe'``.
        objective: What was minimised: ``'makespan'`` or ``'bottleneck'``.
        value: The objective's value of this plan, in seconds.
        lower_bound: A proven bound that no plan of the same problem can beat, in seconds. If
            the balance was given, it is part of the problem.
        status: ``'optimal'`` or ``'feasible'``.
        method: The algorithm that found it, or ``'given'``.
        makespan: Predicted seconds from the first forward to the last backward, without the
            loss.
        bottleneck: The largest time of a partition for one micro-batch, in seconds: forward,
            plus recompute under its mode, plus backward.
        step_time: Predicted seconds of a training step: forwards, gather, loss, backwards,
            optimizer; None when a part of it was not measured. It counts on shorter forwards
            where no graph is recorded, if they were measured; the makespan does not.
        pause_time: Seconds of gather and loss, between the phases; None if not measured, or if
            the schedule has no phases.
        loss_inside: Whether the last partition computes the loss of each micro-batch, as in
            `GPipe.step`, or the caller that of the mini-batch. Step time and memory go by it.
        equal_split_value: The objective's value of the split into equally many layers.
        shared_memory: Whether neighbouring partitions share one memory (one CPU), so that the
            tensor at a cut exists once.
        provenance: Where the costs come from: the profile's own provenance.
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
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.checkpoint, list):
            # As a file has it. The only way to normalise a field of a frozen dataclass.
            object.__setattr__(self, "checkpoint", tuple(self.checkpoint))
        check_count("partitions", self.n_partitions)
        modes_of(self.checkpoint, self.n_partitions)
        if check_count("chunks", self.chunks) > MOST_CHUNKS:
            raise BalanceError(
                f"plan has too many micro-batches: chunks={self.chunks} (expected at most "
                f"{MOST_CHUNKS}).\nFix: plan with fewer chunks."
            )
        for j, partition in enumerate(self.partitions):
            check_count(f"layers of partition {j}", len(partition.layers))
            _check_quantities(f"partition {j}", partition)
            _check_quantities(f"memory of partition {j}", partition.memory)
            for text in (*partition.layers, *partition.fingerprints):
                if not isinstance(text, str):
                    raise _bad_value(f"partition {j}", "name", text)
        _check_quantities("plan", self)
        for name in ("schedule", "objective", "method"):
            if not isinstance(getattr(self, name), str):
                raise _bad_value("plan", name, getattr(self, name))
        for name in ("shared_memory", "loss_inside"):
            if not isinstance(getattr(self, name), bool):
                raise _bad_value("plan", name, getattr(self, name))
        if self.lower_bound > self.value * (1 + 1e-9):
            raise _bad_value("plan", "lower_bound", self.lower_bound)
        if self.status not in ("optimal", "feasible"):
            raise _bad_value("plan", "status", self.status)
        threads = self.provenance.get("threads") if isinstance(self.provenance, Mapping) else ""
        if threads is not None and (type(threads) is not int or threads < 1):
            raise _bad_value("provenance", "threads", threads)

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.partitions)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return sum(self.balance)

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of layers in each partition."""
        return tuple(len(partition.layers) for partition in self.partitions)

    @property
    def gap(self) -> float:
        """How far the value can be from the optimum, as a fraction of the value."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0

    @property
    def imbalance(self) -> float:
        """Bottleneck over the mean time of a partition; 1.0 is perfect."""
        times = [self.micro_batch_time(j) for j in range(self.n_partitions)]
        return max(times) * len(times) / sum(times) if sum(times) else 1.0

    @property
    def modes(self) -> tuple[CheckpointMode, ...]:
        """Checkpoint mode of each partition."""
        return modes_of(self.checkpoint, self.n_partitions)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """How many micro-batches each partition recomputes.

        It is the schedule that says so: ``'1f1b'`` leaves some recomputes out.
        """
        if self.schedule in SCHEDULES:
            rows = make_schedule(
                self.schedule, self.n_partitions, self.chunks, self.checkpoint
            ).rows
            return tuple(sum(action.kind == "R" for action in row) for row in rows)
        return tuple(
            sum(is_checkpointed(mode, i, self.chunks) for i in range(self.chunks))
            for mode in self.modes
        )

    @property
    def recomputes(self) -> bool:
        """Whether any micro-batch is recomputed."""
        return any(self.recomputed)

    def micro_batch_time(self, partition: int) -> float:
        """Seconds that a partition works for one micro-batch under its mode."""
        part = self.partitions[partition]
        recompute_time = part.recompute_time if self.recomputed[partition] else 0.0
        return part.forward_time + recompute_time + part.backward_time

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all devices' time inside the predicted makespan."""
        busy = sum(
            self.chunks * (part.forward_time + part.backward_time)
            + recomputed * part.recompute_time
            for part, recomputed in zip(self.partitions, self.recomputed, strict=True)
        )
        space = self.n_partitions * self.makespan
        return (space - busy) / space if space else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` returned.

        Raises:
            FileFormatError: a field is missing or unknown, or has a value it cannot have.
        """
        try:
            content = without_header(record, FORMAT, VERSION)
            content["partitions"] = tuple(
                PartitionPlan(
                    **{
                        **part,
                        "layers": _texts(part["layers"], "layers"),
                        "fingerprints": _texts(part["fingerprints"], "fingerprints"),
                        "memory": PeakMemory(**part["memory"]),
                    }
                )
                for part in tuple_of(content["partitions"], "partitions")
            )
            for name in ("schedule", "objective", "method"):
                text_of(content[name], name)
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise FileFormatError(
                f"plan is damaged: {reason.splitlines()[0]}\nFix: solve again."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, whole or not at all."""
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: the file cannot be read, is damaged, or is from a newer gpipebal.
        """
        return read_noun(path, FORMAT, VERSION, cls.from_dict)

    def __str__(self) -> str:
        return f"{_headline(self)}\n{_table(self)}\n{_footer(self)}"


#: Quantities that may be unknown.
_OPTIONAL = ("optimizer", "step_time", "pause_time", "equal_split_value")


def _check_quantities(where: str, noun: Any) -> None:
    """Refuse a time or a size that is none: bytes are ints, times are finite, neither negative."""
    whole = isinstance(noun, PeakMemory)
    for item in fields(noun):
        value = getattr(noun, item.name)
        if "float" not in str(item.type) and not whole and item.name != "rows":
            continue
        if value is None and item.name in _OPTIONAL:
            continue
        kinds = (int,) if whole or item.name == "rows" else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if not (good and 0 <= value < 2**63 and math.isfinite(value)):
            raise _bad_value(where, item.name, value)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(text_of(text, name) for text in tuple_of(value, name))


def _bad_value(where: str, name: str, value: Any) -> ProfileError:
    return ProfileError(f"{where} has an impossible value: {name}={value!r}.\nFix: solve again.")


def _headline(plan: Plan) -> str:
    proof = "proven optimal" if plan.status == "optimal" else f"within {format_percent(plan.gap)}"
    schedule = "" if plan.schedule == "gpipe" else f"schedule={plan.schedule!r}, "
    modes = set(plan.modes)
    checkpoint = f"checkpoint={modes.pop()!r}" if len(modes) == 1 else "checkpoint by partition"
    return (
        f"{plan.n_layers} layers on {plan.n_partitions} partitions, {plan.chunks} micro-batches "
        f"of {plan.rows} rows, {schedule}{checkpoint}: balance={list(plan.balance)}, "
        f"{plan.objective} {format_seconds(plan.value)} ({proof})"
    )


def _table(plan: Plan) -> str:
    times = [plan.micro_batch_time(j) for j in range(plan.n_partitions)]
    total = sum(times) or 1.0
    mixed = len(set(plan.modes)) > 1
    header = ["partition", "layers", ""]
    header += ["checkpoint"] if mixed else []
    header += ["forward", "backward"]
    header += ["recompute"] if plan.recomputes else []
    header += ["peak memory", "share"]
    rows = []
    for j, part in enumerate(plan.partitions):
        row = [str(j), str(len(part.layers)), _layer_range(part.layers)]
        row += [plan.modes[j]] if mixed else []
        row += [format_seconds(part.forward_time), format_seconds(part.backward_time)]
        if plan.recomputes:
            row += [format_seconds(part.recompute_time) if plan.recomputed[j] else "-"]
        row += [format_bytes(part.memory.total), format_percent(times[j] / total)]
        rows.append(row)
    widths = [max(len(line[k]) for line in [header, *rows]) for k in range(len(header))]
    lines = []
    for line in [header, *rows]:
        cells = [
            cell.ljust(width) if k == 2 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _footer(plan: Plan) -> str:
    parts = [
        f"makespan {format_seconds(plan.makespan)}",
        f"bubble {format_percent(plan.bubble_fraction)}",
        f"imbalance {plan.imbalance:.3f}",
    ]
    if plan.step_time is not None:
        parts.insert(1, f"training step {format_seconds(plan.step_time)}")
    if plan.equal_split_value is not None and plan.equal_split_value > 0:
        gain = 1 - plan.value / plan.equal_split_value
        where = "below" if gain >= 0 else "above"
        parts.append(f"{format_percent(abs(gain))} {where} the split into equally many layers")
    text = "; ".join(parts)
    if any(p.memory.parameters and p.memory.optimizer is None for p in plan.partitions):
        text += "\nPeak memory does not count optimizer state: it was not given to the profiler."
    return text


def _layer_range(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
