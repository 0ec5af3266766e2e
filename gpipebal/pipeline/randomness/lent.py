"""Lent states: what the default generator has while an operation draws a layer's numbers from it.

Code that saves the generator's state meanwhile, such as `torch.utils.checkpoint` in a layer of
another partition, puts it back at some time. So a lent state of the CPU bears a mark, where other
states have the seed that they came from. Mini-batches that are under way also note the states in
which an operation has drawn although it was lent another one: code that saved one of those puts it
back in a later phase of the same mini-batch; at any other time such a state is like all others.
States are read and written as memory: operations on them would be seen by code that counts what a
step needs.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gpipebal.errors import PipelineError
from gpipebal.pipeline.process.forks import in_child, open_in_child

__all__ = [
    "Strays",
    "bytes_of_state",
    "default_generators",
    "mark_as_lent",
    "note_home",
    "run_with_default",
]

#: How often an operation that draws from the default generator is run, if other code sets that
#: generator; and after how many runs in a row that leave the state as it was it is taken to draw
#: nothing.
_TRIES, _NOTHING = 1000, 10
#: How many states that other code has put back during one operation are remembered.
_FEW = 8
#: After how many runs in a row that end with the same state it is taken to set that state itself.
_ITSELF = 50
#: Operations of other libraries that were found to draw nothing, and those that set the generator
#: themselves: they are run once.
_without_draws: set[Any] = set()
_seeding: set[Any] = set()

#: Held while a default generator is read, advanced, or temporarily has another state. It knows its
#: owner, who can so release it after an interrupt without knowing whether it came before or after.
default_generators = open_in_child(threading.RLock())

#: Bytes of the seed that a state begins with; half of a mark is the same in all marks.
_HEAD = 8
_MARK = hashlib.blake2b(b"gpipebal: lent", digest_size=_HEAD // 2).digest()
_n_lent = count()
#: Those of the phases that are under way; changed and read while holding `default_generators`,
#: unless a worker that hangs has that for ever.
_noting: list[Strays] = []
in_child(_noting.clear)
#: The first bytes of the states that were last lent on devices other than the CPU.
_heads: deque[bytes] = deque(maxlen=1000)
#: The first bytes of states that the process's generator had when phases of mini-batches began.
_homes: deque[bytes] = deque(maxlen=100)


def bytes_of_state(state: Tensor) -> bytes:
    """Return the bytes of a generator's state."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _head_of(state: Tensor) -> bytes:
    """Return the first bytes of a state: the seed that it came from, or a mark."""
    return ctypes.string_at(state.data_ptr(), _HEAD)


