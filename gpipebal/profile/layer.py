"""The parts of a profile: layers, what connects them, and what else a step costs."""

from __future__ import annotations

from dataclasses import dataclass

from gpipebal.argument_kinds import check_list, keep_as_tuples

__all__ = [
    "MOMENTS",
    "AloneShares",
    "LayerProfile",
    "SkipProfile",
    "StepTerms",
    "TieProfile",
    "TurnTimes",
]

#: Largest memory of a layer, and what it is the largest of, by their fields.
MOMENTS = {
    "forward_peak_bytes": "forward_moments",
    "no_grad_forward_peak_bytes": "no_grad_forward_moments",
    "backward_peak_bytes": "backward_moments",
    "accumulating_peak_bytes": "accumulating_moments",
    "chained_peak_bytes": "chained_moments",
    "chained_accumulating_peak_bytes": "chained_accumulating_moments",
}


@dataclass(frozen=True)
class LayerProfile:
    """Costs of one layer, for one micro-batch of `Profile.rows` rows.

    Attributes:
        name: Name of the layer in its container.
        kind: Name of its class.
        forward_time: Median seconds of a forward that records the graph.
        backward_time: Median seconds of a backward, without recompute.
        recompute_time: Median seconds of a forward run again during the backward.
        forward_spread: Interquartile range of the measured forwards, in seconds.
        backward_spread: Interquartile range of the measured backwards, in seconds.
        no_grad_forward_time: Median seconds of a forward without a graph, as a micro-batch that
            is recomputed later has it; None: not known, take `forward_time`.
        forward_host_time: Seconds that the host needs to launch the forward on a device that
            works by itself; None: the host does the work.
        backward_host_time: The same for the backward.
        flops: Floating-point operations of the forward; None: not counted.
        parameter_bytes: Bytes of parameters that no earlier layer holds. Where they are parts of
            something larger, the first layer that has any of it counts what is in no other.
        gradient_bytes: Bytes of gradients that its backward makes: of those parameters, and of
            those that an earlier layer holds and this one uses too.
        buffer_bytes: Bytes of buffers and attributes that no earlier layer holds, counted in the
            same way, and of what its forward leaves behind as attributes.
        kept_buffer_bytes: Bytes of the copies of buffers that a micro-batch which is recomputed
            keeps from its forward to its recompute.
        saved_buffer_bytes: How many of `kept_buffer_bytes` the graph of the recompute keeps until
            the backward.
        optimizer_bytes: Bytes of optimizer state of its parameters; None if it is not known.
        outputs: Storages (indices into `Profile.storages`) of the layer's output.
        saved: Storages that it keeps from its forward until its backward, without parameters
            and buffers.
        handed_through: Storages of its input that it outputs as they are: the gradient that its
            backward is given is the one that it returns, in the same memory.
        kept_outputs: Storages of its output, and of what it stashes, that it keeps all the time:
            those of buffers and parameters that it returns. `buffer_bytes` and `parameter_bytes`
            have them too.
        output_bytes: Bytes of the storages in `outputs`.
        output_gradient_bytes: Bytes of the gradients that its backward is given for its output,
            without skip connections: more than the output's storages have where a tensor is output
            twice, fewer where it is a part of a larger one; None: not known, take the bytes of
            those storages that have a gradient.
        gradient_storages: Storages that the gradients hold that its backward is given for its
            output, if the next layer is in the same partition: those of larger gradients, where
            they are parts of these, and the same as those of the next layer, as far as that hands
            on what it is given. None: not known, take memory of its own for each.
        through_gradient_storages: Those of `gradient_storages` in which nothing lies but gradients
            of outputs that are inputs themselves, the same tensors: a partition that begins with it
            has a copy of these at once, and holds the storage no longer.
        forward_peak_bytes: Largest memory during its forward beyond what existed at its start; this
            includes its outputs and what it saves.
        no_grad_forward_peak_bytes: The same for a forward without a graph; None: not known, take
            `forward_peak_bytes`.
        written: Storages of its inputs that its forward writes to: a partition that is given them
            copies these first.
        written_input_bytes: Bytes of copies of those of its inputs that its forward writes to: a
            partition that begins with it makes these first. None: not known, take what the forward
            leaves and was not given for all that it needs there, if that is more than its peak.
        backward_peak_bytes: Largest memory during its backward beyond what existed at its start;
            this includes the gradients that it makes.
        accumulating_peak_bytes: The same for a backward that adds to gradients which exist
            already; None: not known, take `backward_peak_bytes`.
        chained_peak_bytes: Like `backward_peak_bytes`, where another layer of the partition comes
            after it: what the backward is given is freed once it is used, with all it holds, and no
            copies are made of what is handed through; None: not known, take `backward_peak_bytes`
            without `copied_bytes`.
        chained_accumulating_peak_bytes: Like `chained_peak_bytes`, for a backward that adds to
            gradients which exist already; None: not known, take `chained_peak_bytes`.
        copied_bytes: How much of `backward_peak_bytes` and of `accumulating_peak_bytes` is copies
            of gradients that are handed through: only the first layer of a partition makes them.
        cut_copied_bytes: How many bytes of `backward_peak_bytes` and of `accumulating_peak_bytes`,
            beside `copied_bytes`, are copies of gradients of its inputs that share memory with each
            other, or are parts of larger ones: only layers make them that are given what their
            partition is given, its first layer above all.
        chained_cut_copied_bytes: The same of `chained_peak_bytes` and of
            `chained_accumulating_peak_bytes`, where they are known.
        forward_moments: Bytes at those moments of the forward that are its peak at any number of
            rows: at each measured size at the same moments, and each is a line in the rows; the
            largest is `forward_peak_bytes`; (): not known.
        no_grad_forward_moments: The same for `no_grad_forward_peak_bytes`.
        backward_moments: The same for `backward_peak_bytes`.
        accumulating_moments: The same for `accumulating_peak_bytes`.
        chained_moments: The same for `chained_peak_bytes`.
        chained_accumulating_moments: The same for `chained_accumulating_peak_bytes`.
        stashed_sum_bytes: How many bytes more than these peaks it needs if what it is given is
            stashed too, by an earlier layer of the partition: the sum of what comes back both ways,
            if the layer hands back its own share in several pieces.
        optimizer_peak_bytes: Largest memory of the optimizer's step on its parameters beyond what
            existed at its start, without state that is made only once; None: not known.
        optimizer_carried_bytes: How much more that is where an earlier layer of the partition has
            been stepped before, and has left something.
        fingerprint: Short hash of its class, options, and parameter shapes.
    """

    name: str
    kind: str
    forward_time: float
    backward_time: float
    recompute_time: float
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    no_grad_forward_time: float | None = None
    forward_host_time: float | None = None
    backward_host_time: float | None = None
    flops: int | None = None
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    buffer_bytes: int = 0
    kept_buffer_bytes: int = 0
    saved_buffer_bytes: int = 0
    optimizer_bytes: int | None = None
    outputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    handed_through: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    output_bytes: int = 0
    output_gradient_bytes: int | None = None
    gradient_storages: tuple[int, ...] | None = None
    through_gradient_storages: tuple[int, ...] = ()
    forward_peak_bytes: int = 0
    no_grad_forward_peak_bytes: int | None = None
    written: tuple[int, ...] = ()
    written_input_bytes: int | None = None
    backward_peak_bytes: int = 0
    accumulating_peak_bytes: int | None = None
    chained_peak_bytes: int | None = None
    chained_accumulating_peak_bytes: int | None = None
    copied_bytes: int = 0
    cut_copied_bytes: int = 0
    chained_cut_copied_bytes: int = 0
    forward_moments: tuple[int, ...] = ()
    no_grad_forward_moments: tuple[int, ...] = ()
    backward_moments: tuple[int, ...] = ()
    accumulating_moments: tuple[int, ...] = ()
    chained_moments: tuple[int, ...] = ()
    chained_accumulating_moments: tuple[int, ...] = ()
    stashed_sum_bytes: int = 0
    optimizer_peak_bytes: int | None = None
    optimizer_carried_bytes: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        keep_as_tuples(self)

    @property
    def time(self) -> float:
        """Forward plus backward, in seconds."""
        return self.forward_time + self.backward_time


