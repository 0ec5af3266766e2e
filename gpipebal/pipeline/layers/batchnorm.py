"""Deferred batch normalisation: statistics of mini-batches, though micro-batches are normalised.

A pipeline shows a layer micro-batches. Plain batch normalisation would update its running
statistics once for each, with the noise of few rows. A deferred one normalises each micro-batch
by its own mean and variance, as the plain one does (nothing else is possible before the others are
seen), but gathers count, mean and squared deviations, and updates its running statistics once, when
the forward of the whole mini-batch has succeeded, with the figures of all rows together.

The gathered figures belong to the mini-batch and not to the layer. So a mini-batch that fails
leaves nothing behind, a small one needs no bookkeeping, and two at once do not mix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.pipeline.process.forks import open_in_child
from gpipebal.pipeline.process.phase import is_recomputing
from gpipebal.pipeline.values.lane import record_stream
from gpipebal.pipeline.values.tensors import copy_of, version_of

__all__ = [
    "SEEN",
    "DeferredBatchNorm",
    "Statistics",
    "blank_deferred",
    "gathering",
    "is_gathering",
]


D = TypeVar("D", bound="DeferredBatchNorm")

_committing = open_in_child(threading.RLock())


class _Moments:
    """Count, mean and sum of squared deviations per channel, merged batch by batch.

    Source:
        Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances", 1979, equation 2.1, in double precision.
    """

    def __init__(self, count: int, mean: Tensor, deviations: Tensor) -> None:
        self.count = count
        self.mean = mean
        self.deviations = deviations

    def merge(self, other: _Moments) -> None:
        total = self.count + other.count
        if not total:
            return
        apart = other.mean - self.mean
        self.mean = self.mean + apart * (other.count / total)
        self.deviations = (
            self.deviations + other.deviations + apart.square() * (self.count * other.count / total)
        )
        self.count = total


class Statistics:
    """What the deferred layers have seen of one mini-batch, and their statistics before it.

    Until it is over no layer writes to its running statistics. A recompute that comes later finds a
    copy of them as they were, one for all micro-batches.
    """

    def __init__(self) -> None:
        self._moments: dict[DeferredBatchNorm, _Moments] = {}
        self._adding = threading.Lock()
        # By identity, buffers with their copies, and how often they had been written to.
        self._before: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._is_over = False

    def copy_before(self, buffer: Tensor) -> Tensor:
        """Return a copy of a running statistic; called by the worker of its layer."""
        known, version = self._before.get(id(buffer)), version_of(buffer)
        if known is not None and known[2] == version and version is not None:
            return known[1]
        copy = copy_of(buffer.detach())
        if not self._is_over:
            self._before[id(buffer)] = buffer, copy, version
        return copy

    def add(self, layer: DeferredBatchNorm, count: int, mean: Tensor, variance: Tensor) -> None:
        """Take in what a layer saw of one micro-batch; `variance` is the unbiased one."""
        if self._is_over:
            return
        # Without rows nothing is known: zeros, which weigh nothing in the merge.
        moments = _Moments(count, mean.double(), variance.double() * max(0, count - 1))
        with self._adding:
            known = self._moments.get(layer)
            if known is None:
                self._moments[layer] = moments
        if known is not None:
            # Only the worker of the layer's partition comes here for this layer.
            known.merge(moments)

    def commit(self) -> None:
        """Update every layer's running statistics, once; afterwards nothing is gathered."""
        moments, self._moments = self._moments, {}
        # The cells have the copies; those of later passes would be of something else.
        self._before, self._is_over = {}, True
        # Each update reads what it writes; mini-batches of two threads may end at the same time.
        with _committing:
            for layer, seen in moments.items():
                for tensor in (seen.mean, seen.deviations):
                    if tensor.is_cuda:
                        # It belongs to the worker's stream, which may use its memory again before
                        # it is read here.
                        record_stream(tensor, torch.cuda.current_stream(tensor.device))
                layer.update(seen.count, seen.mean, seen.deviations / max(1, seen.count - 1))


#: For passes over rows that have been seen before: one that is over.
SEEN = Statistics()
SEEN.commit()


class _Gathering(threading.local):
    statistics: Statistics | None = None


_current = _Gathering()


@contextmanager
def gathering(statistics: Statistics | None) -> Iterator[None]:
    """Let deferred layers gather here, in this thread and this block."""
    before = _current.statistics
    _current.statistics = statistics
    try:
        yield
    finally:
        _current.statistics = before


