"""What a split of a chain costs, exactly.

A chain of layers is cut into partitions, one per device, and a mini-batch flows through them in
`chunks` micro-batches. Two numbers describe how good a cut is: the bottleneck (the largest time
of a partition for one micro-batch) and the makespan (first start to last end of the mini-batch).
They are not the same: GPipe pays for the slowest forward and for the slowest backward, which may
belong to different partitions.

Comparing sums of floats is treacherous: two splits that cost the same differ in the last bit, and
"proven optimal" becomes a matter of rounding. But every float is an integer over a power of two.
So all times are scaled once, by one common power of two, to Python integers; from there on every
sum, comparison and tie is exact, and only results are converted back. Prefix sums give the cost
of any run of layers in constant time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Integral, Real
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.schedule import CheckpointMode, check_checkpoint, check_count

__all__ = ["PartitionTimes", "Problem", "to_balance", "to_bounds"]


class PartitionTimes(NamedTuple):
    """Times of one partition for one micro-batch, in the unit of the problem.

    `recompute` is what the checkpoint mode makes of it: 0 where nothing is recomputed.
    """

    forward: float
    backward: float
    recompute: float


@dataclass(frozen=True)
class Problem:
    """Pose the question how to cut a chain of layers into partitions.

    All times are those of ONE micro-batch, per layer, in seconds or in any other unit (results
    have the same). They may be ints or floats, 0 or more; if all are ints, results are ints too.
    Micro-batches are taken to be equal, and every partition has a device of the same speed.

    `bounds` describe a split: ``(0, ..., n_layers)``, of length `n_partitions` + 1, so that
    partition ``j`` holds the layers ``bounds[j]`` to ``bounds[j + 1] - 1``. No partition is empty.

    Attributes:
        forward: Forward time of each layer.
        backward: Backward time of each layer, without recompute; as long as `forward`.
        recompute: Time to repeat the forward of each layer in the backward phase; as long as
            `forward`. It counts only where `recomputes` is true.
        n_partitions: Number of partitions, 1 to number of layers.
        chunks: Number of micro-batches in a mini-batch, 1 or more.
        checkpoint: Which micro-batches are recomputed.

    Raises:
        BalanceError: no layer; times that are missing, negative, infinite or NaN; a count that is
            not a whole number or out of range; an unknown checkpoint mode.

    Example:
        >>> problem = Problem([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4], n_partitions=2, chunks=4)
        >>> problem.bottleneck((0, 3, 4)), problem.makespan((0, 3, 4))
        (24, 102)
    """

    forward: Sequence[float]
    backward: Sequence[float]
    recompute: Sequence[float]
    n_partitions: int
    chunks: int = 1
    checkpoint: CheckpointMode = "except_last"

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "recompute"):
            # The only way to normalise a field of a frozen dataclass.
            object.__setattr__(self, name, _check_times(name, getattr(self, name)))
        for name in ("n_partitions", "chunks"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        self._check_lengths()
        check_checkpoint(self.checkpoint)
        total = self.forward_sums[-1] + self.backward_sums[-1] + self._all_recompute_sums[-1]
        if not self._whole and total * (self.chunks + 1) > self.scale * int(sys.float_info.max):
            largest = max(*self.forward, *self.backward, *self.recompute)
            raise BalanceError(
                f"times are too large to be added: largest time={largest!r} "
                f"(expected a makespan below {sys.float_info.max:.3g}).\n"
                "Fix: give the times in a larger unit, such as seconds."
            )

    def _check_lengths(self) -> None:
        n_layers = self.n_layers
        if not n_layers:
            raise BalanceError(
                "chain has no layers: len(forward)=0 (expected 1 or more).\n"
                "Fix: give the forward, backward and recompute time of at least one layer."
            )
        for name in ("backward", "recompute"):
            if len(getattr(self, name)) != n_layers:
                raise BalanceError(
                    f"{name} and forward differ in length: len({name})="
                    f"{len(getattr(self, name))} (expected len(forward)={n_layers}).\n"
                    f"Fix: give {n_layers} {name} times, 0 for a layer that has none."
                )
        if self.n_partitions > n_layers:
            raise BalanceError(
                f"chain has fewer layers than partitions: n_partitions={self.n_partitions} "
                f"(expected 1 <= n_partitions <= {n_layers}, the number of layers).\n"
                f"Fix: n_partitions={n_layers}, or open nested layers so that there are more."
            )

    @classmethod
    def from_costs(cls, costs: Sequence[float], n_partitions: int) -> Problem:
        """Pose the plain question of balancing one cost per layer.

        Args:
            costs: Cost of each layer, 0 or more, in any unit.
            n_partitions: Number of partitions, 1 to number of layers.

        Raises:
            BalanceError: as for `Problem`.

        Example:
            >>> Problem.from_costs([1, 2, 3, 4], 2).bottleneck((0, 3, 4))
            6
        """
        costs = _check_times("forward", costs)
        zeros = [0] * len(costs)
        return cls(costs, zeros, zeros, n_partitions, chunks=1, checkpoint="never")

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.forward)

    @property
    def recomputes(self) -> bool:
        """Whether at least one micro-batch is recomputed, so that recompute times count."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and self.chunks > 1)

    # Exact integers, for solvers.

    @cached_property
    def scale(self) -> int:
        """The power of two by which times were multiplied to become the integers below."""
        if self._whole:
            return 1
        times = (*self.forward, *self.backward, *self.recompute)
        return max(time.as_integer_ratio()[1] for time in times)

    @cached_property
    def forward_sums(self) -> tuple[int, ...]:
        """Prefix sums of the scaled forward times: 0, then one per layer."""
        return self._sums(self.forward)

    @cached_property
    def backward_sums(self) -> tuple[int, ...]:
        """Prefix sums of the scaled backward times: 0, then one per layer."""
        return self._sums(self.backward)

    @cached_property
    def recompute_sums(self) -> tuple[int, ...]:
        """Prefix sums of the scaled recompute times that count; zeros where none does."""
        return self._all_recompute_sums if self.recomputes else (0,) * (self.n_layers + 1)

    @cached_property
    def load_sums(self) -> tuple[int, ...]:
        """Prefix sums of what a device is busy with for one micro-batch: all three added."""
        columns = zip(self.forward_sums, self.backward_sums, self.recompute_sums, strict=True)
        return tuple(f + b + r for f, b, r in columns)

    @cached_property
    def _all_recompute_sums(self) -> tuple[int, ...]:
        return self._sums(self.recompute)

    @cached_property
    def _whole(self) -> bool:
        """Whether all times are ints, so that results are ints as well."""
        times = (*self.forward, *self.backward, *self.recompute)
        return all(isinstance(time, int) for time in times)

    def _sums(self, times: Iterable[float]) -> tuple[int, ...]:
        scale = self.scale
        ratios = (time.as_integer_ratio() for time in times)
        return tuple(accumulate((top * (scale // low) for top, low in ratios), initial=0))

    def to_time(self, units: int) -> float:
        """Convert a scaled integer back to the unit of the problem, rounding once.

        Example:
            >>> Problem([0.5, 0.25], [0, 0], [0, 0], 1).to_time(3)
            0.75
        """
        return units if self._whole else units / self.scale

    def exact_bottleneck(self, bounds: Sequence[int]) -> int:
        """Return the bottleneck of a split as a scaled integer."""
        sums = self.load_sums
        return max(sums[end] - sums[start] for start, end in pairwise(self.check_bounds(bounds)))

    def exact_makespan(self, bounds: Sequence[int]) -> int:
        """Return the makespan of a split as a scaled integer."""
        bounds = self.check_bounds(bounds)
        if self.checkpoint == "always":
            return self._makespan_always(bounds)
        # Prefix sums: f forward, b backward, r recompute.
        f, b, r = self.forward_sums, self.backward_sums, self.recompute_sums
        slowest_forward = max(f[end] - f[start] for start, end in pairwise(bounds))
        slowest_backward = max(
            b[end] - b[start] + r[end] - r[start] for start, end in pairwise(bounds)
        )
        return f[-1] + b[-1] + (self.chunks - 1) * (slowest_forward + slowest_backward)

    def _makespan_always(self, bounds: Sequence[int]) -> int:
        # A partition may recompute its last micro-batch as soon as its own forwards are done,
        # while later partitions still work. The mini-batch ends when the slowest such path does:
        # forwards up to a partition k, recompute there, backwards from k down to 0.
        f, b, r = self.forward_sums, self.backward_sums, self.recompute_sums
        slowest_forward = slowest_backward = longest = 0
        for start, end in pairwise(bounds):
            recompute = r[end] - r[start]
            slowest_forward = max(slowest_forward, f[end] - f[start])
            slowest_backward = max(slowest_backward, b[end] - b[start] + recompute)
            repeated = (self.chunks - 1) * (slowest_forward + slowest_backward)
            longest = max(longest, f[end] + b[end] + recompute + repeated)
        return longest

    # The same in the unit of the problem, for people.

    def bottleneck(self, bounds: Sequence[int]) -> float:
        """Compute the largest time of a partition for one micro-batch.

        Args:
            bounds: A split; see `Problem`.

        Returns:
            Forward + recompute + backward of the slowest partition. Recompute counts as 0 with
            checkpoint ``'never'``, and with ``'except_last'`` and one chunk.

        Raises:
            BalanceError: `bounds` is no split of this chain.

        Complexity:
            O(n_partitions).

        Example:
            >>> Problem([1, 1, 4], [2, 2, 8], [1, 1, 4], 2, 2, "never").bottleneck((0, 2, 3))
            12
        """
        return self.to_time(self.exact_bottleneck(bounds))

    def makespan(self, bounds: Sequence[int]) -> float:
        """Compute the time of one mini-batch, from first start to last end.

        The schedule is GPipe's: all forwards, then all backwards, the last micro-batch first; a
        partition recomputes before the gradient arrives. Transfers, loss and optimizer are not
        part of it. For partitions with times f, b, r and m chunks:

        * ``'never'``: sum f + (m-1) max f + sum b + (m-1) max b
        * ``'except_last'``: sum f + (m-1) max f + sum b + (m-1) max(b+r)
        * ``'always'``: the maximum over k of E_k + r_k + sum b_j + (m-1) max(b_j+r_j), over the
          partitions j <= k, where E_k = sum f_j + (m-1) max f_j over the same.

        Args:
            bounds: A split; see `Problem`.

        Raises:
            BalanceError: `bounds` is no split of this chain.

        Complexity:
            O(n_partitions).

        Source:
            Identical jobs in a permutation flow shop; Tarnawski et al., "Efficient Algorithms for
            Device Placement of DNN Graph Operators", NeurIPS 2020, appendix C, has the sum of
            two maxima for 'never'. Differs: recompute, in all three modes.

        Example:
            >>> problem = Problem([3, 1, 1], [1, 3, 5], [0, 0, 0], 2, chunks=3)
            >>> problem.makespan((0, 1, 3)), problem.makespan((0, 2, 3))
            (36, 32)
        """
        return self.to_time(self.exact_makespan(bounds))

    def partition_times(self, bounds: Sequence[int]) -> tuple[PartitionTimes, ...]:
        """Add up the times of every partition of a split, for one micro-batch.

        Raises:
            BalanceError: `bounds` is no split of this chain.

        Example:
            >>> Problem([1, 2], [3, 4], [1, 2], 2, 4).partition_times((0, 1, 2))[1]
            PartitionTimes(forward=2, backward=4, recompute=2)
        """
        columns = (self.forward_sums, self.backward_sums, self.recompute_sums)
        return tuple(
            PartitionTimes(*(self.to_time(sums[end] - sums[start]) for sums in columns))
            for start, end in pairwise(self.check_bounds(bounds))
        )

    def check_bounds(self, bounds: Sequence[int]) -> Sequence[int]:
        """Return `bounds` if they split this chain.

        Raises:
            BalanceError: they do not.
        """
        n_layers, n_partitions = self.n_layers, self.n_partitions
        fits = len(bounds) == n_partitions + 1 and bounds[0] == 0 and bounds[-1] == n_layers
        if not fits or any(start >= end for start, end in pairwise(bounds)):
            even = tuple(j * n_layers // n_partitions for j in range(n_partitions + 1))
            raise BalanceError(
                f"bounds do not split the chain: bounds={tuple(bounds)} (expected "
                f"{n_partitions + 1} increasing indices from 0 to {n_layers}).\n"
                f"Fix: such as bounds={even}."
            )
        return bounds


def to_balance(bounds: Sequence[int]) -> tuple[int, ...]:
    """Count the layers of every partition.

    Example:
        >>> to_balance((0, 2, 5))
        (2, 3)
    """
    return tuple(end - start for start, end in pairwise(bounds))


def to_bounds(balance: Iterable[int]) -> tuple[int, ...]:
    """Place the cuts of a balance.

    Example:
        >>> to_bounds([2, 3])
        (0, 2, 5)
    """
    return tuple(accumulate(balance, initial=0))


def _check_times(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return times as plain ints and floats, or say which layer has none."""
    times: list[float] = []
    for layer, value in enumerate(values):
        time = value
        if type(time) is not float and type(time) is not int:
            # Other numbers, such as numpy's; a bool is an Integral but no time.
            if isinstance(time, Integral) and not isinstance(time, bool):
                time = int(time)
            elif isinstance(time, Real) and not isinstance(time, bool):
                time = float(time)
            else:
                time = math.nan
        if not 0 <= time < math.inf:
            raise BalanceError(
                f"{name} time of layer {layer} is not a time: {name}[{layer}]={value!r} "
                "(expected a finite number, 0 or more).\n"
                "Fix: measure that layer again, or give 0 if it costs nothing."
            )
        times.append(time)
    return tuple(times)