@dataclass(frozen=True)
class SkipProfile:
    """A value that one layer stashes and a later one pops.

    Attributes:
        name: Name of the skip connection, with its namespace if that has one.
        source: Index of the layer that stashes it.
        destination: Index of the layer that pops it.
        storages: Storages of its tensors (indices into `Profile.storages`).
        gradient_storages: Storages that its gradient holds while it waits for the layer that
            stashed it, in the same partition: that of a larger gradient, where it is a part of
            one, which others may hold too; None: not known, take the bytes of those of `storages`
            that have a gradient.
    """

    name: str
    source: int
    destination: int
    storages: tuple[int, ...] = ()
    gradient_storages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        keep_as_tuples(self)


@dataclass(frozen=True)
class TieProfile:
    """Parameters that are shared by the same layers.

    Attributes:
        layers: Indices of the layers that have them, in ascending order; two or more.
        parameter_bytes: Bytes of the parameters. The first layer's `parameter_bytes` has them too,
            unless they lie in memory that an earlier layer has.
        gradient_bytes: Bytes of their gradients, counted for one use; every layer's
            `gradient_bytes` has them too.
    """

    layers: tuple[int, ...]
    parameter_bytes: int
    gradient_bytes: int

    def __post_init__(self) -> None:
        keep_as_tuples(self)