def _set_head(state: Tensor, head: bytes) -> None:
    """Set the first bytes of a state; on a CPU that changes no number that is drawn."""
    ctypes.memmove(state.data_ptr(), head, _HEAD)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two states are equal."""
    return bytes_of_state(one) == bytes_of_state(other)


def mark_as_lent(state: Tensor) -> None:
    """Give a state of the CPU's generator a mark that no other one has."""
    _set_head(state, _MARK + (next(_n_lent) % 2**32).to_bytes(_HEAD // 2, "little"))


def _is_lent(state: Tensor) -> bool:
    """Tell whether a state bears a mark."""
    return _head_of(state).startswith(_MARK)


def note_home(state: bytes) -> None:
    """Remember a state that the process's generator has while it is not lent one."""
    head = state[:_HEAD]
    if head not in _homes:
        _homes.append(head)


def _is_of_process(state: Tensor) -> bool:
    """Tell whether a state may be one that other code had saved, lent or not."""
    return _is_lent(state) or _head_of(state) in (*_homes, *_heads)


def _note_head(state: Tensor) -> None:
    head = _head_of(state)
    if head not in tuple(_heads)[-1:]:
        _heads.append(head)


class Strays:
    """States from which only an operation that was run again has drawn, in a mini-batch's phases.

    `begin` and `end` enclose a phase, and are called while holding `default_generators`.
    """

    def __init__(self) -> None:
        self._hashes: deque[int] = deque(maxlen=1000)

    def begin(self) -> None:
        """Note states from now on."""
        _noting.append(self)

    def end(self) -> None:
        """Note no more. Harmless when repeated."""
        with suppress(ValueError):  # in one go: another phase may begin at the same time
            _noting.remove(self)

    def note(self, state: Tensor) -> None:
        """Remember a state."""
        self._hashes.append(hash(bytes_of_state(state)))

    def __contains__(self, state: Tensor) -> bool:
        """Tell whether a state was lent, or was noted: code that put it back had only saved it."""
        return _is_lent(state) or hash(bytes_of_state(state)) in tuple(self._hashes)


def _note_stray(state: Tensor) -> None:
    for strays in tuple(_noting):
        strays.note(state)


def _note_what_follows(
    states: list[Tensor], default: Any, operation: Any, args: Any, kwargs: Any
) -> None:
    """Note what an operation makes of the states from which it may have drawn.

    Other code may have put back one of them before the operation drew, saved what the operation
    left, and put back the first one again: then nobody has seen the state that it saved.
    """
    for state in states:
        for _ in range(2):
            # With a mark, to see that nobody sets the generator meanwhile.
            marked = torch.frombuffer(bytearray(bytes_of_state(state)), dtype=torch.uint8)
            mark_as_lent(marked)
            default.set_state(marked)
            operation(*args, **kwargs)
            after = default.get_state()
            if _head_of(after) == _head_of(marked):
                _set_head(after, _head_of(state))
                if not _is_same(after, state):
                    _note_stray(after)
                break


class _Loan:
    """A state that the process's default generator is lent while one operation draws.

    Other code, which knows nothing of it, may set the generator meanwhile: then the operation has
    drawn from something else, and is to be run again.

    Args:
        generator: Has the state, and gets the state after the operation.
        default: The default generator of its device.
        operation: The operation.
    """

    def __init__(
        self, generator: torch.Generator, default: torch.Generator, operation: Any
    ) -> None:
        self._generator, self._default, self._operation = generator, default, operation
        self._is_cpu = generator.device.type == "cpu"
        self._before, self._ours = default.get_state(), generator.get_state()
        self._seed = _head_of(self._ours)
        # How many runs in a row have left the state as it was, or have ended with the same one.
        self._n_unmoved = self._n_alike = 0
        self._earlier: Tensor | None = None
        # States that the default generator had after runs that did not count.
        self._disturbed: list[Tensor] = []

    def begin(self) -> None:
        """Lend the state, before the operation runs."""
        if self._is_cpu:
            mark_as_lent(self._ours)
        else:  # there the numbers depend on the seed: no mark
            _note_head(self._ours)
            note_home(bytes_of_state(self._before))
        self._default.set_state(self._ours)

    def end(self) -> bool:
        """Look at the state after the operation; tell whether it has drawn from ours, or seeded."""
        after = self._default.get_state()
        is_unmoved = _is_same(after, self._ours)
        self._n_unmoved = self._n_unmoved + 1 if is_unmoved else 0
        if self._n_unmoved == _NOTHING and self._operation.namespace != "aten":
            _without_draws.add(self._operation)
        is_ours = _head_of(after) == _head_of(self._ours)
        if is_ours and (not is_unmoved or self.draws_nothing or self._operation._schema.is_mutable):
            _set_head(after, self._seed)
            self._generator.set_state(after)
            return True
        is_alike = self._earlier is not None and _is_same(after, self._earlier)
        self._n_alike = self._n_alike + 1 if is_alike else 1
        self._earlier = after
        if self._n_alike == _ITSELF and self._operation.namespace != "aten":
            _seeding.add(self._operation)
        is_known = _head_of(after) == _head_of(self._before) or _is_of_process(after)
        if not is_unmoved and (not is_known or self._operation in _seeding):
            # The operation itself has set the seed, and may draw what it likes.
            self._generator.set_state(after)
            self._disturbed = []
            return True
        # Code that knows nothing of this lending has meanwhile put back some earlier state, as
        # torch.utils.checkpoint does in a layer of another partition.
        _note_stray(after)
        if not any(_is_same(after, known) for known in self._disturbed[-_FEW:]):
            self._disturbed.append(after)
        return False

    @property
    def draws_nothing(self) -> bool:
        """Whether the operation is taken to draw nothing."""
        return self._n_unmoved == _NOTHING or self._operation in _without_draws

    @property
    def met(self) -> list[Tensor]:
        """States from which it may have drawn unseen, where others may have saved what followed."""
        if not (self._disturbed and self._is_cpu) or self.draws_nothing:
            return []
        return [self._before, *self._disturbed[1 - _FEW :]]

    def give_back(self) -> None:
        """Give the default generator its own state back."""
        self._default.set_state(self._before)


def run_with_default(generator: torch.Generator, operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that reads the process's default generator, which is lent a state for it.

    Args:
        generator: Has the state, and gets the state after the operation.
        operation: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        PipelineError: other code has set the generator's state whenever it ran.
    """
    device = generator.device
    default = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    with default_generators:
        loan = _Loan(generator, default, operation)
        try:
            for _ in range(_TRIES):
                loan.begin()
                result = operation(*args, **kwargs)
                if loan.end():
                    if loan.met:
                        with suppress(Exception):  # the layer has its result
                            _note_what_follows(loan.met, default, operation, args, kwargs)
                    return result
                if operation._schema.is_mutable:
                    break
        finally:
            loan.give_back()
    raise PipelineError(
        f"the random numbers of a layer are lost: while {operation} drew, somebody else set the "
        f"state of the default generator of {device}.\n"
        "Fix: preserve_rng_state=False where layers use torch.utils.checkpoint by themselves and "
        "draw nothing; or run the mini-batch again."
    )