def copy_before(buffer: Tensor) -> Tensor:
    """Return a copy of a running statistic; in a mini-batch, the one for all its micro-batches."""
    return (_current.statistics or SEEN).copy_before(buffer)


def is_gathering() -> bool:
    """Tell whether deferred layers of this thread gather, as they do inside a pipeline."""
    return _current.statistics is not None


class DeferredBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation whose running statistics are those of whole mini-batches.

    Parameters, buffers and state-dict keys are plain BatchNorm's. Inside a pipeline the running
    statistics are updated once per mini-batch, with mean and unbiased variance over all its rows,
    and ``num_batches_tracked`` counts mini-batches. Outside a pipeline every call is a mini-batch,
    so it is plain BatchNorm.

    Source:
        Kim et al., "torchgpipe", 2020, section 3.2. Differs: the variance is unbiased, as
        torch's is, and merged without cancellation; the mini-batch ends when its forward does,
        not after a fixed number of calls.

    Example:
        >>> layer = DeferredBatchNorm(3, momentum=1.0)
        >>> _ = layer(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 2.0]]))
        >>> layer.running_mean.tolist(), layer.running_var.tolist()
        ([1.0, 1.0, 2.0], [2.0, 0.0, 0.0])
    """

    #: The class that a converted layer had; None for a layer made as deferred.
    plain_class: type[nn.Module] | None = None
    #: The class that it was converted to.
    _deferred: type[DeferredBatchNorm]

    #: Buffers that no pass over a micro-batch writes to, so that the checkpointed micro-batches of
    #: a mini-batch can share one copy of them, which other layers may read.
    buffers_left_alone = frozenset({"running_mean", "running_var", "num_batches_tracked"})

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Only the class that defines a forward knows this; one that says nothing may read them.
        owner = next(base for base in cls.__mro__ if "forward" in base.__dict__)
        if "buffers_left_alone" not in owner.__dict__:
            cls.buffers_left_alone = frozenset()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Keys in torchgpipe's files, which hold what a mini-batch had gathered.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes of converted layers are made on the fly: pickle finds them by the plain one.
        if self.plain_class is None:
            return super().__reduce_ex__(protocol)
        return blank_deferred, (self._deferred, self.plain_class), self.__getstate__()

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch of shape (rows, channels, ...)."""
        if not self.training or not self.track_running_stats:
            return super().forward(input)
        self._check_input_dim(input)
        if self.running_mean is None or self.running_var is None:
            # Taken away, so that no evaluation uses them: there is nothing to gather for.
            means = self.running_mean, self.running_var
            return F.batch_norm(input, *means, self.weight, self.bias, True, 0.0, self.eps)
        # With a momentum of 1 torch puts the batch's own mean and unbiased variance into the
        # buffers it is given: no second pass over the input.
        mean = torch.zeros_like(self.running_mean)
        variance = torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        # A recompute does all the same up to here: its graph must be that of the forward.
        if is_recomputing():
            return output
        count = input.numel() // input.shape[1]
        if _current.statistics is None:
            self.update(count, mean, variance)
        else:
            _current.statistics.add(self, count, mean, variance)
        return output

    @torch.no_grad()
    def update(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of one mini-batch.

        Args:
            count: Values per channel that the mini-batch had. If there are none, the mini-batch
                is counted, as torch does, and nothing else changes.
            mean: Their mean.
            variance: Their unbiased variance.
        """
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if not count:
            return
        momentum: float | Tensor | None = self.momentum
        if momentum is None:
            # A tensor: reading the number would make the host wait for the device.
            momentum = self.num_batches_tracked.double().reciprocal()
        for running, seen in ((self.running_mean, mean), (self.running_var, variance)):
            new = running.double() * (1 - momentum) + seen.double() * momentum
            running.copy_(new)


_derived_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[Any]] = {}


def blank_deferred(kind: type[D], plain: type[nn.Module]) -> D:
    """Make a deferred layer without contents, whose class is also that of a plain layer.

    Among the bases of the new class `kind` comes after `plain` and before torch's base class, so a
    subclass of BatchNorm that wraps ``super().forward`` wraps the deferred one.

    Args:
        kind: `DeferredBatchNorm`, or a subclass of it.
        plain: A BatchNorm class, or a subclass of one.
    """
    if (kind, plain) not in _derived_classes:
        contents = {"plain_class": plain, "_deferred": kind, "__module__": kind.__module__}
        _derived_classes[kind, plain] = type(f"Deferred{plain.__name__}", (plain, kind), contents)
    derived: type[D] = _derived_classes[kind, plain]
    return derived.__new__(derived)
