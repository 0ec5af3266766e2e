"""Durations: the seconds of every partition for one micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from gpipebal.argument_kinds import check_list, plain_number
from gpipebal.errors import ProfileError
from gpipebal.plan import Plan

__all__ = ["Durations", "seconds_of", "too_large"]

Times = tuple[float, ...]

_CELLS = ("forward", "no_grad_forward", "recompute", "backward")
#: Fields of actions after one of the other kind (recomputes: after one of their own kind), and of
#: first ones: the kind of action, and the name of its factor in `turning`.
_TURNS = {
    "forward_after_backward": ("forward", "forward"),
    "no_grad_forward_after_backward": ("no_grad_forward", "no_grad_forward"),
    "recompute_after_forward": ("recompute", "recompute"),
    "backward_after_forward": ("backward", "backward"),
    "first_forward": ("forward", "first_forward"),
    "first_no_grad_forward": ("no_grad_forward", "first_no_grad_forward"),
    "first_backward": ("backward", "first_backward"),
}


#: What stands in for the times of a kind of actions that are None.
_INSTEAD = {
    "no_grad_forward": "forward",
    "forward_after_backward": "forward",
    "no_grad_forward_after_backward": "no_grad_forward",
    "recompute_after_forward": "recompute",
    "backward_after_forward": "backward",
    "first_forward": "forward_after_backward",
    "first_no_grad_forward": "no_grad_forward_after_backward",
    "first_backward": "backward",
}


@dataclass(frozen=True)
class Durations:
    """Seconds of every partition for one micro-batch; all micro-batches are alike.

    Each field has one time per partition; for those that may be None a substitute is given.

    Attributes:
        forward: Seconds of each partition's forward.
        recompute: Seconds of each partition's recompute.
        backward: Seconds of each partition's backward, without recompute.
        no_grad_forward: The forward of a micro-batch that is recomputed later; None: `forward`.
        input_gradient: The part of the backward that others wait for; None: what
            `weight_gradient` leaves of the backward, or half of it.
        weight_gradient: The part of the backward that no partition waits for; None: what
            `input_gradient` leaves of the backward.
        forward_transfer: Seconds to bring a micro-batch into the partition from the one before,
            where that is on another device; the first entry is ignored. None: no time.
        backward_transfer: Seconds to bring a gradient into the partition from the one after; the
            last entry is ignored. None: no time.
        optimizer: Seconds of the optimizer's step; None: it is not placed.
        forward_launch: Seconds of the host to launch a forward or a recompute; None, and
            `backward_launch` is None too: there is no host to wait for.
        backward_launch: The same for a backward; of a backward in two parts each takes half.
        forward_after_backward: A forward after a backward of the same device; None: `forward`.
        no_grad_forward_after_backward: The same for `no_grad_forward`; None: as that.
        recompute_after_forward: A recompute after a forward; None: `recompute`.
        backward_after_forward: A backward after a forward or a recompute; None: `backward`.
        first_forward: The first forward of a device in a step, which comes after the backwards of
            the step before; None: `forward_after_backward`.
        first_no_grad_forward: The same for `no_grad_forward`, where that is given; None:
            `no_grad_forward_after_backward`.
        first_backward: The first backward of a device in a step, unless its recompute is right
            before it; None: as any other backward after an action of the same kind.
        recompute_launch: Seconds of the host to launch a recompute; None: `forward_launch`.

    Raises:
        ProfileError: a time that is negative or not finite, or not one per partition.

    Example:
        >>> Durations((1.0, 3.0), (1.0, 3.0), (2.0, 6.0)).input_gradients
        (1.0, 3.0)
    """

    forward: Times
    recompute: Times
    backward: Times
    no_grad_forward: Times | None = None
    input_gradient: Times | None = None
    weight_gradient: Times | None = None
    forward_transfer: Times | None = None
    backward_transfer: Times | None = None
    optimizer: Times | None = None
    forward_launch: Times | None = None
    backward_launch: Times | None = None
    forward_after_backward: Times | None = None
    no_grad_forward_after_backward: Times | None = None
    recompute_after_forward: Times | None = None
    backward_after_forward: Times | None = None
    first_forward: Times | None = None
    first_no_grad_forward: Times | None = None
    first_backward: Times | None = None
    recompute_launch: Times | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            name, times = item.name, getattr(self, item.name)
            if times is None and item.default is None:
                continue
            # Numpy's arrays and numbers, too.
            times = check_list(name, times)
            plain = tuple(seconds_of(f"{name}[{j}]", time) for j, time in enumerate(times))
            object.__setattr__(self, name, plain)
            if len(times) != len(self.forward):
                raise ProfileError(
                    f"durations have different lengths: len({name})={len(times)} "
                    f"(expected {len(self.forward)}, as many as forward).\n"
                    "Fix: give one time per partition."
                )

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.forward)

    def times_of(self, name: str) -> Times:
        """Return the times of a kind of actions, by its field, or what stands in for them."""
        times: Times | None = getattr(self, name)
        return self.times_of(_INSTEAD[name]) if times is None else times

    @property
    def input_gradients(self) -> Times:
        """Seconds of each partition's input gradient, given or estimated."""
        if self.input_gradient is not None:
            return self.input_gradient
        if self.weight_gradient is not None:
            return _rest(self.backward, self.weight_gradient)
        return tuple(time / 2 for time in self.backward)

    @property
    def weight_gradients(self) -> Times:
        """Seconds of each partition's weight gradient, given or estimated."""
        if self.weight_gradient is not None:
            return self.weight_gradient
        return _rest(self.backward, self.input_gradients)

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer takes time."""
        return any(self.forward_transfer or ()) or any(self.backward_transfer or ())

    @property
    def has_launches(self) -> bool:
        """Whether the host takes time."""
        launches = (self.forward_launch, self.recompute_launch, self.backward_launch)
        return any(times is not None for times in launches)

    @property
    def has_turns(self) -> bool:
        """Whether an action's time depends on the action before it."""
        return any(getattr(self, name) is not None for name in _TURNS)

    @property
    def without_launches(self) -> Durations:
        """The same durations if every device has its own process, which launches ahead of it."""
        return replace(self, forward_launch=None, backward_launch=None, recompute_launch=None)

    def longer_by(self, seconds: float) -> Durations:
        """Add some time to every cell, such as the time that it takes in addition to its layers.

        Args:
            seconds: The added time. Forwards and backwards that take no time get it too, and
                recomputes do not: where no output needs a gradient, nothing is recomputed.

        Example:
            >>> Durations((1.0,), (1.0,), (2.0,)).longer_by(0.5).backward
            (2.5,)
        """

        def longer(name: str, time: float) -> float:
            return time + seconds if time or name != "recompute" else time

        return self._changed(longer)

    def scaled(self, factors: Mapping[str, float]) -> Durations:
        """Multiply the time of every cell of a kind by a factor.

        Args:
            factors: One for each kind: forward, recompute, backward, no_grad_forward.

        Example:
            >>> Durations((1.0,), (1.0,), (2.0,)).scaled(
            ...     {"forward": 1, "recompute": 1, "backward": 3}
            ... ).backward
            (6.0,)
        """
        return self._changed(lambda name, time: factors[name] * time)

    def turning(self, factors: Mapping[str, float]) -> Durations:
        """Set how much longer actions take after those of the other kind, and as first ones.

        A partition without backwards has no other kind: its forwards stay as they are.

        Args:
            factors: For each kind (forward, recompute, backward, no_grad_forward) how many times
                as long it takes after the other kind as after its own; for a recompute, after a
                forward as after a backward. With the prefix ``first_`` (not for recomputes), the
                same for a device's first in a step; without those, first ones are as the others.

        Example:
            >>> times = Durations((1.0,), (1.5,), (2.0,))
            >>> turned = times.turning(
            ...     {"forward": 1.5, "recompute": 0.5, "backward": 1.25}
            ...     | {"first_forward": 1.75, "first_backward": 1.5}
            ... )
            >>> turned.first_forward, turned.forward_after_backward, turned.backward_after_forward
            ((1.75,), (1.5,), (2.5,))
            >>> turned.recompute_after_forward
            (0.75,)
        """
        turned = {}
        for field, (kind, name) in _TURNS.items():
            times = getattr(self, kind)
            if times is not None:
                factor = factors.get(name, factors[kind])
                pairs = zip(times, self.backward, strict=True)
                turned[field] = tuple(factor * time if back else time for time, back in pairs)
        return replace(self, **turned)

    def _changed(self, change: Callable[[str, float], float]) -> Durations:
        """Change the time of every cell, by the name of its kind."""
        changed = {}
        kinds = {kind: kind for kind in _CELLS}
        kinds |= {field: kind for field, (kind, _) in _TURNS.items()}
        for field, kind in kinds.items():
            times = getattr(self, field)
            if times is not None:
                changed[field] = tuple(change(kind, time) for time in times)
        return replace(self, **changed)

    @classmethod
    def of_plan(cls, plan: Plan) -> Durations:
        """Take the times that a plan predicts for its partitions and for transfers over cuts."""
        parts = plan.partitions
        receive = tuple(part.receive_time for part in parts)
        back = tuple(part.return_time for part in parts)
        weights = tuple(part.weight_time for part in parts if part.weight_time is not None)
        return cls(
            forward=tuple(part.forward_time for part in parts),
            recompute=tuple(part.recompute_time for part in parts),
            backward=tuple(part.backward_time for part in parts),
            weight_gradient=weights if len(weights) == len(parts) else None,
            forward_transfer=receive if any(receive) else None,
            backward_transfer=back if any(back) else None,
        )


def seconds_of(name: str, time: object) -> float:
    """Return a number of seconds of any kind as Python's.

    Raises:
        ProfileError: `time` is negative, not finite or not a number.
    """
    number = plain_number(time)
    if not 0 <= number <= sys.float_info.max:
        shown = number if number == number else time
        raise ProfileError(
            f"time is impossible: {name}={shown!r:.60} (expected finite seconds, 0 or more).\n"
            "Fix: correct the value, or profile the model again."
        )
    return number


def _rest(whole: Times, part: Times) -> Times:
    return tuple(max(0.0, w - p) for w, p in zip(whole, part, strict=True))


def too_large() -> ProfileError:
    """Return the error for durations that add up to infinity."""
    return ProfileError(
        "times are too large to be added: the sum of all durations is infinite (expected a finite "
        "one).\nFix: give the times in seconds."
    )
