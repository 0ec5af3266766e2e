"""Tied parameters in a partition: which gradients its backwards find, and where they are added up.

A parameter belongs to the first layer that has it, and so to that layer's partition. Each use of it
makes a gradient. The gradients of one partition are added up inside a backward, and reach the
parameter after the last use: until then the sum so far waits. Where other partitions use the
parameter too, each adds up its gradients in a buffer of its own, the first of them as a copy, and
at the end of the step all go to the first partition.
"""

from __future__ import annotations

from functools import cached_property

from gpipebal.profile import Profile, TieProfile

__all__ = ["Ties"]


class Ties:
    """Tied parameters of a run of layers; layers are counted from its first.

    Args:
        profile: Costs of all layers.
        first: Index of the run's first layer in the chain.
        end: Index after its last layer.
    """

    def __init__(self, profile: Profile, first: int, end: int) -> None:
        self._first = first
        self._uses: list[tuple[TieProfile, list[int]]] = []
        for tie in profile.ties:
            uses = [layer - first for layer in tie.layers if first <= layer < end]
            if uses:
                self._uses.append((tie, uses))

    @cached_property
    def counted_again(self) -> int:
        """Bytes of gradients that several layers of the run count although there is only one."""
        return sum((len(uses) - 1) * tie.gradient_bytes for tie, uses in self._uses)

    @cached_property
    def others(self) -> int:
        """Bytes of gradients that belong to another partition at the end of the step."""
        return sum(tie.gradient_bytes for tie, _ in self._uses if tie.layers[0] < self._first)

    @cached_property
    def summed_apart(self) -> int:
        """Bytes of sums in addition to the run's own gradients, if these exist before the step.

        For parameters that other partitions use too. The others have only the sums of this step.
        """
        return sum(
            tie.gradient_bytes
            for tie, uses in self._uses
            if tie.layers[0] >= self._first and len(uses) < len(tie.layers)
        )

    def counted_before(self, k: int) -> int:
        """Return the bytes of layer k's gradients that a later layer of the run makes too."""
        return sum(tie.gradient_bytes for tie, uses in self._uses if k in uses[:-1])

    def beside(self, k: int, gradients_exist: bool) -> tuple[int, int]:
        """Return what exists in addition to the gradients during layer k's backward.

        Returns:
            Bytes of sums, or copies, that come into being with its own gradients; and of gradients
            of later layers that wait for them, where they are to be added to existing ones.
        """
        summed = waiting = 0
        for tie, uses in self._uses:
            if k == uses[0] and (len(uses) > 1 or not gradients_exist):
                summed += tie.gradient_bytes
            if gradients_exist and uses[0] <= k < uses[-1]:
                waiting += tie.gradient_bytes
        return summed, waiting
