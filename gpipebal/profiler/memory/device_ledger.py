"""A ledger of one kind of device, and the largest memory that it sees from a moment on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import has_storage, storage_key

__all__ = ["Beside", "DeviceLedger", "Peak"]

#: Each moment of a backward at which there is more memory than before: which of the gradients that
#: it was given live then, by place of the output, and the memory of everything else, beyond what
#: existed before. Of one layer they are the same moments at every number of rows.
Beside = tuple[tuple[frozenset[int], int], ...]


class DeviceLedger(Ledger):
    """A ledger of one kind of device: what a layer moves to another kind does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self._given: dict[int, tuple[int, object]] = {}
        self._beside: list[tuple[frozenset[int], int]] | None = None

    def start_beside(self, given: Mapping[int, Tensor]) -> None:
        """From now on, note what lives beside some tensors whenever something new does.

        Args:
            given: The tensors, by numbers of their own.
        """
        with self._lock:
            keys = {place: storage_key(one) for place, one in given.items() if has_storage(one)}
            known = self._references
            self._given = {place: (key, known[key]) for place, key in keys.items() if key in known}
            self._beside = []
            self._note_beside()

    def beside(self) -> list[tuple[frozenset[int], int]]:
        """Stop that; return for each such moment which of them lived, and the bytes of the rest."""
        with self._lock:
            found, self._beside = self._beside, None
            self._given = {}
        return found or []

    def _alive(self) -> dict[int, int]:
        """Return the bytes of those that live; some may be freed meanwhile, in this thread too."""
        return {
            place: self._entries.get(key, (0, 0))[1]
            for place, (key, one) in self._given.items()
            if self._references.get(key) is one
        }

    def _note_beside(self) -> None:
        if self._beside is not None:
            alive = self._alive()
            self._beside.append((frozenset(alive), sum(self.live) - sum(alive.values())))

    def _enter(self, tensor: Tensor, owner: int, *, take_over: bool) -> bool:
        if tensor.device.type != self._type:
            return False
        with self._lock:
            is_new = super()._enter(tensor, owner, take_over=take_over)
            if is_new:
                self._note_beside()
        return is_new


class Peak:
    """The largest memory from now on, beyond what exists now, and the memory at each moment.

    On CUDA the allocator sees memory that the ledger does not, for example a library's workspace:
    the larger of the two counts.
    """

    def __init__(self, ledger: DeviceLedger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device if device.type == "cuda" else None
        self._at_start = ledger.start_peak()
        ledger.start_beside({})
        self._allocated = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated = torch.cuda.memory_allocated(self._device)

    @property
    def counted(self) -> int:
        """Bytes of the peak so far, by the ledger alone."""
        return self._ledger.total_peak - self._at_start

    @property
    def bytes(self) -> int:
        """Bytes of the peak so far."""
        if self._device is None:
            return self.counted
        return max(self.counted, torch.cuda.max_memory_allocated(self._device) - self._allocated)

    def beside(self) -> Beside:
        """Return the memory beside what the ledger was told of, moment by moment.

        What only the allocator saw, as if it had been there all the time, is added to everything
        that the ledger counted: the most of all that lives is then what the allocator says. Which
        of the tensors lived beside a library's workspace is not known.
        """
        more = self.bytes - self.counted - self._at_start
        return tuple((alive, rest + more) for alive, rest in self._ledger.beside())

    def moments(self) -> list[int]:
        """Return the memory moment by moment, where the ledger was told of nothing."""
        return [n_bytes for _, n_bytes in self.beside()]
