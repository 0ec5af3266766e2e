"""Predicted peak memory of the partitions of a chain.

One micro-batch of a partition holds its input and what its layers save, as a union of storages.
GPipe runs all forwards before the first backward, so all micro-batches are in flight at once::

    never         m x held
    except_last   (m - 1) x input + held
    always        (m - 1) x input + held      (of the micro-batch that is being recomputed)

with parameters, gradients, buffers and optimizer state beside them. The peak falls into the
backward of one layer, while the gradients of the parameters behind it exist and those before it do
not yet (``zero_grad`` frees them between steps), so the backward is walked layer by layer.

Where two neighbours share one memory (partitions on one CPU), the tensor at the cut exists once.
It is charged to the partition that receives it, unless the sender makes it anew in a recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpipebal.plan import PeakMemory
from gpipebal.profile import LayerProfile, Profile
from gpipebal.schedule import CheckpointMode

__all__ = ["partition_memory"]


def partition_memory(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: CheckpointMode,
    shared_memory: bool = False,
) -> tuple[PeakMemory, ...]:
    """Predict the peak memory of every partition in a training step.

    Args:
        profile: Costs for one micro-batch.
        bounds: First layer of each partition, then the number of layers.
        chunks: Micro-batches per mini-batch.
        checkpoint: Which micro-batches are recomputed.
        shared_memory: Whether all partitions live in one memory.

    Returns:
        One `PeakMemory` per partition, in bytes.

    Complexity:
        O(n s) for n layers that save s storages each.
    """
    n_partitions = len(bounds) - 1
    return tuple(
        _peak(
            profile,
            bounds[j],
            bounds[j + 1],
            chunks=chunks,
            checkpoint=checkpoint,
            hands_over=shared_memory and j < n_partitions - 1,
            last=j == n_partitions - 1,
        )
        for j in range(n_partitions)
    )


class _Moment(NamedTuple):
    """Bytes at one moment of a step, beside parameters, buffers and optimizer state."""

    activations: int
    gradients: int
    transient: int


def _peak(
    profile: Profile,
    first: int,
    end: int,
    *,
    chunks: int,
    checkpoint: CheckpointMode,
    hands_over: bool,
    last: bool,
) -> PeakMemory:
    layers = profile.layers[first:end]
    received = set(profile.layers[first - 1].outputs) if first else set(profile.inputs)
    handed = set(layers[-1].outputs) if hands_over else set()
    held = received.union(*(layer.saved for layer in layers))
    recomputed = checkpoint == "always" or (checkpoint == "except_last" and chunks > 1)
    # What one other micro-batch holds while this one is in its backward, and which storages of
    # this one its neighbour holds for it.
    waiting = profile.bytes_of((received if recomputed else held) - handed)
    elsewhere = set() if recomputed else handed
    # Two backwards can be the highest: the first of the step, in which the gradients of the
    # parameters come into being one by one, and the next, in which all of them exist.
    moments = [
        m._replace(activations=m.activations + (chunks - 1) * waiting)
        for m in (
            *_forward_moments(profile, layers, received, elsewhere, gradients_exist=False),
            *_backward_moments(profile, layers, received, elsewhere, gradients_exist=False),
        )
    ]
    if chunks > 1:
        again = list(_backward_moments(profile, layers, received, elsewhere, gradients_exist=True))
        if recomputed:
            again += _forward_moments(profile, layers, received, elsewhere, gradients_exist=True)
        moments += [m._replace(activations=m.activations + (chunks - 2) * waiting) for m in again]
    highest = max(moments, key=lambda m: (sum(m), m.activations))
    states = [layer.optimizer_bytes for layer in layers]
    return PeakMemory(
        parameters=sum(layer.parameter_bytes for layer in layers),
        gradients=highest.gradients,
        buffers=sum(layer.buffer_bytes for layer in layers),
        optimizer=None if None in states else sum(b for b in states if b is not None),
        activations=highest.activations,
        transient=highest.transient,
        outputs=_output_bytes(profile, chunks) if last else 0,
    )


def _forward_moments(
    profile: Profile,
    layers: Sequence[LayerProfile],
    received: set[int],
    elsewhere: set[int],
    *,
    gradients_exist: bool,
) -> Iterator[_Moment]:
    """Walk one micro-batch through its forward or its recompute, at the run of each layer.

    Storages in `elsewhere` are charged to a neighbour.
    """
    gradients = sum(layer.gradient_bytes for layer in layers) if gradients_exist else 0
    seen = set(received)
    held = profile.bytes_of(received - elsewhere)
    given = received
    for layer in layers:
        # The input of a layer lives while it runs, even if nothing saves it.
        live = profile.bytes_of(given - seen)
        yield _Moment(held, gradients, live + layer.forward_peak_bytes)
        new = set(layer.saved) - seen
        seen |= new
        held += profile.bytes_of(new - elsewhere)
        given = set(layer.outputs)


def _backward_moments(
    profile: Profile,
    layers: Sequence[LayerProfile],
    received: set[int],
    elsewhere: set[int],
    *,
    gradients_exist: bool,
) -> Iterator[_Moment]:
    """Walk one micro-batch through its backward, at the run of each layer."""
    gradients = sum(layer.gradient_bytes for layer in layers) if gradients_exist else 0
    seen = set(received)
    held_up_to = [profile.bytes_of(received - elsewhere)]
    for layer in layers:
        new = set(layer.saved) - seen
        seen |= new
        held_up_to.append(held_up_to[-1] + profile.bytes_of(new - elsewhere))
    for layer, held in zip(reversed(layers), reversed(held_up_to[1:]), strict=True):
        # The gradient of its output is as large as the output.
        yield _Moment(held, gradients, layer.output_bytes + layer.backward_peak_bytes)
        if not gradients_exist:
            gradients += layer.gradient_bytes


def _output_bytes(profile: Profile, chunks: int) -> int:
    """Bytes of the gathered outputs, the loss over them, and their gradients."""
    if profile.step.loss_bytes is not None:
        # Measured for the mini-batch of the profile; it grows with the rows.
        return profile.step.loss_bytes * chunks // profile.chunks
    return 3 * chunks * profile.layers[-1].output_bytes
