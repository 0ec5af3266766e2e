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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add
from typing import Literal

from gpipebal.argument_kinds import check_list, check_whole, whole_number
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import check_flag, check_times, scaled
from gpipebal.problem.costs import Costs, denominators
from gpipebal.problem.device import Device
from gpipebal.problem.fits import check_lengths, check_parts, check_total
from gpipebal.problem.link import Links
from gpipebal.problem.memory import Memory
from gpipebal.problem.rules import Rules
from gpipebal.schedule import Checkpoint, CheckpointMode, check_checkpoint, check_count, modes_of

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """The question how to cut a chain of layers into partitions.

    All times are those of ONE micro-batch, per layer, in seconds or in any other unit (results
    have the same). They may be ints or floats, 0 or more; if all are ints, results are ints too.
    Micro-batches are taken to be equal. Unless `devices` says otherwise, every partition has a
    device of the same speed and without a limit of its memory.

    `bounds` describe a split: ``(0, ..., n_layers)``, of length `n_partitions` + 1, so that
    partition ``j`` holds the layers ``bounds[j]`` to ``bounds[j + 1] - 1``. No partition is empty.

    Attributes:
        forward: Forward time of each layer.
        backward: Backward time of each layer, without recompute; as long as `forward`.
        recompute: Time to repeat the forward of each layer in the backward phase; as long as
            `forward`. It counts only where `has_recomputes` is true.
        n_partitions: Number of partitions, 1 to number of layers.
        chunks: Number of micro-batches in a mini-batch, 1 or more.
        checkpoint: Which micro-batches are recomputed: one mode, one for each partition, or
            ``'auto'``: for each partition the fastest mode that fits its device, ``'never'``,
            ``'except_last'`` or ``'always'``.
        devices: The device of each partition; None: every layer takes the times above, and no
            device has a limit.
        any_order: Whether `devices` may be put into another order.
        links: What handing over costs; None: nothing.
        memory: What runs of layers need; None: not known, and no device limits it.
        rules: Where cuts may not be, and which layers belong where; None: no rules.
        n_frozen: How many layers at the beginning hand on nothing that needs a gradient. A
            partition that ends among them recomputes nothing, whatever its mode.

    Raises:
        BalanceError: no layer; times that are missing, negative, infinite or NaN; a count that is
            not a whole number or out of range; an unknown checkpoint mode; parts that do not fit
            the chain.
        KindError: a part of another kind, or times that are not a list.

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
    checkpoint: Checkpoint | Literal["auto"] = "except_last"
    devices: Sequence[Device] | None = None
    any_order: bool = False
    links: Links | None = None
    memory: Memory | None = None
    rules: Rules | None = None
    n_frozen: int = 0

    def __post_init__(self) -> None:
        known: dict[int, tuple[float, ...]] = {}
        for name in ("forward", "backward", "recompute"):
            given = getattr(self, name)
            # The same column may be given twice: zeros, or recompute as forward.
            times = known[id(given)] if id(given) in known else check_times(name, given)
            known[id(given)] = times
            # The only way to normalise a field of a frozen dataclass.
            object.__setattr__(self, name, times)
        for name in ("n_partitions", "chunks"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        check_lengths(self)
        object.__setattr__(self, "n_frozen", min(self._checked_n_frozen(), self.n_layers))
        self._check_parts()
        if not self._whole:
            check_total(self)

    def _checked_n_frozen(self) -> int:
        frozen = whole_number(self.n_frozen)
        if frozen is None or frozen < 0:
            raise BalanceError(
                f"n_frozen is not a number of layers: n_frozen={self.n_frozen!r:.60} (expected an "
                "int of 0 or more).\nFix: n_frozen=0, or profile.n_frozen."
            )
        return frozen

    def _check_parts(self) -> None:
        """Normalise the parts other than the times, or refuse them."""
        n_partitions = self.n_partitions
        # An array of modes is equal to no text, but has no truth value either.
        if not (isinstance(self.checkpoint, str) and self.checkpoint == "auto"):
            check_checkpoint(self.checkpoint)
            modes = modes_of(self.checkpoint, n_partitions)
            one = modes[0] if len(set(modes)) == 1 else modes
            object.__setattr__(self, "checkpoint", one)
        if self.devices is not None:
            devices = check_list(
                "devices", self.devices, Device, "devices=[Device(slowness=2)], say"
            )
            object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "any_order", check_flag("any_order", self.any_order))
        check_parts(self)

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
        costs = check_list("costs", costs)
        zeros = (0,) * len(costs)
        return cls(costs, zeros, zeros, n_partitions, chunks=1, checkpoint="never")

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.forward)

    @property
    def has_recomputes(self) -> bool:
        """Whether any partition recomputes a micro-batch, so that recompute times count."""
        modes = {self.checkpoint} if isinstance(self.checkpoint, str) else set(self.checkpoint)
        return "always" in modes or (modes != {"never"} and self.chunks > 1)

    @property
    def is_plain(self) -> bool:
        """Whether partitions differ only in their layers, and every split is allowed."""
        extras = (self.devices, self.links, self.memory, self.rules)
        one_mode = isinstance(self.checkpoint, str) and self.checkpoint != "auto"
        # A single partition recomputes all of its layers, unless nothing in it needs a gradient.
        some_differ = self.n_partitions > 1 or self.n_frozen == self.n_layers
        alike = not (self.n_frozen and self.has_recomputes and some_differ)
        return one_mode and alike and all(extra is None for extra in extras)

    @cached_property
    def modes(self) -> tuple[CheckpointMode, ...] | None:
        """Checkpoint mode of each partition; None: modes are left open."""
        if self.checkpoint == "auto":
            return None
        return modes_of(self.checkpoint, self.n_partitions)

    @cached_property
    def limits(self) -> tuple[int | None, ...]:
        """Memory limit of each device, in the order in which devices were given."""
        if self.devices is None:
            return (None,) * self.n_partitions
        return tuple(device.memory_limit for device in self.devices)

    @property
    def is_limited(self) -> bool:
        """Whether some device has a memory limit."""
        return any(limit is not None for limit in self.limits)

    # Exact integers, for solvers.

    @cached_property
    def scale(self) -> int:
        """The power of two by which times were multiplied to become the integers below."""
        return 1 if self._whole else denominators(self)

    @cached_property
    def costs(self) -> Costs:
        """The exact costs where devices, links or modes make a difference."""
        return Costs(self)

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
        return self._all_recompute_sums if self.has_recomputes else (0,) * (self.n_layers + 1)

    @cached_property
    def load_sums(self) -> tuple[int, ...]:
        """Prefix sums of how long a device is busy with one micro-batch: all three added."""
        columns = [self.forward_sums, self.backward_sums, self.recompute_sums]
        sums, *others = [column for column in columns if column[-1]] or columns
        for other in others:
            sums = tuple(map(add, sums, other))
        return sums

    @cached_property
    def backward_phase_sums(self) -> tuple[int, ...]:
        """Prefix sums of backward and of recompute that counts, added."""
        if not self.recompute_sums[-1]:
            return self.backward_sums
        return tuple(map(add, self.backward_sums, self.recompute_sums))

    @property
    def layer_sums(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Prefix sums of forward, backward and recompute times, whether or not they count."""
        return self.forward_sums, self.backward_sums, self._all_recompute_sums

    @cached_property
    def _all_recompute_sums(self) -> tuple[int, ...]:
        return self._sums(self.recompute)

    @cached_property
    def _whole(self) -> bool:
        """Whether all times are ints, so that results are ints as well."""
        columns = [self.forward, self.backward, self.recompute]
        for device in self.devices or ():
            columns += [(device.slowness,), *(device.times or ())]
        if self.links is not None:
            columns += [self.links.forward, self.links.backward]
        return all({int}.issuperset(map(type, column)) for column in columns)

    def _sums(self, times: Sequence[float]) -> tuple[int, ...]:
        if not any(times):
            return (0,) * (len(times) + 1)
        return tuple(accumulate(scaled(times, self.scale, self._whole), initial=0))

    def to_time(self, units: int) -> float:
        """Convert a scaled integer back to the unit of the problem, rounding once.

        Example:
            >>> Problem([0.5, 0.25], [0, 0], [0, 0], 1).to_time(3)
            0.75
        """
        return units if self._whole else units / self.scale

    def exact_bottleneck(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> int:
        """Return the bottleneck of a split as a scaled integer."""
        return self.costs.bottleneck(self.check_bounds(bounds), modes, order)

    def exact_makespan(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> int:
        """Return the makespan of a split as a scaled integer."""
        return self.costs.makespan(self.check_bounds(bounds), modes, order)

    # The same in the unit of the problem.

    def bottleneck(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> float:
        """Compute the largest time of a partition for one micro-batch.

        Args:
            bounds: A split; see `Problem`.
            modes: Checkpoint mode of each partition; None: the problem's.
            order: Device of each partition, as an index into `devices`; None: in order.

        Returns:
            Forward + recompute + backward of the slowest partition; or forward + backward copy of
            the slowest link, if that takes longer. Recompute counts as 0 with checkpoint
            ``'never'``, and with ``'except_last'`` and one chunk.

        Raises:
            BalanceError: `bounds` is not a split of this chain.

        Complexity:
            O(n_partitions).

        Example:
            >>> Problem([1, 1, 4], [2, 2, 8], [1, 1, 4], 2, 2, "never").bottleneck((0, 2, 3))
            12
        """
        return self.to_time(self.exact_bottleneck(bounds, modes, order))

    def makespan(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> float:
        """Compute the time of one mini-batch, from first start to last end.

        The schedule is GPipe's: all forwards, then all backwards, the last micro-batch first; a
        partition recomputes before the gradient arrives. Loss and optimizer are not part of it.
        A link that overlaps is one more machine between two partitions. For partitions with times
        f, b, r and m chunks:

        * ``'never'``: sum f + (m-1) max f + sum b + (m-1) max b
        * ``'except_last'``: sum f + (m-1) max f + sum b + (m-1) max(b+r)
        * ``'always'``: the maximum over k of E_k + r_k + sum b_j + (m-1) max(b_j+r_j), over the
          partitions j <= k, where E_k = sum f_j + (m-1) max f_j over the same.

        Args:
            bounds: A split; see `Problem`.
            modes: Checkpoint mode of each partition; None: the problem's.
            order: Device of each partition, as an index into `devices`; None: in order.

        Raises:
            BalanceError: `bounds` is not a split of this chain.

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
        return self.to_time(self.exact_makespan(bounds, modes, order))

    def check_bounds(self, bounds: Sequence[int]) -> Sequence[int]:
        """Return `bounds` if they split this chain.

        Raises:
            BalanceError: they do not.
        """
        n_layers, n_partitions = self.n_layers, self.n_partitions
        if type(bounds) is not tuple:
            bounds = tuple(check_whole("bounds", end) for end in check_list("bounds", bounds))
        fits = len(bounds) == n_partitions + 1 and bounds[0] == 0 and bounds[-1] == n_layers
        if not fits or any(start >= end for start, end in pairwise(bounds)):
            even = tuple(j * n_layers // n_partitions for j in range(n_partitions + 1))
            raise BalanceError(
                f"bounds do not split the chain: bounds={tuple(bounds)} (expected "
                f"{n_partitions + 1} increasing indices from 0 to {n_layers}).\n"
                f"Fix: such as bounds={even}."
            )
        return bounds
