"""torchgpipe's `DeferredBatchNorm`: it knows how many micro-batches make a mini-batch.

In a pipeline a mini-batch ends when its forward does, as for gpipebal's own deferred layers.
Without a pipeline, in a loop over micro-batches, it ends at the `chunks`-th call.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from gpipebal.pipeline.layers import batchnorm, deferral
from gpipebal.pipeline.layers.batchnorm import Statistics, blank_deferred, gathering
from gpipebal.schedule import check_count

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(batchnorm.DeferredBatchNorm):
    """Batch normalisation whose running statistics are those of whole mini-batches.

    Each call normalises one micro-batch by its own mean and variance. Parameters, buffers and
    state-dict keys are plain BatchNorm's; torchgpipe's two further buffers, ``sum`` and
    ``sum_squares``, are left out, and ignored where a state dictionary has them.

    Args:
        num_features: Channels, which are along dim 1.
        eps: As for `torch.nn.BatchNorm2d`.
        momentum: As for `torch.nn.BatchNorm2d`; None: the average of all mini-batches.
        affine: Whether to scale and shift by learned parameters.
        chunks: Calls that make a mini-batch, outside a pipeline.

    Attributes:
        chunks: As given.

    Example:
        >>> import torch
        >>> layer = DeferredBatchNorm(1, momentum=1.0, chunks=2)
        >>> for micro_batch in torch.tensor([[0.0], [2.0], [4.0], [6.0]]).split(2):
        ...     _ = layer(micro_batch)
        ...     print(layer.running_mean.item(), layer.num_batches_tracked.item())
        0.0 0
        3.0 1
    """

    chunks: int
    _seen: int
    _statistics: Statistics | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self._begin(chunks)

    def _begin(self, chunks: int) -> None:
        self.chunks = check_count("chunks", chunks)
        self._seen = 0
        self._statistics = None

    # In a pipeline the forward below does the same as the base class's.
    buffers_left_alone = batchnorm.DeferredBatchNorm.buffers_left_alone

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch of shape (rows, channels, ...)."""
        in_pipeline = batchnorm.is_gathering()
        if in_pipeline or not self.training or not self.track_running_stats:
            return super().forward(input)
        statistics = self._statistics = self._statistics or Statistics()
        with gathering(statistics):
            output = super().forward(input)
        self._seen += 1
        if self._seen == self.chunks:
            self._begin(self.chunks)
            statistics.commit()
        return output

    def __getstate__(self) -> Any:
        # Statistics of an unfinished mini-batch are not part of a copy.
        return {**super().__getstate__(), "_seen": 0, "_statistics": None}

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Return a module whose BatchNorm layers are deferred.

        Parameters, buffers, hooks and the training flag are shared with the original, and so is
        the class: a deferred BatchNorm2d is a BatchNorm2d. Containers of such layers are replaced
        by shallow copies, so the original keeps its own layers.

        Args:
            module: Any module.
            chunks: Calls that make a mini-batch, outside a pipeline.

        Returns:
            The converted module; `module` itself where there is nothing to convert. Lazy layers
            stay as they are.

        Raises:
            ModelError: a module would run the original layer all the same.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            >>> DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=4)[1].chunks
            4
        """
        check_count("chunks", chunks)
        # A layer that is in two places becomes one layer in two places.
        memo: dict[nn.Module, nn.Module] = {
            layer: _deferred(layer, chunks)
            for layer in module.modules()
            if isinstance(layer, _BatchNorm)
        }
        return deferral.convert_deferred_batch_norm(module, memo)  # type: ignore[return-value]


def _deferred(layer: _BatchNorm, chunks: int) -> _BatchNorm:
    """Return a deferred layer that shares everything with `layer`; itself if nothing is needed."""
    # A lazy layer has no channels yet, and gets another class with them.
    if not layer.track_running_stats or isinstance(layer, _LazyNormBase):
        return layer
    if isinstance(layer, DeferredBatchNorm) and layer.chunks == chunks:
        return layer
    if isinstance(layer, batchnorm.DeferredBatchNorm):
        plain = layer.plain_class
    else:
        # A SyncBatchNorm would talk to other processes, and update the statistics on its own.
        plain = None if isinstance(layer, nn.SyncBatchNorm) else type(layer)
    deferral.check_own_forward(layer)
    deferred = (
        DeferredBatchNorm.__new__(DeferredBatchNorm)
        if plain is None
        else blank_deferred(DeferredBatchNorm, plain)
    )
    deferred.__dict__.update(layer.__getstate__())  # without the compiled call of the original
    deferred._begin(chunks)
    return deferred
