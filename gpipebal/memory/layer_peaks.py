"""The memory that one layer needs in one action, by its profile: several kinds of peaks."""

from __future__ import annotations

from collections.abc import Callable

from gpipebal.profile import LayerProfile, Profile

__all__ = [
    "backward_peak",
    "chained_peak",
    "copied",
    "first_forward_peak",
    "forward_peak",
    "peak_at_cut",
    "uncopied_peak",
]


def forward_peak(layer: LayerProfile, records: bool) -> int:
    """Return the largest memory of a layer's forward beyond what was there at its start."""
    if records or layer.no_grad_forward_peak_bytes is None:
        return layer.forward_peak_bytes
    return layer.no_grad_forward_peak_bytes


def first_forward_peak(profile: Profile, k: int, layer: LayerProfile, records: bool) -> int:
    """Return the largest memory of a layer's forward, in the place of layer k, behind a cut.

    If it writes to its input, that is a copy of what was sent, made before the layer runs.
    """
    peak = forward_peak(layer, records)
    if layer.written_input_bytes is not None:
        return peak + layer.written_input_bytes
    # What it leaves and was not given is part of its peak, or that copy.
    given = set(profile.layers[k - 1].outputs if k else ()).union(profile.inputs)
    given.update(*(skip.storages for skip in profile.skips if skip.destination == k))
    left = frozenset(layer.outputs).union(layer.saved if records else ())
    return max(peak, profile.bytes_of(left - given))


def backward_peak(layer: LayerProfile, gradients_exist: bool) -> int:
    """Return the largest memory of a layer's backward beyond what was there at its start.

    Where gradients exist and this case was not measured, it is an upper bound: in a layer with
    several parameters, what is added to one gradient is freed before the next is made.
    """
    if gradients_exist and layer.accumulating_peak_bytes is not None:
        return layer.accumulating_peak_bytes
    return layer.backward_peak_bytes


def copied(layer: LayerProfile, gradients_exist: bool) -> int:
    """Return how much of `backward_peak` is copies of gradients that are handed through."""
    return min(layer.copied_bytes, backward_peak(layer, gradients_exist))


def uncopied_peak(layer: LayerProfile, gradients_exist: bool, *, inside: bool) -> int:
    """Return the largest memory of a layer's backward without copies of what is handed through.

    Args:
        layer: Costs of the layer.
        gradients_exist: Whether gradients of its parameters exist.
        inside: Whether all its inputs are made by other layers of the partition, not just handed
            through. Then no gradient is copied because others have a part of its memory.
    """
    peak = backward_peak(layer, gradients_exist) - copied(layer, gradients_exist)
    return max(0, peak - layer.cut_copied_bytes) if inside else peak


def chained_peak(layer: LayerProfile, gradients_exist: bool, *, inside: bool) -> int:
    """Return the largest memory of a backward that frees what it is given once it is used.

    Arguments are those of `uncopied_peak`.
    """
    exist = layer.chained_accumulating_peak_bytes if gradients_exist else None
    known = layer.chained_peak_bytes if exist is None else exist
    if known is None:
        return uncopied_peak(layer, gradients_exist, inside=inside)
    return max(0, known - layer.chained_cut_copied_bytes) if inside else known


def peak_at_cut(
    peak: Callable[..., int], layer: LayerProfile, gradients_exist: bool, at_cut: int | None
) -> int:
    """Return the largest memory of a backward some of whose inputs are given to its partition.

    Args:
        peak: `uncopied_peak` or `chained_peak`.
        layer: Costs of the layer.
        gradients_exist: Whether gradients of its parameters exist.
        at_cut: Bytes of those inputs: of other gradients it makes no copies. None: all are.
    """
    inside, cut = (peak(layer, gradients_exist, inside=inside) for inside in (True, False))
    return cut if at_cut is None else min(cut, inside + at_cut)
