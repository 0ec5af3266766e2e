"""What the loss needs: inside the last partition, or computed after it by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.memory.cell import Cell
from gpipebal.memory.layer_peaks import backward_peak
from gpipebal.problem.checks import check_flag
from gpipebal.profile import LayerProfile, Profile
from gpipebal.profile.sizes import target_bytes

__all__ = ["AroundLoss", "around_loss", "is_loss_inside", "loss_of_micro_batch", "new_output"]


class AroundLoss(NamedTuple):
    """What the caller adds on the last partition between the phases, in bytes.

    Attributes:
        most: The most at one time, of outputs, loss and gradients.
        stays: What still exists while the backwards run.
        always: What exists all the time: the target, the loss's parameters, and their gradients if
            they exist before the step.
        after: What still exists after the backwards, while the optimizer steps.
    """

    most: int
    stays: int
    always: int
    after: int


def is_loss_inside(schedule: str, loss_inside: object) -> bool:
    """Tell whether the last partition computes the loss; None: under all schedules but GPipe.

    Raises:
        BalanceError: it is neither true nor false, or the caller cannot compute the loss.
    """
    if loss_inside is None:
        return schedule != "gpipe"
    inside = check_flag("loss_inside", loss_inside)
    if not inside and schedule != "gpipe":
        raise BalanceError(
            f"the caller cannot compute the loss under this schedule: schedule={schedule!r}, "
            "loss_inside=False (expected loss_inside=True: with 'gpipe' alone does the caller "
            "compute the loss, after all forwards).\nFix: loss_inside=None."
        )
    return inside


def loss_of_micro_batch(profile: Profile) -> LayerProfile:
    """Describe the loss over one micro-batch as a layer after the last.

    If it was not measured, it is that over the mini-batch, divided by its rows; if that was not
    measured either, it takes no time, saves its input, and its backward makes twice as much.
    """
    if profile.step.loss is not None:
        return profile.step.loss
    last, whole = profile.layers[-1], profile.step.whole_loss
    if whole is None:
        return _unknown(last.outputs, last.output_bytes)
    m = profile.chunks
    whole = _at_chunks(whole, 1, m)
    return replace(
        whole,
        forward_time=whole.forward_time / m,
        backward_time=whole.backward_time / m,
        recompute_time=whole.recompute_time / m or whole.forward_time / m,
        no_grad_forward_time=None,
        saved=last.outputs,
        outputs=(),
        output_bytes=0,
        no_grad_forward_peak_bytes=None,
        accumulating_peak_bytes=None,
    )


def new_output(cell: Cell, chunks: int, *, recomputed: bool) -> int:
    """Return the bytes that the output of a micro-batch adds to what its cell holds anyway.

    An output may be a part of the graph or, as a view of the cell's input, of what is kept for the
    recompute. Only a partition whose outputs are the caller's has any.

    Args:
        cell: The partition's.
        chunks: Micro-batches of the mini-batch.
        recomputed: Whether the micro-batch is recomputed.
    """
    if not cell.gives_outputs:
        return 0
    held = cell.kept_input if recomputed else cell.graph
    if recomputed and chunks == 1:  # the caller has the output itself, until the backward is over
        held &= cell.entering
    return cell.bytes_of(cell.outputs - held)


def around_loss(
    cell: Cell, chunks: int, outputs: int, *, gradients_exist: bool = False
) -> AroundLoss:
    """Find what the caller adds on the last partition between the phases.

    Args:
        cell: The last partition's.
        chunks: Micro-batches of the mini-batch.
        outputs: Bytes of the outputs of all micro-batches that no cell holds, without those that
            are the caller's input.
        gradients_exist: Whether the loss's parameters have gradients before the step.
    """
    profile = cell.profile
    whole, joined, gradient = _whole_loss(profile, chunks)
    # One micro-batch is the mini-batch; several are copied into one piece.
    gathered = outputs if chunks == 1 else joined
    gather = outputs + (gathered if chunks > 1 else 0)
    forward = gathered + whole.forward_peak_bytes
    saved = _bytes_of_saved(profile, whole, gathered, chunks)
    backward = saved + whole.output_bytes + backward_peak(whole, gradients_exist)
    always = whole.buffer_bytes + whole.parameter_bytes
    always += whole.gradient_bytes if gradients_exist else 0
    made = 0 if gradients_exist else whole.gradient_bytes
    # The output, which a caller has given a name; its gradient; the loss, whose number may have a
    # large storage; and the gradients of the loss's parameters.
    stays = gathered + gradient + whole.output_bytes + made
    # The output of one micro-batch may be one of the tensors of its graph.
    output = cell.bytes_of(cell.outputs) if chunks == 1 else joined
    after = output + whole.output_bytes + made
    return AroundLoss(max(gather, forward, backward), stays, always, after)


def _whole_loss(profile: Profile, chunks: int) -> tuple[LayerProfile, int, int]:
    """Return the loss over a mini-batch of `chunks` micro-batches, and its input and gradient.

    Returns:
        The loss; the bytes of its input in one piece; the bytes of the gradient of that.
    """
    step, last = profile.step, profile.layers[-1]
    joined = profile.chunks * last.output_bytes
    gradient = profile.chunks * profile.gradients_into(profile.n_layers - 1)
    if step.whole_loss is not None:
        if step.gathered:
            joined = profile.bytes_of(step.gathered)
            gradient = profile.gradient_bytes_of(step.gathered)
            if set(step.gathered) == set(last.outputs):  # the output of one micro-batch
                gradient += profile.further_gradients(profile.n_layers - 1)
        loss = _at_chunks(step.whole_loss, chunks, profile.chunks)
        if profile.mini_batch_rows:
            rows = -(-profile.mini_batch_rows * chunks // profile.chunks)
            loss = replace(loss, buffer_bytes=target_bytes(profile, step.whole_loss, rows))
    elif step.loss is not None:
        loss = _at_chunks(step.loss, chunks, 1)
    else:
        loss = _unknown(last.outputs, chunks * last.output_bytes)
    n, m = chunks, profile.chunks
    return loss, -(-joined * n // m), -(-gradient * n // m)


def _bytes_of_saved(profile: Profile, whole: LayerProfile, gathered: int, chunks: int) -> int:
    """Return what a loss over the mini-batch keeps for its backward, with its input, `gathered`."""
    step, m = profile.step, profile.chunks
    if step.whole_loss is not None and step.gathered:
        n_bytes = -(-profile.bytes_of(set(whole.saved) - set(step.gathered)) * chunks // m)
    else:
        n_bytes = chunks * profile.bytes_of(set(whole.saved) - set(profile.layers[-1].outputs))
    return n_bytes + gathered


def _at_chunks(loss: LayerProfile, chunks: int, of_chunks: int) -> LayerProfile:
    """Bring a loss over `of_chunks` micro-batches to `chunks`.

    Its bytes scale with the rows, except for parameters and their gradients.
    """
    if chunks == of_chunks:
        return loss

    def scaled(n_bytes: int) -> int:
        return -(-n_bytes * chunks // of_chunks)

    def beside_gradients(n_bytes: int) -> int:
        fixed = min(n_bytes, loss.gradient_bytes)
        return fixed + scaled(n_bytes - fixed)

    accumulating = loss.accumulating_peak_bytes
    return replace(
        loss,
        buffer_bytes=scaled(loss.buffer_bytes),
        output_bytes=scaled(loss.output_bytes),
        forward_peak_bytes=scaled(loss.forward_peak_bytes),
        backward_peak_bytes=beside_gradients(loss.backward_peak_bytes),
        accumulating_peak_bytes=None if accumulating is None else beside_gradients(accumulating),
    )


def _unknown(saved: tuple[int, ...], n_bytes: int) -> LayerProfile:
    """Return a substitute for a loss that was not measured."""
    return LayerProfile("loss", "loss", 0.0, 0.0, 0.0, saved=saved, backward_peak_bytes=2 * n_bytes)
