"""What is known of a layer's memory, alone and in its chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.replicas.replica import kept_by

__all__ = ["LayerMemory", "given_their_own"]


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer; storages are numbered over the whole chain.

    Attributes:
        own_chained_peaks: `chained_peak_bytes` and `chained_accumulating_peak_bytes`, where nothing
            else holds the memory of the gradients that come in: torch may add to them in place.
        hands_back_own: For each of its inputs, by place, whether the gradient that it hands back is
            such too: if those that come in are not, and if they are.
        hands_through: Places of inputs whose gradients go back as they came, and of the outputs
            that they came for.
        stashes: Whether it stashes values for later layers.
        kept_bytes: Bytes of what the layer keeps after its forward, besides its parameters:
            buffers, and tensors that are attributes of its modules.
        n_parameters: How many parameters it has after its forward.
    """

    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    handed_through: tuple[int, ...]
    output_bytes: int
    output_gradient_bytes: int
    forward_peak_bytes: int
    no_grad_forward_peak_bytes: int
    backward_peak_bytes: int
    accumulating_peak_bytes: int
    chained_peak_bytes: int
    chained_accumulating_peak_bytes: int
    own_chained_peaks: tuple[int, int]
    hands_back_own: Mapping[int, tuple[bool, bool]]
    hands_through: Mapping[int, int]
    stashes: bool
    copied_bytes: int
    kept_buffer_bytes: int
    saved_buffer_bytes: int
    kept_bytes: int
    n_parameters: int

    def beside(
        self, own: dict[str, int], name: str, layer: nn.Module, *, given_own: bool
    ) -> dict[str, Any]:
        """Return the columns of a layer profile, with what the layer has all the time.

        Args:
            own: Columns of parameters and buffers.
            name: Name of the layer.
            layer: The caller's layer, of which a copy ran.
            given_own: What `given_their_own` says of it.

        Raises:
            ProfileError: the forward makes parameters, which the caller's layer does not have yet.
        """
        n_before = len(list(layer.parameters()))
        if self.n_parameters != n_before:
            raise ProfileError(
                f"layer {name!r} makes parameters in its first forward: {self.n_parameters} "
                f"(expected {n_before}, as many as before).\nFix: run model(sample) once."
            )
        columns = vars(self) | own
        chained = columns.pop("own_chained_peaks")
        if given_own:
            columns["chained_peak_bytes"], columns["chained_accumulating_peak_bytes"] = chained
        del columns["kept_bytes"], columns["n_parameters"]
        del columns["hands_back_own"], columns["hands_through"], columns["stashes"]
        columns["buffer_bytes"] += max(0, self.kept_bytes - sum(map(bytes_of, kept_by(layer))))
        return columns


def given_their_own(memory: Sequence[LayerMemory]) -> list[bool]:
    """Tell which layers of a chain are given gradients whose memory nothing else holds.

    The next layer's backward makes them, or hands back those that it was given. It may hand back
    views, which hold what they are views of: then a sum needs new memory. Of layers that stash a
    value, and of the last, not all gradients come from the next one: no.
    """
    found = [False] * len(memory)
    given: dict[int, bool] = {}  # of the later layer, by place
    for k in reversed(range(len(memory) - 1)):
        after, all_own = memory[k + 1], found[k + 1]
        back = {place: own[all_own] for place, own in after.hands_back_own.items()}
        back |= {place: given.get(output, False) for place, output in after.hands_through.items()}
        given = back
        found[k] = bool(given) and all(given.values()) and not memory[k].stashes
    return found
