"""`held_of`: what the partitions of a plan hold, computed from a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipebal.argument_kinds import check_kind
from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import around_loss, new_output
from gpipebal.memory.moment import Moment
from gpipebal.memory.partitions import cells_of
from gpipebal.memory.recomputed_runs import with_runs
from gpipebal.memory.waiting import streams_of
from gpipebal.plan import Plan
from gpipebal.problem.bounds import check_bounds, to_bounds
from gpipebal.problem.chunking import as_planned
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint, check_count, is_checkpointed, modes_of
from gpipebal.simulator.held import CellBytes, HeldBytes

__all__ = ["held_of"]


def held_of(
    profile: Profile,
    plan: Plan | Sequence[int],
    *,
    chunks: int | None = None,
    checkpoint: Checkpoint | None = None,
    loss_inside: bool | None = None,
    shared_memory: bool | None = None,
) -> list[HeldBytes]:
    """Return what each partition of a plan holds, by the same rules as the plan's own peak memory.

    In the same timeline, peaks over time equal those of `partition_memory` to the byte, with four
    exceptions: the optimizer's step comes after the timeline; a layer that needs less while it
    works than it leaves behind counts with what it leaves; a partition that no gradient reaches
    has gradients of its parameters after its first backward already, not only from the optimizer's
    step on; and where a neighbour takes a value at the very instant at which the next action
    starts, as with layers that take no time, the value still counts while that action runs.
    How much waits for busy neighbours depends on timing, and a plan counts the most: over time it
    may be less. A plan's memory has the recomputes after the caller's loss,
    as in ``simulate(plan, pause=0.0)``: without a pause the last partitions may begin while outputs
    of forwards still wait, and it may be more.

    Args:
        profile: Costs of the layers for one micro-batch.
        plan: The plan; or the first layer of each partition, then the number of layers.
        chunks: Micro-batches of a mini-batch; None: the plan's, or the profile's.
        checkpoint: Which of them are recomputed; None: as the plan has it, or ``'never'``.
        loss_inside: Whether the last partition computes the loss of each micro-batch; if not, the
            caller computes that of the mini-batch between the phases. None: as the plan has it,
            or not.
        shared_memory: Whether all partitions share one memory; None: as the plan has it, or not.

    Raises:
        KindError: `profile` is not a Profile, or `plan` is neither a Plan nor bounds.
        BalanceError: not one checkpoint mode per partition, or an unknown one.
        ProfileError: the profile does not have the costs at the rows of the plan.

    Example:
        >>> profile = Profile.from_costs([1.0, 2.0], saved_bytes=[10, 20], output_bytes=[1, 2])
        >>> [size.recorded.graph for size in held_of(profile, (0, 1, 2))]
        [10, 21]
    """
    check_kind("profile", profile, Profile)
    if isinstance(plan, Plan):
        profile = with_runs(as_planned(profile, plan), plan.runs)
        bounds: Sequence[int] = to_bounds(plan.balance)
        chunks = plan.chunks if chunks is None else chunks
        checkpoint = plan.checkpoint if checkpoint is None else checkpoint
        loss_inside = plan.loss_inside if loss_inside is None else loss_inside
        shared_memory = plan.shared_memory if shared_memory is None else shared_memory
    else:
        bounds = check_bounds("plan", plan, profile.n_layers)
    m = profile.chunks if chunks is None else check_count("chunks", chunks)
    mode = modes_of("never" if checkpoint is None else checkpoint, len(bounds) - 1)[-1]
    cells = cells_of(profile, bounds, bool(loss_inside), bool(shared_memory))
    n_recomputed = sum(is_checkpointed(mode, i, m) for i in range(m))
    exist = isinstance(plan, Plan) and plan.gradients_exist
    return [_held(cells, j, m, n_recomputed, exist) for j in range(len(cells))]


def _held(
    cells: Sequence[Cell], j: int, chunks: int, n_recomputed: int, gradients_exist: bool
) -> HeldBytes:
    """Tell what partition j holds, whose last `n_recomputed` of so many are recomputed."""
    cell = cells[j]
    recorded, recomputed = (
        _of_micro_batch(cell, chunks, recomputed=flag) for flag in (False, True)
    )
    around, always = None, cell.of_loss(chunks)
    if cell.gives_outputs:
        n_recorded = chunks - n_recomputed
        outputs = n_recomputed * recomputed.output + n_recorded * recorded.output
        around = around_loss(cell, chunks, outputs, gradients_exist=gradients_exist)
        always = around.always
    fixed = cell.fixed.total + cell.of_caller(chunks) + always
    return HeldBytes(
        fixed=fixed + (cell.ties.summed_apart if gradients_exist else 0),
        gradients=cell.all_gradients,
        gradients_exist=gradients_exist,
        recorded=recorded,
        recomputed=recomputed,
        streams=tuple(streams_of(cells, j)),
        around=around,
    )


def _of_micro_batch(cell: Cell, chunks: int, *, recomputed: bool) -> CellBytes:
    held = cell.held(recomputed=recomputed)
    graph = cell.bytes_of(cell.graph - cell.handed_recomputed) if recomputed else held
    gradients = cell.all_gradients
    first_backward, backward = (
        cell.backward(
            recomputed=recomputed,
            gradients_exist=exist,
            kept=cell.kept_of(chunks, recomputed=recomputed),
        )
        for exist in (False, True)
    )
    return CellBytes(
        kept=held if recomputed else 0,
        graph=graph,
        forward=_most(cell.forward(records=not recomputed, gradients_exist=False), held),
        recompute=_most(cell.recompute(gradients_exist=False), graph),
        first_backward=_most(first_backward, graph),
        backward=_most(backward, graph + gradients),
        # The last partition's outputs are kept for the caller; of a loss only the number.
        output=new_output(cell, chunks, recomputed=recomputed),
    )


def _most(moments: Iterable[Moment], held: int) -> int:
    """Return the most that there is at any moment beyond what is held anyway."""
    return max(0, max(map(sum, moments)) - held)
