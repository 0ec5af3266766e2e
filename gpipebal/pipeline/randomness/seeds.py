"""The seed of a mini-batch, and the default generator of the process, which it comes from.

A mini-batch that draws nothing leaves the generator as it was; one that does takes its seed from
the state that the caller's thread found when it began, and advances the generator by one number
when the workers have ended. Nothing is read from it in between: layers of several partitions may
save and restore it side by side, and the last one leaves whatever state it had saved. In a backward
`torch.utils.checkpoint` temporarily puts back the state of the forward. If at the end of the phase
the generator still has that state, or a state that a layer was lent for an operation, the state at
the beginning of the phase is put back: otherwise the caller and the next mini-batch would get
numbers that were already drawn.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gpipebal.pipeline.process.forks import in_child
from gpipebal.pipeline.randomness.lent import Strays, bytes_of_state, default_generators, note_home

__all__ = ["MiniBatchSeed", "cell_seed", "draw_seed"]

#: Seconds to wait for an operation that holds `default_generators`.
_PATIENCE = 5.0

#: Mini-batches in a phase that is under way, and the hash of the state that it began with: of those
#: with one state each has a seed of its own.
_under_way: dict[MiniBatchSeed, int] = {}
in_child(_under_way.clear)


def cell_seed(seed: int, layer: int | str, micro_batch: int) -> int:
    """Mix a mini-batch's seed with a layer and a micro-batch into a seed of 63 bits."""
    return _mixed(f"{seed}/{layer}/{micro_batch}".encode()) >> 1


def draw_seed() -> int:
    """Return the seed of a mini-batch that begins now, and advance the default generator."""
    with default_generators:
        seed = _seed_from(_state(), 0)
        _go_on()
        return seed


class MiniBatchSeed:
    """The seed of a mini-batch, made when the first of its cells needs it.

    Args:
        inside: Makes it for a mini-batch that a layer of another pipeline begins: it follows from
            that layer's random numbers, so that a recompute of the layer gives the same. None:
            it comes from the default generator.
    """

    def __init__(self, inside: Callable[[], int] | None) -> None:
        self._inside = inside
        self._value: int | None = None
        self._making = threading.Lock()
        # Hashes of the states that phases of the mini-batch have begun with.
        self._earlier: set[int] = set()
        self._strays = Strays()
        # State of the generator when the phase began, and how many phases had begun with it.
        self._begun: tuple[bytes, int] | None = None

    def __int__(self) -> int:
        with self._making:
            if self._value is None:
                if self._inside is None:
                    assert self._begun is not None
                    self._value = _seed_from(*self._begun)
                else:
                    self._value = self._inside()
            return self._value

    @contextmanager
    def in_phase(self) -> Iterator[None]:
        """Enclose a phase of the mini-batch: inside the block cells may ask for the seed."""
        if self._inside is not None:
            yield
            return
        is_new, before = self._value is None, b""
        try:
            with _held_for_a_while():
                before = _state()
                note_home(before)
                self._begun = before, list(_under_way.values()).count(hash(before))
                _under_way[self] = hash(before)
                self._strays.begin()
            yield
        finally:
            try:
                self._end_phase(before, is_new)
            except BaseException:  # an interrupt came in between
                self._forget_phase()
                raise

    def _end_phase(self, before: bytes, is_new: bool) -> None:
        """End a phase.

        Args:
            before: The state that it began with; empty if it was interrupted before.
            is_new: Whether there was no seed before.
        """
        with _held_for_a_while():
            self._forget_phase()
            if before:
                self._put_back(before)
            if is_new and self._value is not None:
                _go_on()

    def _forget_phase(self) -> None:
        _under_way.pop(self, None)
        self._strays.end()

    def _put_back(self, before: bytes) -> None:
        """Put back the state that a phase began with, if another one that was saved is there."""
        now = torch.default_generator.get_state()
        found = bytes_of_state(now)
        if found != before and (now in self._strays or hash(found) in self._earlier):
            old = torch.frombuffer(bytearray(before), dtype=torch.uint8)
            torch.default_generator.set_state(old)
        self._earlier.add(hash(before))


@contextmanager
def _held_for_a_while() -> Iterator[None]:
    """Hold `default_generators`, unless a worker that hangs in an operation has it for ever."""
    try:
        default_generators.acquire(timeout=_PATIENCE)
        yield
    finally:
        # Not with suppress: an interrupt could come in between.
        try:  # noqa: SIM105
            default_generators.release()
        except RuntimeError:  # another thread has it
            pass


def _state() -> bytes:
    return bytes_of_state(torch.default_generator.get_state())


def _go_on() -> None:
    torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")


def _seed_from(state: bytes, n: int) -> int:
    return _mixed(state + n.to_bytes(8, "little")) >> 2


def _mixed(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