@dataclass(frozen=True)
class AloneShares:
    """How much faster the work of a partition is while no other partition works.

    Partitions on a CPU share caches, memory and the interpreter. The times of a profile are those
    of partitions that all work at the same time.

    Attributes:
        n_partitions: How many worked side by side; two or more.
        forward: Share of its time that a forward takes alone; more than 0, and at most 1.
        no_grad_forward: The same for a forward without a graph.
        recompute: The same for a recompute.
        backward: The same for a backward.
    """

    n_partitions: int
    forward: float
    no_grad_forward: float
    recompute: float
    backward: float

    @property
    def changes_nothing(self) -> bool:
        """Whether partitions do not slow each other down."""
        return min(self.forward, self.no_grad_forward, self.recompute, self.backward) == 1


@dataclass(frozen=True)
class TurnTimes:
    """What it costs to turn between forwards and backwards, in seconds of the whole chain.

    What a forward needs (parameters, memory that it writes to) has left the caches if a backward
    ran before it, and the other way round. A partition takes the share of these seconds that its
    layers have of the chain's work. They hardly depend on the rows. The first cells of a step cost
    more, because more has run in between. A negative value means that a turn is faster.

    Attributes:
        forward: How much longer a forward takes after a backward than after a forward.
        no_grad_forward: The same for a forward without a graph.
        recompute: How much longer a recompute takes after a forward than after a backward, which is
            its usual place; mostly below zero.
        backward: How much longer a backward takes after a forward or recompute than after a
            backward.
        first_forward: How much longer a partition's first forward of a step takes than one after a
            forward. It comes after the backwards of the step before.
        first_no_grad_forward: The same for a forward without a graph.
        first_backward: How much longer a partition's first backward of a step takes than one after
            a backward, unless its recompute is right before it.
    """

    forward: float = 0.0
    no_grad_forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    first_forward: float = 0.0
    first_no_grad_forward: float = 0.0
    first_backward: float = 0.0


@dataclass(frozen=True)
class StepTerms:
    """What a training step costs besides the layers; None: not measured.

    Attributes:
        gather_time: Seconds to join the outputs of all micro-batches of a mini-batch.
        loss: The loss over one micro-batch, as `GPipe.step` computes it: a layer after the last
            one. Its `buffer_bytes` are the target's.
        whole_loss: The loss over the gathered output of the mini-batch, as a caller computes it
            after ``pipe(x)``.
        gathered: Storages of the gathered output (indices into `Profile.storages`).
        optimizer_time: Seconds of the optimizer's step and of clearing the gradients.
        optimizer_together: Whether the optimizer steps all parameters at once, so that what it
            needs temporarily adds up, or in several steps.
        optimizer_groups: Where it takes several: for each of these that steps parameters of several
            layers at once, what it needs temporarily for each layer, in bytes, which adds up. Steps
            come one after the other.
        overhead_time: Seconds of a step with ``loss(pipe(x)).backward()`` that no cell, gather,
            loss or optimizer takes: the way from the caller to the workers and back, twice.
        inside_overhead_time: The same for a step with `GPipe.step`, which goes there once.
        cell_overhead_time: Seconds that a cell (a micro-batch in a partition) takes in addition to
            its layers, until the cell that waits for it has started.
        side_by_side: How much partitions that work side by side slow each other down; None: not at
            all, or not known.
        turns: What it costs to turn from forwards to backwards and back; None: not known.
    """

    gather_time: float | None = None
    loss: LayerProfile | None = None
    whole_loss: LayerProfile | None = None
    gathered: tuple[int, ...] = ()
    optimizer_time: float | None = None
    optimizer_together: bool = False
    optimizer_groups: tuple[tuple[int, ...], ...] = ()
    overhead_time: float | None = None
    inside_overhead_time: float | None = None
    cell_overhead_time: float | None = None
    side_by_side: AloneShares | None = None
    turns: TurnTimes | None = None

    def __post_init__(self) -> None:
        keep_as_tuples(self)
        groups = [check_list("optimizer_groups", group) for group in self.optimizer_groups]
        object.__setattr__(self, "optimizer_groups", tuple(groups))

    @property
    def loss_time(self) -> float | None:
        """Seconds of the loss over the whole mini-batch, forward and backward."""
        return None if self.whole_loss is None else self.whole_loss.time
