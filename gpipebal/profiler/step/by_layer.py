"""What an optimizer needs for every layer: parameters belong to the first layer that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.sparse_gradients import join_kinds
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import CALLS_MODEL, OptimizerNeeds, optimizer_needs

__all__ = ["OptimizerCosts", "optimizer_costs"]


class OptimizerCosts(NamedTuple):
    """What an optimizer needs for every layer, each parameter at its first layer; and its time.

    None: it is not known, for all layers or for one.

    Attributes:
        seconds: Of its step.
        state: Bytes that it keeps.
        peaks: Bytes that its step needs temporarily.
        carried: Further bytes where the step of the layer before has left something.
        together: Whether the peaks of all layers add up.
        groups: Where they do not: for each group that is stepped at once and has parameters of
            several layers, what its step needs temporarily for each layer.
        doubts: Flags about these numbers.
    """

    seconds: float | None = None
    state: list[int | None] | None = None
    peaks: list[int | None] | None = None
    carried: list[int] | None = None
    together: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    doubts: tuple[str, ...] = ()

    def columns(self, k: int) -> dict[str, int | None]:
        """Return the columns of a layer profile."""
        return {
            "optimizer_bytes": None if self.state is None else self.state[k],
            "optimizer_peak_bytes": None if self.peaks is None else self.peaks[k],
            "optimizer_carried_bytes": 0 if self.carried is None else self.carried[k],
        }


def optimizer_costs(
    maker: Maker | None,
    modules: Sequence[nn.Module],
    device_type: str,
    memory: Sequence[LayerMemory],
    chunks: int,
) -> OptimizerCosts:
    """Find out what memory an optimizer needs for every layer, on a type of device.

    Args:
        maker: Makes the optimizer; it takes note of gradients that are sparse. None: there is none.
        modules: The layers.
        device_type: The type of device.
        memory: Memory of each layer, with one micro-batch.
        chunks: How many micro-batches there are.
    """
    if maker is None:
        return OptimizerCosts()
    of_layers = [found.parameter_gradients for found in memory]
    maker.note_gradients(join_kinds(modules, of_layers, chunks))
    owner: dict[int, int] = {}
    for k, module in enumerate(modules):
        for parameter in module.parameters():
            owner.setdefault(id(parameter), k)
    places = [owner[id(parameter)] for parameter in maker.parameters]
    by_layer = partial(_by_layer, places, len(modules))
    needs = optimizer_needs(maker, device_type)
    found = OptimizerCosts(peaks=by_layer(needs.peaks), together=True)
    if not needs.together:
        found = _in_turn(needs, places, len(modules))
    return found._replace(state=by_layer(needs.state), doubts=_doubts(needs.why))


def _doubts(why: Mapping[str, str]) -> tuple[str, ...]:
    """Say which optimizers could not step stand-ins, and so of which too little is known."""
    return tuple(
        f"the optimizer's time and state are not known: a step of {name} calls the model"
        if reason == CALLS_MODEL
        else "the optimizer's state and temporary memory are not known: "
        f"{name} cannot step stand-ins ({reason})"
        for name, reason in why.items()
    )


def _by_layer(
    places: Sequence[int], n_layers: int, known: Sequence[int | None]
) -> list[int | None]:
    """Add up what is known of parameters, which belong to the layers in these places.

    Where one of a layer's is not known, neither is the sum.
    """
    found: list[int | None] = [0] * n_layers
    for k, n_bytes in zip(places, known, strict=True):
        so_far = found[k]
        found[k] = None if n_bytes is None or so_far is None else so_far + n_bytes
    return found


def _in_turn(needs: OptimizerNeeds, places: Sequence[int], n_layers: int) -> OptimizerCosts:
    """Describe an optimizer that steps one parameter, or one group, after the other."""
    # With what the parameter before has left: wherever that is, and of the same layer only.
    whole, inside = [0] * n_layers, [0] * n_layers
    groups: dict[Any, list[int]] = {}
    own = (needs.peaks, needs.left, needs.before, needs.at_once)
    unknown = {k for k, n_bytes in zip(places, needs.peaks, strict=True) if n_bytes is None}
    for k, n_bytes, left, before, group in zip(places, *own, strict=True):
        if k in unknown or n_bytes is None:
            continue
        if group is not None:  # what is stepped at once leaves nothing
            groups.setdefault(group, [0] * n_layers)[k] += n_bytes
            continue
        whole[k] = max(whole[k], n_bytes + left)
        is_inside = before is not None and places[before] == k
        inside[k] = max(inside[k], n_bytes + left if is_inside else n_bytes)
    for sums in groups.values():
        whole, inside = (list(map(max, most, sums)) for most in (whole, inside))
    return OptimizerCosts(
        peaks=[None if k in unknown else n_bytes for k, n_bytes in enumerate(inside)],
        carried=[more - n_bytes for more, n_bytes in zip(whole, inside, strict=True)],
        # Of one layer alone the peak says it all.
        groups=tuple(tuple(sums) for sums in groups.values() if sum(map(bool, sums)) > 1),
    )
